package claim

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// round has a link, and its rounds.
type round struct {
	c        *Claims
	sess     link.Session
	link     link.ReceiverLink
	inactive atomic.Bool
	// left are tokens whose messages may still be the link's: they come with later credit.
	left map[string]bool
	// gone says that the link was lost, and taken has the deliveries that the broker has taken back.
	// Both are guarded by the Claims' mu.
	gone  bool
	taken map[uint32]bool
	// held are the deliveries without a written settlement, guarded by the same.
	held map[uint32]bool
}

// State is called with the properties of flows.
func (r *round) State(properties map[string]any) {
	if active, ok := properties["rabbitmq:active"].(bool); ok {
		r.inactive.Store(!active)
	}
}

// Revoked is called when the broker has taken deliveries back after the consumer timeout. It sends
// the link nothing more until they are settled.
func (r *round) Revoked(first, last uint32) {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range r.held {
		if id-first <= last-first { // ids are serial numbers
			r.taken[id] = true
			c.written = append(c.written, &settlement{id: id, d: link.Disposition{Kind: link.DispositionReleased}})
		}
	}
	c.nudge()
}

// put has a settlement be written with the next round.
func (r *round) put(s *settlement) {
	c := r.c
	c.mu.Lock()
	gone := r.gone || r.taken[s.id]
	if !gone {
		c.written = append(c.written, s)
	}
	c.mu.Unlock()
	switch {
	case !gone:
		c.nudge()
	case s.ended != nil:
		s.ended(&failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrConnectionLost, Text: "before the message was settled; it is ready in its queue"})
	}
}

// over fails the settlements that weren't written, and all later ones.
func (r *round) over() {
	c := r.c
	c.mu.Lock()
	r.gone = true
	left := c.written
	c.written = nil
	c.mu.Unlock()
	for _, s := range left {
		r.put(s)
	}
}

// close gives the link back. What isn't settled returns to the queue.
func (r *round) close() {
	ctx, cancel := context.WithTimeout(context.Background(), link.CloseTimeout)
	defer cancel()
	_ = r.link.Close(ctx)
	r.c.Sessions.Give(r.sess, false)
}

// work makes rounds until the link is lost. It returns nil if the session is worn out.
func (r *round) work() error {
	c := r.c
	for {
		settlements, parked := r.settlements()
		var asked []*ask
		var tokens []string
		if parked {
			asked, tokens = c.next()
		}
		if len(settlements) == 0 && len(asked) == 0 {
			if r.sess.Exhaust() >= 1 && c.unsettled() == 0 {
				return nil
			}
			if len(r.left) > 0 { // the caller that claimed them wants no more
				if err := r.claim(nil, nil, nil); err != nil {
					return err
				}
				continue
			}
			if err := r.await(); err != nil {
				return err
			}
			continue
		}
		if err := r.write(settlements); err != nil {
			c.again(asked, false)
			return err
		}
		if err := r.claim(settlements, asked, tokens); err != nil {
			return err
		}
	}
}

// unsettled is how many claims and messages are in flight.
func (c *Claims) unsettled() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

// await waits for work.
func (r *round) await() error {
	// Receive returns when the link ends; nothing comes without credit.
	ctx, cancel := context.WithCancel(r.c.ctx)
	ended := make(chan error, 1)
	go func() {
		a, err := r.link.Receive(ctx)
		if err == nil {
			r.requeue(&Message{a.Msg, r, a.ID})
			r.link.Release(a.Kept)
		}
		ended <- err
	}()
	select {
	case <-r.c.wake:
		cancel()
		err := <-ended
		if ctx.Err() != nil && r.c.ctx.Err() == nil {
			return nil
		}
		return err
	case err := <-ended:
		cancel()
		return err
	}
}

// settlements takes those of the next round. parked says that no message is left that nobody has wanted, and
// that isn't parked again yet.
func (r *round) settlements() (all []*settlement, parked bool) {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortStableFunc(c.written, byID)
	n, frames := 0, 0
	for ; n < len(c.written); n++ {
		joins := n > 0 && c.written[n].id == c.written[n-1].id+1 && c.written[n].d.Annotations == nil &&
			c.written[n-1].d.Annotations == nil && c.written[n].d.Kind == c.written[n-1].d.Kind
		if !joins {
			if frames++; frames > maxFrames {
				break
			}
		}
	}
	all = slices.Clone(c.written[:n])
	c.written = slices.Delete(c.written, 0, n)
	for _, s := range all {
		delete(r.held, s.id)
	}
	return all, !slices.ContainsFunc(c.written, func(s *settlement) bool { return s.ended == nil && s.d.Annotations != nil })
}

