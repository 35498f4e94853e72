package hopback_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbacktest"
)

// Payment is the body of the messages in this example.
type Payment struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

// A service that publishes, handles, and retries, and stops after SIGTERM: running handlers
// finish for up to 30 s, and all other messages return to the queue. The broker here is one in
// memory; for a real one, pass its URL and leave Dial out.
func Example() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	conn, err := hopback.Connect(ctx, broker.URL(), hopback.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	payments := hopback.Queue[Payment]{
		Conn:  conn,
		Name:  "payments",
		Retry: hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(10*time.Millisecond, time.Minute)},
	}
	if err := payments.Declare(ctx); err != nil {
		log.Fatal(err)
	}
	if err := payments.Publish(ctx, Payment{ID: "p-1", Cents: 995}); err != nil {
		log.Fatal(err)
	}
	pay := func(ctx context.Context, p Payment) error {
		fmt.Println("attempt", hopback.Attempt(ctx), "to pay", p.Cents, "cents")
		if hopback.Attempt(ctx) == 1 {
			return errors.New("the bank timed out") // retried after 10 ms
		}
		stop() // as SIGTERM does
		return nil
	}
	if err := payments.Consume(ctx, pay, hopback.ConsumerConfig{Concurrency: 16}); err != nil {
		log.Fatal(err)
	}
	fmt.Println("stopped")
	// Output:
	// attempt 1 to pay 995 cents
	// attempt 2 to pay 995 cents
	// stopped
}
