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
	"github.com/hopback/hopback/internal/link/linktest"
)

// A suspect that the broker takes back while it waits is out of the way: those
// behind it are handled, and the link is wide again.
func TestSuspectThatIsTakenBackWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("first")
		b.Update(func() {
			for i := range 3 {
				m := linktest.WithID(fmt.Sprintf("s%d", i))
				m.Header.DeliveryCount = 5
				b.Ready = append(b.Ready, m)
			}
		})
		k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 8}, func(_ context.Context, d *Delivery) error {
			time.Sleep(time.Minute)
			return nil
		})
		synctest.Wait()
		b.Revoke("s0", false)
		time.Sleep(time.Hour)
		b.Publish(linktest.Numbered("m", 8)...)
		time.Sleep(time.Hour)
		assert.ElementsMatch(t, append(linktest.Numbered("accept m", 8), "accept first", "accept s1", "accept s2"), b.History(settlements...))
		assert.Equal(t, []string{"stale release s0"}, b.History("stale"))
		var stats instrument.Stats
		k.Count(&stats)
		assert.Equal(t, 8, stats.Consumers[0].Window)
		start := time.Now()
		require.NoError(t, k.end())
		assert.Less(t, time.Since(start), time.Second)
	})
}
