package client

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// farSession is a session over a network with a latency.
type farSession struct {
	link.Session
	latency time.Duration
}

func (s *farSession) Receiver(ctx context.Context, source string, o link.ReceiverOptions) (link.ReceiverLink, error) {
	time.Sleep(2 * s.latency)
	link, err := s.Session.Receiver(ctx, source, o)
	if err != nil {
		return nil, err
	}
	r := &farReceiver{ReceiverLink: link, latency: s.latency, commands: make(chan farStep, 10_000), arriving: make(chan farStep, 10_000)}
	ctx, r.stop = context.WithCancel(context.Background())
	go r.pass(ctx, r.commands)
	go func() {
		for {
			a, err := link.Receive(ctx)
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
	link.ReceiverLink
	latency  time.Duration
	commands chan farStep
	arriving chan farStep
	stop     context.CancelFunc
}

type farStep struct {
	due     time.Time
	do      func()
	arrival link.Arrival
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

func (r *farReceiver) IssueCredit(n uint32) error {
	r.later(func() { _ = r.ReceiverLink.IssueCredit(n) })
	return nil
}

func (r *farReceiver) Settle(id uint32, d link.Disposition) error {
	r.later(func() { _ = r.ReceiverLink.Settle(id, d) })
	return nil
}

func (r *farReceiver) Drain(ctx context.Context) error {
	done := make(chan error)
	r.later(func() { done <- r.ReceiverLink.Drain(context.Background()) })
	err := <-done
	time.Sleep(r.latency)
	return err
}

func (r *farReceiver) Receive(ctx context.Context) (link.Arrival, error) {
	select {
	case s := <-r.arriving:
		time.Sleep(time.Until(s.due))
		return s.arrival, nil
	case <-ctx.Done():
		return link.Arrival{}, ctx.Err()
	}
}

func (r *farReceiver) Prefetched() (a link.Arrival, ok bool) {
	select {
	case s := <-r.arriving:
		return s.arrival, true
	default:
		return a, false
	}
}

func (r *farReceiver) Close(ctx context.Context) error {
	time.Sleep(2 * r.latency)
	defer r.stop()
	return r.ReceiverLink.Close(ctx)
}

// Handlers stay busy at any round-trip time, without a Prefetch that somebody has
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
				b := linktest.NewFakeBroker(t)
				const n = 50_000 // none of the spans takes a third of that
				if c.gap == 0 {
					b.Update(func() {
						for range n {
							b.Ready = append(b.Ready, linktest.WithID("m"))
						}
					})
				}
				cfg, err := ConsumerConfig{Concurrency: c.workers}.withDefaults()
				require.NoError(t, err)
				k := newConsumer("q", "/queues/q", HandlerFunc(func(context.Context, *Delivery) error {
					time.Sleep(c.handles)
					return nil
				}), cfg, asked{}, nil, consumerDeps{Sessions: linktest.SessionsOf(func(ctx context.Context) (link.Session, error) {
					s, err := b.Open(ctx)
					return &farSession{s, c.trip / 2}, err
				}), Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet})
				ctx, stop := context.WithCancel(t.Context())
				done := async(func() error { return k.run(ctx) })
				span := 10*c.handles + 20*c.trip
				if c.gap > 0 {
					for range 100 {
						time.Sleep(c.gap)
						b.Publish("m")
					}
				}
				time.Sleep(span) // to warm up
				before := len(b.History("accept"))
				b.Mu.Lock()
				b.MostOutstanding = 0
				b.Mu.Unlock()
				time.Sleep(span)
				after := len(b.History("accept"))
				if c.busy > 0 {
					share := float64(after-before) * float64(c.handles) / float64(span) / float64(c.workers)
					assert.GreaterOrEqual(t, share, c.busy)
				}
				var stats instrument.Stats
				k.Count(&stats)
				assert.LessOrEqual(t, stats.Consumers[0].Window, c.most)
				stop()
				require.NoError(t, <-done)
				b.Mu.Lock()
				defer b.Mu.Unlock()
				assert.LessOrEqual(t, b.MostOutstanding, c.most+c.most/2) // the broker hears of settlements later
			})
		})
	}
}
