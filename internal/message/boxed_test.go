package message

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// usual are the keys that RabbitMQ and hopback itself write.
var usual = []string{
	"x-exchange", "x-routing-key", "x-delivery-count", "x-acquired-count", "x-cc", "x-opt-deaths", "x-opt-hopback-known-count", "x-opt-hopback-attempts", "x-opt-hopback-retries",
	"x-first-death-exchange", "x-first-death-queue", "x-first-death-reason", "x-last-death-exchange", "x-last-death-queue", "x-last-death-reason", "x-retry-count",
	"x-opt-hopback-reason", "x-opt-hopback-error", "x-opt-hopback-error-type", "x-opt-hopback-first-failure", "x-opt-hopback-last-failure", "x-opt-hopback-queue",
	"x-opt-hopback-exchange", "x-opt-hopback-routing-key", "x-opt-hopback-worker", "x-opt-hopback-delay", "x-opt-hopback-history",
	"queue", "reason", "count", "exchange", "routing-keys", "first-time", "last-time", "rejected", "expired", "",
}

func TestUsualKeysTakeNoAllocation(t *testing.T) {
	var c boxCache
	for _, s := range usual {
		boxed(&c, s)
	}
	for _, s := range usual {
		b := []byte(s)
		assert.Zero(t, testing.AllocsPerRun(10, func() { boxed(&c, b) }), "%q has the same hash as two others", s)
		assert.Zero(t, testing.AllocsPerRun(10, func() { boxed(&c, s) }), s)
	}
}

func TestBoxedIsWhatWasGiven(t *testing.T) {
	t.Parallel()
	var c boxCache
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range 20_000 {
				s := fmt.Sprint("key-", i%3000)
				b := []byte(s)
				assert.Equal(t, any(s), boxed(&c, b))
				clear(b)
				assert.Equal(t, any(s), boxed(&c, s))
			}
		})
	}
	all.Wait()
	for i := range 2 * maxBoxed {
		s := strings.Repeat("s", i)
		require.Equal(t, any(s), boxed(&boxes, s))
	}
}

// Strings that come once don't push out one that comes always, for long; one that is new
// and comes always finds a place.
func TestBoxesFollowWhatComes(t *testing.T) {
	t.Parallel()
	var c boxCache
	for i := range 50_000 {
		boxed(&c, fmt.Sprint("once-", i))
	}
	kept := func(s string) bool {
		for i := range c {
			for j := range c[i] {
				if b := c[i][j].Load(); b != nil && b.s == s {
					return true
				}
			}
		}
		return false
	}
	require.False(t, kept("always"))
	for n := 0; !kept("always"); n++ {
		require.Less(t, n, 1000, "it finds a place one time in %d", pushOneIn)
		boxed(&c, "always")
	}
	boxed(&c, strings.Repeat("l", maxBoxed+1))
	require.False(t, kept(strings.Repeat("l", maxBoxed+1)))
}
