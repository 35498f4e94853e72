package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// stint is the life of one receiver link. Four kinds of goroutines share the
// work, so that none waits for another's broker:
//
//	receive ──crew──▶ workers ──settles──▶ settle
//	                     └──▶ forwarder ──────┘
type stint struct {
	*consumer
	sess    session
	link    receiverLink
	crew    crew
	settles backlog[settlement]
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled is how many deliveries were when the link was lost.
	unsettled int
	// aside counts the deliveries whose forwards wait, and that the window doesn't count
	// any more; asideBytes is how large their copies are.
	aside, asideBytes atomic.Int64
	// window grants credit; when it counts nothing unsettled any more, idle is
	// signalled.
	window     *window
	idle       chan struct{}
	quarantine *quarantine
	lanes      *lanes
	narrow     atomic.Bool // the quarantine allows one delivery only
	silent     atomic.Bool // the broker answers nothing
	resizing   sync.Mutex
	// worn is signalled when the session has carried as many deliveries as it should.
	worn chan struct{}
	// counts says that the broker counts what is given back as a delivery.
	counts bool
	leases *leases // nil where the broker takes no delivery back
	// held are deliveries that nobody can read; guarded by consumer.mu. holding are those
	// that are about to be, which only the goroutine that receives adds to.
	held    []*Delivery
	holding sync.WaitGroup
	// deciding are the goroutines that deal with forwards that were given up.
	deciding group
	// keeps says that the queue is known to have a dead-letter exchange.
	keeps atomic.Bool
	// lastTarget is where the last forward went to: mostly the next goes there, too.
	lastTarget atomic.Pointer[builtAddress]
	// closing is closed when workers are to take no more deliveries.
	closing    chan struct{}
	settler    settler
	handlerCtx context.Context
}

// settler runs the goroutine that settles, from the first settlement on.
type settler struct {
	once   sync.Once
	run    func(finish <-chan struct{})
	ended  chan struct{} // closed: no further settlement will come
	exited chan struct{}
}

func newSettler(run func(finish <-chan struct{})) settler {
	return settler{run: run, ended: make(chan struct{}), exited: make(chan struct{})}
}

func (x *settler) start() {
	x.once.Do(func() {
		go func() {
			defer close(x.exited)
			x.run(x.ended)
		}()
	})
}

// finish returns when all that was to be settled is written.
func (x *settler) finish() {
	close(x.ended)
	x.start()
	<-x.exited
}

// group is goroutines that may be started until finish is called.
type group struct {
	mu       sync.Mutex
	finished bool
	running  sync.WaitGroup
}

// start runs f on a goroutine, unless finish was called.
func (g *group) start(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.finished {
		g.running.Go(f)
	}
}

// finish returns when all have ended. No more are started.
func (g *group) finish() {
	g.mu.Lock()
	g.finished = true
	g.mu.Unlock()
	g.running.Wait()
}

func (s *stint) over() bool {
	select {
	case <-s.dead:
		return true
	default:
		return false
	}
}

func (s *stint) die(err error) {
	s.deadOnce.Do(func() {
		s.why = err
		close(s.dead)
		s.crew.stop()
	})
}

// resize sets the window to the lowest of all that limits it.
func (s *stint) resize() {
	s.resizing.Lock() // so that the last to look is the last to set
	defer s.resizing.Unlock()
	s.mu.Lock()
	limit := s.limit
	s.mu.Unlock()
	n := min(limit, s.cfg.Prefetch)
	if s.appetite != nil {
		n = min(n, s.appetite.size())
	}
	if s.narrow.Load() {
		n = min(n, 1)
	}
	s.window.setLimit(n)
	if limit == 0 && !s.counts {
		s.giveBack()
	}
}

// giveBack returns what no handler has begun.
func (s *stint) giveBack() {
	for d := s.crew.pop(); d != nil; d = s.crew.pop() {
		s.push(d, disposition{kind: released})
		s.lanes.next(d) // to the crew, so that they go back in their order
	}
	for _, d := range s.lanes.empty() {
		s.push(d, disposition{kind: released})
	}
}

// stintEnd is how a stint came to its end.
type stintEnd int

const (
	stintLost    stintEnd = iota // the link was lost
	stintDrained                 // ctx has ended
	stintRenewed                 // the session is to be replaced, and nothing is left on it
)

