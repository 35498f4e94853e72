// Command rpc is the first program of docs/rpc.md: a responder and a requester in one process.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
)

type Order struct {
	Item  string `json:"item"`
	Count int    `json:"count"`
}

type Quote struct {
	Cents int `json:"cents"`
}

var prices = map[string]int{"apple": 50, "pear": 70}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Second)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "quotes", DeliveryLimit: 5})
	check(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	check(err)

	// The responder: a handler that returns a reply.
	responder, err := rpc.NewResponder(ctx, conn, rpc.ResponderConfig{})
	check(err)
	handler := rpc.Respond(responder, func(_ context.Context, o Order) (Quote, error) {
		cents, ok := prices[o.Item]
		if !ok {
			return Quote{}, &rpc.Error{Code: "no-price", Text: "we have no " + o.Item} // goes to the caller
		}
		return Quote{Cents: cents * o.Count}, nil // any other error is retried
	})
	stopped := make(chan error, 1)
	go func() { stopped <- conn.Consume(ctx, "quotes", retry.With(policy)(handler), client.ConsumerConfig{}) }()

	// The requester.
	quotes, err := rpc.NewRequester[Order, Quote](ctx, conn, address.Queue("quotes"), rpc.RequesterConfig{})
	check(err)
	for _, o := range []Order{{"apple", 3}, {"plum", 1}} {
		quote, err := quotes.Call(ctx, o)
		fmt.Println(quote.Cents, err)
	}

	quotes.Close(ctx)
	stop()
	check(<-stopped)
	check(conn.Close(context.Background()))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
