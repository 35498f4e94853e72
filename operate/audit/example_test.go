package audit_test

import (
	"fmt"
	"os"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

// Check a recipe from the web: it works, and it can lose messages.
func ExampleParseDefinitions() {
	text, err := os.ReadFile("testdata/cookbook.json")
	if err != nil {
		panic(err)
	}
	definitions, err := audit.ParseDefinitions(text)
	if err != nil {
		panic(err)
	}
	for _, f := range check.Verify(definitions.Snapshot("/"), declare.Topology{}).Findings {
		fmt.Println(f)
	}
	// Output:
	// error   queue "my_work_queue": it has no dead-letter exchange, so it drops a message that is rejected or comes back more than 5 times (dead-letter)
	//         give it a dead-letter exchange in its declaration or by a policy
	// error   queue "delay_10s": it dead-letters at most once, so a dead letter is lost if its target is missing or full (at-most-once)
	//         make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both
	// error   queue "delay_60s": it dead-letters at most once, so a dead letter is lost if its target is missing or full (at-most-once)
	//         make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both
	// warning exchange "requeue_exchange": it has no alternate exchange for messages that match no binding: such dead letters of queue "delay_10s" are lost, or 32 of them block all others (alternate-exchange)
	//         give it an alternate exchange with a parking queue; a policy can set one on a live exchange
}
