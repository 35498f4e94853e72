package outbox_test

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/postgres/outbox"
)

func remind(ctx context.Context, tx pgx.Tx, invoice string) error {
	in14Days := time.Now().AddDate(0, 0, 14)
	messageID, err := outbox.PublishAt(ctx, tx, address.Queue("reminders"), in14Days, invoice)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, "UPDATE invoices SET reminder = $1 WHERE number = $2", messageID, invoice)
	return err
}

func paid(ctx context.Context, tx pgx.Tx, messageID string) (reminded bool, err error) {
	is, err := outbox.Cancel(ctx, tx, messageID)
	return is == outbox.CancelPublished, err
}

// Write a reminder in the transaction of the invoice, and cancel it in the transaction of the payment.
func ExamplePublishAt() {
	_ = remind
	_ = paid
}
