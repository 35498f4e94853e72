package client_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// An edit sets headers and properties before a message is sent. A handler reads them from its
// delivery. What AMQP 0-9-1 calls headers are application properties in AMQP 1.0.
func ExamplePublisher_Publish_headers() {
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	queue := declare.QuorumQueue{Name: "mails", DeadLetter: declare.ToQueue("mails.dead")}
	dead := declare.QuorumQueue{Name: "mails.dead", DeadLetter: declare.Drop()}
	if _, err := declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{queue, dead}}); err != nil {
		log.Fatal(err)
	}

	publisher, err := client.NewPublisher[string](ctx, conn, queue.Address(), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	err = publisher.Publish(ctx, "Welcome!", func(m *client.Message) {
		m.Header.Priority = 9                                   // 0 to 9; higher is sooner
		m.Header.TTL = time.Hour                                // the broker drops it after that
		m.Properties.MessageID = "mail-1"                       // default: a random string
		m.Properties.Subject = new("mail.welcome")              // the message's type, for instance
		m.Properties.CorrelationID = "signup-17"                // what it belongs to
		m.ApplicationProperties = map[string]any{"tenant": "a"} // your own headers
	})
	if err != nil {
		log.Fatal(err)
	}

	handler := client.JSON(func(ctx context.Context, text string) error {
		delivery, _ := client.DeliveryFrom(ctx)
		properties := delivery.Message().Properties
		fmt.Println(text, properties.MessageID, *properties.Subject, properties.CorrelationID)
		fmt.Println("priority", delivery.Message().Header.Priority, "for tenant", delivery.Property("tenant"))
		stop()
		return nil
	})
	if err := conn.Consume(ctx, "mails", handler, client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// Welcome! mail-1 mail.welcome signup-17
	// priority 9 for tenant a
}
