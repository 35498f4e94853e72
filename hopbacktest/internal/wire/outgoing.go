package wire

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// maxAsked is how much credit the engine is given at a time for a link. What it delivers
// may have to wait for the session's window, so it isn't given all that a client may ask
// for.
const maxAsked = 256

// maxFlows is how many answers to flow frames may wait behind a delivery that the session's
// window doesn't let go.
const maxFlows = 1024

// queue is what waits for a session's window, in order.
type queue struct {
	items []waiting
	first int
}

// waiting is one of a delivery, a reply to a request, and the flow state of a link.
type waiting struct {
	link     *link
	delivery *engine.Delivery
	payload  []byte // of a reply; or what is left of a delivery
	flow     *frames.Flow
	id       uint32 // the delivery-id of what has begun
	begun    bool
}

func (q *queue) len() int { return len(q.items) - q.first }

func (q *queue) push(w waiting) {
	if q.first > 0 && q.first*2 >= len(q.items) {
		n := copy(q.items, q.items[q.first:])
		clear(q.items[n:])
		q.items, q.first = q.items[:n], 0
	}
	q.items = append(q.items, w)
}

func (q *queue) pop() {
	q.items[q.first] = waiting{}
	if q.first++; q.first == len(q.items) {
		q.items, q.first = q.items[:0], 0
	}
}

// remove takes out what is for a link.
func (q *queue) remove(l *link) {
	q.items = slices.DeleteFunc(q.items[q.first:], func(w waiting) bool {
		if w.link != l {
			return false
		}
		switch {
		case w.flow != nil:
			l.s.pendingFlows--
		case w.delivery == nil:
			l.s.pendingReplies--
		}
		return true
	})
	q.first = 0
}

// deliver is given a delivery of the engine. It counts from now on, though it may have to
// wait: every later frame of the link comes after it.
func (l *link) deliver(d *engine.Delivery) {
	l.count++
	l.askedCount++
	l.credit -= min(l.credit, 1)
	l.asked -= min(l.asked, 1)
	l.s.push(waiting{link: l, delivery: d})
	if !l.gone {
		l.askMore()
	}
}

// push sends w as soon as the window lets it.
func (s *session) push(w waiting) {
	if s.pending.len() == 0 && s.put(&w) || s.gone {
		return
	}
	switch {
	case w.delivery != nil:
		w.link.waiting++
	case w.flow != nil:
		if s.pendingFlows++; s.pendingFlows > maxFlows {
			s.fail(sessionFault("amqp:resource-limit-exceeded", "%d flow frames wait for the session's window", maxFlows))
			return
		}
	}
	s.pending.push(w)
	s.stall()
}

// pump sends what waits, as far as the window goes.
func (s *session) pump() {
	for !s.gone && s.pending.len() > 0 && len(s.c.out) < maxOut {
		w := &s.pending.items[s.pending.first]
		l, counts, flow := w.link, w.delivery != nil, w.flow != nil
		if !s.put(w) || s.gone {
			return
		}
		s.pending.pop()
		if flow {
			s.pendingFlows--
		}
		if counts {
			l.waiting--
			l.askMore()
		}
	}
}

// put sends w, or what the window takes of it. It says whether w has left.
func (s *session) put(w *waiting) bool {
	if w.flow != nil {
		s.sendFlow(*w.flow)
		return true
	}
	if s.remoteWindow == 0 {
		return false
	}
	l, c := w.link, s.c
	t := &c.write.transfer
	if !w.begun {
		w.begun = true
		w.id = s.nextDelivery
		s.nextDelivery++
		*t = frames.Transfer{
			Handle: l.handle, DeliveryID: frames.Some(w.id), MessageFormat: frames.Some[uint32](0), Settled: frames.Some(true), DeliveryTag: []byte{},
		}
		if d := w.delivery; d != nil {
			t.DeliveryTag = d.DeliveryTag()
			t.Settled.Value = l.settled
			if w.payload = s.whole(t, d, l.maxSize); w.payload == nil {
				l.sent(d, w.id)
				return true
			}
		}
	} else {
		*t = frames.Transfer{Handle: l.handle}
	}
	for {
		n := len(w.payload)
		if c.maxFrame > 0 {
			n = min(n, max(c.maxFrame-overhead(t), 1))
		}
		if t.More = n < len(w.payload); !s.send(t, w.payload[:n]) {
			return true
		}
		w.payload = w.payload[n:]
		if !t.More {
			break
		}
		if s.remoteWindow == 0 {
			return false
		}
		*t = frames.Transfer{Handle: l.handle}
	}
	if w.delivery != nil {
		l.sent(w.delivery, w.id)
	} else {
		s.pendingReplies--
	}
	return true
}

// overhead is more than the head of a transfer frame takes.
func overhead(t *frames.Transfer) int { return 64 + len(t.DeliveryTag) }

// whole sends a delivery as one frame. Where it doesn't fit into one it isn't sent, and
// the encoded message returned.
func (s *session) whole(t *frames.Transfer, d *engine.Delivery, maxSize uint64) (payload []byte) {
	c := s.c
	if c.closeSent {
		return nil
	}
	at := len(c.out)
	b, err := c.encode.Begin(c.out, s.channel, t)
	if err != nil {
		return nil
	}
	head := len(b)
	b = d.Append(b)
	size := len(b) - head
	switch {
	case maxSize > 0 && uint64(size) > maxSize:
		c.out = b[:at]
		s.fail(sessionFault("amqp:link:message-size-exceeded", "message size (%d bytes) > maximum message size (%d bytes)", size, maxSize))
		return nil
	case c.maxFrame > 0 && len(b)-at > c.maxFrame:
		c.out = b[:at]
		return bytes.Clone(b[head:])
	}
	c.out = b
	frames.Complete(c.out, at)
	s.remoteWindow--
	s.nextOutgoing++
	return nil
}

