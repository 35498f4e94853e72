package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
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

// prices is what the responder knows.
var prices = map[string]int{"apple": 50, "pear": 70}

// A responder answers requests from a queue, and a requester asks.
func Example() {
	ctx := context.Background()
	conn, done := connect(ctx)
	defer done()

	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(10 * time.Millisecond)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "quotes"})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}

	stop := serve(ctx, conn, policy)
	defer stop()

	quotes, err := rpc.NewRequester[Order, Quote](ctx, conn, address.Queue("quotes"), rpc.RequesterConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer quotes.Close(ctx)
	for _, o := range []Order{{"apple", 3}, {"plum", 1}, {"", 1}} {
		quote, err := quotes.Call(ctx, o)
		fmt.Println(describe(quote, err))
	}
	// Output:
	// 150 cents
	// refused: no-price: we have no plum
	// given up: exhausted
}

// serve answers until the function that it returns is called.
func serve(ctx context.Context, conn *client.Conn, policy retry.Policy) (stop func()) {
	responder, err := rpc.NewResponder(ctx, conn, rpc.ResponderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	handler := rpc.Respond(responder, func(ctx context.Context, o Order) (Quote, error) {
		if o.Item == "" {
			return Quote{}, errors.New("the database is down") // retried
		}
		cents, ok := prices[o.Item]
		if !ok {
			return Quote{}, &rpc.Error{Code: "no-price", Text: "we have no " + o.Item} // notified to the caller
		}
		return Quote{Cents: cents * o.Count}, nil
	})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Consume(ctx, "quotes", retry.With(policy)(handler), client.ConsumerConfig{Concurrency: 8})
	}()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			log.Fatal(err)
		}
	}
}

// describe tells the ends of a call apart.
func describe(quote Quote, err error) string {
	var refused *rpc.Error
	var givenUp *rpc.GivenUpError
	switch {
	case err == nil:
		return fmt.Sprintf("%d cents", quote.Cents)
	case errors.As(err, &refused):
		return "refused: " + refused.Error()
	case errors.As(err, &givenUp):
		return "given up: " + string(givenUp.Reason)
	case client.SafeToRetry(err):
		return "it hasn't run: call again"
	case errors.Is(err, rpc.ErrNoReply):
		return "it may have run: call again if it may run twice"
	default:
		return err.Error()
	}
}

// connect connects to a RabbitMQ in memory.
func connect(ctx context.Context) (*client.Conn, func()) {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	if err != nil {
		log.Fatal(err)
	}
	return conn, func() {
		_ = conn.Close(ctx)
		broker.Close()
	}
}

// A responder for callers whose reply queue is called "answers".
func ExampleIsReplyQueue() {
	cfg :=
		rpc.ResponderConfig{Allow: func(to address.Address) bool { return rpc.IsReplyQueue(to) || to == address.Queue("answers") }}
	fmt.Println(cfg.Allow(address.Queue("answers")), cfg.Allow(address.Queue("hopback-replies-1")), cfg.Allow(address.Queue("payments")))
	// Output: true true false
}
