package client

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// A slow consumer leaves to others what it couldn't begin for long; a fast one has
// its buffer full.
func TestPrefetchFollowsTheHandlers(t *testing.T) {
	for _, c := range []struct {
		took  time.Duration
		least int
		most  int
	}{{time.Second, 2, 2}, {0, 64, 64}, {5 * time.Millisecond, 30, 64}} {
		t.Run(c.took.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				for i := range 2000 {
					b.Publish(fmt.Sprint(i))
				}
				ctx, cancel := context.WithCancel(t.Context())
				h := HandlerFunc(func(context.Context, *Delivery) error {
					time.Sleep(c.took)
					return nil
				})
				cfg, err := ConsumerConfig{}.withDefaults()
				require.NoError(t, err)
				k := newConsumer("q", "/queues/q", h, cfg, asked{}, nil, consumerDeps{Sessions: b, Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet})
				done := async(func() error { return k.run(ctx) })
				time.Sleep(3 * time.Second)
				b.Mu.Lock()
				most := b.MostOutstanding
				b.Mu.Unlock()
				cancel()
				require.NoError(t, <-done)
				assert.LessOrEqual(t, most, c.most)
				assert.GreaterOrEqual(t, most, c.least)
			})
		})
	}
}