// write writes settlements. If the link is lost, those that weren't written have no effect.
func (r *round) write(all []*settlement) error {
	for i, s := range all {
		if err := r.link.Settle(s.id, s.d); err != nil {
			r.unknown(all[:i])
			r.c.mu.Lock()
			r.c.written = append(all[i:], r.c.written...)
			r.c.mu.Unlock()
			return err
		}
	}
	return nil
}

// unknown ends settlements that were written.
func (r *round) unknown(all []*settlement) {
	for _, s := range all {
		if s.ended != nil {
			s.ended(&failure.Error{Op: "claim", Target: r.c.Queue, Kind: failure.ErrOutcomeUnknown, Text: "the link was lost before the broker had confirmed the settlement"})
		}
	}
}

// confirm ends settlements after the answer to a drain.
func (r *round) confirm(all []*settlement) {
	for _, s := range all {
		if s.ended == nil {
			continue
		}
		r.c.mu.Lock()
		taken := r.taken[s.id]
		r.c.mu.Unlock()
		if taken {
			s.ended(&failure.Error{Op: "claim", Target: r.c.Queue, Kind: failure.ErrConnectionLost, Text: "the broker had taken the message back after the consumer timeout"})
			continue
		}
		s.ended(nil)
	}
}

// claim makes the round for tokens, and more if that didn't bring all of their messages. With
// nothing to do but to confirm settlements, it grants no credit.
func (r *round) claim(settlements []*settlement, asked []*ask, tokens []string) error {
	c := r.c
	for _, t := range tokens {
		r.left[t] = true
	}
	f := findings{of: map[string][]*Message{}}
	credit, more := uint32(len(tokens)), false
	if len(tokens) > 0 {
		credit++ // what comes for it belongs to the backlog, so all that was claimed has come
	}
	if len(r.left) > len(tokens) || len(tokens) == 0 && len(settlements) == 0 {
		credit = moreCredit
	}
	for {
		f.got, f.all = 0, false
		if err := r.link.Claim(c.ctx, credit, tokens, func() { r.take(&f) }); err != nil {
			r.unknown(settlements)
			c.again(asked, true)
			return err
		}
		r.confirm(settlements)
		settlements = nil
		if credit == 0 {
			break
		}
		r.take(&f)
		if f.all || f.got < credit {
			clear(r.left)
			break
		}
		if f.held >= maxHeld || f.bytes >= maxHeldBytes {
			more = true
			break
		}
		tokens, credit = nil, uint32(min(moreCredit, max(1, (maxHeldBytes-f.bytes)*f.held/max(f.bytes, 1))))
	}
	for _, m := range c.answer(asked, f.of, more && f.held > 0) {
		r.park(m)
	}
	return nil
}

// findings are what has come for claims, by token.
type findings struct {
	of          map[string][]*Message
	held, bytes int
	got         uint32 // in the last round
	// all says that a message of the backlog is among it: then all that was claimed has come.
	all bool
}

// take sorts what has come. What isn't claimed takes no memory afterwards.
func (r *round) take(f *findings) {
	now, known := r.c.now()
	for a, ok := r.link.Prefetched(); ok; a, ok = r.link.Prefetched() {
		f.got++
		f.held++
		f.bytes += a.Kept
		m := &Message{a.Msg, r, a.ID}
		r.hold(a.ID)
		t, at, parked := token(a.Msg)
		switch {
		case a.Unreadable || !parked || !r.left[t]:
			f.all = true
			r.requeue(m)
		case !known || at.Sub(now) > near:
			f.of[t] = append(f.of[t], m)
		case at.After(now):
			r.park(m)
		default: // it is due, or its annotations are forged
			r.requeue(m)
		}
		r.link.Release(a.Kept)
	}
}

func (r *round) hold(id uint32) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	r.held[id] = true
}

// requeue returns a message of the backlog to its place.
func (r *round) requeue(m *Message) {
	r.put(&settlement{id: m.id, d: link.Disposition{Kind: link.DispositionModified}})
}

// park parks a message again, unchanged.
func (r *round) park(m *Message) {
	t, at, _ := token(m.Message)
	r.put(&settlement{id: m.id, d: Parking(t, at, nil)})
}

// Parking is the disposition that parks a message until a time by the broker's clock, with more
// annotations.
func Parking(token string, until time.Time, more amqp.Annotations) link.Disposition {
	if more == nil {
		more = amqp.Annotations{}
	}
	more[annotation.DeferralToken], more[annotation.DeliveryTime] = token, until.UnixMilli()
	return link.Disposition{Kind: link.DispositionModified, Annotations: more}
}
