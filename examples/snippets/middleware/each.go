package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/middleware/typemux"
)

var errBankDown = errors.New("the bank is down")

func breakerMiddleware() client.Middleware {
	return breaker.With(breaker.Config{
		Name:  "bank",
		Trips: func(err error) bool { return errors.Is(err, errBankDown) },
	})
}

func ratelimitMiddleware() client.Middleware {
	return ratelimit.With(ratelimit.Config{PerSecond: 50, Burst: 10})
}

func orderedMiddleware() client.Middleware {
	return ordered.With(ordered.Config{Attempts: 3, Pause: time.Second})
}

func dedupeMiddleware() client.Middleware {
	return dedupe.With(dedupe.Config{TTL: 48 * time.Hour})
}

func batchHandler(insert func(context.Context, []Order) error) client.Handler {
	return batch.JSON(batch.Config{Size: 100, Wait: 50 * time.Millisecond, Split: true},
		func(ctx context.Context, items []*batch.Item[Order]) error {
			orders := make([]Order, len(items))
			for i, item := range items {
				orders[i] = item.Value
			}
			return insert(ctx, orders) // an error fails them all; Split then tries each alone
		})
}

func muxHandler(placed, canceled func(context.Context, Order) error) client.Handler {
	return typemux.New(typemux.Config{Handlers: map[string]client.Handler{
		"order.placed":   client.JSON(placed), // by the property subject
		"order.canceled": client.JSON(canceled),
	}})
}

// timed logs how long a handler takes.
func timed(log *slog.Logger) client.Middleware {
	return func(h client.Handler) client.Handler {
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			began := time.Now()
			err := h.Handle(ctx, d)
			log.InfoContext(ctx, "handled", "queue", d.Queue(), "took", time.Since(began), "error", err)
			return err
		})
	}
}

// needs41 is a handler for RabbitMQ 4.1 and later only.
type needs41 struct{ client.Handler }

// Prepare is called once, before the first delivery.
func (h needs41) Prepare(ctx context.Context, s client.Start) error {
	if !s.Broker.AtLeast(4, 1) {
		return fmt.Errorf("queue %s: the handler needs RabbitMQ 4.1", s.Queue)
	}
	return client.Prepare(ctx, h.Handler, s)
}
