package migrate_test

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/operate/migrate"
)

// The messages of a classic queue move to a quorum queue.
func ExampleRun() {
	ctx := context.Background()
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a RabbitMQ in memory
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	server := httptest.NewServer(broker.HTTPHandler()) // RabbitMQ has it on port 15672
	defer server.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	if _, err := declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.ClassicQueue{Name: "orders", DeadLetter: declare.Drop()},
		declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}}); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[string](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.PublishAll(ctx, []string{"o-1", "o-2", "o-3"}); err != nil {
		log.Fatal(err)
	}

	api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	if err != nil {
		log.Fatal(err)
	}
	report, err := migrate.Run(ctx, conn, api, migrate.Config{
		Old:   "orders",
		New:   declare.QuorumQueue{Name: "orders.v2", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
		Quiet: 100 * time.Millisecond, // leave it out with RabbitMQ, whose counts are late
	})
	fmt.Println(report.Moved, report.Deleted, err)
	fmt.Println(broker.Queue("orders.v2").Counts().Ready)
	// Output:
	// 3 true <nil>
	// 3
}
