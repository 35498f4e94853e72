package inbox_test

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/inbox"
	"github.com/hopback/hopback/postgres/outbox"
	"github.com/hopback/hopback/retry"
)

// Payment is the body of a message, as JSON.
type Payment struct {
	Order string `json:"order"`
	Cents int64  `json:"cents"`
}

// book writes in the inbox's transaction: once for each message, however often it is delivered.
func book(ctx context.Context, p Payment) error {
	tx, ok := inbox.Tx(ctx)
	if !ok {
		return errors.New("book isn't wrapped by inbox.With")
	}
	tag, err := tx.Exec(ctx, "UPDATE orders SET paid = paid + $2 WHERE id = $1", p.Order, p.Cents)
	if err != nil {
		return err // rolled back, and retried
	}
	if tag.RowsAffected() == 0 {
		return retry.Permanent(errors.New("no such order"))
	}
	// This message is published if the transaction commits.
	_, err = outbox.Publish(ctx, tx, address.Exchange("shop", "order.paid"), p)
	return err
}

func consumePayments(ctx context.Context, pool *pgxpool.Pool, conn *client.Conn, policy retry.Policy) error {
	if err := postgres.Migrate(ctx, pool); err != nil { // creates the tables, or does nothing
		return err
	}
	once := inbox.With(pool, inbox.Config{Keep: 30 * 24 * time.Hour})
	return conn.Consume(ctx, "payments", retry.With(policy)(once(client.JSON(book))), client.ConsumerConfig{})
}

// A handler that adds to a sum must not run twice for a message. The inbox commits its work
// together with a mark, and skips the message if the mark exists.
func ExampleWith() {
	_ = consumePayments
}
