package client

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// A consumer with as many handlers as it may hold messages writes far fewer flow frames than it handles
// messages, if its handlers are quick. If they are slow, each is busy again after a round trip; and a slow
// one among quick ones makes nobody wait.
func TestCreditIsGathered(t *testing.T) {
	const workers, trip = 16, time.Millisecond
	for name, c := range map[string]struct {
		handles func(i int) time.Duration
		n       int
		flows   float64 // at most, of each message
		within  time.Duration
	}{
		"quick": {func(i int) time.Duration { return time.Duration(10+i%7) * time.Microsecond }, 1600, 0.2, 500 * time.Millisecond},
		"slow":  {func(int) time.Duration { return 100 * time.Millisecond }, 160, 1.1, 1100 * time.Millisecond},
		"slow among quick": {func(i int) time.Duration {
			return map[bool]time.Duration{true: 10 * time.Second, false: 10 * time.Microsecond}[i%100 == 50]
		}, 1000, 1.1, 12 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Publish(linktest.Numbered("m", c.n)...)
				cfg, err := ConsumerConfig{Concurrency: workers, Prefetch: workers}.withDefaults()
				require.NoError(t, err)
				handled := make(chan struct{}, c.n)
				numbers := make(chan int, c.n)
				for i := range c.n {
					numbers <- i
				}
				k := newConsumer("q", "/queues/q", HandlerFunc(func(context.Context, *Delivery) error {
					time.Sleep(c.handles(<-numbers))
					handled <- struct{}{}
					return nil
				}), cfg, asked{}, nil, consumerDeps{Sessions: linktest.SessionsOf(func(ctx context.Context) (link.Session, error) {
					s, err := b.Open(ctx)
					return &farSession{s, trip / 2}, err
				}), Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet})
				ctx, stop := context.WithCancel(t.Context())
				done := async(func() error { return k.run(ctx) })
				began := time.Now()
				for range c.n {
					<-handled
				}
				assert.LessOrEqual(t, time.Since(began), c.within)
				stop()
				require.NoError(t, <-done)
				flows := 0
				for _, e := range b.History("credit") {
					if strings.HasPrefix(e, "credit ") {
						flows++
					}
				}
				assert.LessOrEqual(t, float64(flows)/float64(c.n), c.flows)
				b.Mu.Lock()
				defer b.Mu.Unlock()
				assert.LessOrEqual(t, b.MostOutstanding, 2*workers) // the broker hears of settlements later
			})
		})
	}
}
