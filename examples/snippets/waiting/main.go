// Command waiting is the first program of docs/waiting.md: an order that waits for its payment, or
// gives up.
package main

import (
	"cmp"
	"context"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

type Order struct {
	ID string `json:"id"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	defer conn.Close(context.Background())
	policy := retry.Policy{Strategy: retry.StrategyNative}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20})
	check(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	check(err)

	// The worker: an order without a payment waits in its queue, for at most 4 s here.
	handler := retry.With(policy)(client.JSON(func(ctx context.Context, o Order) error {
		d, _ := client.DeliveryFrom(ctx)
		parked, again := d.Parked()
		switch {
		case !again:
			log.Println(o.ID, "waits for its payment")
			return client.Park{Token: "payment/" + o.ID, Until: time.Now().Add(4 * time.Second)}
		case time.Now().Before(parked.Until): // it was woken early: keep waiting
			return parked
		}
		log.Println(o.ID, "was never paid: canceled")
		return nil
	}))
	go func() { check(conn.Consume(ctx, "orders", handler, client.ConsumerConfig{Concurrency: 1})) }()

	p, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	check(err)
	check(p.PublishAll(ctx, []Order{{"order-1"}, {"order-2"}}))

	// The webhook of the payments, in this or in any other process: it claims the order.
	claimer, err := client.NewClaimer(ctx, conn, "orders")
	check(err)
	paid := func(order string) {
		n, err := claimer.Claim(ctx, "payment/"+order, client.JSON(func(_ context.Context, o Order) error {
			log.Println(o.ID, "is paid: shipped")
			return nil
		}))
		check(err)
		log.Println(order, "orders claimed:", n) // 0: none waits
	}
	time.Sleep(time.Second)
	paid("order-1")
	paid("order-1")
	<-ctx.Done()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
