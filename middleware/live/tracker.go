package live

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/retry"
)

// tracker knows the running handlers of a worker, and what it did in the last hour.
type tracker struct {
	born time.Time

	mu sync.Mutex // guards the rest, and the counters in it
	// oldest is the handler that has run longest; each one has the next as its after.
	oldest, newest *handling
	running        int
	changes        uint64 // grows when a handler begins or returns
	queues         map[string]*counter
}

// handling is a running handler.
type handling struct {
	before, after *handling // guarded by the tracker's mu
	// These don't change.
	ctx      context.Context
	delivery *client.Delivery
	began    time.Time
	of       *counter
	// described is the result of describe, so that the next question costs less; nil before the first.
	described atomic.Pointer[Running]
}

// counter is what a worker knows about a queue.
type counter struct {
	running int
	latest  int // the minute of the newest of minutes, counted from the tracker's birth
	minutes [60]struct{ handled, failed uint64 }
}

func newTracker(now time.Time) *tracker { return &tracker{born: now, queues: map[string]*counter{}} }

func (t *tracker) begin(ctx context.Context, d *client.Delivery) *handling {
	r := &handling{ctx: ctx, delivery: d}
	t.mu.Lock()
	defer t.mu.Unlock()
	r.began = time.Now() // with mu held, so that the list is in order
	if r.of = t.queues[d.Queue()]; r.of == nil {
		r.of = &counter{}
		t.queues[d.Queue()] = r.of
	}
	r.of.running++
	t.running++
	t.changes++
	if r.before = t.newest; r.before == nil {
		t.oldest = r
	} else {
		r.before.after = r
	}
	t.newest = r
	return r
}

func (t *tracker) end(r *handling, failed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.before == nil {
		t.oldest = r.after
	} else {
		r.before.after = r.after
	}
	if r.after == nil {
		t.newest = r.before
	} else {
		r.after.before = r.before
	}
	t.running--
	t.changes++
	r.of.running--
	now := r.of.at(t.minute(time.Now()))
	now.handled++
	if failed {
		now.failed++
	}
}

func (t *tracker) minute(now time.Time) int { return int(now.Sub(t.born) / time.Minute) }

// at empties the minutes that are over an hour old, and returns the current one.
func (c *counter) at(minute int) *struct{ handled, failed uint64 } {
	for c.latest = max(c.latest, minute-len(c.minutes)); c.latest < minute; {
		c.latest++
		c.minutes[c.latest%len(c.minutes)] = struct{ handled, failed uint64 }{}
	}
	return &c.minutes[c.latest%len(c.minutes)]
}

// mark identifies what a tracker knows: it differs when a handler has begun, returned, or become stuck since.
type mark struct {
	changes uint64
	stuck   int
}

func (t *tracker) mark(now time.Time, stuckAfter time.Duration) mark {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := mark{changes: t.changes}
	for r := t.oldest; r != nil && now.Sub(r.began) >= stuckAfter; r = r.after {
		m.stuck++
	}
	return m
}

// snapshot is what a tracker knows at one moment.
type snapshot struct {
	queues  []Queue // by name
	oldest  []*handling
	running int
}

// snapshot returns the state, with at most so many of the handlers that have run longest.
func (t *tracker) snapshot(now time.Time, stuckAfter time.Duration, most int) (s snapshot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.running = t.running
	stuck := map[*counter]int{}
	for r := t.oldest; r != nil && now.Sub(r.began) >= stuckAfter; r = r.after {
		stuck[r.of]++
	}
	for r := t.oldest; r != nil && len(s.oldest) < most; r = r.after {
		s.oldest = append(s.oldest, r)
	}
	for name, c := range t.queues {
		q := Queue{Name: name, Running: c.running, Stuck: stuck[c]}
		c.at(t.minute(now))
		for _, m := range c.minutes {
			q.Handled += m.handled
			q.Failed += m.failed
		}
		s.queues = append(s.queues, q)
	}
	slices.SortFunc(s.queues, func(a, b Queue) int { return cmp.Compare(a.Name, b.Name) })
	return s
}

// typeOf091 is the annotation in which RabbitMQ delivers the property type of AMQP 0-9-1.
const typeOf091 = "x-basic-type"

// describe reads the message of a running handler. Its sender may have written anything.
func (r *handling) describe() *Running {
	if x := r.described.Load(); x != nil {
		return x
	}
	m := r.delivery.Message()
	x := &Running{Queue: r.delivery.Queue(), Attempt: retry.Attempt(r.ctx)}
	if id := message.ID(m); id != nil {
		x.ID = text(fmt.Sprint(id))
	}
	kind, _ := r.delivery.Annotation(typeOf091).(string)
	tenant, _ := r.delivery.Annotation(annotation.Tenant).(string)
	if p := m.Properties; p != nil {
		if p.Subject != nil {
			kind = *p.Subject
		}
		if p.GroupID != nil {
			tenant = *p.GroupID
		}
	}
	x.Type, x.Tenant = text(kind), text(tenant)
	r.described.Store(x)
	return x
}
