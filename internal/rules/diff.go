package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/values"
)

// What Change.Kind may be.
const (
	changeCreate  = "create"
	changeKeep    = "keep"
	changeRefuse  = "refuse"
	changeUnknown = "unknown"
)

// Change is what [declare.Apply] would do about one exchange, queue, or binding.
type Change struct {
	// Kind is what Apply would do:
	//
	//	"create"   it doesn't exist
	//	"keep"     it exists as declared
	//	"refuse"   it exists with different settings, which can't be changed in place. Or it
	//	           is a binding whose source or destination is missing
	//	"unknown"  it is unknown whether it exists. Apply declares it. That changes nothing
	//	           if it exists as declared, and is refused if it differs
	Kind     string           `json:"kind"`
	Resource declare.Resource `json:"resource"`
	// Settings are what Apply would create, for "create" only, sorted by name.
	Settings []NamedSetting `json:"settings,omitempty"`
	// Differences lists every argument that differs, for "refuse" only.
	Differences []declare.Conflict `json:"differences,omitempty"`
	// Remedies lists what you can do, for "refuse" only.
	Remedies []string `json:"remedies,omitempty"`
	// Why is the reason for "unknown", and for the "refuse" of a binding.
	Why string `json:"why,omitempty"`
}

// NamedSetting is a setting with its name, such as "durable" or "x-message-ttl".
type NamedSetting struct {
	Name    string          `json:"name"`
	Setting declare.Setting `json:"setting"`
}

// Diff is the result of [Compare]: a change for each exchange, queue, and binding of a topology,
// in that order. It prints like a diff and marshals to JSON.
type Diff struct {
	Changes []Change `json:"changes"`
}

// Compare returns what [declare.Apply] of t would do to the broker that s is a snapshot of. It
// changes nothing. Conflicts with the broker are in the Diff. If the snapshot was read without
// the HTTP API, it is unknown whether exchanges exist.
func Compare(s Snapshot, t declare.Topology) Diff {
	var d Diff
	exchanges := map[string]ExchangeInfo{}
	for _, x := range s.Exchanges {
		exchanges[x.Name] = x
	}
	queues := map[string]declare.QueueInfo{}
	for _, q := range s.Queues {
		queues[q.Name] = q
	}
	for _, want := range (declare.Topology{Exchanges: t.Exchanges, Queues: t.Queues}).Declarations() {
		d.Changes = append(d.Changes, s.change(want, exchanges, queues))
	}
	byEnds := map[string][]declare.Binding{}
	for _, b := range s.Bindings {
		question := bindingQuestion(b)
		byEnds[question] = append(byEnds[question], b)
	}
	ends := endsOf(s, t, exchanges, queues)
	seen := map[string][]declare.Binding{}
	for _, b := range t.Bindings {
		question := bindingQuestion(b)
		same := func(other declare.Binding) bool { return SameBinding(b, other) }
		if slices.ContainsFunc(seen[question], same) {
			continue
		}
		seen[question] = append(seen[question], b)
		want := bindingDeclaration(b)
		change := creation(want)
		if slices.ContainsFunc(byEnds[question], same) {
			change = Change{Kind: changeKeep, Resource: want.Resource}
		}
		if why := s.refused(declare.Resource{Kind: "binding", Name: question}); why != "" {
			change = Change{Kind: changeUnknown, Resource: want.Resource, Why: why}
		}
		if end := ends.missing(b); change.Kind == changeCreate && end != "" {
			change = Change{
				Kind: changeRefuse, Resource: want.Resource, Why: end + " doesn't exist and isn't in the topology",
				Remedies: []string{"fix the name, or declare it too"},
			}
		}
		d.Changes = append(d.Changes, change)
	}
	return d
}

// change is what Apply would do about an exchange or a queue.
func (s Snapshot) change(want declare.Declaration, exchanges map[string]ExchangeInfo, queues map[string]declare.QueueInfo) Change {
	var found map[string]any
	var why string
	switch want.Resource.Kind {
	case "exchange":
		if x, ok := exchanges[want.Resource.Name]; ok {
			found = exchangeBody(x)
		} else if unread := s.unread(PartExchanges); unread != "" {
			why = "it is unknown whether it exists: " + unread
		}
	default:
		if q, ok := queues[want.Resource.Name]; ok {
			found = queueBody(q)
		} else {
			why = s.refused(want.Resource)
		}
	}
	switch {
	case why != "":
		return Change{Kind: changeUnknown, Resource: want.Resource, Why: why}
	case found == nil:
		return creation(want)
	}
	if e := want.Differs(found); e != nil {
		return Change{Kind: changeRefuse, Resource: want.Resource, Differences: e.Differences, Remedies: e.Remedies}
	}
	return Change{Kind: changeKeep, Resource: want.Resource}
}

// ends are the exchanges and queues that are there or will be. A nil map stands for
// all: the snapshot doesn't show them.
type ends struct{ exchanges, queues map[string]bool }

