// Command schedule is the first program of docs/schedule.md: it publishes a reminder for
// later, and handles it when it comes.
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
	"github.com/hopback/hopback/schedule"
)

type Reminder struct {
	Invoice string `json:"invoice"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	defer conn.Close(context.Background())

	// The work queue with its retries, then the delay queues that scheduled messages wait in.
	policy := retry.Policy{Backoff: retry.Delays(time.Second, time.Minute)}
	reminders := declare.QuorumQueue{Name: "reminders", DeliveryLimit: 5}
	work, err := retry.Topology(policy, reminders)
	check(err)
	ladder, err := schedule.Topology(schedule.Names{}, reminders.Name)
	check(err)
	topology, err := declare.Merge(work, ladder)
	check(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	check(err)

	p, err := schedule.NewPublisher[Reminder](ctx, conn, address.Queue("reminders"), schedule.PublisherConfig{})
	check(err)
	scheduled, err := p.Publish(ctx, schedule.After(2*time.Second), Reminder{Invoice: "17"})
	check(err) // nil only when the broker has stored it
	log.Println("due at", scheduled.Due)

	handler := retry.With(policy)(client.JSON(func(_ context.Context, r Reminder) error {
		log.Println("please pay invoice", r.Invoice)
		return nil
	}))
	check(conn.Consume(ctx, reminders.Name, handler, client.ConsumerConfig{})) // until ^C
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
