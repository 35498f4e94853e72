package client

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/grace"
)

// consumer is one call of Consume.
type consumer struct {
	queue, source string
	handler       Handler
	cfg           ConsumerConfig
	deps          consumerDeps
	log           *slog.Logger
	forwards      *forwarder
	returns       lateReturns
	asked

	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its stint, in a long handler, keeps the next stint's from
	// beginning, so that Concurrency holds across a reconnect.
	slots   chan struct{}
	workers roster
	// timeouts ends handlers before the broker takes their deliveries back; timeoutAsked says
	// that the broker has told the queue's own timeout.
	timeouts     timeouts
	timeoutAsked atomic.Bool

	active   *activity // nil: nobody asks
	attached bool      // it has had a link
	missing  bool      // the last attempt has found no queue
	appetite *appetite // nil: Prefetch was given
	hunger   hunger    // of the stint that runs
	control  *Control
	mu       sync.Mutex
	limit    int       // the Control's
	current  running   // the stint that runs; nil: none
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

// asked is what a Preparer has asked of its consumer.
type asked struct {
	order    func(*Delivery) (string, bool) // nil: none
	forwards []address.Address
}

// running is the consumer's stint, as long as it runs.
type running interface {
	resize()
	count(*instrument.ConsumerStats)
}

// consumerDeps is what a consumer takes from outside, so that it runs on faulty
// links in tests.
type consumerDeps struct {
	sessions sessions
	backoff  ReconnectBackoff
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
	now   func() (time.Time, bool)
	hooks *hooks // nil: no Instrument
}

func newConsumer(queue, source string, h Handler, cfg ConsumerConfig, deps consumerDeps) *consumer {
	if cfg.Control == nil {
		cfg.Control = &Control{}
	}
	if deps.now == nil {
		deps.now = func() (time.Time, bool) { return time.Now(), true }
	}
	var wanted *appetite
	if cfg.near > 0 {
		wanted = newAppetite(cfg.Concurrency, cfg.near, cfg.Prefetch)
	}
	k := &consumer{
		appetite: wanted, hunger: newHunger(deps.starving), control: cfg.Control, limit: noLimit,
		queue: queue, source: source, handler: h, cfg: cfg, deps: deps,
		log:      deps.log.With("queue", queue),
		forwards: newForwarder(deps.sessions, senderConfig{copies: true, depth: cfg.Prefetch, backoff: deps.backoff, tell: deps.tell, overdue: deps.overdue, log: deps.log}),
		slots:    make(chan struct{}, cfg.Concurrency),
		active:   newActivity(cfg.OnActive),
		since:    time.Now(),
		gone:     make(chan struct{}), hurry: make(chan struct{}),
	}
	k.timeouts.workers = &k.workers
	k.closed, k.close = context.WithCancel(context.Background())
	return k
}

// limited is told of the Control's limit.
func (k *consumer) limited(n int) {
	k.mu.Lock()
	k.limit = n
	s := k.current
	k.mu.Unlock()
	if s != nil {
		s.resize()
	}
}

// allowed is how many deliveries the Control allows.
func (k *consumer) allowed() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.limit
}

// setCurrent notes the stint that runs; nil: none does.
func (k *consumer) setCurrent(s running) {
	k.mu.Lock()
	k.current = s
	k.mu.Unlock()
}

func (k *consumer) count(all *instrument.Stats) {
	one := instrument.ConsumerStats{Queue: k.queue, Concurrency: k.cfg.Concurrency}
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
func (r *lateReturns) notice(m *Message, brokerNow func() (time.Time, bool)) (ignored bool) {
	if !r.any.Load() || r.ignored.Load() {
		return false
	}
	at, ok := m.Annotations[annotationDeliveryTime].(int64)
	if !ok {
		return false
	}
	now, known := brokerNow()
	if !known || time.UnixMilli(at).Sub(now) < returnFor/2 {
		return false
	}
	return r.ignored.CompareAndSwap(false, true)
}
