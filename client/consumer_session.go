package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// linkSession is the life of one receiver link: it receives, watches, drains, and closes it. A consumer
// has one after the other, as long as it runs (consumer_run.go). What it received is in deliveries, and
// what becomes of that is decided and carried out by results. Four kinds of goroutines share the work,
// so that none waits for another's broker:
//
//	receive ──admit──▶ workers ──finish──▶ settler
//	                      └──▶ forwarder ─────┘
//
// Only the goroutine that runs the consumer changes its fields, apart from the atomic silent; receive only signals
// exhausted.
type linkSession struct {
	consumer   *consumer
	sess       link.Session
	deliveries *deliveries
	results    *results
	// receiving has the goroutine of receive, which ends with cancelReceive.
	receiving     sync.WaitGroup
	cancelReceive context.CancelFunc
	// exhausted is signaled when the session has carried as many deliveries as it should.
	exhausted chan struct{}
	silent    atomic.Bool // the broker answers nothing
	// unsettled is the number of unsettled deliveries when the link was lost.
	unsettled int
}

// newLinkSession returns one whose link is still to be attached.
func newLinkSession(k *consumer, sess link.Session) *linkSession {
	ds := newDeliveries(k, sess.Quirks())
	rs := &results{consumer: k, deliveries: ds}
	ds.workers = newWorkers(ds, rs, k.cfg.Concurrency, k.slots, &k.workers)
	return &linkSession{consumer: k, sess: sess, deliveries: ds, results: rs, exhausted: make(chan struct{}, 1)}
}

// Revoked and State are called by the link.
func (s *linkSession) Revoked(first, last uint32) { s.results.leaseEnded(first, last) }

func (s *linkSession) State(state map[string]any) {
	active, ok := state["rabbitmq:active"].(bool)
	switch k := s.consumer; {
	case !ok:
	case k.gated():
		s.deliveries.gate.heard(active)
	case k.active != nil:
		k.active.heard(s, active)
	}
}

// sessionEnd is how a link session came to its end.
type sessionEnd int

const (
	sessionLost    sessionEnd = iota // the link was lost
	sessionDrained                   // ctx has ended
	sessionRenewed                   // the session is to be replaced, and nothing is left on it
	sessionStepped                   // a gated consumer goes to the end of the line
)

// startReceiving starts the goroutine of receive, which renew stops and may start again.
func (s *linkSession) startReceiving() {
	ctx, cancel := context.WithCancel(context.Background())
	s.cancelReceive = cancel
	s.receiving.Go(func() { s.receive(ctx) })
}

// stopReceiving returns when all that has arrived was admitted.
func (s *linkSession) stopReceiving() {
	s.cancelReceive()
	s.receiving.Wait()
}

// run handles deliveries until ctx ends, the link is lost or the session worn out.
func (s *linkSession) run(ctx, handlerCtx context.Context, cancelHandlers context.CancelCauseFunc) sessionEnd {
	ds := s.deliveries
	s.results.handlerCtx = handlerCtx
	interrupt := context.CancelCauseFunc(func(error) {})
	if s.consumer.gated() {
		s.results.handlerCtx, interrupt = context.WithCancelCause(handlerCtx)
	}
	defer interrupt(nil)
	ds.isolation.begin()
	s.consumer.setCurrent(ds)
	defer s.consumer.setCurrent(nil)
	ds.resize()
	s.startReceiving()
	s.results.askTimeout()

	end := s.live(ctx)
	switch end {
	case sessionDrained:
		s.drain(cancelHandlers)
	case sessionStepped:
		s.drain(interrupt)
	case sessionLost:
		s.unsettled = ds.open()
		level := slog.LevelWarn
		if link.EndedConnection(ds.why) {
			level = slog.LevelDebug // the line about the connection is for all its links
		}
		s.consumer.log.Log(handlerCtx, level, "hopback: the consumer's link was lost; opening it again", "error", failure.NewError("consume", s.consumer.queue, failure.ErrConnectionLost, ds.why), "unsettled", s.unsettled)
	}
	if ds.over() {
		interrupt(failure.ErrConnectionLost) // another consumer continues
	}
	s.stopReceiving()
	s.results.deciding.finish()
	switch end {
	case sessionDrained:
		// Handlers that ignored the end of their ctx can't be waited for: their
		// messages go back to the queue as the link closes.
		if s.silent.Load() {
			s.consumer.forwarder.End()
		} else {
			s.consumer.forwarder.Close()
		}
		ds.settler.finish()
		s.overBeforeClose()
		s.closeLink()
		if ds.open() == 0 {
			ds.workers.wait() // none is in a handler
		}
		ds.die(failure.ErrClosed)
	case sessionRenewed, sessionStepped:
		ds.settler.finish()
		s.overBeforeClose()
		s.closeLink()
		ds.die(errReplaced)
	default:
		ds.settler.finish()
	}
	s.give()
	return end
}

