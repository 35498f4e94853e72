package topologyfile_test

import (
	"context"
	"fmt"
	"log"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/retry"
)

// A worker takes its policy from the file that operators apply, which it may have
// embedded, and adds which errors are retried.
func ExampleParse() {
	f, err := topologyfile.Parse("topology.yaml", []byte(`
retry:
  delays: [10s, 1m]
work-queues:
  orders: {delivery-limit: 5}
`))
	if err != nil {
		log.Fatal(err)
	}
	policy := f.Policy // for retry.With(policy)
	ladder, _ := policy.QueueDelays()
	fmt.Println(f.Work[0].Name, ladder, len(f.Topology.Queues))
	// Output: orders [10s 1m0s] 5
}

// A worker that handles the orders of a file's work queue, with the file's policy.
func ExampleParse_worker() {
	_ = func(ctx context.Context, conn *client.Conn, handler client.Handler, text []byte) error {
		f, err := topologyfile.Parse("topology.yaml", text) // text: the file, for example from go:embed
		if err != nil {
			return err
		}
		return conn.Consume(ctx, "orders", retry.With(f.Policy)(handler), client.ConsumerConfig{})
	}
}
