package client

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/inside"
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

// gated is what a gated consumer has in addition to a ConsumerConfig.
type gated struct {
	inside.Gated[*Delivery]
	control *Control
}

// Log is the Conn's logger.
func (in internal) Log() *slog.Logger { return in.conn.log }

// ConsumeGated consumes in turns, for package partition.
func (in internal) ConsumeGated(ctx context.Context, queue string, g inside.Gated[*Delivery]) error {
	source, err := address.Queue(queue).Build()
	if err != nil {
		return err
	}
	// The consumer's isolation and a Control that it follows would change how much it holds.
	cfg := ConsumerConfig{Concurrency: g.Concurrency, Prefetch: g.Window, Grace: g.Grace, ConsumerTimeout: g.ConsumerTimeout, NoIsolation: true}
	return in.conn.consume(ctx, queue, source, g.Handler, cfg, &gated{g, g.Control.(*Control)})
}

// prepare sets what a gated consumer has.
func (g *gated) prepare(a *asked) {
	if g == nil {
		return
	}
	a.order = func(d *Delivery) (string, bool) { return g.Handler.Key(d), true }
	a.gate = g
}

// holdLeft is how long what the consumer holds is still safe from the consumer timeout. What the
// broker takes back by itself comes back without its annotations, so without its attempts.
func (ds *deliveries) holdLeft() time.Duration {
	limit := ds.consumer.cfg.ConsumerTimeout
	oldest := time.Now()
	ds.mu.Lock()
	for _, d := range ds.leases {
		if d.received.Before(oldest) {
			oldest = d.received
		}
	}
	ds.mu.Unlock()
	return time.Until(oldest.Add(limit - timeoutMargin(limit)))
}

// consumerTurn is a time in which a gated consumer is the active one of its queue. Its methods are safe
// for concurrent use, and do nothing once the turn is over.
type consumerTurn struct{ of *deliveries }

// Serve grants the window.
func (t *consumerTurn) Serve() {
	t.of.mu.Lock()
	t.of.gate.serves = true
	t.of.mu.Unlock()
	t.of.resize()
}

// StepBack lets running handlers finish, returns what none has begun in its order, and attaches
// again, behind all other consumers. Without Serve it only attaches again.
func (t *consumerTurn) StepBack() { t.of.gate.stepBack() }

// Before returns what the consumer holds of the deliveries that came before one: the lanes that have a delivery in
// hand, and how many deliveries all other lanes have. It also returns lanes whose delivery in hand came later.
func (t *consumerTurn) Before(of *Delivery) (inHand []string, others int) {
	d := of.core
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	held := map[string]bool{}
	for h := range t.of.gate.inHand {
		if h != d && h.lane != nil && (d.key == nil || *h.lane != *d.key) && !h.settling.Load() && !held[*h.lane] {
			held[*h.lane] = true
			inHand = append(inHand, *h.lane)
		}
	}
	for id, h := range t.of.leases {
		if int32(id-d.id) < 0 && (h.key == nil || !held[*h.key]) { // serial numbers, which may wrap
			others++
		}
	}
	return inHand, others
}

// Taken returns a channel that is closed when the broker has taken the settlement of a delivery whose handler
// runs, or the link session is over.
func (*consumerTurn) Taken(of *Delivery) <-chan struct{} {
	ds, taken, written := of.core.results.deliveries, make(chan struct{}), make(chan struct{}) // those of an earlier turn, if it was over
	ds.mu.Lock()
	if of.core.settled {
		close(written)
	} else {
		if ds.gate.written == nil {
			ds.gate.written = map[*delivery]chan struct{}{}
		}
		ds.gate.written[of.core] = written
	}
	ds.mu.Unlock()
	go func() {
		defer close(taken)
		select {
		case <-written:
			ds.credit.roundTrip()
		case <-ds.dead:
		}
	}()
	return taken
}

// settled notes that the settlement of d is written. It is called with mu held.
func (g *gate) settled(d *delivery) {
	if written, asked := g.written[d]; asked {
		delete(g.written, d)
		close(written)
	}
}

// gate is the state of a gated consumer's link session. deliveries.mu guards serves, inHand, and written; begun belongs to
// the goroutine that runs the link session.
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
	// written has the channels that are closed when the settlements of these deliveries are.
	written map[*delivery]chan struct{}
}

// gated reports whether the consumer has its queue in turns.
func (k *consumer) gated() bool { return k.gate != nil }

// begin is called before the link is attached.
func (g *gate) begin(of *deliveries) {
	g.active, g.step = make(chan struct{}), make(chan struct{})
	g.turn = &consumerTurn{of}
}

// heard reports whether the broker has made the consumer the active one.
func (g *gate) heard(active bool) {
	if active {
		g.became.Do(func() { close(g.active) })
		return
	}
	select {
	case <-g.active: // the broker has chosen another
		g.stepBack()
	default:
	}
}

func (g *gate) stepBack() { g.steps.Do(func() { close(g.step) }) }

// awaitGate waits while a gated consumer is paused. It returns false if d stays in hand, since its turn ends.
func (rs *results) awaitGate(d *delivery, canceled <-chan struct{}) (begin bool) {
	for {
		resume, paused := rs.paused(d)
		if !paused {
			return true
		}
		if begin, _ := rs.resumed(resume, canceled); !begin {
			return false
		}
	}
}

// keep has d's handler called again after a delay. Without one, d stays in hand until the link
// session ends, which is about to. It is called with mu held.
func (g *gate) keep(of *deliveries, d *delivery, after time.Duration) {
	if g.inHand == nil {
		g.inHand = map[*delivery]*time.Timer{}
	}
	d.rewind()
	if after <= 0 {
		g.inHand[d] = nil
		return
	}
	g.inHand[d] = time.AfterFunc(after, func() {
		var then followUps
		of.mu.Lock()
		if _, waits := g.inHand[d]; waits {
			delete(g.inHand, d)
			of.enqueue(d, &then)
		}
		of.mu.Unlock()
		of.followUp(&then)
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
	if !s.consumer.gated() || s.deliveries.open() > 0 {
		return
	}
	if handling, _, _ := s.consumer.workers.running(); handling == 0 {
		s.deliveries.workers.stop()
		s.deliveries.workers.wait()
		s.turnOver()
	}
}

func (s *linkSession) turnOver() {
	if g := &s.deliveries.gate; g.begun {
		g.overs.Do(func() { s.consumer.gate.Handler.Over(g.turn) })
	}
}

// endTurn returns when no handler of the link session runs any more, or ctx ends.
func (s *linkSession) endTurn(ctx context.Context) {
	if !s.consumer.gated() {
		return
	}
	ended := make(chan struct{})
	go func() {
		s.deliveries.workers.wait()
		s.turnOver()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
}
