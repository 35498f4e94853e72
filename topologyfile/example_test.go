package topologyfile_test

import (
	"fmt"
	"log"

	"github.com/hopback/hopback/topologyfile"
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
