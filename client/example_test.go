package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// Order is the body of the messages in these examples.
type Order struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

// A handler is tested without a broker: NewDelivery stands in for the consumer, and
// OutcomeOf returns what the consumer would do.
func ExampleJSON() {
	handler := client.JSON(func(ctx context.Context, o Order) error {
		if o.Cents <= 0 {
			return client.DeadLetter{Reason: "worthless", Err: fmt.Errorf("order %s costs %d cents", o.ID, o.Cents)}
		}
		return nil
	})

	for _, body := range []string{`{"id": "o-1", "cents": 995}`, `{"id": "o-2"}`, `{"id": "o-3`} {
		delivery := client.NewDelivery("orders", client.NewMessage([]byte(body)))
		err := handler.Handle(context.Background(), delivery)
		switch outcome := client.OutcomeOf(err).(type) {
		case nil:
			fmt.Println("accepted")
		case client.DeadLetter:
			fmt.Printf("dead-lettered as %s: %v\n", outcome.Reason, outcome.Err)
		default:
			fmt.Println("something else:", outcome)
		}
	}
	// Output:
	// accepted
	// dead-lettered as worthless: order o-2 costs 0 cents
	// dead-lettered as undecodable: unexpected end of JSON input
}

// What an error means to a consumer on which no middleware decides otherwise.
func ExampleOutcomeOf() {
	for _, err := range []error{
		nil,
		errors.New("bank timed out"),
		client.Requeue{},
		fmt.Errorf("charge: %w", client.DeadLetter{Reason: "declined"}),
		client.Forward{To: address.Queue("orders.manual")},
	} {
		fmt.Println(client.OutcomeOf(err))
	}
	// Output:
	// <nil>
	// requeue as failed: bank timed out
	// requeue
	// dead-letter (declined)
	// forward to /queues/orders.manual
}

// A decorator in one line: Wrap passes on what the inner handler prepares.
func ExampleWrap() {
	counted := 0
	count := func(h client.Handler) client.Handler {
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			counted++
			return h.Handle(ctx, d)
		})
	}
	handler := client.Chain(count, client.Recover())(client.HandlerFunc(func(context.Context, *client.Delivery) error {
		panic("no currency")
	}))
	err := handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil)))
	fmt.Println(counted, err)
	// Output:
	// 1 handler panicked: no currency
}

// Tokens come from an authorization server, by golang.org/x/oauth2 for instance; the
// connection asks for the next one before the last one ends.
func ExampleOAuth2() {
	fetch := func(context.Context) (client.Token, error) {
		return client.Token{Value: "eyJ…", Expires: time.Now().Add(10 * time.Minute)}, nil
	}
	cfg := client.Config{
		SASL: client.OAuth2(fetch),
		OnEvent: func(e client.Event) {
			if e.Kind == client.EventTokenRefused {
				fmt.Println("the broker will end the connection soon:", e.Err)
			}
		},
	}
	_, err := client.Connect(context.Background(), "amqp://127.0.0.1:1", cfg)
	fmt.Println(errors.Is(err, client.ErrUnreachable))
	// Output: true
}

// Each message gets its order's id. The error lists each order that wasn't accepted.
func ExamplePublisher_PublishAll() {
	broker := startBroker()
	defer broker.Close()
	ctx := context.Background()
	conn := connect(broker)
	defer conn.Close(ctx)
	publisher, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer publisher.Close(ctx)

	orders := []Order{{ID: "o-1"}, {ID: "o-2"}, {ID: "o-3"}}
	err = publisher.PublishAll(ctx, orders, func(o Order, m *client.Message) {
		m.Properties.MessageID = o.ID
	})
	if batch, ok := errors.AsType[*client.BatchError](err); ok {
		for _, f := range batch.Failed {
			log.Printf("order %s: %v; safe to publish again: %t", orders[f.Index].ID, f.Err, client.SafeToRetry(f.Err))
		}
	}
	for _, m := range broker.Queue("orders").Messages() {
		fmt.Println(m.ID())
	}
	// Output:
	// o-1
	// o-2
	// o-3
}
