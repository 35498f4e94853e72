package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// sessionEnd is how a link session came to its end.
type sessionEnd int

const (
	sessionLost    sessionEnd = iota // the link was lost
	sessionDrained                   // ctx has ended
	sessionRenewed                   // the session is to be replaced, and nothing is left on it
	sessionStepped                   // a gated consumer goes to the end of the line
)

// receiving is the goroutine that receives, which renew stops and may start again.
type receiving struct {
	of     *linkSession
	cancel context.CancelFunc
	ended  sync.WaitGroup
}

func (r *receiving) start() {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.ended.Go(func() { r.of.receive(ctx) })
}

// stop returns when all that has arrived was taken.
func (r *receiving) stop() {
	r.cancel()
	r.ended.Wait()
}

// run handles deliveries until ctx ends, the link is lost or the session worn out.
func (s *linkSession) run(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) sessionEnd {
	s.handlerCtx = handlerCtx
	interrupt := context.CancelCauseFunc(func(error) {})
	if s.gated() {
		s.handlerCtx, interrupt = context.WithCancelCause(handlerCtx)
	}
	defer interrupt(nil)
	receive := &receiving{of: s}
	s.isolation.begin()
	s.consumer.setCurrent(s)
	defer s.consumer.setCurrent(nil)
	s.resize()
	receive.start()
	s.askTimeout()

	end := s.live(ctx, receive)
	switch end {
	case sessionDrained:
		s.drain(receive, hard)
	case sessionStepped:
		s.drain(receive, interrupt)
	case sessionLost:
		interrupt(failure.ErrConnectionLost) // another consumer continues
		s.unsettled = s.open()
		level := slog.LevelWarn
		if link.EndedConnection(s.why) {
			level = slog.LevelDebug // the line about the connection is for all its links
		}
		s.consumer.log.Log(handlerCtx, level, "hopback: the consumer's link was lost; opening it again", "error", failure.NewError("consume", s.consumer.queue, failure.ErrConnectionLost, s.why), "unsettled", s.unsettled)
	}
	receive.stop()
	s.deciding.finish()
	switch end {
	case sessionDrained:
		// Handlers that ignored the end of their ctx can't be waited for: their
		// messages go back to the queue as the link closes.
		if s.silent.Load() {
			s.consumer.forwarder.End()
		} else {
			s.consumer.forwarder.Close()
		}
		s.finishSettling()
		s.overBeforeClose()
		s.closeLink()
		if s.open() == 0 {
			s.workers.wait() // none is in a handler
		}
		s.die(failure.ErrClosed)
	case sessionRenewed, sessionStepped:
		s.finishSettling()
		s.overBeforeClose()
		s.closeLink()
		s.die(errReplaced)
	default:
		s.finishSettling()
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
	if s.link.Close(ctx) != nil && ctx.Err() != nil {
		s.silent.Store(true) // nor is the end of the session answered
	}
}

// live waits for the end of the link session.
func (s *linkSession) live(ctx context.Context, receive *receiving) sessionEnd {
	exhausted, active := s.exhausted, s.gate.active
	var again <-chan time.Time
	starving := s.watchStarving(ctx)
	defer starving.stop()
	var tooLong <-chan time.Time
	if s.gated() && s.consumer.cfg.ConsumerTimeout > 0 {
		tooLong = time.After(s.holdLeft())
	}
	for {
		select {
		case <-ctx.Done():
			return sessionDrained
		case <-s.dead:
			return sessionLost
		case <-active:
			active = nil
			s.gate.begun = true
			s.consumer.gate.Turn(s.gate.turn)
			continue
		case <-s.gate.step:
			return sessionStepped
		case <-tooLong:
			left := s.holdLeft()
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
			if s.renew(ctx, receive) {
				return sessionRenewed
			}
			starving.again(0)
			continue
		case <-exhausted:
			if s.gated() {
				return sessionStepped
			}
			exhausted = nil
		case <-again:
		}
		if s.renew(ctx, receive) {
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
func (s *linkSession) renew(ctx context.Context, receive *receiving) bool {
	s.stopCredit(s.consumer.expedite, ctx)
	receive.stop()
	s.requeueHeld()
	grace := time.NewTimer(s.consumer.cfg.Grace)
	defer grace.Stop()
	s.awaitIdle(grace.C, ctx.Done())
	switch {
	case s.over() || ctx.Err() != nil:
	case s.open() == 0:
		s.consumer.log.Debug("hopback: the consumer's session is replaced")
		return true
	case s.sess.Exhaust() >= 1.5:
		s.consumer.log.Warn("hopback: the consumer's session must be replaced; the broker delivers unsettled messages again", "count", s.open())
		return true
	}
	if ctx.Err() != nil && s.undrained() {
		return false // the drain that follows asks again
	}
	receive.start()
	s.resumeCredit()
	return false
}

func (s *linkSession) give() {
	if s.silent.Load() {
		go s.consumer.deps.Sessions.Give(s.sess, false) // which waits for the broker
		return
	}
	s.consumer.deps.Sessions.Give(s.sess, false)
}

// requeueHeld is called by the drain, and before the session is replaced.
func (s *linkSession) requeueHeld() {
	s.holding.Wait()
	s.mu.Lock()
	all := make([]*delivery, len(s.held))
	for i, h := range s.held {
		all[i] = h.delivery
	}
	s.held = nil
	s.mu.Unlock()
	s.release(all)
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
func (s *linkSession) drain(receive *receiving, hard context.CancelCauseFunc) {
	enough, heard := s.awaitSilence()
	defer heard()
	graceEnd := time.Now().Add(s.consumer.cfg.Grace)
	// What the broker has to send before its answer can go back with the link, unless that is counted.
	patience, end := context.WithDeadline(context.Background(), graceEnd)
	defer end()
	if !s.old.CountsReturns {
		end()
	}
	s.stopCredit(enough, patience)
	receive.stop()

	s.requeueHeld()
	grace := time.NewTimer(time.Until(graceEnd))
	defer grace.Stop()
	if s.old.CountsReturns {
		s.awaitIdle(grace.C, enough)
		s.stopWorkers()
	} else {
		s.stopWorkers()
		shared := s.returnIfShared()
		s.awaitBegun(grace.C, enough)
		shared()
	}
	switch {
	case s.begun() == 0 || s.over():
	case s.silent.Load():
		if !s.gated() { // what runs comes before it
			s.returnUnbegun() // in case the broker reads it later
		}
		// What waits for the broker, such as a copy, isn't waited for. Handlers are.
		if !s.awaitWorkers(time.Until(graceEnd)) {
			hard(errGraceOver)
			s.awaitWorkers(lastGrace)
		}
	default:
		hard(errGraceOver)
		last := time.NewTimer(lastGrace)
		defer last.Stop()
		s.awaitBegun(last.C, enough)
	}
	if s.begun() == 0 {
		s.returnUnbegun()
		written := time.NewTimer(lastGrace)
		defer written.Stop()
		s.awaitIdle(written.C, enough)
	}
	if n := s.open(); n > 0 && !s.over() {
		s.consumer.log.Warn("hopback: the drain ended with unsettled deliveries; the broker delivers them again", "count", n)
	}
}

// returnUnbegun has everything go back that no handler has begun.
func (s *linkSession) returnUnbegun() {
	s.mu.Lock()
	s.returning = true
	all := s.unbegun()
	s.mu.Unlock()
	s.release(all)
}

// returnIfShared has everything go back that no handler has begun if the queue certainly
// has no single active consumer, once the broker has said so. It is called if handlers run.
// end ends that.
func (s *linkSession) returnIfShared() (end func()) {
	if s.consumer.deps.SingleActive == nil || s.begun() == 0 || s.begun() == s.open() {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var asked sync.WaitGroup
	asked.Go(func() {
		if single, err := s.consumer.deps.SingleActive(ctx, s.consumer.queue); err == nil && !single {
			s.returnUnbegun()
		}
	})
	return func() {
		cancel()
		asked.Wait()
	}
}

// stopWorkers has workers take no more deliveries.
func (s *linkSession) stopWorkers() {
	s.closingOnce.Do(func() { close(s.closing) })
	s.workers.stop()
}

const (
	// silentAfter is how long a drain may take before the broker is asked whether it
	// answers at all, and silentLimit how long it has for that.
	silentAfter = time.Second
	silentLimit = 4 * time.Second
)

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
		case <-s.dead:
			return false
		}
	}
	return true
}

// awaitIdle waits until nothing is unsettled, the timer fires, or the link ends.
func (s *linkSession) awaitIdle(timer <-chan time.Time, expedite <-chan struct{}) {
	s.await(s.open, timer, expedite)
}

// awaitBegun does so until nothing is unsettled but what waits for a handler.
func (s *linkSession) awaitBegun(timer <-chan time.Time, expedite <-chan struct{}) {
	s.await(s.begun, timer, expedite)
}

func (s *linkSession) await(left func() int, timer <-chan time.Time, expedite <-chan struct{}) {
	for left() > 0 {
		select {
		case <-s.idle:
		case <-timer:
			return
		case <-expedite:
			return
		case <-s.dead:
			return
		}
	}
}
