package desk

import "time"

// turn finds out whether a queue is out of order because a scan was lost.
//
// A queue delivers returned messages before all others, and puts newly returned ones behind
// them. A scan returns all messages of that part or none, so it keeps the order. But a scan
// whose connection is lost, or whose process is killed, may have held only the start of the
// part. The broker puts that start at the part's end: the part is rotated. It stays rotated
// until a scan that holds all of it returns it from its true start on. The true start is
// behind the cut, the only place where
//
//   - a message was returned more often than the one before it, and
//   - was dead-lettered earlier than the one before it, and earlier than the first one.
//
// Messages without a recorded time of dead-lettering are compared only by how often they were
// returned.
type turn struct {
	seen        bool
	first, last mark
	found       bool   // the cut was found
	cut         uint32 // the delivery behind the cut
	over        bool   // the end of the part was reached
	end         uint32 // the first delivery behind the part, if over
}

// mark is what turn knows of a message.
type mark struct {
	returns uint64
	died    time.Time // recorded by the broker; zero if unknown
}

// see reads the next message.
func (t *turn) see(id uint32, l *deadLetter) {
	if t.over {
		return
	}
	m := mark{l.returns(), l.deadLetteredAt()}
	switch {
	case m.returns == 0, t.found && !m.beforeTurn(t.first):
		t.over, t.end = true, id
		return
	case !t.seen:
		t.seen, t.first = true, m
	case !t.found && m.returns > t.last.returns && m.notAfter(t.last) && m.notAfter(t.first):
		t.found, t.cut = true, id
	}
	t.last = m
}

// notAfter reports whether m wasn't dead-lettered after n, or neither time is known.
func (m mark) notAfter(n mark) bool {
	return m.died.IsZero() == n.died.IsZero() && !m.died.After(n.died)
}

// beforeTurn reports whether m, which is behind the cut, belongs before first.
func (m mark) beforeTurn(first mark) bool {
	if m.died.Equal(first.died) {
		return m.returns > first.returns
	}
	return m.notAfter(first)
}

// deadLetteredAt is when the broker last dead-lettered the message.
func (l *deadLetter) deadLetteredAt() (last time.Time) {
	for _, d := range l.deaths() {
		if d.Last.After(last) {
			last = d.Last
		}
	}
	return last
}
