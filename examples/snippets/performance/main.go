// Command performance is the program of docs/performance.md: it measures what the two settings that matter most do.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID int `json:"id"`
}

const count = 1000

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	orders := &hopback.Queue[Order]{Conn: conn, Name: "orders"}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	publisher, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		return err
	}

	began := time.Now()
	for i := range count {
		if err := publisher.Publish(ctx, Order{ID: i}); err != nil { // waits for each confirm
			return err
		}
	}
	fmt.Printf("%d published, one after the other (%.2fs)\n", count, time.Since(began).Seconds())
	if err := handle(ctx, orders, 1); err != nil {
		return err
	}

	began = time.Now()
	if err := publisher.PublishAll(ctx, make([]Order, count)); err != nil { // many in flight at once
		return err
	}
	fmt.Printf("%d published, with PublishAll (%.2fs)\n", count, time.Since(began).Seconds())
	return handle(ctx, orders, 16)
}

// handle handles all orders. Each takes a millisecond.
func handle(ctx context.Context, orders *hopback.Queue[Order], concurrency int) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var handled atomic.Int64
	began := time.Now()
	err := orders.Consume(ctx, func(context.Context, Order) error {
		time.Sleep(time.Millisecond)
		if handled.Add(1) == count {
			stop()
		}
		return nil
	}, hopback.ConsumerConfig{Concurrency: concurrency})
	fmt.Printf("%d handled, %d at a time (%.2fs)\n", count, concurrency, time.Since(began).Seconds())
	return err
}
