package client

import (
	"context"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/link"
)

// A gated consumer has a queue with a single active consumer in turns. It attaches without
// credit, so being the active one gives it no message:
//
//	attach ──▶ wait ──active──▶ turn ──Serve──▶ the whole window ──StepBack──▶ drain ──▶ detach ─┐
//	  ▲                          └──────────────StepBack────────────────────────────▶ detach ─┤
//	  └───────────────────────────────── the end of the line ─────────────────────────────────┘
//
// RabbitMQ appends returned messages to those that were returned before, and delivers all of them
// before what it hasn't delivered yet. So a queue keeps its order through crashes only if each of
// its consumers takes all returned messages at once: all have the same window, grant it in one
// piece, and never hold more. A gated consumer therefore has no adaptive prefetch, sets no delivery
// aside, and never returns one message alone: a delivery that can't be finished yet stays in hand
// (resolutionAgain), and those of its lane wait behind it. Package partition isolates poison messages, by
// handling one of those that it holds, and no other.
//
// When its link is lost, another consumer continues. So the ctx of its handlers ends at once, and
// it attaches again only when they have returned.

// holdLeft is how long what the consumer holds is still safe from the consumer timeout. What the
// broker takes back by itself comes back without its annotations, so without its attempts.
func (s *linkSession) holdLeft() time.Duration {
	limit := s.consumer.cfg.ConsumerTimeout
	oldest := time.Now()
	s.mu.Lock()
	for _, d := range s.leases {
		if d.received.Before(oldest) {
			oldest = d.received
		}
	}
	s.mu.Unlock()
	return time.Until(oldest.Add(limit - timeoutMargin(limit)))
}

// consumerTurn is a time in which a gated consumer is the active one of its queue. Its methods are safe
// for concurrent use, and do nothing once the turn is over.
type consumerTurn struct{ s *linkSession }

// Serve grants the window.
func (t *consumerTurn) Serve() {
	s := t.s
	s.mu.Lock()
	s.gate.serves = true
	s.mu.Unlock()
	s.resize()
}

// StepBack lets running handlers finish, returns what none has begun in its order, and attaches
// again, behind all other consumers. Without Serve it only attaches again.
func (t *consumerTurn) StepBack() { t.s.gate.stepBack() }

// Before returns what the consumer holds of the deliveries that came before one: the lanes that have a delivery in
// hand, and how many deliveries all other lanes have. It also returns lanes whose delivery in hand came later.
func (t *consumerTurn) Before(of *Delivery) (inHand []string, others int) {
	d := of.core
	s := t.s
	s.mu.Lock()
	defer s.mu.Unlock()
	held := map[string]bool{}
	for h := range s.gate.inHand {
		if h != d && h.lane != nil && (d.key == nil || *h.lane != *d.key) && !h.settling.Load() && !held[*h.lane] {
			held[*h.lane] = true
			inHand = append(inHand, *h.lane)
		}
	}
	for id, h := range s.leases {
		if int32(id-d.id) < 0 && (h.key == nil || !held[*h.key]) { // serial numbers, which may wrap
			others++
		}
	}
	return inHand, others
}

// gate is the state of a gated consumer's link session. linkSession.mu guards serves and inHand.
type gate struct {
	turn   *consumerTurn
	active chan struct{} // closed when the broker has made it the active one
	step   chan struct{} // closed when it is to step back
	became sync.Once
	steps  sync.Once
	begun  bool // gated.Turn was called
	overs  sync.Once

	serves bool
	// inHand are the deliveries whose handlers are called again later.
	inHand map[*delivery]*time.Timer
}

func (s *linkSession) gated() bool { return s.consumer.gate != nil }

// begin returns what is called with the link's states.
func (g *gate) begin(s *linkSession) func(map[string]any) {
	g.active, g.step = make(chan struct{}), make(chan struct{})
	g.turn = &consumerTurn{s}
	return func(state map[string]any) {
		active, ok := state["rabbitmq:active"].(bool)
		switch {
		case !ok:
		case active:
			g.became.Do(func() { close(g.active) })
		default:
			select {
			case <-g.active: // the broker has chosen another
				g.stepBack()
			default:
			}
		}
	}
}

func (g *gate) stepBack() { g.steps.Do(func() { close(g.step) }) }

// keep has d's handler called again after a delay. Without one, d stays in hand until the link
// session ends, which is about to. It is called with mu held.
func (g *gate) keep(s *linkSession, d *delivery, after time.Duration) {
	if g.inHand == nil {
		g.inHand = map[*delivery]*time.Timer{}
	}
	d.rewind()
	if after <= 0 {
		g.inHand[d] = nil
		return
	}
	g.inHand[d] = time.AfterFunc(after, func() {
		var then wakes
		s.mu.Lock()
		if _, waits := g.inHand[d]; waits {
			delete(g.inHand, d)
			s.enqueue(d, &then)
		}
		s.mu.Unlock()
		s.after(&then)
	})
}

// rewind makes d ready for another call of its handler, unless the broker has revoked it.
func (d *delivery) rewind() {
	l := &d.lease
	l.mu.Lock()
	l.cancel = nil
	l.mu.Unlock()
	l.asked.Store(false)
	d.inner.mu.Lock()
	d.inner.inner = nil
	d.inner.mu.Unlock()
	l.ended.CompareAndSwap(handlerReturned, nil)
}

// empty takes out those that are in hand.
func (g *gate) empty() (all []*delivery) {
	for d, timer := range g.inHand {
		if timer != nil {
			timer.Stop()
		}
		all = append(all, d)
	}
	clear(g.inHand)
	return all
}

// count is how many are in hand.
func (g *gate) count() (n int) {
	for d := range g.inHand {
		if !d.settling.Load() {
			n++
		}
	}
	return n
}

// unbegun is how a delivery returns to its queue that no handler runs for. If its consumer is gated,
// its failures are reported with that: see withKnownCount.
func (d *delivery) unbegun(gated bool) link.Disposition {
	if len(d.kept) == 0 && !(gated && d.failures() > 0) {
		return link.Disposition{Kind: link.DispositionReleased}
	}
	return link.Disposition{Kind: link.DispositionModified, Annotations: amqp.Annotations(annotations(d.kept, 1))}
}

// overBeforeClose reports the end of the turn while the broker can't choose another consumer yet.
// It doesn't wait for handlers that ignore the end of their ctx: then the link closes first.
func (s *linkSession) overBeforeClose() {
	if !s.gated() || s.open() > 0 {
		return
	}
	if handling, _, _ := s.consumer.workers.running(); handling == 0 {
		s.workers.stop()
		s.workers.wait()
		s.turnOver()
	}
}

func (s *linkSession) turnOver() {
	if g := &s.gate; g.begun {
		g.overs.Do(func() { s.consumer.gate.Over(g.turn) })
	}
}

// endTurn returns when no handler of the link session runs any more, or ctx ends.
func (s *linkSession) endTurn(ctx context.Context) {
	if !s.gated() {
		return
	}
	ended := make(chan struct{})
	go func() {
		s.workers.wait()
		s.turnOver()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
}
