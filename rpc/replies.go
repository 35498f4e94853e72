package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

const (
	// directWindow is how many calls await a reply on one link of direct reply-to. RabbitMQ
	// drops a direct reply that finds no credit. It grants its own queue at most 256 of the
	// client's credits at a time, and adds to them when half are used
	// (TestDirectRepliesAreDroppedWithoutCredit).
	directWindow = 128
	directCredit = 256
	// queueCredit is how many replies a queue sends in advance.
	queueCredit = 1000
	// queueExpires is how long the broker keeps a reply queue without its requester.
	queueExpires = 5 * time.Minute
	queuePrefix  = "hopback-replies-"
)

// replyReceiverConfig is what a replyReceiver needs from a requester.
type replyReceiverConfig struct {
	replies  Replies
	inFlight int
	conn     *client.Conn
	calls    *calls
	to       address.Address // of requests
}

// replyReceiver receives replies, and opens its links again whenever they are lost.
type replyReceiver struct {
	cfg   replyReceiverConfig
	place link.ReplyPlace
	queue string // the reply queue, if there is one

	ctx    context.Context // without a deadline
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	now     *links        // nil while there are none
	why     error         // why there are none
	since   time.Time     // when that changed
	changed chan struct{} // closed and renewed when now changes

	// Only run uses these.
	made     bool // the queue was declared
	noDirect bool // the broker has refused direct reply-to
}

// links are the links of one session. They are lost together.
type links struct {
	session link.ReplySession
	n       int
	direct  bool
	// address is where replies are sent to, by link.
	address []string
	// free has a slot for each call that a link has room for.
	free chan int

	// The mu of calls protects these.
	lost bool
	next *links // those that have the same queue, once these have ended
}

func newReplyReceiver(cfg replyReceiverConfig) (*replyReceiver, error) {
	l := &replyReceiver{cfg: cfg, since: time.Now(), done: make(chan struct{}), changed: make(chan struct{}), queue: queuePrefix + strings.ToLower(rand.Text())}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	var err error
	if l.place, err = inside.Of(cfg.conn).ReserveReplies(l.stop, l.count); err != nil {
		l.cancel()
		return nil, err
	}
	return l, nil
}

// run opens links and receives replies until it is stopped.
func (l *replyReceiver) run() {
	defer close(l.done)
	defer l.place.Leave()
	// last are links on the queue, whose replies wait there for the next session.
	var last *links
	lose := func(now *links, why error) {
		e := &client.Error{Op: "call", Kind: client.ErrConnectionLost, Err: why}
		if l.ctx.Err() != nil {
			e.Kind, e.Err = client.ErrClosed, nil
		}
		l.cfg.calls.lose(now, e)
	}
	for try := range backoff.Tries(l.ctx, l.place.Pause) {
		now, err := l.open(last)
		if errors.Is(err, errQueueGone) {
			lose(last, err)
			last = nil
			now, err = l.open(nil)
		}
		if err != nil {
			l.set(nil, err)
			continue
		}
		try.Up()
		l.set(now, nil)
		err = l.receive(now)
		l.set(nil, err)
		if last = now; now.direct {
			lose(now, err)
			last = nil
		}
		now.session.Close()
	}
	l.set(nil, &client.Error{Op: "call", Kind: client.ErrClosed})
	if last != nil {
		lose(last, nil)
	}
	l.remove()
}

// open opens a session. If last is not nil, it used the same queue, and calls wait for replies in
// it: they move to the new session.
func (l *replyReceiver) open(last *links) (*links, error) {
	now := &links{}
	s, err := l.place.Open(l.ctx, func(old oldbroker.Quirks) (link.ReplySource, error) {
		now.direct = l.cfg.replies == RepliesDirect || l.cfg.replies == RepliesAuto && !old.LacksDirectReplies && !l.noDirect
		if now.direct {
			now.n = (l.cfg.inFlight + directWindow - 1) / directWindow
			return link.ReplySource{Links: now.n, Credit: directCredit}, nil
		}
		now.n = 1
		if err := l.declare(last != nil); err != nil {
			return link.ReplySource{}, err
		}
		to, err := address.Queue(l.queue).Build()
		return link.ReplySource{Queue: to, Links: 1, Credit: queueCredit}, err
	})
	if err != nil {
		if now.direct && l.cfg.replies == RepliesAuto && errors.Is(err, client.ErrRefused) && !errors.Is(err, client.ErrUnauthorized) {
			// Below 4.2, or with its feature flag off, the broker doesn't support this.
			l.noDirect = true
			return l.open(last)
		}
		return nil, err
	}
	now.session = s
	now.free = make(chan int, l.cfg.inFlight)
	for i := range l.cfg.inFlight {
		now.free <- i % now.n
	}
	for i := range now.n {
		now.address = append(now.address, s.Address(i))
	}
	if last != nil {
		if now.direct {
			// The broker now supports direct reply-to.
			l.cfg.calls.lose(last, &client.Error{Op: "call", Kind: client.ErrConnectionLost, Text: "the requester has switched to direct reply-to"})
		} else {
			l.cfg.calls.move(last, now)
		}
	}
	return now, nil
}