// closeLink is called before the session is closed: see DESIGN.md, delivery counts.
func (s *linkSession) closeLink() {
	limit := link.CloseTimeout
	if s.silent.Load() {
		limit = 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if s.deliveries.link.Close(ctx) != nil && ctx.Err() != nil {
		s.silent.Store(true) // nor is the end of the session answered
	}
}

// live waits for the end of the link session.
func (s *linkSession) live(ctx context.Context) sessionEnd {
	ds := s.deliveries
	exhausted, active := s.exhausted, ds.gate.active
	var again <-chan time.Time
	starving := s.watchStarving(ctx)
	defer starving.stop()
	var tooLong <-chan time.Time
	if s.consumer.gated() && s.consumer.cfg.ConsumerTimeout > 0 {
		tooLong = time.After(ds.holdLeft())
	}
	for {
		select {
		case <-ctx.Done():
			return sessionDrained
		case <-ds.dead:
			return sessionLost
		case <-active:
			active = nil
			ds.gate.begun = true
			s.consumer.gate.Handler.Turn(ds.gate.turn)
			continue
		case <-ds.gate.step:
			return sessionStepped
		case <-tooLong:
			left := ds.holdLeft()
			if left <= 0 {
				return sessionStepped
			}
			tooLong = time.After(left)
			continue
		case <-starving.due():
			starving.check()
			continue
		case f := <-starving.found:
			why := starving.starves(f)
			if why == nil {
				continue
			}
			starving.replaces(why)
			if s.renew(ctx) {
				return sessionRenewed
			}
			starving.rearm(0)
			continue
		case <-exhausted:
			if s.consumer.gated() {
				return sessionStepped
			}
			exhausted = nil
		case <-again:
		}
		if s.renew(ctx) {
			return sessionRenewed
		}
		again = time.After(renewPause)
	}
}

// errReplaced is why a link session has ended whose session was replaced.
var errReplaced = errors.New("the consumer's session was replaced")

// renewPause is between two attempts to replace a session, which a long handler
// can be in the way of. There are 2³⁰ deliveries left before it must be.
const renewPause = time.Minute

// renew has all that was delivered handled, so that another session can take over:
// no credit for more, and within Grace nothing is unsettled. If it is by then, the
// link session lives on, and renew says false; unless it can't any more: then what is left
// goes back to the queue with the link.
func (s *linkSession) renew(ctx context.Context) bool {
	ds := s.deliveries
	ds.credit.stop(s.consumer.expedite, ctx)
	s.stopReceiving()
	s.results.requeueUnreadable()
	grace := time.NewTimer(s.consumer.cfg.Grace)
	defer grace.Stop()
	s.await(ds.open, grace.C, ctx.Done())
	switch {
	case ds.over() || ctx.Err() != nil:
	case ds.open() == 0:
		s.consumer.log.Debug("hopback: the consumer's session is replaced")
		return true
	case s.sess.Exhaust() >= 1.5:
		s.consumer.log.Warn("hopback: the consumer's session must be replaced; the broker delivers unsettled messages again", "count", ds.open())
		return true
	}
	if ctx.Err() != nil && ds.credit.undrained() {
		return false // the drain that follows asks again
	}
	s.startReceiving()
	ds.credit.resume()
	return false
}

func (s *linkSession) give() {
	if s.silent.Load() {
		go s.consumer.deps.Sessions.Give(s.sess, false) // which waits for the broker
		return
	}
	s.consumer.deps.Sessions.Give(s.sess, false)
}

// receive admits deliveries until the link ends, or ctx does. It never waits for a handler, so it
// notices at once when the link ends.
func (s *linkSession) receive(ctx context.Context) {
	for {
		a, err := s.deliveries.link.Receive(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.deliveries.die(err)
				return
			}
			for a, ok := s.deliveries.link.Prefetched(); ok; a, ok = s.deliveries.link.Prefetched() {
				s.arrived(a)
			}
			return
		}
		s.arrived(a)
	}
}

// arrived makes a delivery of what has come.
func (s *linkSession) arrived(a link.Arrival) {
	now := time.Now()
	if s.sess.Exhaust() >= 1 {
		select {
		case s.exhausted <- struct{}{}:
		default:
		}
	}
	if s.consumer.returns.Notice(a.Msg, s.consumer.deps.Now) {
		s.consumer.log.Warn("hopback: the queue redelivers returned messages too early; deliveries whose copies wait are kept instead")
	}
	d := &delivery{consumer: s.consumer, id: a.ID, results: s.results, bytes: a.Kept}
	d.Delivery = Delivery{message: a.Msg, queue: s.consumer.queue, received: now, core: d}
	if s.consumer.order != nil && !a.Unreadable {
		d.keyed()
	}
	var then followUps
	s.deliveries.admit(d, a.Unreadable, &then)
	s.deliveries.followUp(&then)
	if a.Unreadable {
		s.results.hold(d, a)
	}
}

