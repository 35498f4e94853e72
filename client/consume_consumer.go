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
	"github.com/hopback/hopback/internal/grace"

	"github.com/hopback/hopback/internal/link"
)

// consumer is one call of Consume.
type consumer struct {
	queue    string
	cfg      consumerSettings
	deps     consumerDeps
	log      *slog.Logger
	forwards *forwarder
	returns  lateReturns

	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its link session, in a long handler, keeps the next one's from
	// beginning, so that Concurrency holds across a reconnect.
	slots   chan struct{}
	workers workerSet
	// timeouts ends handlers before the broker takes their deliveries back; timeoutAsked says
	// that the broker has told the queue's own timeout.
	timeouts     timeouts
	timeoutAsked atomic.Bool

	active   *activity         // nil: nobody asks
	attached bool              // it has had a link
	missing  bool              // the last attempt has found no queue
	estimate *prefetchEstimate // nil: Prefetch was given
	hunger   hunger            // of the link session that runs
	mu       sync.Mutex
	limit    int       // the lowest that the user has set
	current  running   // the link session that runs; nil: none
	up       bool      // there is a link, or one that takes over from it
	since    time.Time // since when up is so
	why      error     // why it is false

	draining <-chan struct{} // closed when the drain begins
	closed   context.Context // ends when shut is called
	close    context.CancelFunc
	gone     chan struct{} // run has returned
	// hurry ends the drain's patience: shut's ctx has ended.
	hurry     chan struct{}
	hurryOnce sync.Once
}

// noLimit is above every prefetch.
const noLimit = math.MaxInt

// consumerSettings is what a consumer is to do. See ConsumerConfig.
type consumerSettings struct {
	queue, source string // the queue's name and its encoded address
	// near is 0 if prefetch was given. Otherwise prefetch is the most, and near the most where
	// the broker is near.
	concurrency, prefetch, near             int
	grace, forwardPatience, consumerTimeout time.Duration
	properties                              map[string]any // of the link
	// ordered says that handled.Lane is to be asked.
	ordered bool
	// forwards are the addresses to check before the first delivery.
	forwards     []address.Address
	noQuarantine bool
	onActive     func(bool)
	onGone       func(context.Context) error
}

// running is the consumer's link session, as long as it runs.
type running interface {
	resize()
	count(*instrument.ConsumerStats)
}

// consumerDeps is what a consumer takes from outside, so that it runs on faulty
// links in tests.
type consumerDeps struct {
	sessions sessions
	backoff  link.Backoff
	log      *slog.Logger
	tell     func(stateEvent) // nil: nobody listens
	overdue  time.Duration    // as senderConfig.overdue
	// deadLetters says whether a queue certainly has a dead-letter exchange. An error says
	// that the broker couldn't be asked.
	deadLetters func(ctx context.Context, queue string) (bool, error)
	// singleActive says whether the queue has a single active consumer. nil: it may.
	singleActive func(ctx context.Context, queue string) (bool, error)
	// consumerTimeout is what the queue's arguments set; 0: nothing. nil: it isn't known.
	consumerTimeout func(ctx context.Context, queue string) (time.Duration, error)
	// look asks the broker about the queue; nil: nothing shows when the consumer starves.
	look func(ctx context.Context, queue string) (queueLook, error)
	// starving is after how long without a delivery that is asked. 0: the default.
	starving time.Duration
	// now is the broker's time; false while it isn't known. nil: this host's.
	now func() (time.Time, bool)
	// arrived returns a delivery of a message with its handled.
	arrived func(m *amqp.Message, at time.Time) *delivery
	// follow has limited called with the most deliveries that the user allows, until stop is
	// called. gate says whether that is none, and returns a channel that is closed when it
	// isn't any more.
	follow func(limited func(n int)) (stop func())
	gate   func() (resumed <-chan struct{}, paused bool)
}

// queueLook is what the broker says of a queue.
type queueLook struct {
	ready  uint64
	leader string // its node; "" if it has none
}

