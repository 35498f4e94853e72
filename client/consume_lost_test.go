package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestConsumerWhoseLinkWasLostWithItsConnectionBeginsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		k := startConsumer(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error { return nil })
		for range 30 {
			time.Sleep(3 * time.Second)
			b.kill(errFakeConn)
			b.publish("again")
			synctest.Wait()
			b.mu.Lock()
			assert.Empty(t, b.ready, "the consumer is back")
			b.mu.Unlock()
		}
		require.NoError(t, k.end())
	})
}
