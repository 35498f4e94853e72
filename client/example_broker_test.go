package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// startBroker starts a broker in memory with the queue "orders", so the examples run
// without a server.
func startBroker() *hopbacktest.Broker {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	conn := connect(broker)
	defer conn.Close(context.Background())
	if _, err := declare.Apply(context.Background(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
		declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}}); err != nil {
		log.Fatal(err)
	}
	return broker
}

func connect(broker *hopbacktest.Broker) *client.Conn {
	conn, err := client.Connect(context.Background(), broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	return conn
}

// The broker here is one in memory. For a real one pass its URL, and leave Dial out.
func ExampleConnect() {
	broker := startBroker()
	defer broker.Close()
	ctx := context.Background()

	conn, err := client.Connect(ctx, broker.URL(), client.Config{Name: "shop", Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	fmt.Println(conn.Broker().Product, conn.Broker().Version)
	// Output: RabbitMQ 4.3.6
}

// Publish returns nil only when the broker has stored the message.
func ExamplePublisher_Publish() {
	broker := startBroker()
	defer broker.Close()
	ctx := context.Background()
	conn := connect(broker)
	defer conn.Close(ctx)

	publisher, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer publisher.Close(ctx)
	err = publisher.Publish(ctx, Order{ID: "o-1", Cents: 995}, func(m *client.Message) {
		m.Properties.MessageID = "o-1"
	})
	if err != nil {
		log.Fatal(err, "; safe to publish again: ", client.SafeToRetry(err))
	}
	body, _ := client.Body(broker.Queue("orders").Messages()[0].Message)
	fmt.Printf("%s\n", body)
	// Output: {"id":"o-1","cents":995}
}

// A publisher of the zero Address sends each message to the address that its edit sets.
func ExamplePublishTo() {
	broker := startBroker()
	defer broker.Close()
	ctx := context.Background()
	conn := connect(broker)
	defer conn.Close(ctx)

	publisher, err := client.NewPublisher[Order](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer publisher.Close(ctx)
	fmt.Println(publisher.Publish(ctx, Order{ID: "o-1"}, client.PublishTo(address.Queue("orders"))))
	err = publisher.Publish(ctx, Order{ID: "o-2"}, client.PublishTo(address.Exchange("amq.direct", "nobody")))
	fmt.Println(errors.Is(err, client.ErrUnroutable))
	// Output:
	// <nil>
	// true
}

// Consume returns nil after its ctx has ended and all settlements are written. A service ends the ctx with signal.NotifyContext; this one stops after one order.
func ExampleConn_Consume() {
	broker := startBroker()
	defer broker.Close()
	conn := connect(broker)
	defer conn.Close(context.Background())
	publisher, err := client.NewPublisher[Order](context.Background(), conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.Publish(context.Background(), Order{ID: "o-1", Cents: 995}); err != nil {
		log.Fatal(err)
	}

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	handler := client.JSON(func(ctx context.Context, o Order) error {
		fmt.Println("charging", o.Cents, "cents for", o.ID)
		stop()
		return nil // an error would requeue the order
	})
	err = conn.Consume(ctx, "orders", handler, client.ConsumerConfig{Concurrency: 16})
	fmt.Println(err, broker.Queue("orders").Counts().Messages)
	// Output:
	// charging 995 cents for o-1
	// <nil> 0
}
