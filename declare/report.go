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
	// Name is the name. A binding has its ends and its key as a name, for people;
	// a broker its version.
	Name string `json:"name"`
}

// String returns the kind and the name on one line.
func (t Resource) String() string {
	if t.Kind == KindBinding {
		return string(t.Kind) + " " + t.Name
	}
	return fmt.Sprintf("%s %q", t.Kind, t.Name)
}

// StepResult is the result of one step.
type StepResult uint8

const (
	// NotTried means that nothing was sent.
	NotTried StepResult = iota
	// Created means that it is new. Only queues have this result.
	Created
	// Existed means that it was there already, declared in the same way. Only
	// queues have this result. A repeated request may find the work of the first.
	Existed
	// Declared means that it exists now. The broker doesn't say whether it existed
	// before.
	Declared
	// Deleted means that it doesn't exist now. The broker doesn't say whether it
	// existed before.
	Deleted
	// Refused means that the broker refused and changed nothing. Err says why.
	Refused
	// Unknown means that the request was sent and no reply came: it may have been
	// done. Repeating it is safe.
	Unknown
)

// String returns the result in words.
func (o StepResult) String() string {
	switch o {
	case NotTried:
		return "not tried"
	case Created:
		return "created"
	case Existed:
		return "existed"
	case Declared:
		return "declared"
	case Deleted:
		return "deleted"
	case Refused:
		return "refused"
	case Unknown:
		return "unknown"
	}
	return fmt.Sprintf("outcome %d", uint8(o))
}

// Step is one declaration or deletion and its result.
type Step struct {
	Thing   Resource
	Outcome StepResult
	// Err is why, for Refused and Unknown; an *[Error].
	Err error
}

// MarshalJSON writes {"thing": ..., "outcome": "created", "error": "..."}.
func (s Step) MarshalJSON() ([]byte, error) {
	text := ""
	if s.Err != nil {
		text = s.Err.Error()
	}
	return values.JSON(struct {
		Thing   Resource `json:"thing"`
		Outcome string   `json:"outcome"`
		Error   string   `json:"error,omitempty"`
	}{s.Thing, s.Outcome.String(), text}), nil
}

// Report is what Apply or Delete did, a step for each thing. Apply lists
// exchanges, queues, bindings; Delete bindings, queues, exchanges.
type Report struct {
	Steps []Step `json:"steps"`
}

// Count returns how many steps have the result o.
func (r Report) Count(o StepResult) int {
	n := 0
	for _, s := range r.Steps {
		if s.Outcome == o {
			n++
		}
	}
	return n
}

// String returns a line for each step.
func (r Report) String() string {
	var b strings.Builder
	for _, s := range r.Steps {
		fmt.Fprintf(&b, "%-9s %s", s.Outcome, s.Thing)
		if s.Err != nil {
			fmt.Fprintf(&b, ": %v", s.Err)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
