package consume

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
	"github.com/hopback/hopback/internal/event"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/publish"
)

// Consumer is one call of Consume.
type Consumer struct {
	queue    string
	cfg      ConsumerSettings
	deps     ConsumerDeps
	log      *slog.Logger
	forwards *publish.Forwarder
	returns  LateReturns

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
	estimate   *prefetchEstimate // nil: Prefetch was given
	starvation starvationWatch   // of the link session that runs
	mu         sync.Mutex
	limit      int       // the lowest that the user has set
	current    running   // the link session that runs; nil: none
	up         bool      // there is a link, or one that takes over from it
	since      time.Time // since when up is so
	why        error     // why it is false

	Draining <-chan struct{} // closed when the drain begins
	closed   context.Context // ends when shut is called
	close    context.CancelFunc
	gone     chan struct{} // run has returned
	// expedite ends the drain's patience: shut's ctx has ended.
	expedite     chan struct{}
	expediteOnce sync.Once
}

// noLimit is above every prefetch.
const noLimit = math.MaxInt

// ConsumerSettings is what a consumer is to do. See ConsumerConfig.
type ConsumerSettings struct {
	Queue, Source string // the queue's name and its encoded address
	// near is 0 if prefetch was given. Otherwise prefetch is the most, and near the most where
	// the broker is near.
	Concurrency, Prefetch, Near             int
	Grace, ForwardPatience, ConsumerTimeout time.Duration
	Properties                              map[string]any // of the link
	// Ordered says that handled.Lane is to be asked.
	Ordered bool
	// Forwards are the addresses to check before the first delivery.
	Forwards    []address.Address
	NoIsolation bool
	OnActive    func(bool)
	OnGone      func(context.Context) error
	// Gate makes a gated consumer; nil: another.
	Gate *Gate
}

// running is the consumer's link session, as long as it runs.
type running interface {
	resize()
	count(*instrument.ConsumerStats)
}

// ConsumerDeps is what a consumer takes from outside, so that it runs on faulty
// links in tests.
type ConsumerDeps struct {
	Sessions link.Sessions
	Backoff  link.Backoff
	Log      *slog.Logger
	Notify   func(event.StateEvent) // nil: nobody listens
	Overdue  time.Duration          // as senderConfig.overdue
	// DeadLetters says whether a queue certainly has a dead-letter exchange. An error says
	// that the broker couldn't be asked.
	DeadLetters func(ctx context.Context, queue string) (bool, error)
	// SingleActive says whether the queue has a single active consumer. nil: it may.
	SingleActive func(ctx context.Context, queue string) (bool, error)
	// ConsumerTimeout is what the queue's arguments set; 0: nothing. nil: it isn't known.
	ConsumerTimeout func(ctx context.Context, queue string) (time.Duration, error)
	// Peek asks the broker about the queue; nil: nothing shows when the consumer starves.
	Peek func(ctx context.Context, queue string) (QueuePeek, error)
	// Starving is after how long without a delivery that is asked. 0: the default.
	Starving time.Duration
	// Now is the broker's time; false while it isn't known. nil: this host's.
	Now func() (time.Time, bool)
	// Arrived returns a delivery of a message with its handled.
	Arrived func(m *amqp.Message, at time.Time) *Delivery
	// Follow has limited called with the most deliveries that the user allows, until stop is
	// called. gate says whether that is none, and returns a channel that is closed when it
	// isn't any more.
	Follow func(limited func(n int)) (stop func())
	Gate   func() (resumed <-chan struct{}, paused bool)
}

// QueuePeek is what the broker says of a queue.
type QueuePeek struct {
	Ready  uint64
	Leader string // its node; "" if it has none
}

