package client

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// stock is what a starving consumer's looks find.
type stock struct {
	b *linktest.FakeBroker

	mu     sync.Mutex
	leader string
	extra  uint64 // ready for others only
	err    error
	peeks  []time.Time
	events []Event
}

func (l *stock) peek(ctx context.Context, queue string) (queuePeek, error) {
	l.mu.Lock()
	l.peeks = append(l.peeks, time.Now())
	leader, extra, err := l.leader, l.extra, l.err
	l.mu.Unlock()
	if err != nil && errors.Is(err, context.DeadlineExceeded) {
		<-ctx.Done() // as in an alarm
		return queuePeek{}, ctx.Err()
	}
	l.b.Mu.Lock()
	defer l.b.Mu.Unlock()
	return queuePeek{Ready: uint64(len(l.b.Ready)) + extra, Leader: leader}, err
}

func (l *stock) set(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

func (l *stock) peeked() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peeks
}

// starved returns the events of the kind.
func (l *stock) starved() (all []Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Kind == EventStarved {
			all = append(all, e)
		}
	}
	return all
}

func startStarving(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc) (*testConsumer, *stock) {
	l := &stock{b: b, leader: "n1"}
	cfg, err := cfg.withDefaults()
	require.NoError(b.T, err)
	k := newConsumer("q", "/queues/q", h, cfg, asked{}, nil, consumerDeps{
		Sessions: b, Backoff: testBackoff, Log: quiet, Queues: fakeQueue{stock: l},
		Notify: func(e Event) { l.set(func() { l.events = append(l.events, e) }) },
	})
	ctx, stop := context.WithCancel(context.Background())
	b.T.Cleanup(stop)
	return &testConsumer{k, stop, async(func() error { return k.run(ctx) })}, l
}

// A consumer whose credit the broker has forgotten has its session replaced soon, is reported, and gets
// what is ready; once it is well again, nothing is replaced.
func TestStarvingConsumerHasItsSessionReplaced(t *testing.T) {
	for _, version := range []string{"4.0.5", "4.3.0"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version, b.Requeues = version, true
				b.Publish(linktest.Numbered("a", 10)...)
				k, l := startStarving(b, ConsumerConfig{Concurrency: 4}, returns(nil))
				time.Sleep(time.Minute)
				require.Len(t, b.History("accept"), 10)
				for range 3 {
					b.Deafen()
					b.Publish("b")
					was, began := len(b.History("accept b")), time.Now()
					require.NoError(t, b.Await(within(t, time.Hour), func() bool {
						n := 0
						for _, e := range b.Events {
							if e == "accept b" {
								n++
							}
						}
						return n > was
					}))
					assert.Less(t, time.Since(began), 3*time.Minute)
					time.Sleep(10 * time.Minute)
				}
				assert.Len(t, b.History("accept"), 13)
				assert.Len(t, b.History("open session"), 4)
				assert.Len(t, l.starved(), 3)
				assert.ErrorContains(t, l.starved()[0].Err, "1 messages ready")
				assert.Empty(t, b.History("requeue", "release"))
				require.NoError(t, k.end())
				b.Mu.Lock()
				defer b.Mu.Unlock()
				assert.Empty(t, b.Sessions)
				assert.Empty(t, b.Ready)
			})
		})
	}
}

// It is noticed within 40 s while there has been something to do.
func TestStarvingAfterWorkIsNoticedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		k, _ := startStarving(b, ConsumerConfig{}, returns(nil))
		for range 30 {
			b.Publish("a")
			time.Sleep(7 * time.Second)
		}
		b.Deafen()
		b.Publish("b")
		began := time.Now()
		require.NoError(t, b.Await(within(t, time.Hour), func() bool { return len(b.Ready) == 0 }))
		assert.Less(t, time.Since(began), 30*time.Second*5/4+starvingConfirm*5/4+drainTimeout+30*time.Second/4)
		require.NoError(t, k.end())
	})
}

// A queue that is empty is looked at now and then, and nothing is replaced.
func TestIdleConsumerLooksSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		k, l := startStarving(b, ConsumerConfig{}, returns(nil))
		time.Sleep(10 * time.Hour)
		assert.LessOrEqual(t, len(l.peeked()), 10*30+3)
		assert.GreaterOrEqual(t, len(l.peeked()), 10*20)
		assert.Len(t, b.History("open session"), 1)
		assert.Empty(t, l.starved())
		began := time.Now()
		require.NoError(t, k.end())
		assert.Zero(t, time.Since(began))
	})
}

// One that is busy doesn't look, and one that is paused has no credit.
func TestBusyAndPausedConsumersDontLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		c := &Control{}
		k, l := startStarving(b, ConsumerConfig{Control: c}, func(context.Context, *Delivery) error {
			time.Sleep(time.Second)
			return nil
		})
		for range 1000 {
			b.Publish("m")
		}
		time.Sleep(15 * time.Minute)
		resume := c.Pause()
		time.Sleep(time.Hour)
		assert.Empty(t, l.peeked())
		resume()
		b.Publish("m")
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
	})
}

