package check_test

import (
	"fmt"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
)

// Check a topology before it is applied: a rejected order would be dropped.
func ExampleVerify() {
	topology := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders"}}}
	for _, f := range check.Verify(check.FromTopology(topology), topology).Findings {
		fmt.Println(f.Severity, f.Resource, f.Rule)
	}
	// Output:
	// error queue "orders" dead-letter
}
