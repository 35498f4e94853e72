package declare

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/internal/values"
)

// What Resource.Kind may be.
const (
	kindExchange = "exchange"
	kindQueue    = "queue"
	kindBinding  = "binding"
)

// Resource identifies an exchange, a queue, a binding, or a broker.
type Resource struct {
	// Kind is "exchange", "queue", or "binding", or in an audit finding also "broker".
	Kind string `json:"kind"`
	// Name is the name of an exchange or a queue. For a binding it is a text with its ends and
	// its key, and for a broker its version.
	Name string `json:"name"`
}

// String returns the kind and the name on one line.
func (r Resource) String() string {
	if r.Kind == kindBinding {
		return r.Kind + " " + r.Name
	}
	return fmt.Sprintf("%s %q", r.Kind, r.Name)
}

// What Step.Result may be.
const (
	stepNotTried = "not tried"
	stepCreated  = "created"
	stepExisted  = "existed"
	stepDeclared = "declared"
	stepDeleted  = "deleted"
	stepRefused  = "refused"
	stepUnknown  = "unknown"
)

// Step is the declaration or deletion of one resource, and its result.
type Step struct {
	Resource Resource
	// Result is one of these:
	//
	//	"not tried"  nothing was sent
	//	"created"    the queue is new
	//	"existed"    the queue existed already, with the same settings. A repeated request
	//	             may find the queue that the first one created
	//	"declared"   the exchange or binding exists now. The broker doesn't say whether it
	//	             existed before
	//	"deleted"    it doesn't exist now. The broker doesn't say whether it existed before
	//	"refused"    the broker refused and changed nothing, also because a permission is
	//	             missing
	//	"unknown"    the request was sent and no reply came. The broker may have carried it
	//	             out. Repeating it is safe
	Result string
	// Err is the reason for "refused" and "unknown". It is an *[Error].
	Err error
}

// MarshalJSON writes {"resource": ..., "result": "created", "error": "..."}.
func (s Step) MarshalJSON() ([]byte, error) {
	text := ""
	if s.Err != nil {
		text = s.Err.Error()
	}
	return values.JSON(struct {
		Resource Resource `json:"resource"`
		Result   string   `json:"result"`
		Error    string   `json:"error,omitempty"`
	}{s.Resource, s.Result, text}), nil
}

// Report lists what [Apply] or [Delete] did, with a step for each resource. Apply lists
// exchanges, queues, bindings; Delete lists bindings, queues, exchanges.
type Report struct {
	Steps []Step `json:"steps"`
}

// Count returns how many steps have this result.
func (r Report) Count(result string) int {
	n := 0
	for _, s := range r.Steps {
		if s.Result == result {
			n++
		}
	}
	return n
}

// String returns a line for each step.
func (r Report) String() string {
	var b strings.Builder
	for _, s := range r.Steps {
		fmt.Fprintf(&b, "%-9s %s", s.Result, s.Resource)
		if s.Err != nil {
			fmt.Fprintf(&b, ": %v", s.Err)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
