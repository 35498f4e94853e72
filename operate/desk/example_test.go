package desk_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http/httptest"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/retry"
)

// bankDown starts a RabbitMQ in memory with three dead-lettered orders.
func bankDown(ctx context.Context) (*hopbacktest.Broker, *client.Conn) {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	policy := retry.Policy{MaxRetries: retry.NoRetries}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[string](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.PublishAll(ctx, []string{"o-1", "o-2", "o-3"}); err != nil {
		log.Fatal(err)
	}
	working, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() {
		ended <- conn.Consume(working, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, order string) error {
			return errors.New("bank: connection 4711 timed out")
		})), client.ConsumerConfig{})
	}()
	if err := broker.Queue("orders.dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 3 }); err != nil {
		log.Fatal(err)
	}
	stop()
	if err := <-ended; err != nil {
		log.Fatal(err)
	}
	return broker, conn
}

// The bank works again: replay the orders that failed because of it.
func Example() {
	ctx := context.Background()
	broker, conn := bankDown(ctx)
	defer broker.Close()
	defer conn.Close(ctx)

	server := httptest.NewServer(broker.HTTPHandler()) // on a real RabbitMQ: port 15672
	defer server.Close()
	api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	if err != nil {
		log.Fatal(err)
	}

	d, err := desk.New(conn, desk.Config{HTTP: api})
	if err != nil {
		log.Fatal(err)
	}
	survey, err := d.Survey(ctx, desk.SurveyConfig{})
	if err != nil {
		log.Fatal(err)
	}
	for _, g := range survey.Groups {
		fmt.Printf("%d in %s, %s: %s\n", g.Count, g.In, g.Reason, g.Text)
	}
	report, err := d.Replay(ctx, desk.ReplayConfig{
		Queue:  survey.Groups[0].In,
		Filter: desk.Filter{Groups: []string{survey.Groups[0].ID}},
		By:     "ada",
	})
	fmt.Println("replayed", report.Replayed, err)
	fmt.Println("in orders", broker.Queue("orders").Counts().Ready)
	// Output:
	// 3 in orders.dead, exhausted: bank: connection # timed out
	// replayed 3 <nil>
	// in orders 3
}

// Count the messages that a replay would send, without sending them.
func ExampleDesk_Replay() {
	ctx := context.Background()
	broker, conn := bankDown(ctx)
	defer broker.Close()
	defer conn.Close(ctx)

	d, err := desk.New(conn, desk.Config{})
	if err != nil {
		log.Fatal(err)
	}
	report, err := d.Replay(ctx, desk.ReplayConfig{
		Queue:  "orders.dead",
		Filter: desk.Filter{Reasons: []client.Reason{retry.ReasonExhausted}, Text: "timed out"},
		DryRun: true,
	})
	fmt.Println(report.Matched, report.Replayed, err)
	// Output: 3 0 <nil>
}

// List shows the dead letters of a queue one by one. It leaves them in the queue.
func ExampleDesk_List() {
	ctx := context.Background()
	broker, conn := bankDown(ctx)
	defer broker.Close()
	defer conn.Close(ctx)

	d, err := desk.New(conn, desk.Config{})
	if err != nil {
		log.Fatal(err)
	}
	list, err := d.List(ctx, desk.ListConfig{
		Queue:  "orders.dead",
		Filter: desk.Filter{Text: "timed out"},
		Limit:  2,
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range list.Messages {
		message, err := d.Show(ctx, desk.ShowConfig{Queue: "orders.dead", ID: m.ID})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(message.Body, m.Reason, m.Error)
	}
	fmt.Println("more:", list.More)
	fmt.Println("still in the queue:", broker.Queue("orders.dead").Counts().Ready)
	// Output:
	// "o-1" exhausted bank: connection 4711 timed out
	// "o-2" exhausted bank: connection 4711 timed out
	// more: true
	// still in the queue: 3
}

// A dead-letter queue is a queue like any other, and a program can consume from it, for
// example to open a ticket for each dead letter. The handler acknowledges the message, which
// removes it. To look at dead letters without removing them, use [desk.Desk.List].
func Example_deadLetterConsumer() {
	ctx := context.Background()
	broker, conn := bankDown(ctx)
	defer broker.Close()
	defer conn.Close(ctx)

	openTicket := client.JSON(func(ctx context.Context, order string) error {
		d, _ := client.DeliveryFrom(ctx)
		origin := retry.DeadLetterOf(d.Message())
		fmt.Printf("%s failed in %s (%s): %s\n", order, origin.Queue, origin.Reason, origin.Error)
		return nil // acknowledges the message
	})

	consuming, stop := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- conn.Consume(consuming, "orders.dead", openTicket, client.ConsumerConfig{}) }()
	err := broker.Queue("orders.dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Messages == 0 })
	if err != nil {
		log.Fatal(err)
	}
	stop()
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	// Output:
	// o-1 failed in orders (exhausted): bank: connection 4711 timed out
	// o-2 failed in orders (exhausted): bank: connection 4711 timed out
	// o-3 failed in orders (exhausted): bank: connection 4711 timed out
}