// drain ends the link session in the order that leaves delivery counts and the queue's order
// alone: no more credit, then the handlers, then their settlements, then what no handler
// has begun; the link after that, and the session last. A quorum queue appends what comes
// back to what has come back before, so a failed message must be back before those behind
// it.
//
// What no handler has begun goes back at once where the order doesn't count: the queue has
// no single active consumer, so others can have it. RabbitMQ below 4.3 counts what goes back
// as delivered, so there handlers get it while Grace lasts.
//
// If a handler ignores the end of its ctx, the link's end brings everything back, in order.
func (s *linkSession) drain(cancelHandlers context.CancelCauseFunc) {
	ds := s.deliveries
	enough, heard := s.awaitSilence()
	defer heard()
	graceEnd := time.Now().Add(s.consumer.cfg.Grace)
	// What the broker has to send before its answer can go back with the link, unless that is counted.
	patience, end := context.WithDeadline(context.Background(), graceEnd)
	defer end()
	if !ds.old.CountsReturns {
		end()
	}
	ds.credit.stop(enough, patience)
	s.stopReceiving()
	defer s.watchEnd()()

	s.results.requeueUnreadable()
	grace := time.NewTimer(time.Until(graceEnd))
	defer grace.Stop()
	if ds.old.CountsReturns {
		s.await(ds.open, grace.C, enough)
		ds.close()
	} else {
		ds.close()
		shared := s.returnIfShared()
		s.await(ds.begun, grace.C, enough)
		shared()
	}
	switch {
	case ds.begun() == 0 || ds.over():
	case s.silent.Load():
		if !s.consumer.gated() { // what runs comes before it
			ds.returnUnbegun() // in case the broker reads it later
		}
		// What waits for the broker, such as a copy, isn't waited for. Handlers are.
		if !s.awaitWorkers(time.Until(graceEnd)) {
			cancelHandlers(errGraceOver)
			s.awaitWorkers(lastGrace)
		}
	default:
		cancelHandlers(errGraceOver)
		last := time.NewTimer(lastGrace)
		defer last.Stop()
		s.await(ds.begun, last.C, enough)
	}
	if ds.begun() == 0 {
		ds.returnUnbegun()
		written := time.NewTimer(lastGrace)
		defer written.Stop()
		s.await(ds.open, written.C, enough)
	}
	if n := ds.open(); n > 0 && !ds.over() {
		s.consumer.log.Warn("hopback: the drain ended with unsettled deliveries; the broker delivers them again", "count", n)
	}
}

// returnIfShared has everything go back that no handler has begun if the queue certainly
// has no single active consumer, once the broker has said so. It is called if handlers run. A gated consumer
// returns nothing before its handlers are done. end ends that.
func (s *linkSession) returnIfShared() (end func()) {
	ds := s.deliveries
	if s.consumer.gated() || ds.begun() == 0 || ds.begun() == ds.open() {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var asked sync.WaitGroup
	asked.Go(func() {
		if single, err := s.consumer.deps.Queues.singleActive(ctx, s.consumer.queue); err == nil && !single {
			ds.returnUnbegun()
		}
	})
	return func() {
		cancel()
		asked.Wait()
	}
}

const (
	// silentAfter is how long a drain may take before the broker is asked whether it
	// answers at all, and silentLimit how long it has for that.
	silentAfter = time.Second
	silentLimit = 4 * time.Second
)

// watchEnd notices the end of the link during a drain, until stop is called: handlers of a gated consumer must not
// run on then, since another one may continue. What still arrives goes back with the link.
func (s *linkSession) watchEnd() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			if _, err := s.deliveries.link.Receive(ctx); err != nil {
				if ctx.Err() == nil {
					s.deliveries.die(err)
				}
				return
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// awaitSilence returns a channel that is closed when the drain is to wait no longer for
// the broker: since it must hurry, or since the broker doesn't answer. heard ends that.
func (s *linkSession) awaitSilence() (enough <-chan struct{}, heard func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var asked sync.WaitGroup
	asked.Go(func() {
		if backoff.Sleep(ctx, silentAfter) && !s.sess.Answering(ctx, silentLimit) {
			s.consumer.log.Warn("hopback: the broker doesn't answer; the consumer stops without waiting for it")
			s.silent.Store(true)
			cancel()
		}
	})
	go func() {
		defer close(done)
		select {
		case <-s.consumer.expedite:
		case <-ctx.Done():
		}
	}()
	return done, func() {
		cancel()
		asked.Wait()
	}
}

// awaitWorkers waits until no handler runs, for at most d, and says whether none does.
// It takes the slots of those that have ended, so that none begins.
func (s *linkSession) awaitWorkers(d time.Duration) bool {
	n := 0
	defer func() {
		for range n {
			<-s.consumer.slots
		}
	}()
	t := time.NewTimer(d)
	defer t.Stop()
	for ; n < cap(s.consumer.slots); n++ {
		select {
		case s.consumer.slots <- struct{}{}:
		case <-t.C:
			return false
		case <-s.consumer.expedite:
			return false
		case <-s.deliveries.dead:
			return false
		}
	}
	return true
}

// await waits until left, which is deliveries.open or begun, returns 0, the timer fires, or the link ends.
func (s *linkSession) await(left func() int, timer <-chan time.Time, expedite <-chan struct{}) {
	for left() > 0 {
		select {
		case <-s.deliveries.idle:
		case <-timer:
			return
		case <-expedite:
			return
		case <-s.deliveries.dead:
			return
		}
	}
}
