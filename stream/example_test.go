package stream_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/stream"
)

type order struct {
	ID     string
	Region string
}

func publishOrders(ctx context.Context, conn *client.Conn, orders []order) error {
	topology := declare.Topology{Queues: []declare.Queue{
		declare.Stream{Name: "orders.log", MaxLengthBytes: 20 << 30, MaxSegmentSize: 100 << 20},
	}}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}
	p, err := client.NewPublisher[order](ctx, conn, address.Queue("orders.log"), client.PublisherConfig{})
	if err != nil {
		return err
	}
	defer p.Close(context.WithoutCancel(ctx))
	for _, o := range orders {
		if err := p.Publish(ctx, o, stream.FilterValue(o.Region)); err != nil {
			return err
		}
	}
	return nil
}

func bill(ctx context.Context, o order) error { return nil }

func consumeOrders(ctx context.Context, conn *client.Conn) error {
	return stream.Consume(ctx, conn, "orders.log", client.JSON(bill), stream.Config{
		Consumer:    "billing",
		Offsets:     &stream.FileStore{Dir: "/var/lib/billing"},
		Filter:      stream.Filter{Values: []string{"eu"}},
		FailedQueue: "orders.failed",
	})
}

var errUnknownOrder = errors.New("unknown order")

func consumeByRules(ctx context.Context, conn *client.Conn) error {
	return stream.Consume(ctx, conn, "orders.log", client.JSON(bill), stream.Config{
		FailedQueue: "orders.failed",
		GiveUpAfter: time.Hour,
		Rules: []retry.ErrorRule{
			{If: retry.On(errUnknownOrder), Do: retry.ActionDiscard},
			{If: retry.OnType[*net.OpError](), Do: retry.ActionRetryUncounted, Backoff: retry.Delays(10 * time.Second)},
		},
	})
}

// Rules decide which errors are tried again, and GiveUpAfter how long.
func ExampleConsume_rules() {
	ctx := context.Background()
	conn, err := client.Connect(ctx, "amqp://guest:guest@localhost/", client.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close(ctx)
	if err := consumeByRules(ctx, conn); err != nil {
		fmt.Println(err)
	}
}

// The position is saved in a file. What fails five times goes to the queue orders.failed,
// where retry.With can go on.
func ExampleConsume() {
	ctx := context.Background()
	conn, err := client.Connect(ctx, "amqp://guest:guest@localhost/", client.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close(ctx)
	if err := publishOrders(ctx, conn, []order{{ID: "1", Region: "eu"}}); err != nil {
		fmt.Println(err)
	}
	if err := consumeOrders(ctx, conn); err != nil {
		fmt.Println(err)
	}
}