// receiving is the goroutine that receives, which renew stops and may start again.
type receiving struct {
	stint  *stint
	cancel context.CancelFunc
	ended  sync.WaitGroup
}

func (r *receiving) start() {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.ended.Go(func() { r.stint.receive(ctx) })
}

// stop returns when all that has arrived was taken.
func (r *receiving) stop() {
	r.cancel()
	r.ended.Wait()
}

// run handles deliveries until ctx ends, the link is lost or the session worn out.
func (s *stint) run(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) stintEnd {
	s.handlerCtx = handlerCtx
	receive := &receiving{stint: s}
	s.quarantine.begin()
	s.setCurrent(s)
	defer s.setCurrent(nil)
	s.resize()
	receive.start()

	end := s.live(ctx, receive)
	switch end {
	case stintDrained:
		s.drain(receive, hard)
	case stintLost:
		s.unsettled = s.open()
		s.log.Warn("hopback: the consumer's link was lost; opening it again", "error", newError("consume", s.queue, ErrConnectionLost, s.why), "unsettled", s.unsettled)
	}
	receive.stop()
	s.deciding.finish()
	switch end {
	case stintDrained:
		// Handlers that ignored the end of their ctx can't be waited for: their
		// messages go back to the queue as the link closes.
		if s.silent.Load() {
			s.forwards.end()
		} else {
			s.forwards.close()
		}
		s.settler.finish()
		s.closeLink()
		if s.open() == 0 {
			s.crew.wait() // none is in a handler
		}
		s.die(ErrClosed)
	case stintRenewed:
		s.settler.finish()
		s.closeLink()
		s.die(errReplaced)
	default:
		s.settler.finish()
	}
	s.give()
	return end
}

// closeLink is called before the session is closed: see DESIGN.md, delivery counts.
func (s *stint) closeLink() {
	limit := closeTimeout
	if s.silent.Load() {
		limit = 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = s.link.close(ctx)
}

// live waits for the end of the stint.
func (s *stint) live(ctx context.Context, receive *receiving) stintEnd {
	worn := s.worn
	var again <-chan time.Time
	starving := s.watchStarving(ctx)
	defer starving.stop()
	for {
		select {
		case <-ctx.Done():
			return stintDrained
		case <-s.dead:
			return stintLost
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
				return stintRenewed
			}
			starving.again(0)
			continue
		case <-worn:
			worn = nil
		case <-again:
		}
		if s.renew(ctx, receive) {
			return stintRenewed
		}
		again = time.After(renewPause)
	}
}

// errReplaced is why a stint has ended whose session was replaced.
var errReplaced = errors.New("the consumer's session was replaced")

// renewPause is between two attempts to replace a session, which a long handler
// can be in the way of. There are 2³⁰ deliveries left before it must be.
const renewPause = time.Minute

// renew has all that was delivered handled, so that another session can take over:
// no credit for more, and within Grace nothing is unsettled. If it is by then, the
// stint goes on, and renew says false; unless it can't any more: then what is left
// goes back to the queue with the link.
func (s *stint) renew(ctx context.Context, receive *receiving) bool {
	s.window.stop(s.hurry)
	receive.stop()
	s.giveBackHeld()
	grace := time.NewTimer(s.cfg.Grace)
	defer grace.Stop()
	s.awaitIdle(grace.C, ctx.Done())
	switch {
	case s.over() || ctx.Err() != nil:
	case s.open() == 0:
		s.log.Debug("hopback: the consumer's session is replaced")
		return true
	case s.sess.wear() >= 1.5:
		s.log.Warn("hopback: the consumer's session must be replaced; the broker delivers unsettled messages again", "count", s.open())
		return true
	}
	receive.start()
	s.window.resume()
	return false
}

func (s *stint) give() {
	if s.silent.Load() {
		go s.deps.give(s.sess) // which waits for the broker
		return
	}
	s.deps.give(s.sess)
}

// open counts the deliveries that are neither settled nor held for good.
func (s *stint) open() int { return s.window.open() + int(s.aside.Load()) }

