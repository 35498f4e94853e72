package declare

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/values"
)

// Topology is a set of exchanges, queues, and bindings, to build, [Merge], and [Apply]. A binding
// may name an exchange or a queue that only the broker has.
type Topology struct {
	Exchanges []Exchange
	Queues    []Queue
	Bindings  []Binding
}

// Merge joins topologies, in order. It keeps equal declarations of one name once. For each name
// with different declarations, the error contains an *[argument.Error]. Merge doesn't validate
// otherwise (see [Topology.Validate]) and doesn't change its arguments.
func Merge(ts ...Topology) (Topology, error) {
	var all Topology
	for _, t := range ts {
		all.Exchanges = append(all.Exchanges, t.Exchanges...)
		all.Queues = append(all.Queues, t.Queues...)
		all.Bindings = append(all.Bindings, t.Bindings...)
	}
	p := all.plan()
	return p.topology, errors.Join(p.contradictions...)
}

// Validate returns all errors in t, joined; each one is an *[argument.Error]. A resource may be
// declared several times, but always in the same way.
func (t Topology) Validate() error { return t.plan().err() }

// plan is a topology without its repetitions, ready to send.
type plan struct {
	topology       Topology
	exchanges      []Declaration
	queues         []Declaration
	bindings       []Declaration
	contradictions []error
	problems       []error
}

func (p plan) err() error { return errors.Join(append(p.problems, p.contradictions...)...) }

func (t Topology) plan() plan {
	var p plan
	seenX := map[string]int{}
	for i, x := range t.Exchanges {
		body, errs := x.declaration()
		d := Declaration{Resource{kindExchange, x.Name}, "PUT", names.ExchangePath(x.Name), body}
		if p.add(&p.exchanges, seenX, x.Name, d, argument.Root("Topology").Field("Exchanges").Index(i), errs) {
			p.topology.Exchanges = append(p.topology.Exchanges, x)
		}
	}
	seenQ := map[string]int{}
	for i, q := range t.Queues {
		if isNil(q) {
			p.problems = append(p.problems, argument.At(argument.Root("Topology").Field("Queues").Index(i), argument.CodeMissing, nil, "is nil", "leave it out"))
			continue
		}
		body, errs := q.declaration()
		name := q.Address().QueueName()
		d := Declaration{Resource{kindQueue, name}, "PUT", names.QueuePath(name), body}
		if p.add(&p.queues, seenQ, name, d, argument.Root("Topology").Field("Queues").Index(i), errs) {
			p.topology.Queues = append(p.topology.Queues, q)
		}
	}
	seenB := map[string][]int{}
	for _, b := range t.Bindings {
		body, errs := b.declaration()
		d := Declaration{Resource{kindBinding, b.describe()}, "POST", "/bindings", body}
		// Bindings that differ only in their arguments are different bindings.
		key := b.listPath()
		if p.repeats(seenB[key], body) {
			continue
		}
		seenB[key] = append(seenB[key], len(p.bindings))
		p.bindings = append(p.bindings, d)
		p.problems = append(p.problems, errs...)
		p.topology.Bindings = append(p.topology.Bindings, b)
	}
	return p
}

// add appends d unless its name was seen before; then it compares the two.
func (p *plan) add(to *[]Declaration, seen map[string]int, name string, d Declaration, where argument.Path, errs []error) bool {
	i, twice := seen[name]
	if !twice {
		seen[name] = len(*to)
		*to = append(*to, d)
		p.problems = append(p.problems, errs...)
		return true
	}
	if !reflect.DeepEqual((*to)[i].Body, d.Body) {
		p.contradictions = append(p.contradictions, argument.At(where, argument.CodeConflict, name,
			fmt.Sprintf("is declared twice with different values: %s", difference((*to)[i].Body, d.Body)), "declare it once"))
	}
	return false
}

func (p *plan) repeats(seen []int, body map[string]any) bool {
	for _, i := range seen {
		if reflect.DeepEqual(p.bindings[i].Body, body) {
			return true
		}
	}
	return false
}

// difference returns the name of the first field or argument in which two declarations of one
// resource differ.
func difference(a, b map[string]any) string {
	for _, k := range values.SortedKeys(union(a, b)) {
		va, oka := a[k]
		vb, okb := b[k]
		if oka == okb && reflect.DeepEqual(va, vb) {
			continue
		}
		ma, mapA := va.(map[string]any)
		mb, mapB := vb.(map[string]any)
		if mapA && mapB {
			return difference(ma, mb)
		}
		return fmt.Sprintf("%.80s is %s, then %s", k, show(va, oka), show(vb, okb))
	}
	return "they differ"
}

func show(v any, set bool) string {
	if !set {
		return "not set"
	}
	return fmt.Sprintf("%.80q", fmt.Sprint(v))
}

func union(a, b map[string]any) map[string]any {
	u := make(map[string]any, len(a)+len(b))
	for k := range a {
		u[k] = nil
	}
	for k := range b {
		u[k] = nil
	}
	return u
}

// isNil also finds the nil pointer in the interface, on which every method
// would panic: *QuorumQueue is a Queue, since QuorumQueue is.
func isNil(q Queue) bool {
	if q == nil {
		return true
	}
	v := reflect.ValueOf(q)
	return v.Kind() == reflect.Pointer && v.IsNil()
}
