package client

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// A thousand queues that nothing comes from cost little: one goroutine that receives,
// besides the caller's, for any Concurrency.
func TestQuietConsumersHaveOneGoroutineEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		b := linktest.NewFakeBroker(t)
		before := runtime.NumGoroutine()
		var all []*testConsumer
		for range n {
			all = append(all, startConsumer(b, ConsumerConfig{Concurrency: 50}, returns(nil)))
		}
		time.Sleep(time.Hour)
		assert.LessOrEqual(t, runtime.NumGoroutine()-before, 2*n+10)
		for _, k := range all {
			require.NoError(t, k.end())
		}
	})
}
