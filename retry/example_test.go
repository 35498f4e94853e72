package retry_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// You can test a policy and its handler without a broker. Here a message is retried
// until it is dead-lettered.
func ExampleWith() {
	policy := retry.Policy{
		MaxRetries: 3,
		Backoff:    retry.Delays(10*time.Second, time.Minute),
	}
	handler := retry.With(policy)(client.JSON(func(ctx context.Context, order struct{ ID string }) error {
		return errors.New("bank timed out")
	}))

	message := client.NewMessage([]byte(`{"id": "o-1"}`))
	for {
		err := handler.Handle(context.Background(), client.NewDelivery("orders", message))
		forward, ok := errors.AsType[client.Forward](err)
		if !ok {
			fmt.Println(err)
			return
		}
		fmt.Println("retry", retry.Count(forward.Message), "by", forward.To)
		message = forward.Message
	}
	// Output:
	// retry 1 by /exchanges/retry_exchange/delay.10000.orders
	// retry 2 by /exchanges/retry_exchange/delay.60000.orders
	// retry 3 by /exchanges/retry_exchange/delay.60000.orders
	// dead-letter (exhausted): bank timed out
}

func ExamplePermanent() {
	errDeclined := errors.New("card declined")
	handler := retry.With(retry.Policy{})(client.JSON(func(ctx context.Context, order struct{ ID string }) error {
		return retry.Permanent(errDeclined)
	}))
	err := handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage([]byte(`{"id": "o-1"}`))))
	fmt.Println(err)
	fmt.Println(errors.Is(err, errDeclined))
	// Output:
	// dead-letter (permanent): card declined
	// true
}

// A delay that the policy has no queue for is made up of several: 30 s is 10 s, three times.
func ExampleAfter() {
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, 10*time.Second, time.Minute)}
	handler := retry.With(policy)(client.JSON(func(ctx context.Context, order struct{ ID string }) error {
		return retry.After(30*time.Second, errors.New("429 Too Many Requests"))
	}))
	err := handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage([]byte(`{"id": "o-1"}`))))
	fmt.Println(err)
	// Output:
	// forward to /exchanges/retry_exchange/delay.10000.orders: 429 Too Many Requests
}

// An order that comes before its time is delivered again, without counting a retry.
func ExampleSnooze() {
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(10 * time.Second)}
	handler := retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		open := false // whether the shop is open
		if !open {
			return retry.Snooze(10 * time.Second)
		}
		return nil
	}))
	err := handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil)))
	forward, _ := errors.AsType[client.Forward](err)
	fmt.Println(forward.To, "retries:", retry.Count(forward.Message))
	// Output:
	// /exchanges/retry_exchange/delay.10000.orders retries: 0
}

// A message that isn't needed any more is acknowledged, although the handler returns an error.
func ExampleDiscard() {
	handler := retry.With(retry.Policy{})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
		return retry.Discard(errors.New("the order was canceled"))
	}))
	fmt.Println(handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil))))
	// Output:
	// <nil>
}

func ExampleDelays() {
	backoff := retry.Delays(10*time.Second, time.Minute, 5*time.Minute)
	for n := 1; n <= 4; n++ {
		fmt.Println(n, backoff(n))
	}
	// Output:
	// 1 10s
	// 2 1m0s
	// 3 5m0s
	// 4 5m0s
}

func ExampleExponential() {
	backoff := retry.Exponential(time.Second, 1.5)
	for n := 1; n <= 4; n++ {
		fmt.Println(n, backoff(n))
	}
	// Output:
	// 1 1s
	// 2 1.5s
	// 3 2.25s
	// 4 3.375s
}

func ExampleOn() {
	errTimeout := errors.New("timeout")
	policy := retry.Policy{RetryIf: retry.On(errTimeout, context.DeadlineExceeded)}
	fmt.Println(policy.RetryIf(fmt.Errorf("charge: %w", errTimeout)))
	fmt.Println(policy.RetryIf(errors.New("card declined")))
	// Output:
	// true
	// false
}

// The queues that two work queues with one policy need. Delay queues are shared.
func ExampleTopology() {
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(500*time.Millisecond, 10*time.Second, time.Minute)}
	topology, err := retry.Topology(policy,
		declare.QuorumQueue{Name: "orders", DeliveryLimit: 5},
		declare.QuorumQueue{Name: "mails", DeliveryLimit: 5},
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, q := range topology.Queues {
		fmt.Println(q.Address().QueueName())
	}
	// Unordered output:
	// orders
	// orders.dead
	// mails
	// mails.dead
	// delay_500ms
	// delay_10s
	// delay_60s
	// parking_queue
}

// deadOrder is a message as a consumer of "orders.dead" receives it. The worker wrote
// the first four annotations, the broker the others.
func deadOrder() *client.Message {
	m := client.NewMessage([]byte(`{"id": "o-1"}`))
	m.Annotations = map[any]any{
		client.AnnotationReason: "exhausted",
		client.AnnotationError:  "bank timed out",
		"x-opt-hopback-retries": int64(3),
		"x-opt-hopback-queue":   "orders",
		"x-last-death-reason":   "rejected",
		"x-last-death-queue":    "orders",
	}
	return m
}

func ExampleDeadLetterOf() {
	dead := retry.DeadLetterOf(deadOrder())
	fmt.Printf("dead-lettered in %s after %d retries (%s): %s\n", dead.Queue, dead.Retries, dead.Reason, dead.Error)
	// Output:
	// dead-lettered in orders after 3 retries (exhausted): bank timed out
}
