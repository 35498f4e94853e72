package engine

import (
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// maxRoutes is how many routing keys an exchange remembers the queues of.
const maxRoutes = 10_000

// route finds the queues that a message which is published to x comes to, each once. The
// result isn't changed by anybody.
func (v *vhost) route(x *exchange, m *message) []*queue {
	if x.name == "" {
		return v.named(m.keys)
	}
	headers := v.peeksAtHeaders(x)
	cachable := !headers && len(m.keys) == 1
	if cachable {
		if targets, ok := x.cache[m.keys[0]]; ok {
			return targets
		}
	}
	w := walk{v: v, m: m}
	w.through(x)
	targets := slices.DeleteFunc(w.targets, func(q *queue) bool { return q.gone })
	if cachable {
		if len(x.cache) >= maxRoutes {
			clear(x.cache)
		}
		x.cache[m.keys[0]] = targets
	}
	return targets
}

// named are the queues that the default exchange routes to.
func (v *vhost) named(keys []string) []*queue {
	if len(keys) == 1 {
		if q := v.target(keys[0]); q != nil {
			return q.alone()
		}
		return nil
	}
	var targets []*queue
	for _, key := range keys {
		if q := v.target(key); q != nil && !slices.Contains(targets, q) {
			targets = append(targets, q)
		}
	}
	return targets
}

// alone is a list of q alone.
func (q *queue) alone() []*queue {
	if q.self[0] == nil {
		q.self[0] = q
	}
	return q.self[:]
}

// peeksAtHeaders says whether the queues that x routes to depend on more than the routing
// key. It also lets go of what x remembers of an older topology.
func (v *vhost) peeksAtHeaders(x *exchange) bool {
	if x.cached == v.topology && x.cache != nil {
		return x.headers
	}
	x.cached, x.cache = v.topology, map[string][]*queue{}
	seen := map[*exchange]bool{}
	var peeks func(x *exchange) bool
	peeks = func(x *exchange) bool {
		if x == nil || seen[x] {
			return false
		}
		seen[x] = true
		if x.kind == typeHeaders || x.kind == typeRandom || x.hasAlternate && peeks(v.exchanges[x.alternate]) {
			return true
		}
		for _, b := range x.bindings {
			if b.target != nil && peeks(b.target) {
				return true
			}
		}
		return false
	}
	x.headers = peeks(x)
	return x.headers
}

// walk is the way of one message through exchanges.
type walk struct {
	v       *vhost
	m       *message
	seen    []*exchange
	targets []*queue
	found   map[*queue]bool // of many targets
	headers map[string]any
}

func (w *walk) through(x *exchange) {
	if slices.Contains(w.seen, x) {
		return
	}
	w.seen = append(w.seen, x)
	if x.name == "" {
		for _, q := range w.v.named(w.m.keys) {
			w.add(q)
		}
		return
	}
	matched := false
	x.matches(w.m, w.headersOf, func(b *binding) {
		matched = true
		if b.queue != nil {
			w.add(b.queue)
		} else {
			w.through(b.target)
		}
	})
	if !matched && x.hasAlternate {
		if alternate := w.v.exchanges[x.alternate]; alternate != nil {
			w.through(alternate)
		}
	}
}

func (w *walk) add(q *queue) {
	if len(w.targets) < 16 {
		if !slices.Contains(w.targets, q) {
			w.targets = append(w.targets, q)
		}
		return
	}
	if w.found == nil {
		w.found = map[*queue]bool{}
		for _, q := range w.targets {
			w.found[q] = true
		}
	}
	if !w.found[q] {
		w.found[q] = true
		w.targets = append(w.targets, q)
	}
}

// headersOf are the application properties of the message, and its annotations, which win,
// above all those of the broker.
func (w *walk) headersOf() map[string]any {
	if w.headers != nil {
		return w.headers
	}
	w.headers = map[string]any{}
	properties, _ := sectionMap(w.m.ApplicationProperties)
	for _, e := range properties {
		if key, ok := e.Key.(string); ok && (e.Value == nil || simple(e.Value)) {
			w.headers[key] = e.Value
		}
	}
	for _, e := range w.m.sent {
		if key, ok := e.Key.(frames.Symbol); ok && simple(e.Value) {
			w.headers[string(key)] = e.Value
		}
	}
	for _, e := range w.m.added {
		w.headers[string(e.Key.(frames.Symbol))] = e.Value
	}
	return w.headers
}

// simple says whether a headers exchange can compare with the value.
func simple(v any) bool {
	switch v.(type) {
	case nil, frames.List, frames.Map, frames.Array, frames.Described:
		return false
	}
	return true
}

// equalHeader compares an argument of a binding with a header, as Erlang does: texts
// of all types are the same, and so are integers.
func equalHeader(a, b any) bool {
	a, b = erlang(a), erlang(b)
	switch a.(type) {
	case frames.List, frames.Map, frames.Array, frames.Described, table, []any:
		return false
	}
	switch b.(type) {
	case frames.List, frames.Map, frames.Array, frames.Described:
		return false
	}
	return a == b
}

// erlang is a simple value without its type.
func erlang(v any) any {
	switch v := v.(type) {
	case uint64:
		if v > 1<<63-1 {
			return v
		}
		return int64(v)
	case float32:
		return float64(v)
	case string, bool, int64, float64, nil:
		return v
	}
	if plain, ok := inferred(v); ok {
		return plain
	}
	return v
}
