package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
)

// stint is the life of one receiver link. Four kinds of goroutines share the
// work, so that none waits for another's broker:
//
//	receive ──inbox──▶ workers ──settles──▶ settle
//	                      └──▶ forwarder ──────┘
type stint struct {
	*consumer
	sess    session
	link    receiverLink
	inbox   chan *Delivery
	settles chan settlement
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled is how many deliveries were when the link was lost.
	unsettled int
	// window grants credit; when it counts nothing unsettled any more, idle is
	// signalled.
	window     *window
	idle       chan struct{}
	quarantine *quarantine
	lanes      *lanes
	narrow     atomic.Bool // the quarantine allows one delivery only
	resizing   sync.Mutex
	// worn is signalled when the session has carried as many deliveries as it should.
	worn chan struct{}
	// counts says that the broker counts what is given back as a delivery.
	counts bool
	leases *leases // nil where the broker takes no delivery back
	// held are deliveries that nobody can read; guarded by consumer.mu.
	held    []*Delivery
	holding sync.WaitGroup
	// closing is closed when workers are to take no more deliveries.
	closing    chan struct{}
	workers    sync.WaitGroup
	handlerCtx context.Context
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
	for {
		select {
		case d := <-s.inbox:
			s.push(d, disposition{kind: released})
			s.lanes.next(d) // into the inbox, so that they go back in their order
		default:
			for _, d := range s.lanes.empty() {
				s.push(d, disposition{kind: released})
			}
			return
		}
	}
}

// stintEnd is how a stint came to its end.
type stintEnd int

const (
	stintLost    stintEnd = iota // the link was lost
	stintDrained                 // ctx has ended
	stintRenewed                 // the session is worn out, and nothing is left on it
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
	var settle sync.WaitGroup
	s.quarantine.begin()
	s.setCurrent(s)
	defer s.setCurrent(nil)
	s.resize()
	receive.start()
	settling := make(chan struct{}) // closed: no further settlement will come
	settle.Go(func() { s.settle(settling) })
	for range s.cfg.Concurrency {
		s.workers.Go(func() { s.work(handlerCtx) })
	}

	end := s.live(ctx, receive)
	switch end {
	case stintDrained:
		s.drain(receive, hard)
	case stintLost:
		s.unsettled = s.window.open()
		s.log.Warn("hopback: consumer's link lost, opening it again", "error", newError("consume", s.queue, ErrConnectionLost, s.why), "unsettled", s.unsettled)
	}
	receive.stop()
	switch end {
	case stintDrained:
		// Handlers that ignored the end of their ctx can't be waited for: their
		// messages go back to the queue as the link closes.
		s.forwards.close()
		close(settling)
		settle.Wait()
		s.closeLink()
		if s.window.open() == 0 {
			s.workers.Wait() // none is in a handler
		}
		s.die(ErrClosed)
	case stintRenewed:
		close(settling)
		settle.Wait()
		s.closeLink()
		s.die(errWorn)
	default:
		close(settling)
		settle.Wait()
	}
	s.give()
	return end
}

// closeLink is called before the session is closed: see DESIGN.md, delivery counts.
func (s *stint) closeLink() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = s.link.close(ctx)
}

// live waits for the end of the stint.
func (s *stint) live(ctx context.Context, receive *receiving) stintEnd {
	worn := s.worn
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return stintDrained
		case <-s.dead:
			return stintLost
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

// errWorn is why a stint has ended whose session was replaced.
var errWorn = errors.New("the session has carried as many deliveries as it should")

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
	case s.window.open() == 0:
		s.log.Debug("hopback: the consumer's session has carried as many deliveries as it should, and is replaced")
		return true
	case s.sess.wear() >= 1.5:
		s.log.Warn("hopback: the consumer's session must be replaced; the broker delivers again what is unsettled", "count", s.window.open())
		return true
	}
	receive.start()
	s.window.resume()
	return false
}

func (s *stint) give() { s.deps.give(s.sess) }

// hold deals with a message that go-amqp can't decode, so that nobody can handle it.
// It is dead-lettered, as it was sent, if the queue is known to have a dead-letter
// exchange; a queue that has none would drop it. So there it is held, unsettled, until
// the consumer ends.
func (s *stint) hold(d *Delivery) {
	s.quarantine.pass(d)
	s.holding.Go(func() {
		err := errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well: go-amqp can't decode it")
		ctx, cancel := context.WithTimeout(context.Background(), prepareSlow)
		defer cancel()
		if s.deps.deadLetters != nil && s.deps.deadLetters(ctx, s.queue) {
			s.log.Error("hopback: a message can't be read, it is dead-lettered", "error", err)
			s.deadLetter(d, DeadLetter{Reason: ReasonUndecodable, Err: err})
			return
		}
		s.log.Error("hopback: a message can't be read, and its queue isn't known to have a dead-letter exchange: it is held until the consumer ends", "error", err)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.held = append(s.held, d)
		if len(s.held) <= s.cfg.Prefetch { // it mustn't take the place of what can be handled
			d.message.Data = nil
			d.uncounted.Store(true)
			s.uncount()
		}
	})
}

// deadLetters asks the broker for the queue's arguments. A policy's dead-letter exchange
// isn't among them.
func (c *Conn) deadLetters(ctx context.Context, queue string) bool {
	path, err := address.Queue(queue).Build()
	if err != nil {
		return false
	}
	status, reply, err := c.mgmt.Request(ctx, "GET", path, nil)
	if err != nil || status != 200 {
		return false
	}
	value := func(in any, key string) any {
		switch m := in.(type) {
		case map[string]any:
			return m[key]
		case map[any]any:
			return m[key]
		}
		return nil
	}
	return value(value(reply, "arguments"), "x-dead-letter-exchange") != nil
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
	s.window.stop(s.hurry)
	receive.stop()

	s.giveBackHeld()
	giveBack := func() {
		for _, d := range s.quarantine.empty() {
			s.push(d, disposition{kind: released})
		}
		s.giveBack()
	}
	if !s.counts {
		close(s.closing)
		giveBack()
	}
	grace := time.NewTimer(s.cfg.Grace)
	defer grace.Stop()
	s.awaitIdle(grace.C, s.hurry)
	if s.counts {
		close(s.closing)
		giveBack()
	}
	if s.window.open() > 0 && !s.over() {
		hard(errGraceOver)
		last := time.NewTimer(lastGrace)
		defer last.Stop()
		s.awaitIdle(last.C, s.hurry)
	}
	if n := s.window.open(); n > 0 && !s.over() {
		s.log.Warn("hopback: drained with deliveries unsettled; the broker delivers them again", "count", n)
	}
}

// awaitIdle waits until nothing is unsettled, the timer fires, or the link ends.
func (s *stint) awaitIdle(timer <-chan time.Time, hurry <-chan struct{}) {
	for s.window.open() > 0 {
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
