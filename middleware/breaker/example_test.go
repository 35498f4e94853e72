package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/breaker"
)

func ExampleWith() {
	errBankDown := errors.New("bank is down")
	changes := make(chan breaker.Change, 10)
	bank := breaker.With(breaker.Config{
		Trips:    func(err error) bool { return errors.Is(err, errBankDown) },
		Failures: 2,
		OpenFor:  50 * time.Millisecond,
		OnChange: func(c breaker.Change) { changes <- c },
		Logger:   slog.New(slog.DiscardHandler),
	})

	calls := 0
	h := bank(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		if calls++; calls <= 2 {
			return errBankDown
		}
		return nil
	}))
	for range 3 { // the third waits for the circuit to be half open
		fmt.Println(h.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil))))
	}
	for range 3 {
		fmt.Println("circuit:", (<-changes).To)
	}
	// Output:
	// bank is down
	// bank is down
	// <nil>
	// circuit: open
	// circuit: half-open
	// circuit: closed
}
