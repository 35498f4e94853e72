package client

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/consume"
	"github.com/hopback/hopback/internal/link/linktest"
)

func TestAppetiteFollowsTheHandlers(t *testing.T) {
	a := consume.NewAppetite(1, 64, 1024)
	assert.Equal(t, 2, a.Size(), "before the first handler has told")
	assert.True(t, a.Handled(10*time.Microsecond))
	assert.Equal(t, 64, a.Size(), "fast handlers get all at once")
	changes := 0
	for range 100 {
		if a.Handled(10 * time.Microsecond) {
			changes++
		}
	}
	assert.Zero(t, changes)
	for range 100 {
		if a.Handled(time.Second) {
			changes++
		}
	}
	assert.Equal(t, 2, a.Size(), "one at work, and one that waits")
	assert.Less(t, changes, 8)
	for range 100 {
		a.Handled(10 * time.Millisecond)
	}
	assert.InDelta(t, 21, a.Size(), 10, "20 of 10 ms last 200 ms")

	a = consume.NewAppetite(16, 64, 1024)
	assert.Equal(t, 32, a.Size())
	a.Handled(time.Hour)
	assert.Equal(t, 17, a.Size(), "never less than keeps every handler at work")
	a.Handled(-time.Hour)
	a.Handled(0)
	assert.GreaterOrEqual(t, a.Size(), 17)

	a = consume.NewAppetite(100_000, 200_000, 1024)
	a.Handled(time.Nanosecond)
	assert.Equal(t, 200_000, a.Size())
	a.Handled(1 << 62)
	assert.Equal(t, 100_001, a.Size())
}

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
				k := newConsuming("q", "/queues/q", h, cfg, asked{}, nil, consume.ConsumerDeps{Sessions: b, Backoff: testBackoff, Log: quiet})
				done := async(func() error { return k.core.Run(ctx) })
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
