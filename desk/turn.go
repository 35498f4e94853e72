package desk

import "time"

// turn finds out whether a queue is out of order because a walk was lost.
//
// A queue delivers what was given back before all else, and puts what is given back now
// behind that. A walk gives back all of that part, or none of it, so it keeps its order. But
// a walk whose connection is lost, or whose process is killed, can have held only the
// beginning of the part. The broker puts that beginning at the part's end: the part is
// turned, as a ring is. It stays turned, by whatever amount, until a walk that holds all of
// it gives it back from its true beginning on. That is behind the cut, the only place where
//
//   - a message was given back more often than the one before it, and
//   - died earlier than the one before it, and than the first one.
//
// Messages that tell no death are told apart by how often they were given back.
type turn struct {
	seen        bool
	first, last mark
	found       bool   // the cut
	cut         uint32 // the delivery behind it
	over        bool   // the end of the part was seen
	end         uint32 // the first delivery behind the part, if over
}

// mark is what turn knows of a message.
type mark struct {
	returns uint64
	died    time.Time // by the broker; zero: unknown
}

// see takes the next message.
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

// notAfter says that m didn't die after n, or that neither tells.
func (m mark) notAfter(n mark) bool {
	return m.died.IsZero() == n.died.IsZero() && !m.died.After(n.died)
}

// beforeTurn says that m, behind the cut, belongs before first.
func (m mark) beforeTurn(first mark) bool {
	if m.died.Equal(first.died) {
		return m.returns > first.returns
	}
	return m.notAfter(first)
}

// deadLetteredAt is when the broker dead-lettered the message last.
func (l *deadLetter) deadLetteredAt() (last time.Time) {
	for _, d := range l.deaths() {
		if d.Last.After(last) {
			last = d.Last
		}
	}
	return last
}
