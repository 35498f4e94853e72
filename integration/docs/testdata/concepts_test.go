package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
)

func TestConsumeBoth(t *testing.T) {
	cook(t, func(k *kitchen) {
		emails := &hopback.Queue[Order]{Conn: k.conn, Name: "emails"}
		require.NoError(k, emails.Declare(k.Context()))
		require.NoError(k, emails.Publish(k.Context(), Order{}))
		ctx, stop := context.WithCancel(k.Context())
		done := client.JSON(func(context.Context, Order) error {
			stop()
			return nil
		})
		require.NoError(k, consumeBoth(ctx, k.conn, done, done))

		invalid := client.JSON[Order](nil) // refused at once: the other one stops, too
		require.Error(k, consumeBoth(k.Context(), k.conn, done, invalid))
	})
}

func TestOrderPlaced(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, orderPlaced(k.Context(), k.conn))
		for _, queue := range []string{"billing", "audit"} {
			assert.Equal(k, 1, k.broker.Queue(queue).Counts().Ready, queue)
		}
	})
}
