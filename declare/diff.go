package declare

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Action is what [Apply] would do about a thing.
type Action string

// The actions.
const (
	// Create: it isn't there.
	Create Action = "create"
	// Keep: it is there, exactly as wanted.
	Keep Action = "keep"
	// Refuse: it is there in another way, which can't be changed in place; or it is
	// a binding of which an end is missing.
	Refuse Action = "refuse"
	// Unsure: it can't be told whether it is there, so Apply declares it. That
	// does nothing if it is, and is refused if it is in another way.
	Unsure Action = "unsure"
)

// Change is what is to be done about one thing.
type Change struct {
	Action Action `json:"action"`
	Thing  Thing  `json:"thing"`
	// Settings are what is to be created, in the order of the arguments' names;
	// for Create only.
	Settings []Named `json:"settings,omitempty"`
	// Differences are argument by argument, for Refuse only.
	Differences []Conflict `json:"differences,omitempty"`
	// WaysOut are what can be done, for Refuse only.
	WaysOut []string `json:"ways_out,omitempty"`
	// Why it can't be told, for Unsure, or can't be done, for a binding to Refuse.
	Why string `json:"why,omitempty"`
}

// Named is a setting and its name, such as "durable" or "x-message-ttl".
type Named struct {
	Name    string  `json:"name"`
	Setting Setting `json:"setting"`
}

// Diff is what [Plan] found: a change for each thing of a topology, exchanges
// first, in its order. It prints like a diff, and marshals to JSON.
type Diff struct {
	Changes []Change `json:"changes"`
}

// Plan says what [Apply] would do, without doing it: what it would create, what
// is there already, what is there in another way, and what can't be told.
//
// With the HTTP API everything can be told. Over AMQP alone, queues and bindings
// can, and exchanges can't.
//
// A topology that can't be declared is refused as by Apply. Otherwise an error
// means that the broker couldn't be asked; what is wrong with what it has is in
// the Diff.
func Plan(ctx context.Context, src Sources, t Topology) (Diff, error) {
	if err := t.Validate(); err != nil {
		return Diff{}, err
	}
	s, err := Read(ctx, src, t)
	if err != nil {
		return Diff{}, err
	}
	return Compare(s, t), nil
}

// Compare is [Plan] over what was read before.
func Compare(s Snapshot, t Topology) Diff {
	p := t.plan()
	var d Diff
	exchanges := map[string]ExchangeInfo{}
	for _, x := range s.Exchanges {
		exchanges[x.Name] = x
	}
	queues := map[string]QueueInfo{}
	for _, q := range s.Queues {
		queues[q.Name] = q
	}
	for i, want := range p.exchanges {
		have, ok := exchanges[p.topology.Exchanges[i].Name]
		switch why := s.blind(PartExchanges); {
		case ok:
			d.Changes = append(d.Changes, compareThing(want, exchangeBody(have)))
		case why != "":
			d.Changes = append(d.Changes, Change{Action: Unsure, Thing: want.thing, Why: "can't be told " + why})
		default:
			d.Changes = append(d.Changes, creation(want))
		}
	}
	for i, want := range p.queues {
		if have, ok := queues[p.topology.Queues[i].Address().QueueName()]; ok {
			d.Changes = append(d.Changes, compareThing(want, queueBody(have)))
		} else if why := s.refused(want.thing); why != "" {
			d.Changes = append(d.Changes, Change{Action: Unsure, Thing: want.thing, Why: why})
		} else {
			d.Changes = append(d.Changes, creation(want))
		}
	}
	byEnds := map[string][]Binding{}
	for _, b := range s.Bindings {
		byEnds[b.listPath()] = append(byEnds[b.listPath()], b)
	}
	for i, want := range p.bindings {
		change := creation(want)
		for _, have := range byEnds[p.topology.Bindings[i].listPath()] {
			if sameBinding(p.topology.Bindings[i], have) {
				change = Change{Action: Keep, Thing: want.thing}
			}
		}
		if why := s.refused(Thing{KindBinding, p.topology.Bindings[i].listPath()}); why != "" {
			change = Change{Action: Unsure, Thing: want.thing, Why: why}
		}
		if end := missingEnd(s, t, p.topology.Bindings[i], exchanges, queues); change.Action == Create && end != "" {
			change = Change{
				Action: Refuse, Thing: want.thing, Why: end + " isn't there, and isn't in the topology either",
				WaysOut: []string{"correct the name, or declare it as well"},
			}
		}
		d.Changes = append(d.Changes, change)
	}
	return d
}