func NewConsumer(cfg ConsumerSettings, deps ConsumerDeps) *Consumer {
	if deps.Now == nil {
		deps.Now = func() (time.Time, bool) { return time.Now(), true }
	}
	depth := cfg.Prefetch
	var estimate *prefetchEstimate
	switch {
	case cfg.Near > 0 && cfg.Ordered: // what waits for its key says nothing about the handlers' times
		cfg.Prefetch = cfg.Near
	case cfg.Near > 0:
		estimate = newPrefetchEstimate(cfg.Concurrency, cfg.Near, cfg.Prefetch)
	}
	k := &Consumer{
		estimate: estimate, starvation: newStarvation(deps.Starving), limit: noLimit,
		queue: cfg.Queue, cfg: cfg, deps: deps,
		log:      deps.Log.With("queue", cfg.Queue),
		forwards: publish.NewForwarder(deps.Sessions, publish.SenderConfig{Copies: true, Depth: depth, Pause: deps.Backoff.Pause, Notify: deps.Notify, Overdue: deps.Overdue, Log: deps.Log}),
		slots:    make(chan struct{}, cfg.Concurrency),
		active:   newActivity(cfg.OnActive),
		since:    time.Now(),
		gone:     make(chan struct{}), expedite: make(chan struct{}),
	}
	k.timeouts.workers = &k.workers
	k.closed, k.close = context.WithCancel(context.Background())
	return k
}

// limited applies the limit of Control.
func (k *Consumer) limited(n int) {
	k.mu.Lock()
	k.limit = n
	s := k.current
	k.mu.Unlock()
	if s != nil {
		s.resize()
	}
}

// allowed is how many deliveries the user allows.
func (k *Consumer) allowed() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.limit
}

// setCurrent notes the link session that runs; nil: none does.
func (k *Consumer) setCurrent(s running) {
	k.mu.Lock()
	k.current = s
	k.mu.Unlock()
}

func (k *Consumer) Count(all *instrument.Stats) {
	one := instrument.ConsumerStats{Queue: k.queue, Concurrency: k.cfg.Concurrency, Partition: k.cfg.Gate != nil}
	k.mu.Lock()
	s := k.current
	one.Up, one.Since, one.Err = k.up, k.since, k.why
	k.mu.Unlock()
	one.Handling, one.Oldest, one.Newest = k.workers.running()
	if s != nil {
		s.count(&one)
	}
	k.forwards.Count(&one)
	all.Consumers = append(all.Consumers, one)
}

// Shut drains the consumer, within ctx.
func (k *Consumer) Shut(ctx context.Context) error {
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
func (k *Consumer) event(e event.StateEvent) {
	switch e.Kind {
	case event.EventUp:
		k.note(true, nil)
	case event.EventLost, event.EventRefused:
		k.note(false, e.Err)
	}
	if k.deps.Notify != nil {
		e.Op, e.Target = "consume", k.queue
		k.deps.Notify(e)
	}
}

// note notes whether the consumer has a link, and why not.
func (k *Consumer) note(up bool, why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if up != k.up {
		k.up, k.since = up, time.Now()
	}
	k.why = why
}

const (
	// LastGrace is what a handler gets after its ctx was ended by the drain.
	LastGrace = grace.Last
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

// ReturnFor is how long a message stays in its queue whose forward found no room to wait.
const ReturnFor = 30 * time.Second

// LateReturns is what a consumer knows of the deliveries that went back to come later.
type LateReturns struct {
	Any     atomic.Bool
	Ignored atomic.Bool // the queue delivers them at once
}

// Notice inspects each delivery. brokerNow returns the broker's time, if it is known.
func (r *LateReturns) Notice(m *amqp.Message, brokerNow func() (time.Time, bool)) (ignored bool) {
	if !r.Any.Load() || r.Ignored.Load() {
		return false
	}
	at, ok := m.Annotations[annotation.DeliveryTime].(int64)
	if !ok || m.Annotations[annotation.DeferralToken] != nil { // a claimed message comes before its time
		return false
	}
	now, known := brokerNow()
	if !known || time.UnixMilli(at).Sub(now) < ReturnFor/2 {
		return false
	}
	return r.Ignored.CompareAndSwap(false, true)
}
