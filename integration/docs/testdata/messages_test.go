package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

var policy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, time.Minute)}

func TestHeaders(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, publishWithHeaders(k.Context(), k.orders))
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "o-2"}))
		k.during(time.Minute, "orders", k.orders.Handler(readHeaders))
		dead := k.broker.Queue("orders.dead").Messages()
		require.Len(k, dead, 1, "the one without a tenant")
		assert.Equal(k, retry.ReasonPermanent, retry.DeadLetterOf(dead[0].Message).Reason)
	})
}

func TestPriorities(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "usual"}))
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "urgent"}, func(m *hopback.Message) { m.Header.Priority = 9 }))
		var got []string
		k.during(time.Minute, "orders", client.JSON(func(_ context.Context, o Order) error {
			got = append(got, o.ID)
			return nil
		}))
		assert.Equal(k, []string{"urgent", "usual"}, got)
	})
}

func TestArchiveBytes(t *testing.T) {
	cook(t, func(k *kitchen) {
		ctx, stop := context.WithCancel(k.Context())
		var stored []byte
		require.NoError(k, archiveBytes(ctx, k.conn, []byte{0, 1, 255}, func(_ context.Context, data []byte) error {
			stored = data
			stop()
			return nil
		}))
		assert.Equal(k, []byte{0, 1, 255}, stored)
	})
}

// A value that isn't bytes is no JSON, and anyBody reads it.
func TestAnyBody(t *testing.T) {
	cook(t, func(k *kitchen) {
		publisher, err := client.NewPublisher[*client.Message](k.Context(), k.conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(k, err)
		publish := func(value any) { require.NoError(k, publisher.Publish(k.Context(), &client.Message{Value: value})) }
		publish(map[string]any{"id": "o-1"})
		publish(`{"id":"o-2"}`)
		var ids []string
		k.during(time.Minute, "orders", k.orders.Handler(func(_ context.Context, o Order) error {
			ids = append(ids, o.ID)
			return nil
		}))
		assert.Equal(k, []string{"o-2"}, ids, "a string can be JSON")
		dead := k.broker.Queue("orders.dead").Messages()
		require.Len(k, dead, 1)
		why := retry.DeadLetterOf(dead[0].Message)
		assert.Equal(k, client.ReasonUndecodable, why.Reason)
		assert.Contains(k, why.Error, "the message's body is not bytes: it is an amqp-value of type ")

		publish(map[string]any{"id": "o-1"})
		publish("text")
		var bodies []any
		k.during(time.Minute, "orders", anyBody(func(body any) error {
			bodies = append(bodies, body)
			return nil
		}))
		assert.Equal(k, []any{map[string]any{"id": "o-1"}, []byte("text")}, bodies)
	})
}