// errQueueGone is the loss of the reply queue, with the replies in it.
var errQueueGone = errors.New("the reply queue was gone")

// declare declares the reply queue. again reports that calls wait for replies in it.
func (l *replyReceiver) declare(again bool) error {
	ctx, cancel := context.WithTimeout(l.ctx, 30*time.Second)
	defer cancel()
	report, err := declare.Apply(ctx, l.cfg.conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.ClassicQueue{Name: l.queue, DeadLetter: declare.Drop(), Expires: queueExpires},
	}})
	if err != nil {
		return fmt.Errorf("hopback: the reply queue can't be declared: %w", err)
	}
	l.made = true
	if again && report.Count("created") > 0 {
		return errQueueGone // it is there now
	}
	return nil
}

// receive passes on replies until the links are lost, and returns why they are.
func (l *replyReceiver) receive(now *links) error {
	ctx, cancel := context.WithCancelCause(l.ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	for i := range now.n {
		running.Go(func() {
			for {
				reply, err := now.session.Receive(ctx, i)
				if err != nil {
					cancel(err) // only the first counts
					return
				}
				l.cfg.calls.dispatch(reply.Message, reply.TooLarge)
				if err := now.session.Accept(i, reply.ID); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	running.Wait()
	return context.Cause(ctx)
}

func (l *replyReceiver) set(now *links, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if (l.now == nil) != (now == nil) {
		l.since = time.Now()
	}
	l.now, l.why = now, why
	close(l.changed)
	l.changed = make(chan struct{})
}

// count adds the requester's numbers.
func (l *replyReceiver) count(s *instrument.Stats) {
	l.mu.Lock()
	r := instrument.RequesterStats{To: l.cfg.to, Up: l.now != nil, Since: l.since, Err: l.why}
	l.mu.Unlock()
	r.Waiting = l.cfg.calls.snapshot().Waiting
	s.Requesters = append(s.Requesters, r)
}

// await waits within ctx until links are up and one of them has a free slot. The slot must be
// returned to links.free.
func (l *replyReceiver) await(ctx context.Context) (now *links, link int, err error) {
	for {
		l.mu.Lock()
		now, why, changed := l.now, l.why, l.changed
		l.mu.Unlock()
		var free chan int
		if now != nil {
			free = now.free
		}
		select {
		case link := <-free:
			return now, link, nil
		default:
		}
		select {
		case link := <-free:
			return now, link, nil
		case <-changed:
		case <-l.ctx.Done():
			return nil, 0, &client.Error{Op: "call", Kind: client.ErrNotSent, Err: client.ErrClosed}
		case <-ctx.Done():
			cause := context.Cause(ctx)
			if why != nil {
				cause = errors.Join(cause, why)
			}
			return nil, 0, &client.Error{Op: "call", Kind: client.ErrNotSent, Err: cause}
		}
	}
}

// first waits until the links are up for the first time, or the broker refuses them.
func (l *replyReceiver) first(ctx context.Context) error {
	for {
		l.mu.Lock()
		now, why, changed := l.now, l.why, l.changed
		l.mu.Unlock()
		switch {
		case now != nil:
			return nil
		case why != nil && !errors.Is(why, client.ErrConnectionLost) && !errors.Is(why, client.ErrNotSent):
			return why
		}
		select {
		case <-changed:
		case <-ctx.Done():
			cause := context.Cause(ctx)
			if why != nil {
				cause = errors.Join(cause, why)
			}
			return &client.Error{Op: "call", Kind: client.ErrNotSent, Err: cause}
		}
	}
}

// stop stops the receiver, and waits for that within ctx.
func (l *replyReceiver) stop(ctx context.Context) {
	l.cancel()
	select {
	case <-l.done:
	case <-ctx.Done():
	}
}

// remove deletes the reply queue, if there is one. A queue that can't be deleted now expires.
func (l *replyReceiver) remove() {
	if !l.made || !l.cfg.conn.State().Connected {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, _ = declare.DeleteQueue(ctx, l.cfg.conn.Management(), l.queue)
}
