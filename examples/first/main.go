// Command first is the shortest program that declares, publishes, and handles with
// retries: the one that README.md begins with.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/first
package main

import (
	"cmp"
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Order is what the messages hold, as JSON.
type Order struct {
	ID string `json:"id"`
}

// charge is the work. Its error decides what becomes of the message.
func charge(ctx context.Context, o Order) error {
	if retry.Attempt(ctx) == 1 {
		return errors.New("the bank timed out") // the message comes back in a second
	}
	log.Println("charged", o.ID)
	return nil // the message is done
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")

	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, 10*time.Second, time.Minute)}
	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
	topology := must(retry.Topology(policy, orders))
	conn := must(client.Connect(ctx, url, client.Config{}))
	must(declare.Apply(ctx, conn.Management(), topology))

	publisher := must(client.NewPublisher[Order](ctx, conn, orders.Address(), client.PublisherConfig{}))
	check(publisher.Publish(ctx, Order{ID: "o-1"})) // nil only when the broker has it

	handler := retry.With(policy)(client.JSON(charge))
	check(conn.Consume(ctx, orders.Name, handler, client.ConsumerConfig{Concurrency: 16})) // until ^C

	check(conn.Close(context.Background()))
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