// hold deals with a message that go-amqp can't decode, so that nobody can handle it.
// It is dead-lettered, as it was sent, if the queue is known to have a dead-letter
// exchange; a queue that has none would drop it. So there it is held, unsettled, until
// the consumer ends.
func (s *stint) hold(d *Delivery) {
	s.quarantine.pass(d)
	s.holding.Go(func() {
		err := errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well: so go-amqp can't decode it")
		ctx, cancel := context.WithTimeout(context.Background(), prepareSlow)
		defer cancel()
		if s.deps.deadLetters != nil && s.deps.deadLetters(ctx, s.queue) {
			s.log.Error("hopback: a message can't be decoded; it is dead-lettered", "error", err)
			s.carryOutAs(d, DeadLetter{Reason: ReasonUndecodable, Err: err}.resolve())
			return
		}
		s.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer ends", "error", err)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.held = append(s.held, d)
		if len(s.held) <= s.cfg.Prefetch { // it mustn't take the place of what can be handled
			d.message.Data = nil
			d.uncounted.Store(true)
			s.uncount(false)
		}
	})
}

// giveBackHeld is called by the drain, and before the session is replaced.
func (s *stint) giveBackHeld() {
	s.holding.Wait()
	s.mu.Lock()
	held := s.held
	s.held = nil
	s.mu.Unlock()
	for _, d := range held {
		s.push(d, disposition{kind: released})
	}
}

// drain ends the stint in the order that leaves delivery counts alone: no more
// credit, then what no handler has begun, then the handlers, then their
// settlements; the link after that, and the session last.
func (s *stint) drain(receive *receiving, hard context.CancelCauseFunc) {
	enough, heard := s.awaitSilence()
	defer heard()
	graceEnd := time.Now().Add(s.cfg.Grace)
	s.window.stop(enough)
	receive.stop()

	s.giveBackHeld()
	giveBack := func() {
		for _, d := range s.quarantine.empty() {
			s.push(d, disposition{kind: released})
		}
		s.giveBack()
	}
	if !s.counts {
		s.stopWorkers()
		giveBack()
	}
	grace := time.NewTimer(time.Until(graceEnd))
	defer grace.Stop()
	s.awaitIdle(grace.C, enough)
	if s.counts {
		s.stopWorkers()
		giveBack()
	}
	switch {
	case s.open() == 0 || s.over():
	case s.silent.Load():
		// What waits for the broker, such as a copy, isn't waited for. Handlers are.
		if !s.awaitWorkers(time.Until(graceEnd)) {
			hard(errGraceOver)
			s.awaitWorkers(lastGrace)
		}
	default:
		hard(errGraceOver)
		last := time.NewTimer(lastGrace)
		defer last.Stop()
		s.awaitIdle(last.C, enough)
	}
	if n := s.open(); n > 0 && !s.over() {
		s.log.Warn("hopback: the drain ended with unsettled deliveries; the broker delivers them again", "count", n)
	}
}

// stopWorkers has workers take no more deliveries.
func (s *stint) stopWorkers() {
	close(s.closing)
	s.crew.stop()
}

const (
	// silentAfter is how long a drain may take before the broker is asked whether it
	// answers at all, and silentLimit how long it has for that.
	silentAfter = time.Second
	silentLimit = 4 * time.Second
)

// awaitSilence returns a channel that is closed when the drain is to wait no longer for
// the broker: since it must hurry, or since the broker doesn't answer. heard ends that.
func (s *stint) awaitSilence() (enough <-chan struct{}, heard func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var asked sync.WaitGroup
	asked.Go(func() {
		if pause(ctx, silentAfter) && !s.sess.answering(ctx, silentLimit) {
			s.log.Warn("hopback: the consumer ends without waiting for the broker, which doesn't answer")
			s.silent.Store(true)
			cancel()
		}
	})
	go func() {
		defer close(done)
		select {
		case <-s.hurry:
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
func (s *stint) awaitWorkers(d time.Duration) bool {
	n := 0
	defer func() {
		for range n {
			<-s.slots
		}
	}()
	t := time.NewTimer(d)
	defer t.Stop()
	for ; n < cap(s.slots); n++ {
		select {
		case s.slots <- struct{}{}:
		case <-t.C:
			return false
		case <-s.hurry:
			return false
		case <-s.dead:
			return false
		}
	}
	return true
}

// awaitIdle waits until nothing is unsettled, the timer fires, or the link ends.
func (s *stint) awaitIdle(timer <-chan time.Time, hurry <-chan struct{}) {
	for s.open() > 0 {
		select {
		case <-s.idle:
		case <-timer:
			return
		case <-hurry:
			return
		case <-s.dead:
			return
		}
	}
}
