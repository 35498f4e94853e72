package declare_test

import (
	"context"
	"fmt"
	"time"

	"github.com/hopback/hopback/declare"
)

// Declare a queue for orders, a delay queue in which a failed order waits for ten seconds, and a
// dead-letter queue.
func Example() {
	topology := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "shop", Type: declare.ExchangeTopic},
			{Name: "requeue", Type: declare.ExchangeTopic},
		},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
			declare.QuorumQueue{Name: "delay.10s", MessageTTL: 10 * time.Second, DeadLetter: declare.DeadLetterTarget{Exchange: "requeue"}},
			declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "orders", Key: "order.*"},
			{Source: "requeue", Queue: "orders", Key: "*.*.orders"},
		},
	}
	var management declare.Requester = &fakeBroker{} // in a service: conn.Management()
	report, err := declare.Apply(context.Background(), management, topology)
	fmt.Print(report)
	fmt.Println(err)
	// Output:
	// declared  exchange "shop"
	// declared  exchange "requeue"
	// created   queue "orders"
	// created   queue "delay.10s"
	// created   queue "orders.dead"
	// declared  binding "shop" to queue "orders", key "order.*"
	// declared  binding "requeue" to queue "orders", key "*.*.orders"
	// <nil>
}

// A queue must say where its dead letters go.
func ExampleQuorumQueue_Validate() {
	fmt.Println(declare.QuorumQueue{Name: "orders"}.Validate())
	fmt.Println(declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop(), MessageTTL: 1500 * time.Microsecond}.Validate())
	// Output:
	// hopback: QuorumQueue("orders").DeadLetter isn't set, so the broker would silently drop messages that are rejected, expire, or exceed a limit; set an exchange or a queue for them, or use declare.Drop()
	// hopback: QuorumQueue("orders").MessageTTL = "1.5ms" isn't a whole number of milliseconds, the broker's unit; round it with Round(time.Millisecond)
}