// What gets nothing by design, such as a standby, isn't replaced all the time.
func TestReplacingInVainBecomesRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		k, l := startStarving(b, ConsumerConfig{}, returns(nil))
		l.set(func() { l.extra = 7 })
		time.Sleep(10 * time.Hour)
		assert.LessOrEqual(t, len(l.starved()), 10*4+6)
		assert.GreaterOrEqual(t, len(l.starved()), 10*60/22)
		assert.Len(t, b.History("open session"), len(l.starved())+1)
		// It takes over, and then starves for real.
		b.Publish("a")
		time.Sleep(time.Hour)
		l.set(func() { l.extra = 0 })
		b.Publish("a")
		time.Sleep(20 * time.Minute)
		b.Deafen()
		b.Publish("b")
		time.Sleep(4 * time.Minute)
		assert.Len(t, b.History("accept b"), 1)
		require.NoError(t, k.end())
	})
}

// A handler that runs keeps its delivery: the session is replaced when it has ended.
func TestStarvingConsumerLeavesARunningHandlerItsDelivery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		k, l := startStarving(b, ConsumerConfig{Concurrency: 2}, func(_ context.Context, d *Delivery) error {
			if linktest.IDOf(d.Message()) == "long" {
				time.Sleep(30 * time.Minute)
			}
			return nil
		})
		b.Publish("long")
		synctest.Wait()
		l.set(func() { l.extra = 1 }) // ready, and not for us
		time.Sleep(2 * time.Hour)
		assert.Equal(t, []string{"accept long"}, b.History(settlements...))
		assert.Greater(t, len(b.History("open session")), 1)
		require.NoError(t, k.end())
	})
}

// A link whose drain was never answered has no credit any more: it is replaced as a
// lost one, and what a handler has is delivered again.
func TestStarvingConsumerWithARunningHandlerOnADeafLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("long")
		k, _ := startStarving(b, ConsumerConfig{Concurrency: 2}, func(_ context.Context, d *Delivery) error {
			if linktest.IDOf(d.Message()) == "long" {
				time.Sleep(30 * time.Minute)
			}
			return nil
		})
		synctest.Wait()
		b.Deafen()
		b.Publish("b")
		time.Sleep(5 * time.Minute)
		assert.Len(t, b.History("accept b"), 1)
		time.Sleep(2 * time.Hour)
		assert.Len(t, b.History("accept long"), 1)
		require.NoError(t, k.end())
	})
}

// The user may lose the right to look: that is asked for once only, since the refusal
// ends the management's session. Other errors are of the moment.
func TestStarvingConsumerThatMayNotLook(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		peeks int
	}{
		"refused":     {&failure.Error{Op: "manage", Kind: failure.ErrUnauthorized}, 1},
		"fails":       {&failure.Error{Op: "manage", Kind: failure.ErrOutcomeUnknown}, 60},
		"no answer":   {context.DeadlineExceeded, 60},
		"is no queue": {errors.New("the broker answers 404"), 60},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				k, l := startStarving(b, ConsumerConfig{}, returns(nil))
				l.set(func() { l.err = c.err })
				time.Sleep(90 * time.Second)
				b.Kill(linktest.ErrFakeLink) // it is remembered
				time.Sleep(2 * time.Hour)
				assert.Empty(t, l.starved())
				assert.LessOrEqual(t, len(l.peeked()), 5*c.peeks)
				assert.GreaterOrEqual(t, len(l.peeked()), min(c.peeks, 20))
				if c.peeks == 1 {
					assert.Len(t, l.peeked(), 1)
				}
				l.set(func() { l.err = context.DeadlineExceeded })
				began := time.Now()
				require.NoError(t, k.end())
				assert.Less(t, time.Since(began), time.Second)
			})
		})
	}
}

// Below 4.3 an idle consumer whose queue has got another leader may have settlements
// that nobody has heard: its session is replaced once.
func TestConsumerOfAQueueWhoseLeaderMoved(t *testing.T) {
	for version, want := range map[string]int{"4.0.5": 1, "4.3.0": 0} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version = version
				b.Publish("a", "b")
				k, l := startStarving(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error {
					if linktest.IDOf(d.Message()) == "b" {
						time.Sleep(5 * time.Minute)
						return nil
					}
					return Modify{Annotations: map[string]any{"x-opt-a": 1}}
				})
				time.Sleep(2 * time.Minute)
				l.set(func() { l.leader = "n2" })
				time.Sleep(5 * time.Hour)
				assert.Len(t, l.starved(), want)
				if want > 0 {
					assert.ErrorContains(t, l.starved()[0].Err, "moved from n1 to n2")
				}
				assert.Len(t, b.History("accept b"), 1)
				require.NoError(t, k.end())
			})
		})
	}
}
