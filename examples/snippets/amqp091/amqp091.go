// Package amqp091 holds the code of docs/migrating-from-amqp091-go.md.
package amqp091

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Order is what the messages hold.
type Order struct {
	ID string `json:"id"`
}

func charge(context.Context, Order) error { return nil }

func publishBefore(ctx context.Context, ch *amqp.Channel, order Order) error {
	body, err := json.Marshal(order)
	if err != nil {
		return err
	}
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "orders", true, false,
		amqp.Publishing{ContentType: "application/json", DeliveryMode: amqp.Persistent, Body: body})
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err != nil {
		return err
	}
	if !acked {
		return errors.New("the broker refused the message")
	}
	return nil // and NotifyReturn reports whether a queue got it
}

func publishAfter(ctx context.Context, publisher *client.Publisher[Order], order Order) error {
	return publisher.Publish(ctx, order)
}

func consumeBefore(ctx context.Context, ch *amqp.Channel) error {
	if err := ch.Qos(64, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.ConsumeWithContext(ctx, "orders", "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for d := range deliveries {
		var order Order
		if err := json.Unmarshal(d.Body, &order); err != nil {
			_ = d.Reject(false)
			continue
		}
		if err := charge(ctx, order); err != nil {
			_ = d.Nack(false, true) // immediately, at the head of the queue, forever
			continue
		}
		_ = d.Ack(false)
	}
	return errors.New("the channel is closed: reconnect and start again")
}

func consumeAfter(ctx context.Context, conn *client.Conn) error {
	policy := retry.Policy{Backoff: retry.Delays(time.Second, 10*time.Second, time.Minute)}
	handler := retry.With(policy)(client.JSON(charge))
	return conn.Consume(ctx, "orders", handler, client.ConsumerConfig{Concurrency: 16})
}

func declareBefore(ch *amqp.Channel) error {
	_, err := ch.QueueDeclare("orders", true, false, false, false, amqp.Table{
		"x-queue-type":              "quorum",
		"x-delivery-limit":          5,
		"x-dead-letter-exchange":    "dead_letter_exchange",
		"x-dead-letter-routing-key": "orders",
	})
	return err
}

func declareAfter(ctx context.Context, conn *client.Conn, policy retry.Policy) error {
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	if err != nil {
		return err
	}
	report, err := declare.Apply(ctx, conn.Management(), topology)
	if err != nil {
		return err
	}
	log.Print(report)
	return nil
}

// Header reads what amqp091-go calls a header.
func header(ctx context.Context) {
	d, ok := client.DeliveryFrom(ctx)
	if !ok {
		return // not called by a consumer
	}
	tenant, _ := d.Property("tenant").(string)
	fmt.Println(tenant)
}

var (
	_ = publishBefore
	_ = publishAfter
	_ = consumeBefore
	_ = consumeAfter
	_ = declareBefore
	_ = declareAfter
	_ = header
)
