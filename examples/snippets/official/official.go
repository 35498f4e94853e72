// Package official holds the code of docs/migrating-from-the-official-client.md.
package official

import (
	"context"
	"errors"
	"fmt"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// Order is what the messages hold.
type Order struct {
	ID string `json:"id"`
}

func publishBefore(ctx context.Context, publisher *rabbitmqamqp.Publisher, body []byte) error {
	result, err := publisher.Publish(ctx, rabbitmqamqp.NewMessage(body))
	if err != nil {
		return err
	}
	switch outcome := result.Outcome.(type) {
	case *rabbitmqamqp.StateAccepted:
		return nil
	case *rabbitmqamqp.StateReleased:
		return errors.New("no queue is bound for the routing key")
	default:
		return fmt.Errorf("the broker answered %T", outcome)
	}
}

func publishAfter(ctx context.Context, conn *client.Conn, order Order) error {
	publisher, err := client.NewPublisher[Order](ctx, conn, address.Exchange("orders", "created"), client.PublisherConfig{})
	if err != nil {
		return err
	}
	defer publisher.Close(ctx)
	return publisher.Publish(ctx, order)
}

func consumeBefore(ctx context.Context, consumer *rabbitmqamqp.Consumer, handle func([]byte) error) error {
	for {
		delivery, err := consumer.Receive(ctx)
		if err != nil {
			return err // also while it reconnects, without a pause
		}
		settle := delivery.Accept
		if handle(delivery.Message().GetData()) != nil {
			settle = delivery.Requeue // immediately, forever
		}
		if err := settle(ctx); err != nil {
			return err
		}
	}
}

func consumeAfter(ctx context.Context, conn *client.Conn, handle func(context.Context, Order) error) error {
	return conn.Consume(ctx, "orders", client.JSON(handle), client.ConsumerConfig{})
}

var (
	_ = publishBefore
	_ = publishAfter
	_ = consumeBefore
	_ = consumeAfter
)
