package audit_test

import (
	"context"
	"fmt"
	"log"
	"net/http/httptest"
	"strings"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/httpapi"
)

// startBroker starts a RabbitMQ in memory, and returns what to read it from.
func startBroker(ctx context.Context) (src check.Sources, stop func()) {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	server := httptest.NewServer(broker.HTTPHandler())
	api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return check.Sources{AMQP: conn.Management(), HTTP: api}, func() {
		server.Close()
		conn.Close(ctx)
		broker.Close()
	}
}

// Compare shows what Apply would do. A queue's arguments can't be changed in place.
func ExampleCompare() {
	ctx := context.Background()
	src, stop := startBroker(ctx)
	defer stop()

	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")}
	dead := declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}
	if _, err := declare.Apply(ctx, src.AMQP, declare.Topology{Queues: []declare.Queue{orders}}); err != nil {
		log.Fatal(err)
	}

	orders.DeliveryLimit = 10
	topology := declare.Topology{Queues: []declare.Queue{orders, dead}}
	live, err := check.Read(ctx, src, topology)
	if err != nil {
		log.Fatal(err)
	}
	diff := audit.Compare(live, topology)
	for _, c := range diff.Changes {
		fmt.Println(c.Kind, c.Resource)
		for _, d := range c.Differences {
			fmt.Println(" ", d)
		}
	}
	fmt.Println(diff.Conflicts())
	// Output:
	// refuse queue "orders"
	//   x-delivery-limit: the broker has "5", declared is "10"
	// create queue "orders.dead"
	// true
}

// Read a live virtual host and check it: nobody has declared the dead-letter queue of orders.
func Example_read() {
	ctx := context.Background()
	src, stop := startBroker(ctx)
	defer stop()

	topology := declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
	}}
	if _, err := declare.Apply(ctx, src.AMQP, topology); err != nil {
		log.Fatal(err)
	}
	live, err := check.Read(ctx, src, topology)
	if err != nil {
		log.Fatal(err)
	}
	verification := check.Verify(live, topology)
	for _, f := range verification.Findings {
		fmt.Println(f.Severity, f.Resource, f.Rule)
	}
	// Output:
	// error queue "orders" dead-letter-route
}
