package declare

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare/internal/values"
)

// Kind is the kind of a [Resource].
type Kind string

// The kinds.
const (
	KindExchange Kind = "exchange"
	KindQueue    Kind = "queue"
	KindBinding  Kind = "binding"
	// KindBroker is the whole broker, in an audit finding. Its name is its
	// version.
	KindBroker Kind = "broker"
)

// Resource names an exchange, a queue, a binding or a broker.
type Resource struct {
	Kind Kind `json:"kind"`
	// Name is the name of an exchange or a queue. A binding's name has its ends and
	// its key, for people. A broker's name is its version.
	Name string `json:"name"`
}

// String returns the kind and the name on one line.
func (r Resource) String() string {
	if r.Kind == KindBinding {
		return string(r.Kind) + " " + r.Name
	}
	return fmt.Sprintf("%s %q", r.Kind, r.Name)
}

// StepResult is the result of one [Step]. It is never "".
type StepResult string

const (
	// NotTried means that nothing was sent.
	NotTried StepResult = "not tried"
	// Created means that the resource is new. Only queues have this result.
	Created StepResult = "created"
	// Existed means that the resource existed already, with the same settings.
	// Only queues have this result. A repeated request may find the work of the
	// first.
	Existed StepResult = "existed"
	// Declared means that the resource exists now. The broker doesn't say whether it
	// existed before.
	Declared StepResult = "declared"
	// Deleted means that the resource doesn't exist now. The broker doesn't say
	// whether it existed before.
	Deleted StepResult = "deleted"
	// Refused means that the broker refused and changed nothing, also because a
	// permission is missing. Err says why.
	Refused StepResult = "refused"
	// Unknown means that the request was sent and no reply came. The broker may have
	// carried it out. Repeating it is safe.
	Unknown StepResult = "unknown"
)

// Step is the declaration or deletion of one resource, and its result.
type Step struct {
	Resource Resource
	Result   StepResult
	// Err is why, for Refused and Unknown; an *[Error].
	Err error
}

// MarshalJSON writes {"resource": ..., "result": "created", "error": "..."}.
func (s Step) MarshalJSON() ([]byte, error) {
	text := ""
	if s.Err != nil {
		text = s.Err.Error()
	}
	return values.JSON(struct {
		Resource Resource   `json:"resource"`
		Result   StepResult `json:"result"`
		Error    string     `json:"error,omitempty"`
	}{s.Resource, s.Result, text}), nil
}

// Report is what Apply or Delete did, with a step for each resource. Apply lists
// exchanges, queues, bindings; Delete bindings, queues, exchanges.
type Report struct {
	Steps []Step `json:"steps"`
}

// Count returns how many steps have this result.
func (r Report) Count(result StepResult) int {
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
