package client

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/link"
)

// consumer is one call of Consume: it keeps a link session open, receives deliveries, has the user's
// Handler process them, and settles them.
type consumer struct {
	queue, source string // the queue's name and its encoded address
	cfg           ConsumerConfig
	asked
	handler   Handler
	follow    *Control
	control   *Control         // of the user; nil: a gated consumer
	hooks     *instrumentHooks // nil: no Instrument
	conn      *Conn            // nil in tests
	deps      consumerDeps
	log       *slog.Logger
	forwarder *forwarder
	returns   lateReturns

	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its link session, in a long handler, keeps the next one's from
	// beginning, so that Concurrency holds across a reconnect.
	slots   chan struct{}
	workers workerSet
	// timeouts ends handlers before the broker takes their deliveries back; timeoutAsked says
	// that the broker has reported the queue's own timeout.
	timeouts     timeouts
	timeoutAsked atomic.Bool

	active     *activity         // nil: nobody asks
	attached   bool              // it has had a link
	missing    bool              // the last attempt has found no queue
	estimate   *prefetchEstimate // pinned: Prefetch was given
	starvation starvationWatch   // of the link session that runs
	mu         sync.Mutex
	limit      int         // the lowest that the user has set
	current    *deliveries // of the link session that runs; nil: none
	up         bool        // there is a link, or one that takes over from it
	since      time.Time   // since when up is so
	why        error       // why it is false

	draining <-chan struct{} // closed when the drain begins
	closed   context.Context // ends when shut is called
	close    context.CancelFunc
	gone     chan struct{} // run has returned
	// expedite ends the drain's patience: shut's ctx has ended.
	expedite     chan struct{}
	expediteOnce sync.Once
}

// noLimit is above every prefetch.
const noLimit = math.MaxInt

// asked is what a Preparer or package partition requested of a consumer.
type asked struct {
	order    func(*Delivery) (string, bool) // nil: none
	forwards []address.Address              // to check before the first delivery
	gate     *gated                         // nil: the consumer isn't gated
}

// consumerDeps is what a consumer takes from outside, so that it runs on faulty
// links in tests.
type consumerDeps struct {
	Sessions link.Sessions
	Backoff  backoff.Exponential
	Log      *slog.Logger
	Notify   func(Event)   // nil: nobody listens
	Overdue  time.Duration // as senderConfig.overdue
	Queues   queueInspector
	// Starving is after how long without a delivery the consumer looks into its queue. 0: the default.
	Starving time.Duration
	// Now is the broker's time; false while it isn't known. nil: this host's.
	Now func() (time.Time, bool)
}

// queueInspector asks the broker about a queue. An error says that the broker couldn't be asked, or has refused.
// *Management is one.
type queueInspector interface {
	// deadLetters reports whether a queue certainly has a dead-letter exchange.
	deadLetters(ctx context.Context, queue string) (bool, error)
	// singleActive reports whether the queue has a single active consumer.
	singleActive(ctx context.Context, queue string) (bool, error)
	// consumerTimeout is what the queue's arguments set; 0: nothing.
	consumerTimeout(ctx context.Context, queue string) (time.Duration, error)
	// peek is by what a consumer notices that it starves.
	peek(ctx context.Context, queue string) (queuePeek, error)
}

// queuePeek is what the broker says of a queue.
type queuePeek struct {
	Ready  uint64
	Leader string // its node; "" if it has none
}

func newConsumer(queue, source string, h Handler, cfg ConsumerConfig, a asked, hooks *instrumentHooks, deps consumerDeps) *consumer {
	if deps.Now == nil {
		deps.Now = func() (time.Time, bool) { return time.Now(), true }
	}
	follow := cfg.Control
	if follow == nil { // a gated consumer
		follow = &Control{}
	}
	depth := cfg.Prefetch
	estimate := &prefetchEstimate{pinned: true, workers: cfg.Concurrency}
	switch {
	case cfg.near > 0 && a.order != nil: // what waits for its key says nothing about the handlers' times
		cfg.Prefetch = cfg.near
	case cfg.near > 0:
		estimate = newPrefetchEstimate(cfg.Concurrency, cfg.near, cfg.Prefetch)
	}
	k := &consumer{
		queue: queue, source: source, cfg: cfg, asked: a, handler: h, follow: follow, control: cfg.Control, hooks: hooks,
		estimate: estimate, starvation: newStarvation(deps.Starving), limit: noLimit,
		deps: deps, log: deps.Log.With("queue", queue),
		forwarder: newForwarder(deps.Sessions, senderConfig{Copies: true, Depth: depth, Pause: deps.Backoff.Pause, Notify: deps.Notify, Overdue: deps.Overdue, Log: deps.Log}),
		slots:     make(chan struct{}, cfg.Concurrency),
		active:    newActivity(cfg.OnActive),
		since:     time.Now(),
		gone:      make(chan struct{}), expedite: make(chan struct{}),
	}
	k.timeouts.workers = &k.workers
	k.closed, k.close = context.WithCancel(context.Background())
	return k
}