func newConsumer(cfg consumerSettings, deps consumerDeps) *consumer {
	if deps.now == nil {
		deps.now = func() (time.Time, bool) { return time.Now(), true }
	}
	depth := cfg.prefetch
	var estimate *prefetchEstimate
	switch {
	case cfg.near > 0 && cfg.ordered: // what waits for its key says nothing about the handlers' times
		cfg.prefetch = cfg.near
	case cfg.near > 0:
		estimate = newPrefetchEstimate(cfg.concurrency, cfg.near, cfg.prefetch)
	}
	k := &consumer{
		estimate: estimate, hunger: newHunger(deps.starving), limit: noLimit,
		queue: cfg.queue, cfg: cfg, deps: deps,
		log:      deps.log.With("queue", cfg.queue),
		forwards: newForwarder(deps.sessions, senderConfig{copies: true, depth: depth, pause: deps.backoff.Pause, tell: deps.tell, overdue: deps.overdue, log: deps.log}),
		slots:    make(chan struct{}, cfg.concurrency),
		active:   newActivity(cfg.onActive),
		since:    time.Now(),
		gone:     make(chan struct{}), hurry: make(chan struct{}),
	}
	k.timeouts.workers = &k.workers
	k.closed, k.close = context.WithCancel(context.Background())
	return k
}

// limited is told of the user's limit.
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

// setCurrent notes the link session that runs; nil: none does.
func (k *consumer) setCurrent(s running) {
	k.mu.Lock()
	k.current = s
	k.mu.Unlock()
}

func (k *consumer) count(all *instrument.Stats) {
	one := instrument.ConsumerStats{Queue: k.queue, Concurrency: k.cfg.concurrency}
	k.mu.Lock()
	s := k.current
	one.Up, one.Since, one.Err = k.up, k.since, k.why
	k.mu.Unlock()
	one.Handling, one.Oldest, one.Newest = k.workers.running()
	if s != nil {
		s.count(&one)
	}
	k.forwards.count(&one)
	all.Consumers = append(all.Consumers, one)
}

// shut drains the consumer, within ctx.
func (k *consumer) shut(ctx context.Context) error {
	k.close()
	select {
	case <-k.gone:
		return nil
	case <-ctx.Done():
		k.hurryOnce.Do(func() { close(k.hurry) })
		<-k.gone
		return ended("consume", k.queue, ErrConnectionLost, ctx)
	}
}

// event tells of the consumer.
func (k *consumer) event(e stateEvent) {
	switch e.Kind {
	case eventUp:
		k.note(true, nil)
	case eventLost, eventRefused:
		k.note(false, e.Err)
	}
	if k.deps.tell != nil {
		e.Op, e.Target = "consume", k.queue
		k.deps.tell(e)
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

// hunger is what a consumer remembers from one link to the next.
type hunger struct {
	after   time.Duration // of silence before the first look
	pause   time.Duration // of silence before the next look
	vain    int           // sessions replaced in a row without a delivery
	refused bool          // the user may not look
}

func newHunger(after time.Duration) hunger {
	if after <= 0 {
		after = starvingAfter
	}
	return hunger{after: after, pause: after}
}

func (h *hunger) reset() { h.pause, h.vain = h.after, 0 }

// returnFor is how long a message stays in its queue whose forward found no room to wait.
const returnFor = 30 * time.Second

// lateReturns is what a consumer knows of the deliveries that went back to come later.
type lateReturns struct {
	any     atomic.Bool
	ignored atomic.Bool // the queue delivers them at once
}

// notice is told of each delivery. brokerNow is the broker's time, if that is known.
func (r *lateReturns) notice(m *amqp.Message, brokerNow func() (time.Time, bool)) (ignored bool) {
	if !r.any.Load() || r.ignored.Load() {
		return false
	}
	at, ok := m.Annotations[annotation.DeliveryTime].(int64)
	if !ok {
		return false
	}
	now, known := brokerNow()
	if !known || time.UnixMilli(at).Sub(now) < returnFor/2 {
		return false
	}
	return r.ignored.CompareAndSwap(false, true)
}