// send sends one transfer frame.
func (s *session) send(t *frames.Transfer, payload []byte) bool {
	c := s.c
	if c.closeSent {
		return false
	}
	at := len(c.out)
	b, err := c.encode.Begin(c.out, s.channel, t)
	if err != nil {
		return false
	}
	c.out = append(b, payload...)
	frames.Complete(c.out, at)
	s.remoteWindow--
	s.nextOutgoing++
	return true
}

// sent is called after a delivery has left.
func (l *link) sent(d *engine.Delivery, id uint32) {
	if !l.settled && !l.s.gone {
		l.s.unsettled[id] = d
	}
}

// askMore gives the engine more of the client's credit, unless much of what it has
// delivered still waits.
func (l *link) askMore() {
	if l.asked <= maxAsked/2 && l.credit > l.asked && l.waiting == 0 && !l.draining {
		l.ask(false)
	}
}

// ask gives the engine credit.
func (l *link) ask(echo bool) {
	l.asked = min(l.credit, maxAsked)
	tokens := l.tokens
	l.tokens = nil
	l.con.Flow(&frames.Flow{DeliveryCount: frames.Some(l.askedCount), LinkCredit: frames.Some(l.asked), Drain: l.draining, Echo: echo}, tokens...)
}

// credited takes the credit that a client gives. During a drain it waits for
// that: then the latest one counts, with its claims.
func (l *link) credited(f *frames.Flow) *engine.Fault {
	tokens, fault := l.con.Tokens(f.Properties)
	if fault != nil {
		return fault
	}
	l.tokens = tokens
	if l.draining {
		later := *f
		l.stashed = &later
		return nil
	}
	l.topUp(f)
	return nil
}

func (l *link) topUp(f *frames.Flow) {
	count := f.DeliveryCount.Or(l.s.initialCount())
	l.credit = 0
	if left := int64(f.LinkCredit.Value) - int64(int32(l.count-count)); left > 0 {
		l.credit = uint32(min(left, unlimited))
	}
	l.draining = f.Drain
	l.ask(f.Echo)
}

// flowed is given the engine's state of the link: an answer to an echo or a drain, or
// news of a single active consumer.
func (l *link) flowed(f *frames.Flow) {
	if f.Drain && l.draining {
		used := f.DeliveryCount.Value == l.askedCount
		l.askedCount, l.asked = f.DeliveryCount.Value, 0
		if used && l.credit > 0 {
			l.ask(false) // there may be more, and the client wants more
			return
		}
		l.count += l.credit
		l.credit, l.draining = 0, false
	}
	l.s.push(waiting{link: l, flow: &frames.Flow{
		Handle: frames.Some(l.handle), DeliveryCount: frames.Some(l.count), LinkCredit: frames.Some(l.credit),
		Available: f.Available, Drain: f.Drain, Properties: f.Properties,
	}})
	if next := l.stashed; next != nil && !l.draining {
		l.stashed = nil
		l.topUp(next)
	}
}

// revoked notifies the client that the broker has given a delivery to somebody else.
func (l *link) revoked(d *engine.Delivery) {
	for id, held := range l.s.unsettled {
		if held == d {
			t := &l.s.c.write.disposition
			*t = frames.Disposition{Role: frames.RoleSender, First: id, Settled: frames.Some(false), State: &frames.Released{}}
			l.s.c.send(l.s.channel, t)
			return
		}
	}
}

// disposition is the client's outcome of deliveries.
func (s *session) disposition(d *frames.Disposition) *engine.Fault {
	if d.Role != frames.RoleReceiver {
		return sessionFault("amqp:internal-error", "Unexpected frame: a disposition of a sender")
	}
	if len(s.unsettled) == 0 {
		return nil
	}
	first, last := d.First, d.Last.Or(d.First)
	all := s.settling[:0]
	if n := last - first; n < uint32(len(s.unsettled)) {
		for id := first; ; id++ {
			if held, ok := s.unsettled[id]; ok {
				delete(s.unsettled, id)
				all = append(all, held)
			}
			if id == last {
				break
			}
		}
	} else if int32(n) >= 0 {
		var ids []uint32
		for id := range s.unsettled {
			if id-first <= n {
				ids = append(ids, id)
			}
		}
		slices.SortFunc(ids, func(a, b uint32) int { return int(int32(a - b)) })
		for _, id := range ids {
			all = append(all, s.unsettled[id])
			delete(s.unsettled, id)
		}
	}
	switch d.State.(type) {
	case *frames.Accepted, *frames.Rejected, *frames.Released, *frames.Modified:
	default:
		return sessionFault("amqp:invalid-field", "Unrecognised state: %s in DISPOSITION", stateTerm(d.State))
	}
	if !d.Settled.Set {
		return sessionFault("amqp:internal-error", "case_clause: a disposition that doesn't say whether it is settled")
	}
	fault := s.e.Settle(all, d.State)
	clear(all)
	s.settling = all[:0]
	if fault != nil {
		return fault
	}
	if !d.Settled.Value {
		t := &s.c.write.disposition
		*t = frames.Disposition{Role: frames.RoleSender, First: d.First, Last: d.Last, Settled: frames.Some(true), State: d.State}
		s.c.send(s.channel, t)
	}
	return nil
}

// stateTerm is a delivery state that is no outcome, as RabbitMQ's errors show it.
func stateTerm(state any) string {
	switch s := state.(type) {
	case nil:
		return "undefined"
	case *frames.Received:
		return fmt.Sprintf("{'v1_0.received',{uint,%d},{ulong,%d}}", s.SectionNumber, s.SectionOffset)
	}
	return fmt.Sprintf("%T", state)
}
