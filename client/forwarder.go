package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
)

// maxForwardLinks is how many addresses a forwarder keeps links to. RabbitMQ ends
// the session at its 257th link.
const maxForwardLinks = 200

// forwarder carries out a consumer's Forward outcomes: a link for each address,
// since a link's own target leaves the message's To property as the sender set
// it, and all links on one session, apart from the consumer's, so that a fault in
// forwarding doesn't end the deliveries.
type forwarder struct {
	depth int
	deps  consumerDeps

	mu      sync.Mutex
	closed  bool
	senders map[string]*forwardSender
	session *sharedSession
	// opening is the turn to open a session.
	opening chan struct{}
}

type forwardSender struct {
	*sender
	pending int // messages not answered yet; guarded by forwarder.mu
}

// sharedSession is a session that several senders use. Once one of them has lost
// its link on it, it is retired: nobody knows whether only the link ended. Those
// whose links still work keep it until they give it back. A link that was closed,
// or that alone was refused, doesn't retire it, or else a rare or a bad address
// would cost a session each time.
type sharedSession struct {
	session
	refs    int
	retired bool
}

// forward is one Forward outcome under way.
type forward struct {
	target   string
	msg      *Message
	patience time.Duration
	// abandoned is closed when the original can't be settled any more: the broker
	// will deliver it again, so a copy would only be a duplicate.
	abandoned <-chan struct{}
	report    func(err error, again time.Duration)
	// done is called at most once, with nil when the broker has the copy. It must
	// not block. It isn't called for an abandoned forward, or after close.
	done func(error)

	since    time.Time // of the first failure
	failures int
}

func newForwarder(depth int, deps consumerDeps) *forwarder {
	return &forwarder{depth: depth, deps: deps, senders: map[string]*forwardSender{}, opening: make(chan struct{}, 1)}
}

// forwardPause is the pause between attempts at the same forward.
var forwardPause = Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second}

// send queues f. It doesn't block.
func (w *forwarder) send(f *forward) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return
	}
	s := w.senders[f.target]
	if s == nil {
		if !w.room() {
			w.mu.Unlock()
			w.answered(f, &Error{Op: "forward", Target: f.target, Kind: ErrNotSent, Text: "too many different addresses are forwarded to at once"})
			return
		}
		s = &forwardSender{sender: newSender("forward", f.target, senderConfig{depth: w.depth, backoff: w.deps.backoff, tell: w.deps.tell}, w.open, w.give)}
		w.senders[f.target] = s
	}
	s.pending++
	out := &outgoing{msg: f.msg, abandoned: f.abandoned, to: answerFunc(func(err error) {
		w.mu.Lock()
		s.pending--
		w.mu.Unlock()
		w.answered(f, err)
	})}
	select {
	case s.queue <- out:
		w.mu.Unlock()
	default:
		s.pending--
		w.mu.Unlock()
		w.answered(f, &Error{Op: "forward", Target: f.target, Kind: ErrNotSent, Text: "too many forwards wait for this address"})
	}
}

// room makes room for one more link by closing an idle one.
func (w *forwarder) room() bool {
	if len(w.senders) < maxForwardLinks {
		return true
	}
	for target, s := range w.senders {
		if s.pending == 0 {
			delete(w.senders, target)
			s.stopOnce.Do(func() { close(s.stop) })
			return true
		}
	}
	return false
}

// answered decides what follows on the broker's answer to f.
func (w *forwarder) answered(f *forward, err error) {
	if err == nil {
		f.done(nil)
		return
	}
	w.mu.Lock()
	closed := w.closed
	w.mu.Unlock()
	if closed {
		return
	}
	if errors.Is(err, ErrTooLarge) || errors.As(err, new(*argument.Error)) {
		f.done(err)
		return
	}
	if f.since.IsZero() {
		f.since = time.Now()
	}
	wait := forwardPause.pause(f.failures)
	f.failures++
	if time.Since(f.since)+wait > f.patience {
		f.done(err)
		return
	}
	if f.failures == 1 {
		f.report(err, wait)
	}
	time.AfterFunc(wait, func() {
		select {
		case <-f.abandoned:
		default:
			w.send(f)
		}
	})
}

// open returns the shared session, opening one if there is none to use.
func (w *forwarder) open(ctx context.Context) (session, error) {
	select {
	case w.opening <- struct{}{}:
		defer func() { <-w.opening }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	w.mu.Lock()
	s := w.session
	if s != nil && !s.retired && s.wear() < 1 && !isClosed(s.broken()) {
		s.refs++
		w.mu.Unlock()
		return s, nil
	}
	w.mu.Unlock()
	fresh, err := w.deps.open(ctx)
	if err != nil {
		return nil, err
	}
	s = &sharedSession{session: fresh, refs: 1}
	w.mu.Lock()
	w.session = s
	w.mu.Unlock()
	return s, nil
}

// give returns a session after the link on it has ended.
func (w *forwarder) give(given session, intact bool) {
	s := given.(*sharedSession)
	w.mu.Lock()
	if !intact {
		s.retired = true
	}
	s.refs--
	last := s.refs == 0
	if w.session == s && (s.retired || last) {
		w.session = nil
	}
	w.mu.Unlock()
	if last {
		w.deps.give(s.session)
	}
}

// close cuts everything off. Forwards that are under way have no outcome then:
// the broker delivers their originals again.
func (w *forwarder) close() {
	w.mu.Lock()
	w.closed = true
	senders := w.senders
	w.senders = map[string]*forwardSender{}
	w.mu.Unlock()
	for _, s := range senders {
		s.cut()
	}
	for _, s := range senders {
		<-s.done
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