func endsOf(s Snapshot, t declare.Topology, exchanges map[string]ExchangeInfo, queues map[string]declare.QueueInfo) ends {
	var e ends
	if s.unread(PartExchanges) == "" {
		e.exchanges = map[string]bool{"": true}
		for name := range exchanges {
			e.exchanges[name] = true
		}
		for _, x := range t.Exchanges {
			e.exchanges[x.Name] = true
		}
	}
	if s.unread(partQueues) == "" {
		e.queues = map[string]bool{"": true}
		for name := range queues {
			e.queues[name] = true
		}
		for _, name := range QueueNames(t) {
			e.queues[name] = true
		}
	}
	return e
}

// missing is the end of a binding that neither exists nor will exist, as far as is known; or "".
func (e ends) missing(b declare.Binding) string {
	switch {
	case e.exchanges != nil && !e.exchanges[b.Source]:
		return ExchangeResource(b.Source).String()
	case e.queues != nil && !e.queues[b.Queue]:
		return QueueResource(b.Queue).String()
	case e.exchanges != nil && !e.exchanges[b.Exchange]:
		return ExchangeResource(b.Exchange).String()
	}
	return ""
}

func creation(want declare.Declaration) Change {
	c := Change{Kind: changeCreate, Resource: want.Resource}
	for _, key := range values.SortedKeys(want.Body) {
		switch v := want.Body[key].(type) {
		case map[string]any:
			for _, k := range values.SortedKeys(v) {
				c.Settings = append(c.Settings, NamedSetting{k, SettingOf(v[k])})
			}
		case bool:
			if v && key != "durable" || !v && key == "durable" {
				c.Settings = append(c.Settings, NamedSetting{key, SettingOf(v)})
			}
		default:
			if key == "type" {
				c.Settings = append(c.Settings, NamedSetting{key, SettingOf(v)})
			}
		}
	}
	return c
}

func queueBody(q declare.QueueInfo) map[string]any {
	return map[string]any{"durable": q.Durable, "exclusive": q.Exclusive, "auto_delete": q.AutoDelete, "arguments": q.Arguments}
}

func exchangeBody(x ExchangeInfo) map[string]any {
	return map[string]any{
		"type": string(x.Type), "durable": x.Durable, "auto_delete": x.AutoDelete, "internal": x.Internal, "arguments": x.Arguments,
	}
}

// Count returns how many changes have this kind.
func (d Diff) Count(kind string) int {
	n := 0
	for _, c := range d.Changes {
		if c.Kind == kind {
			n++
		}
	}
	return n
}

// Nothing reports whether Apply would change nothing: every resource is known to exist as
// declared.
func (d Diff) Nothing() bool { return d.Count(changeKeep) == len(d.Changes) }

// Conflicts reports whether the broker would refuse a part of Apply.
func (d Diff) Conflicts() bool { return d.Count(changeRefuse) > 0 }

// String returns the diff as text. "+" marks what Apply would create, "!" what the broker would
// refuse, and "?" what is unknown. Resources that exist as declared have no mark.
func (d Diff) String() string {
	var b strings.Builder
	for _, c := range d.Changes {
		switch c.Kind {
		case changeKeep:
			fmt.Fprintf(&b, "  %s\n", c.Resource)
		case changeCreate:
			fmt.Fprintf(&b, "+ %s\n", c.Resource)
			for _, s := range c.Settings {
				fmt.Fprintf(&b, "+     %s: %s\n", s.Name, s.Setting)
			}
		case changeRefuse:
			fmt.Fprintf(&b, "! %s\n", c.Resource)
			if c.Why != "" {
				fmt.Fprintf(&b, "      %s\n", c.Why)
			}
			for _, x := range c.Differences {
				fmt.Fprintf(&b, "-     %s: %s\n", x.Argument, typed(x.Found))
				fmt.Fprintf(&b, "+     %s: %s\n", x.Argument, typed(x.Wanted))
			}
			for _, w := range c.Remedies {
				fmt.Fprintf(&b, "      remedy: %s\n", w)
			}
		case changeUnknown:
			fmt.Fprintf(&b, "? %s\n", c.Resource)
			fmt.Fprintf(&b, "      %s\n", c.Why)
		}
	}
	if d.Nothing() {
		fmt.Fprintf(&b, "Nothing to do: everything exists as declared (%s).\n", values.Count(len(d.Changes), "resource"))
		return b.String()
	}
	exist := "exist"
	if d.Count(changeKeep) == 1 {
		exist = "exists"
	}
	fmt.Fprintf(&b, "%d to create, %d %s, %d refused, %d unknown.\n", d.Count(changeCreate), d.Count(changeKeep), exist, d.Count(changeRefuse), d.Count(changeUnknown))
	return b.String()
}

// typed is the setting with its type, where that is known.
func typed(s declare.Setting) string {
	if s.Type == "" || !s.Set {
		return s.String()
	}
	return s.String() + " (" + s.Type + ")"
}

func SettingOf(v any) declare.Setting {
	text, typ := values.Describe(v)
	return declare.Setting{Value: text, Type: typ, Set: true}
}