// limited applies the limit of Control.
func (k *consumer) limited(n int) {
	k.mu.Lock()
	k.limit = n
	s := k.current
	k.mu.Unlock()
	if s != nil {
		s.resize()
	}
}

// allowed is how many deliveries the user allows.
func (k *consumer) allowed() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.limit
}

// setCurrent notes the deliveries of the link session that runs; nil: none does.
func (k *consumer) setCurrent(ds *deliveries) {
	k.mu.Lock()
	k.current = ds
	k.mu.Unlock()
}

func (k *consumer) Count(all *instrument.Stats) {
	one := instrument.ConsumerStats{Queue: k.queue, Concurrency: k.cfg.Concurrency, Partition: k.gate != nil, Paused: k.follow.Paused()}
	if k.gated() {
		one.Paused = k.gate.control.Paused()
	}
	k.mu.Lock()
	s := k.current
	one.Up, one.Since, one.Err = k.up, k.since, k.why
	k.mu.Unlock()
	one.Handling, one.Oldest, one.Newest = k.workers.running()
	if s != nil {
		s.count(&one)
	}
	k.forwarder.Count(&one)
	all.Consumers = append(all.Consumers, one)
}

// Shut drains the consumer, within ctx.
func (k *consumer) Shut(ctx context.Context) error {
	k.close()
	select {
	case <-k.gone:
		return nil
	case <-ctx.Done():
		k.expediteOnce.Do(func() { close(k.expedite) })
		<-k.gone
		return failure.Ended("consume", k.queue, failure.ErrConnectionLost, ctx)
	}
}

// event reports an event of the consumer.
func (k *consumer) event(e Event) {
	switch e.Kind {
	case EventUp:
		k.note(true, nil)
	case EventLost, EventRefused:
		k.note(false, e.Err)
	}
	if k.deps.Notify != nil {
		e.Op, e.Target = "consume", k.queue
		k.deps.Notify(e)
	}
}

// note notes whether the consumer has a link, and why not.
func (k *consumer) note(up bool, why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if up != k.up {
		k.up, k.since = up, time.Now()
	}
	k.why = why
}

const (
	// lastGrace is what a handler gets after its ctx was ended by the drain.
	lastGrace = grace.Last
	// askLimit bounds what the broker is asked on the way.
	askLimit = 5 * time.Second
)

// errGraceOver is the cause of a handler's ctx that the drain has ended.
var errGraceOver = grace.ErrOver

// starvingAfter is for how long a consumer with credit gets nothing before it looks
// whether its queue has messages.
const starvingAfter = 30 * time.Second

// starvationWatch is what a consumer remembers from one link to the next.
type starvationWatch struct {
	after   time.Duration // of silence before the first look
	pause   time.Duration // of silence before the next look
	vain    int           // sessions replaced in a row without a delivery
	refused bool          // the user may not look
}

func newStarvation(after time.Duration) starvationWatch {
	if after <= 0 {
		after = starvingAfter
	}
	return starvationWatch{after: after, pause: after}
}

func (h *starvationWatch) reset() { h.pause, h.vain = h.after, 0 }

// returnFor is how long a message stays in its queue whose forward found no room to wait.
const returnFor = 30 * time.Second

// lateReturns is what a consumer knows of the deliveries that went back to come later.
type lateReturns struct {
	Any     atomic.Bool
	Ignored atomic.Bool // the queue delivers them at once
}

// Notice inspects each delivery. brokerNow returns the broker's time, if it is known.
func (r *lateReturns) Notice(m *amqp.Message, brokerNow func() (time.Time, bool)) (ignored bool) {
	if !r.Any.Load() || r.Ignored.Load() {
		return false
	}
	at, ok := m.Annotations[annotation.DeliveryTime].(int64)
	if !ok || m.Annotations[annotation.DeferralToken] != nil { // a claimed message comes before its time
		return false
	}
	now, known := brokerNow()
	if !known || time.UnixMilli(at).Sub(now) < returnFor/2 {
		return false
	}
	return r.Ignored.CompareAndSwap(false, true)
}