// missingEnd is the end of a binding that neither is there nor will be, as far as
// can be told; or "".
func missingEnd(s Snapshot, t Topology, b Binding, exchanges map[string]ExchangeInfo, queues map[string]QueueInfo) string {
	exchange := func(name string) string {
		_, there := exchanges[name]
		if name == "" || there || s.blind(PartExchanges) != "" || slices.ContainsFunc(t.Exchanges, func(x Exchange) bool { return x.Name == name }) {
			return ""
		}
		return Thing{KindExchange, name}.String()
	}
	if end := exchange(b.Source); end != "" {
		return end
	}
	_, there := queues[b.Queue]
	if b.Queue != "" && !there && s.blind(PartQueues) == "" &&
		!slices.ContainsFunc(t.Queues, func(q Queue) bool { return !isNil(q) && q.Address().QueueName() == b.Queue }) {
		return Thing{KindQueue, b.Queue}.String()
	}
	return exchange(b.Exchange)
}

func creation(want declaration) Change {
	c := Change{Action: Create, Thing: want.thing}
	for _, key := range sortedKeys(want.body) {
		switch v := want.body[key].(type) {
		case map[string]any:
			for _, k := range sortedKeys(v) {
				c.Settings = append(c.Settings, Named{k, settingOf(v[k], true)})
			}
		case bool:
			if v && key != "durable" || !v && key == "durable" {
				c.Settings = append(c.Settings, Named{key, settingOf(v, true)})
			}
		default:
			if key == "type" {
				c.Settings = append(c.Settings, Named{key, settingOf(v, true)})
			}
		}
	}
	return c
}

func compareThing(want declaration, have map[string]any) Change {
	differences := conflicts(want.body, have)
	if len(differences) == 0 {
		return Change{Action: Keep, Thing: want.thing}
	}
	return Change{Action: Refuse, Thing: want.thing, Differences: differences, WaysOut: waysOut(want.thing.Kind, differences)}
}

func queueBody(q QueueInfo) map[string]any {
	return map[string]any{"durable": q.Durable, "exclusive": q.Exclusive, "auto_delete": q.AutoDelete, "arguments": q.Arguments}
}

func exchangeBody(x ExchangeInfo) map[string]any {
	return map[string]any{
		"type": string(x.Type), "durable": x.Durable, "auto_delete": x.AutoDelete, "internal": x.Internal, "arguments": x.Arguments,
	}
}

// conflicts compares a declaration with what is there, field by field and then
// argument by argument.
func conflicts(want, have map[string]any) []Conflict {
	wantArgs, _ := want["arguments"].(map[string]any)
	haveArgs, _ := have["arguments"].(map[string]any)
	var list []Conflict
	compare := func(key string, w, h any, wok, hok bool) {
		if wok == hok && reflect.DeepEqual(w, h) {
			return
		}
		c := Conflict{Argument: key, Wanted: settingOf(w, wok), Found: settingOf(h, hok)}
		if c.Wanted.Set && c.Found.Set && c.Wanted.Type == c.Found.Type {
			// Only where the types differ do they say more than the values.
			c.Wanted.Type, c.Found.Type = "", ""
		}
		list = append(list, c)
	}
	for _, key := range sortedKeys(want) {
		if key != "arguments" {
			h, ok := have[key]
			compare(key, want[key], h, true, ok)
		}
	}
	for _, key := range sortedKeys(union(wantArgs, haveArgs)) {
		w, wok := wantArgs[key]
		h, hok := haveArgs[key]
		if key == "x-queue-type" && !wok {
			continue // the broker adds its virtual host's default
		}
		compare(key, w, h, wok, hok)
	}
	return list
}

func settingOf(v any, set bool) Setting {
	if !set {
		return Setting{}
	}
	s := Setting{Set: true, Type: strings.TrimPrefix(strings.TrimPrefix(typeName(v), "an "), "a ")}
	if text, ok := v.(string); ok {
		s.Value = text
	} else {
		s.Value = string(canonicalJSON(v))
	}
	return s
}

