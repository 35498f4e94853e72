package testing

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

func TestOrders(t *testing.T) {
	orders := hopbacktest.Run(t, policy, client.JSON(charge), Order{ID: "o-1"}, Order{ID: "o-2"}, Order{ID: "o-3"})

	orders.Message(0).WantHandled().WantAttempts(1)
	orders.Message(1).WantHandled().WantDelays(10 * time.Second)
	orders.Message(2).WantDead(retry.ReasonExhausted).
		WantAttempts(4).
		WantDelays(10*time.Second, time.Minute, 5*time.Minute)
}

func TestOrdersOutliveTheBroker(t *testing.T) {
	orders := hopbacktest.Scenario{
		Policy:   policy,
		Handler:  client.JSON(charge),
		Messages: []any{Order{ID: "o-2"}},
		Queue:    declare.QuorumQueue{Name: "orders", DeliveryLimit: 5},
		Broker:   hopbacktest.Config{Version: "4.0.5"},
		Consumer: client.ConsumerConfig{Concurrency: 16},
		Workers:  2,
		Disturb: func(b *hopbacktest.Broker) {
			time.Sleep(5 * time.Second) // while the order waits
			b.Kill()
			time.Sleep(time.Minute)
			b.Restart()
		},
	}.Run(t)
	orders.Message(0).WantHandled().WantAttempts(2)
}

func TestAnOrderIsPublishedOnceWhenItsAnswerIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
		require.NoError(t, err)
		defer func() { _ = conn.Close(ctx) }()
		queue := declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}
		_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{queue}})
		require.NoError(t, err)
		publisher, err := client.NewPublisher[Order](ctx, conn, queue.Address(), client.PublisherConfig{})
		require.NoError(t, err)

		broker.DelayAnswers(2 * time.Second)
		began := time.Now()
		require.NoError(t, publisher.Publish(ctx, Order{ID: "o-1"}))
		assert.GreaterOrEqual(t, time.Since(began), 2*time.Second)
		assert.Equal(t, 1, broker.Queue("orders").Counts().Ready)
		broker.DelayAnswers(0)
	})
}

func TestBuyPublishesAnOrder(t *testing.T) {
	var recorder hopbacktest.Recorder[Order]
	shop := Shop{orders: &recorder}
	require.NoError(t, shop.Buy(t.Context(), "o-1"))
	assert.Equal(t, []Order{{ID: "o-1"}}, recorder.Values())
}

func TestBuySaysThatTheOrderWasNotTaken(t *testing.T) {
	recorder := hopbacktest.Recorder[Order]{Fail: func(Order) error { return client.ErrUnroutable }}
	shop := Shop{orders: &recorder}
	require.ErrorIs(t, shop.Buy(t.Context(), "o-1"), client.ErrUnroutable)
	assert.Empty(t, recorder.Values())
}

func TestOverTCP(t *testing.T) {
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	require.NoError(t, conn.Close(context.WithoutCancel(t.Context())))
}
