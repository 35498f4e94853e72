package amqp

import "github.com/hopback/hopback/internal/frames"

// ranges are settlements that wait to be written. Neighbors with the same outcome are joined: the
// broker then has one command to put through Raft in place of many. Only what was settled is in
// them.
//
// Accepted messages are gone, so their order doesn't matter, and neighbors are joined in any
// order. A message with another outcome goes back to the end of its queue's returned
// messages, or to a dead-letter queue. So these leave in the order in which they were settled.
type ranges struct{ all []span }

type span struct {
	first, last uint32
	kind        outcomeKind
}

// maxSpans is how many ranges wait before they are written.
const maxSpans = 128

// peekBack is in how many of the newest ranges a settlement looks for its neighbors: handlers
// end in nearly the order in which they began.
const peekBack = 32

// add adds the deliveries from first to last, and says whether the ranges are to be written now.
// Delivery-ids wrap at 2³².
func (w *ranges) add(first, last uint32, kind outcomeKind) (full bool) {
	if kind == kindAccepted {
		w.accept(first, last)
		return len(w.all) >= maxSpans
	}
	for i := len(w.all) - 1; i >= 0; i-- {
		s := &w.all[i]
		if s.kind == kindAccepted {
			continue
		}
		if s.kind == kind && s.last+1 == first {
			s.last = last
			return false
		}
		break
	}
	w.all = append(w.all, span{first, last, kind})
	return len(w.all) >= maxSpans
}

// accept joins accepted deliveries with their neighbors on both sides.
func (w *ranges) accept(first, last uint32) {
	at := -1 // the span that they became a part of
	for i := len(w.all) - 1; i >= max(0, len(w.all)-peekBack); i-- {
		s := w.all[i]
		switch {
		case s.kind != kindAccepted:
			continue
		case s.last+1 == first:
			first = s.first
		case last+1 == s.first:
			last = s.last
		default:
			continue
		}
		if at >= 0 { // they close the gap between two spans
			w.all = append(w.all[:at], w.all[at+1:]...)
			w.all[i] = span{first, last, kindAccepted}
			return
		}
		at = i
		w.all[i] = span{first, last, kindAccepted}
	}
	if at < 0 {
		w.all = append(w.all, span{first, last, kindAccepted})
	}
}

// writeSettled encodes the ranges that wait. It is called with mu held.
func (s *Session) writeSettled() {
	c := s.c
	if c.err == nil && !c.closing && !s.ending {
		d := &c.out.disposition
		for _, r := range s.settled.all {
			*d = frames.Disposition{Role: frames.RoleReceiver, First: r.first, Last: frames.Optional[uint32]{Value: r.last, Set: r.last != r.first}, Settled: frames.Some(true), State: r.kind.state()}
			_ = c.put(s.channel, d) // it is small, and can be encoded
			c.note(r.first, r.last)
		}
	}
	s.settled.all = s.settled.all[:0]
}
