package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

type Order struct {
	ID string `json:"id"`
}

var policy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, time.Minute)}

func TestReportDeadLetters(t *testing.T) {
	cook(t, func(k *kitchen) {
		archive := declare.QuorumQueue{Name: "orders.archive", DeadLetter: declare.Drop()}
		_, err := declare.Apply(k.Context(), k.conn.Management(), declare.Topology{Queues: []declare.Queue{archive}})
		require.NoError(k, err)
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "o-1"}))
		k.during(time.Minute, "orders", k.orders.Handler(func(context.Context, Order) error { return hopback.Permanent(errors.New("no such customer")) }))
		var reasons []client.Reason
		ctx, stop := context.WithTimeout(k.Context(), time.Minute)
		defer stop()
		require.NoError(k, reportDeadLetters(ctx, k.conn, func(d retry.DeadLetter) { reasons = append(reasons, d.Reason) }))
		assert.Equal(k, []client.Reason{retry.ReasonPermanent}, reasons)
		assert.Zero(k, k.broker.Queue("orders.dead").Counts().Messages)
		kept := k.broker.Queue("orders.archive").Messages()
		require.Len(k, kept, 1)
		assert.Equal(k, "no such customer", retry.DeadLetterOf(kept[0].Message).Error)
	})
}
