package outbox_test

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres/outbox"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID       string `json:"id"`
	Customer string `json:"customer"`
}

// placeOrder writes an order and its message in one transaction: both are committed, or neither is.
func placeOrder(ctx context.Context, pool *pgxpool.Pool, o Order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id, customer) VALUES ($1, $2)", o.ID, o.Customer); err != nil {
			return err
		}
		_, err := outbox.Publish(ctx, tx, address.Exchange("shop", "order.placed"), o, func(m *client.Message) {
			m.ApplicationProperties = map[string]any{"customer": o.Customer}
		})
		return err
	})
}

// Publish a message in the transaction that writes the data. A Relay sends it to RabbitMQ after the
// commit.
func ExamplePublish() {
	_ = placeOrder
}
