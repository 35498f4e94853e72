package client

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// farSession is a session over a network with a latency.
type farSession struct {
	session
	latency time.Duration
}

func (s *farSession) receiver(ctx context.Context, source string, o receiverOptions) (receiverLink, error) {
	time.Sleep(2 * s.latency)
	link, err := s.session.receiver(ctx, source, o)
	if err != nil {
		return nil, err
	}
	r := &farReceiver{receiverLink: link, latency: s.latency, commands: make(chan farStep, 10_000), arriving: make(chan farStep, 10_000)}
	ctx, r.stop = context.WithCancel(context.Background())
	go r.pass(ctx, r.commands)
	go func() {
		for {
			a, err := link.receive(ctx)
			if err != nil {
				return
			}
			r.arriving <- farStep{due: time.Now().Add(s.latency), arrival: a}
		}
	}()
	return r, nil
}

// farReceiver passes everything on in its order, and later.
type farReceiver struct {
	receiverLink
	latency  time.Duration
	commands chan farStep
	arriving chan farStep
	stop     context.CancelFunc
}

type farStep struct {
	due     time.Time
	do      func()
	arrival arrival
}

func (r *farReceiver) pass(ctx context.Context, steps <-chan farStep) {
	for {
		select {
		case s := <-steps:
			time.Sleep(time.Until(s.due))
			s.do()
		case <-ctx.Done():
			return
		}
	}
}

func (r *farReceiver) later(do func()) {
	r.commands <- farStep{due: time.Now().Add(r.latency), do: do}
}

func (r *farReceiver) issueCredit(n uint32) error {
	r.later(func() { _ = r.receiverLink.issueCredit(n) })
	return nil
}

func (r *farReceiver) settle(id uint32, d disposition) error {
	r.later(func() { _ = r.receiverLink.settle(id, d) })
	return nil
}

func (r *farReceiver) drain(ctx context.Context) error {
	done := make(chan error)
	r.later(func() { done <- r.receiverLink.drain(context.Background()) })
	err := <-done
	time.Sleep(r.latency)
	return err
}

func (r *farReceiver) receive(ctx context.Context) (arrival, error) {
	select {
	case s := <-r.arriving:
		time.Sleep(time.Until(s.due))
		return s.arrival, nil
	case <-ctx.Done():
		return arrival{}, ctx.Err()
	}
}

func (r *farReceiver) prefetched() (a arrival, ok bool) {
	select {
	case s := <-r.arriving:
		return s.arrival, true
	default:
		return a, false
	}
}

func (r *farReceiver) close(ctx context.Context) error {
	time.Sleep(2 * r.latency)
	defer r.stop()
	return r.receiverLink.close(ctx)
}

// Handlers are busy whatever the round trip is, without a Prefetch that somebody has
// to work out; and a slow consumer still takes little more than it can begin.
func TestPrefetchFollowsTheRoundTrip(t *testing.T) {
	for _, c := range []struct {
		workers       int
		trip, handles time.Duration
		gap           time.Duration // between messages published; 0: all are there
		busy          float64       // at least so much of the handlers' time
		most          int           // unsettled or on their way
	}{
		{workers: 16, trip: 200 * time.Millisecond, handles: 10 * time.Millisecond, busy: 0.97, most: 1024},
		{workers: 16, trip: 50 * time.Millisecond, handles: 10 * time.Millisecond, busy: 0.97, most: 340},
		{workers: 16, trip: 10 * time.Millisecond, handles: 10 * time.Millisecond, busy: 0.97, most: 64},
		{workers: 1, trip: 200 * time.Millisecond, handles: time.Millisecond, busy: 0.97, most: 1024},
		{workers: 256, trip: 500 * time.Millisecond, handles: time.Second, busy: 0.97, most: 1024},
		{workers: 16, trip: 200 * time.Millisecond, handles: 10 * time.Second, busy: 0.95, most: 32},
		{workers: 16, trip: time.Millisecond, handles: 10 * time.Second, busy: 0.95, most: 32},
		{workers: 4, trip: time.Millisecond, handles: 10 * time.Millisecond, gap: 3 * time.Second, most: 64},
		{workers: 4, trip: time.Millisecond, handles: 2 * time.Second, gap: 5 * time.Second, most: 8},
	} {
		t.Run(fmt.Sprintf("%d handlers of %v, %v away, one message every %v", c.workers, c.handles, c.trip, c.gap), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				const n = 50_000 // none of the spans takes a third of that
				if c.gap == 0 {
					b.update(func() {
						for range n {
							b.ready = append(b.ready, withID("m"))
						}
					})
				}
				cfg, err := ConsumerConfig{Concurrency: c.workers}.withDefaults()
				require.NoError(t, err)
				k := newConsuming("q", "/queues/q", HandlerFunc(func(context.Context, *Delivery) error {
					time.Sleep(c.handles)
					return nil
				}), cfg, asked{}, nil, consumerDeps{sessions: sessionsOf(func(ctx context.Context) (session, error) {
					s, err := b.open(ctx)
					return &farSession{s, c.trip / 2}, err
				}), backoff: testBackoff, log: quiet})
				ctx, stop := context.WithCancel(t.Context())
				done := async(func() error { return k.core.run(ctx) })
				span := 10*c.handles + 20*c.trip
				if c.gap > 0 {
					for range 100 {
						time.Sleep(c.gap)
						b.publish("m")
					}
				}
				time.Sleep(span) // to warm up
				before := len(b.history("accept"))
				b.mu.Lock()
				b.mostOutstanding = 0
				b.mu.Unlock()
				time.Sleep(span)
				after := len(b.history("accept"))
				if c.busy > 0 {
					share := float64(after-before) * float64(c.handles) / float64(span) / float64(c.workers)
					assert.GreaterOrEqual(t, share, c.busy)
				}
				k.core.mu.Lock()
				s := k.core.current.(*linkSession)
				k.core.mu.Unlock()
				s.mu.Lock()
				assert.LessOrEqual(t, k.core.estimate.size(), c.most)
				s.mu.Unlock()
				stop()
				require.NoError(t, <-done)
				b.mu.Lock()
				defer b.mu.Unlock()
				assert.LessOrEqual(t, b.mostOutstanding, c.most+c.most/2) // the broker hears of settlements later
			})
		})
	}
}