// waysOut says what can be done about a thing that is there in another way.
func waysOut(kind Kind, differences []Conflict) []string {
	if kind != KindQueue {
		return []string{
			"declare an exchange under a new name, bind it as well, and let publishers move over",
			"delete it while nobody publishes to it, and run this again: its bindings go with it",
		}
	}
	var ways []string
	var byPolicy []string
	for _, d := range differences {
		if a, ok := queueArguments[d.Argument]; ok && a.policy && d.Wanted.Set && !d.Found.Set {
			byPolicy = append(byPolicy, strings.TrimPrefix(d.Argument, "x-"))
		}
	}
	if len(byPolicy) > 0 {
		ways = append(ways, "let a policy set "+strings.Join(byPolicy, ", ")+", which changes a live queue, and leave it out here")
	}
	return append(ways,
		"declare it as it is there",
		"declare it under a new name and move the messages, as package declare/migrate does",
		"delete it once it is empty and unused, and run this again")
}

// Count is how many changes have the action a.
func (d Diff) Count(a Action) int {
	n := 0
	for _, c := range d.Changes {
		if c.Action == a {
			n++
		}
	}
	return n
}

// Nothing reports whether everything is there as wanted, for certain.
func (d Diff) Nothing() bool { return d.Count(Keep) == len(d.Changes) }

// Conflicts reports whether Apply would be refused.
func (d Diff) Conflicts() bool { return d.Count(Refuse) > 0 }

// String is the diff for people: "+" is created, "!" differs, "?" can't be told,
// and what is there as wanted has no mark.
func (d Diff) String() string {
	var b strings.Builder
	for _, c := range d.Changes {
		switch c.Action {
		case Keep:
			fmt.Fprintf(&b, "  %s\n", c.Thing)
		case Create:
			fmt.Fprintf(&b, "+ %s\n", c.Thing)
			for _, s := range c.Settings {
				fmt.Fprintf(&b, "+     %s: %s\n", s.Name, s.Setting)
			}
		case Refuse:
			fmt.Fprintf(&b, "! %s\n", c.Thing)
			if c.Why != "" {
				fmt.Fprintf(&b, "      %s\n", c.Why)
			}
			for _, x := range c.Differences {
				fmt.Fprintf(&b, "-     %s: %s\n", x.Argument, x.Found.typed())
				fmt.Fprintf(&b, "+     %s: %s\n", x.Argument, x.Wanted.typed())
			}
			for _, w := range c.WaysOut {
				fmt.Fprintf(&b, "      way out: %s\n", w)
			}
		case Unsure:
			fmt.Fprintf(&b, "? %s\n", c.Thing)
			fmt.Fprintf(&b, "      %s\n", c.Why)
		}
	}
	if d.Nothing() {
		fmt.Fprintf(&b, "Nothing to do: all %d are there.\n", len(d.Changes))
		return b.String()
	}
	fmt.Fprintf(&b, "%d to create, %d there, %d refused, %d can't be told.\n", d.Count(Create), d.Count(Keep), d.Count(Refuse), d.Count(Unsure))
	return b.String()
}

// typed is the setting with its type, where that is known.
func (s Setting) typed() string {
	if s.Type == "" || !s.Set {
		return s.String()
	}
	return s.String() + " (" + s.Type + ")"
}

// conflictDetails completes a refusal with all that differs: the broker's text
// has only the first.
func conflictDetails(ctx context.Context, r Requester, d declaration, e *Error) {
	if e.Reason != ErrConflict {
		return
	}
	if d.thing.Kind == KindQueue {
		info, err := Inspect(ctx, r, d.thing.Name)
		if err == nil {
			e.Differences = conflicts(d.body, queueBody(info))
		}
	}
	if len(e.Differences) == 0 && e.Conflict != nil {
		e.Differences = []Conflict{*e.Conflict}
	}
	e.WaysOut = waysOut(d.thing.Kind, e.Differences)
}

// unlike finds what differs in a queue of which the broker says that it exists:
// it doesn't compare every argument.
func (d declaration) unlike(status int, reply any) error {
	info, missing := parseQueueInfo(reply)
	if missing != "" {
		return nil // an older or a newer reply; the broker has compared what it compares
	}
	differences := conflicts(d.body, queueBody(info))
	if len(differences) == 0 {
		return nil
	}
	return &Error{
		Op: opDeclare, Thing: d.thing, Method: d.method, Path: d.path, Status: status, Reason: ErrConflict,
		Conflict: &differences[0], Differences: differences, WaysOut: waysOut(KindQueue, differences),
	}
}

// asError finds the *Error in err.
func asError(err error) *Error {
	var e *Error
	errors.As(err, &e)
	return e
}
