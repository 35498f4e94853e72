package declare_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/hopback/hopback/declare"
)

// A queue for orders, one in which a failed order waits for ten seconds, and
// one for those that nobody could handle.
func Example() {
	topology := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "shop", Type: declare.Topic},
			{Name: "requeue", Type: declare.Topic},
		},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
			declare.QuorumQueue{Name: "delay.10s", MessageTTL: 10 * time.Second, DeadLetter: declare.DeadLetter{Exchange: "requeue"}},
			declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "orders", Key: "order.*"},
			{Source: "requeue", Queue: "orders", Key: "*.*.orders"},
		},
	}
	var management declare.Requester = &fakeBroker{} // a connection's, elsewhere
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

// A queue must say where its dead go.
func ExampleQuorumQueue_Validate() {
	fmt.Println(declare.QuorumQueue{Name: "orders"}.Validate())
	fmt.Println(declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop(), MessageTTL: 1500 * time.Microsecond}.Validate())
	// Output:
	// hopback: QuorumQueue("orders").DeadLetter isn't set, so rejected, expired and exceeding messages would be lost without a trace; name an exchange or a queue for them, or say declare.Drop()
	// hopback: QuorumQueue("orders").MessageTTL = "1.5ms" isn't whole milliseconds, which is all that the broker can count; round it with Round(time.Millisecond)
}

// A recipe from the web, read as it is: it works, and it can lose messages.
func ExampleCheck() {
	text, err := os.ReadFile("testdata/cookbook.json")
	if err != nil {
		panic(err)
	}
	definitions, err := declare.ParseDefinitions(text)
	if err != nil {
		panic(err)
	}
	for _, f := range declare.Check(definitions.Snapshot("/"), declare.Topology{}).Findings {
		fmt.Println(f)
	}
	// Output:
	// error   queue "my_work_queue": it drops a message that comes back more than 5 times, or is rejected, since it has no dead-letter exchange (dead-letter)
	//         give it a dead-letter exchange, by its declaration or by a policy
	// error   queue "delay_10s": it dead-letters at most once, so a dead letter is lost when what comes next is missing or full (at-most-once)
	//         make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both
	// error   queue "delay_60s": it dead-letters at most once, so a dead letter is lost when what comes next is missing or full (at-most-once)
	//         make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both
	// warning exchange "requeue_exchange": it has no alternate exchange that takes what matches no binding: such dead letters of queue "delay_10s" are lost, or after 32 of them hold up all others (alternate-exchange)
	//         give it an alternate exchange with a parking queue, by a policy if it is live
}
