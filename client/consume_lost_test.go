package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

func TestConsumerWhoseLinkWasLostWithItsConnectionBeginsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error { return nil })
		for range 30 {
			time.Sleep(3 * time.Second)
			b.Kill(linktest.ErrFakeConn)
			b.Publish("again")
			synctest.Wait()
			b.Mu.Lock()
			assert.Empty(t, b.Ready, "the consumer is back")
			b.Mu.Unlock()
		}
		require.NoError(t, k.end())
	})
}
