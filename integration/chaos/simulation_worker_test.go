package chaos

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/clockstep"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/retry"
)

// simWorker runs one worker after the other. Each can be killed like a process.
type simWorker struct {
	lane   *simLane
	n      int
	policy retry.Policy
	// ahead is by how much its clock is ahead of the broker's.
	ahead atomic.Int64

	mu    sync.Mutex
	life  context.Context
	end   context.CancelFunc
	dead  bool // killed: nothing may leave it any more
	conns []net.Conn
	// absent is how long nobody takes the place.
	absent time.Duration
	// hangs is until when its handlers don't return, not even when their ctx ends.
	hangs atomic.Int64
	// forwarding sends copies to another queue.
	forwarding struct {
		conn      *client.Conn
		publisher *client.Publisher[*client.Message]
	}
}

// kill ends it as kill -9 does: its connections close, and nothing leaves it any more.
func (w *simWorker) kill(absent time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead, w.absent = true, absent
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.conns = nil
	w.end()
}

// drain ends it in order.
func (w *simWorker) drain(absent time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.absent = absent
	w.end()
}

// dial is the network of one life.
func (w *simWorker) dial(life context.Context) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := w.lane.dial(SideWorkers)(ctx, network, address)
		if err != nil {
			return nil, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.dead && life.Err() != nil {
			_ = c.Close()
			return nil, errSimKilled
		}
		w.conns = append(w.conns, c)
		return c, nil
	}
}

// run lives, again and again, until ctx ends.
func (w *simWorker) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.mu.Lock()
		life := w.life
		w.mu.Unlock()
		w.consume(life)
		w.mu.Lock()
		absent := w.absent
		w.absent = 0
		w.mu.Unlock()
		backoff.Sleep(ctx, max(absent, 200*time.Millisecond)) // like a supervisor that keeps a worker running
		w.mu.Lock()
		if w.life.Err() != nil {
			w.life, w.end = context.WithCancel(ctx)
			w.dead, w.conns = false, nil
		}
		w.mu.Unlock()
	}
}

// consume is one life.
func (w *simWorker) consume(life context.Context) {
	l := w.lane
	connecting := l.config("worker-"+l.name, w.n, SideWorkers)
	connecting.Dial = w.dial(life)
	if reported := connecting.OnEvent; l.limit != nil {
		connecting.OnEvent = func(e client.Event) {
			if e.Kind == client.EventLost {
				l.limit.lost(w)
			}
			reported(e)
		}
	}
	conn, err := client.Connect(life, workerURL, connecting)
	if err != nil {
		return
	}
	defer closeConn(conn)
	clocked := brokerclock.WithOwnClock(life, func() time.Time { return clockstep.Step(time.Now(), time.Duration(w.ahead.Load())) })
	if l.group != nil {
		w.consumeGroup(life, clocked, conn)
		return
	}
	if l.fair != nil {
		w.consumeFair(life, clocked, conn)
		return
	}
	var inner client.Handler = client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		if err := w.forward(ctx, life, conn, d); err != nil {
			return err
		}
		if park, parks := l.parks(ctx, d); parks {
			return park
		}
		if l.recurred(d.Message()) {
			return nil
		}
		return w.handle(ctx, d)
	})
	switch l.name {
	case Limited:
		show, end := l.view.begin(w, conn)
		defer end()
		inner = show(l.limit.of(w))
	case Called:
		if inner, err = w.answer(life, conn); err != nil {
			return
		}
	}
	handler := retry.With(w.policy)(inner)
	if l.name == Limited {
		handler = pause.With(pause.Config{})(handler)
	}
	var consuming sync.WaitGroup
	defer consuming.Wait()
	if l.name == Centralized {
		handler = client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			err := w.handle(ctx, d)
			if errors.Is(err, errNotYet) {
				return client.Modify{DeadLetter: true} // as workers in other languages do
			}
			return err
		})
		consuming.Go(func() { w.retrier(life, clocked, conn) })
	}
	if l.name == Parking {
		consuming.Go(func() { w.claim(life, conn) })
	}
	if l.recurring != nil {
		w.publishRecurring(life, conn, &consuming)
	}
	if l.name == Scheduled {
		consuming.Go(func() { w.dispatch(life, clocked, conn) })
	}
	consumers, cfg := 1, client.ConsumerConfig{Concurrency: 4, Grace: 10 * time.Second}
	if l.name == "republish" {
		cfg.Concurrency, cfg.Prefetch = 2, 2 // forwards that are stuck have few slots to hold
	}
	if l.name == "crowd" && w.n == 0 {
		consumers = 8
		if l.Stretch > 1 {
			consumers = 3 // each asks every two minutes whether its queue is empty
		} else if l.Seed%4 == 1 { // a quarter of the seeds: each fault recreates all of their sessions
			consumers = 34 // which is more than one connection has sessions for, with those of the copies
		}
	}
	for range consumers {
		consuming.Go(func() {
			for life.Err() == nil {
				if err := conn.Consume(clocked, l.queue, handler, cfg); err != nil && life.Err() == nil {
					l.heard.Add(1)
					l.say("worker-%s-%d: consume: %v", l.name, w.n, err)
					backoff.Sleep(life, 5*time.Second)
				}
			}
		})
	}
}

// workerURL is for a user whose permissions the operator changes.
const workerURL = "amqp://worker:worker@rabbitmq.memory:5672/"

// handle plays the message's fate.
func (w *simWorker) handle(ctx context.Context, d *client.Delivery) error {
	l := w.lane
	if left := time.Until(l.began.Add(time.Duration(w.hangs.Load()))); left > 0 {
		time.Sleep(left)
	}
	w.mu.Lock()
	dead := w.dead
	w.mu.Unlock()
	if dead && ctx.Err() != nil {
		return ctx.Err() // a killed worker does nothing more
	}
	if id, _ := d.Message().Properties.MessageID.(string); strings.HasPrefix(id, keyless) {
		l.wrong(ViolationOrder, l.n, "message %s has no key, and a handler got it", id)
		return nil
	} else if strings.HasPrefix(id, poisonous) {
		w.kill(0)
		return ctx.Err()
	}
	if of, _, err := l.read(d.Message()); err == nil && of.name == Stranger {
		l = of
	}
	return l.script.play(ctx, d, l.number, l.n, func(r record) {
		r.at, r.lane, r.count = l.now(), uint8(l.n), uint8(min(d.DeliveryCount(), 255))
		l.ledger.attempted(r)
		if r.what == whatFailed {
			w.lane.failed.Add(1)
		}
		if r.what == whatHandled {
			l.mu.Lock()
			defer l.mu.Unlock()
			if at := &l.waits[l.n][r.id]; at.handled == 0 {
				at.handled = time.Since(l.began)
			}
		}
	})
}
