// Command streams is the first program of docs/streams.md: it publishes to a stream, and consumes
// from it.
package main

import (
	"cmp"
	"context"
	"log"
	"os"
	"os/signal"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/stream"
)

type Order struct {
	ID     string
	Region string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	defer conn.Close(context.Background())
	topology := declare.Topology{Queues: []declare.Queue{
		declare.Stream{Name: "orders.log", MaxLengthBytes: 20 << 30, MaxSegmentSize: 100 << 20},
	}}
	_, err = declare.Apply(ctx, conn.Management(), topology)
	check(err)

	p, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders.log"), client.PublisherConfig{})
	check(err)
	for _, o := range []Order{{"o-1", "eu"}, {"o-2", "us"}} {
		check(p.Publish(ctx, o, stream.FilterValue(o.Region)))
	}

	handler := client.JSON(func(_ context.Context, o Order) error {
		log.Println("billed", o.ID)
		return nil
	})
	check(stream.Consume(ctx, conn, "orders.log", handler, stream.Config{ // until ^C
		Consumer: "billing",
		Offsets:  &stream.FileStore{Dir: "."},
		Filter:   stream.Filter{Values: []string{"eu"}},
	}))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
