package main

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// kitchen is a broker in memory, in virtual time, with the queue orders of the page's policy.
type kitchen struct {
	*testing.T
	broker *hopbacktest.Broker
	conn   *hopback.Conn
	orders *hopback.Queue[Order]
}

func cook(t *testing.T, recipe func(*kitchen)) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{})
		k := &kitchen{T: t, broker: b}
		k.connect()
		defer func() { assert.NoError(t, k.conn.Close(context.Background())) }()
		k.orders = &hopback.Queue[Order]{Conn: k.conn, Name: "orders", Retry: policy}
		require.NoError(t, k.orders.Declare(t.Context()))
		recipe(k)
	})
}

func (k *kitchen) connect() {
	var err error
	k.conn, err = hopback.Connect(k.Context(), k.broker.URL(), hopback.Config{Dial: k.broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(k, err)
}

// during consumes from a queue for a time.
func (k *kitchen) during(d time.Duration, queue string, h client.Handler) {
	ctx, stop := context.WithTimeout(k.Context(), d)
	defer stop()
	require.NoError(k, k.conn.Consume(ctx, queue, h, client.ConsumerConfig{}))
}
