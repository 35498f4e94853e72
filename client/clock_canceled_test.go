package client_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A consumer that stops while it asks for the broker's time keeps nobody else from learning it. Otherwise the consumers
// that start on its connection afterwards go by their host's clock, and retries come early.
func TestWhoStopsAskingForTheTimeKeepsNobodyFromLearningIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker, conn := withOrders(t)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		broker.StepClock(time.Hour)
		broker.DelayAnswers(2 * time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err := conn.BrokerTime(ctx)
		require.ErrorIs(t, err, context.Canceled)
		broker.DelayAnswers(0)
		now, err := conn.BrokerTime(t.Context())
		require.NoError(t, err)
		assert.InDelta(t, time.Hour.Seconds(), time.Until(now).Seconds(), 1)
	})
}
