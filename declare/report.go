package declare

import (
	"fmt"
	"strings"
)

// Kind is a kind of thing that a broker has.
type Kind string

// The kinds.
const (
	KindExchange Kind = "exchange"
	KindQueue    Kind = "queue"
	KindBinding  Kind = "binding"
)

// Thing is an exchange, a queue or a binding by its name.
type Thing struct {
	Kind Kind `json:"kind"`
	// Name is the name; for a binding, its ends and its key, for people.
	Name string `json:"name"`
}

// String is the thing on one line.
func (t Thing) String() string {
	if t.Kind == KindBinding {
		return string(t.Kind) + " " + t.Name
	}
	return fmt.Sprintf("%s %q", t.Kind, t.Name)
}

// Outcome is what came of one step.
type Outcome uint8

const (
	// NotTried: nothing was sent.
	NotTried Outcome = iota
	// Created: it is there now, and wasn't before. Only queues tell.
	Created
	// Existed: it was there already, declared in the same way (or a repeated
	// request found the work of the first). Only queues tell.
	Existed
	// Declared: it is there now; the broker doesn't say whether it was before.
	Declared
	// Deleted: it is gone now; the broker doesn't say whether it was there.
	Deleted
	// Refused: the broker said no, and Err why. Nothing has changed.
	Refused
	// Unknown: it was sent and no reply came, so it may have happened.
	// Repeating it is safe.
	Unknown
)

// String is the outcome in words.
func (o Outcome) String() string {
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

// Step is one declaration or deletion, and what came of it.
type Step struct {
	Thing   Thing
	Outcome Outcome
	// Err is why, for Refused and Unknown; an *[Error].
	Err error
}

// MarshalJSON writes {"thing": ..., "outcome": "created", "error": "..."}.
func (s Step) MarshalJSON() ([]byte, error) {
	text := ""
	if s.Err != nil {
		text = s.Err.Error()
	}
	return canonicalJSON(struct {
		Thing   Thing  `json:"thing"`
		Outcome string `json:"outcome"`
		Error   string `json:"error,omitempty"`
	}{s.Thing, s.Outcome.String(), text}), nil
}

// Report is what Apply or Delete did: one step for each thing, in the order of
// the topology, exchanges first on the way up and last on the way down.
type Report struct {
	Steps []Step `json:"steps"`
}

// Count is how many steps have the outcome o.
func (r Report) Count(o Outcome) int {
	n := 0
	for _, s := range r.Steps {
		if s.Outcome == o {
			n++
		}
	}
	return n
}

// String is the report for people, a line for each step.
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
