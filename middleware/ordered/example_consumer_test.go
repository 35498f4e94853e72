package ordered_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/ordered"
)

// Sixteen handlers run at once, but the messages of a customer are handled one after the other.
// The key is the property group-id.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	queue := declare.QuorumQueue{Name: "changes", DeadLetter: declare.Drop()}
	if _, err := declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{queue}}); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[int](ctx, conn, queue.Address(), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	err = publisher.PublishAll(ctx, []int{1, 2, 3, 4, 5, 6}, func(n int, m *client.Message) {
		m.Properties.GroupID = new([]string{"even", "odd"}[n%2])
	})
	if err != nil {
		log.Fatal(err)
	}

	var mu sync.Mutex
	seen, left := map[string][]int{}, 6
	handler := client.JSON(func(ctx context.Context, n int) error {
		delivery, _ := client.DeliveryFrom(ctx)
		customer := *delivery.Message().Properties.GroupID
		mu.Lock()
		defer mu.Unlock()
		seen[customer] = append(seen[customer], n)
		if left--; left == 0 {
			stop()
		}
		return nil
	})
	inOrder := ordered.With(ordered.Config{})
	if err := conn.Consume(ctx, "changes", inOrder(handler), client.ConsumerConfig{Concurrency: 16}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(seen)
	// Output: map[even:[2 4 6] odd:[1 3 5]]
}
