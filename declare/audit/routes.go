package audit

import (
	"maps"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
)

// routes answers where messages go in a snapshot.
type routes struct {
	s         Snapshot
	queues    map[string]liveQueue
	exchanges map[string]liveExchange
	bySource  map[string][]declare.Binding
	byKey     map[sourceKey][]declare.Binding // of direct exchanges
	bound     map[string]bool                 // queues with a binding

	// What was worked out before: many queues share a dead-letter exchange.
	order   []liveQueue
	reached map[deadLetterTo]map[string]bool
	fed     map[string][]liveQueue
	byQueue map[string][]declare.Binding
}

type sourceKey struct{ source, key string }

type deadLetterTo struct {
	exchange, key, reason string
	keyed                 bool
}

// liveQueue is a queue with what policies make of its arguments.
type liveQueue struct {
	declare.QueueInfo
	args map[string]any
}

type liveExchange struct {
	ExchangeInfo
	alternate string
}

func newRoutes(s Snapshot) *routes {
	r := &routes{s: s, queues: map[string]liveQueue{}, exchanges: map[string]liveExchange{}, bySource: map[string][]declare.Binding{}, byKey: map[sourceKey][]declare.Binding{}, bound: map[string]bool{}, reached: map[deadLetterTo]map[string]bool{}}
	for _, q := range s.Queues {
		r.queues[q.Name] = liveQueue{q, s.effective("queue", q.Type, q.Name, q.Arguments)}
	}
	for _, x := range s.Exchanges {
		alternate, _ := s.effective("exchange", "", x.Name, x.Arguments)["alternate-exchange"].(string)
		r.exchanges[x.Name] = liveExchange{x, alternate}
	}
	for _, b := range s.Bindings {
		r.bySource[b.Source] = append(r.bySource[b.Source], b)
		if r.exchanges[b.Source].Type == declare.ExchangeDirect {
			at := sourceKey{b.Source, b.Key}
			r.byKey[at] = append(r.byKey[at], b)
		}
		r.bound[b.Queue] = true
	}
	return r
}

// absent reports whether an exchange certainly doesn't exist.
func (r *routes) absent(exchange string) bool {
	_, exists := r.exchanges[exchange]
	return !exists && !r.s.assumed
}

// number is an argument that should be an integer.
func (q liveQueue) number(key string) (int64, bool) {
	n, ok := q.args[key].(int64)
	return n, ok
}

func (q liveQueue) text(key string) (string, bool) {
	s, ok := q.args[key].(string)
	return s, ok
}

// passing is a queue that belongs to a connection, or goes with its consumers: it
// loses messages by design.
func (q liveQueue) passing() bool { return q.Exclusive || q.AutoDelete || !q.Durable }

// deadLetters is where dead letters go; ok is false when they are dropped.
func (q liveQueue) deadLetters() (exchange string, key *string, ok bool) {
	exchange, ok = q.text("x-dead-letter-exchange")
	if k, has := q.text("x-dead-letter-routing-key"); has {
		key = &k
	}
	return exchange, key, ok
}

func (q liveQueue) hasTTL() bool {
	_, ok := q.number("x-message-ttl")
	return ok
}

// delays reports whether a queue only delays messages and then dead-letters them.
func (q liveQueue) delays() bool {
	_, _, ok := q.deadLetters()
	return ok && q.hasTTL() && q.Consumers == 0
}

func (q liveQueue) atLeastOnce() bool {
	strategy, _ := q.text("x-dead-letter-strategy")
	overflow, _ := q.text("x-overflow")
	return q.Type == queuearg.Quorum && strategy == "at-least-once" && overflow == string(declare.OverflowRejectPublish)
}

// deadLetter is what is known about a message: its key, if known, and why it was dead-lettered.
type deadLetter struct {
	key    *string
	reason string // "expired", "rejected", "delivery_limit"; "" for any
}

// reach returns the queues that a dead letter sent to an exchange may reach.
func (r *routes) reach(exchange string, l deadLetter) map[string]bool {
	to := deadLetterTo{exchange: exchange, reason: l.reason, keyed: l.key != nil}
	if l.key != nil {
		to.key = *l.key
	}
	if found, ok := r.reached[to]; ok {
		return found
	}
	found := map[string]bool{}
	r.walk(exchange, l, found, map[string]bool{})
	r.reached[to] = found
	return found
}

func (r *routes) walk(exchange string, l deadLetter, found, seen map[string]bool) {
	if seen[exchange] {
		return
	}
	seen[exchange] = true
	if exchange == "" {
		if l.key != nil {
			if _, ok := r.queues[*l.key]; ok {
				found[*l.key] = true
			}
		}
		return
	}
	x, ok := r.exchanges[exchange]
	if !ok {
		return
	}
	certain := x.Type == declare.ExchangeModulusHash && len(r.bySource[exchange]) > 0
	for _, b := range r.candidates(x, l) {
		may, must := x.matches(b, l)
		certain = certain || must
		switch {
		case !may:
		case b.Queue != "":
			if _, ok := r.queues[b.Queue]; ok {
				found[b.Queue] = true
			}
		default:
			r.walk(b.Exchange, l, found, seen)
		}
	}
	if !certain && x.alternate != "" {
		r.walk(x.alternate, l, found, seen)
	}
}

// sure reports whether every dead letter sent to an exchange reaches a queue.
func (r *routes) sure(exchange string, l deadLetter, seen map[string]bool) bool {
	if seen[exchange] {
		return false
	}
	seen[exchange] = true
	if exchange == "" {
		if l.key == nil {
			return false
		}
		_, ok := r.queues[*l.key]
		return ok
	}
	x, ok := r.exchanges[exchange]
	if !ok {
		return false
	}
	if x.Type == declare.ExchangeModulusHash && len(r.bySource[exchange]) > 0 {
		// It chooses one of its bindings, and nobody knows which.
		return !slices.ContainsFunc(r.bySource[exchange], func(b declare.Binding) bool { return b.Queue == "" && !r.sure(b.Exchange, l, maps.Clone(seen)) })
	}
	for _, b := range r.candidates(x, l) {
		if _, must := x.matches(b, l); must && (b.Queue != "" || r.sure(b.Exchange, l, seen)) {
			return true
		}
	}
	return x.alternate != "" && r.sure(x.alternate, l, seen)
}

// candidates are the bindings that a dead letter may match. A direct exchange can have thousands,
// so they are looked up by key.
func (r *routes) candidates(x liveExchange, l deadLetter) []declare.Binding {
	if x.Type == declare.ExchangeDirect && l.key != nil {
		return r.byKey[sourceKey{x.Name, *l.key}]
	}
	return r.bySource[x.Name]
}

// matches reports whether a dead letter may match a binding, and whether it must.
func (x liveExchange) matches(b declare.Binding, l deadLetter) (may, must bool) {
	switch x.Type {
	case declare.ExchangeFanout:
		return true, true
	case declare.ExchangeDirect:
		if l.key == nil {
			return true, false
		}
		return b.Key == *l.key, b.Key == *l.key
	case declare.ExchangeTopic:
		if b.Key == "#" {
			return true, true
		}
		if l.key == nil {
			return true, false
		}
		yes := topicMatches(b.Key, *l.key)
		return yes, yes
	case declare.ExchangeHeaders:
		if reason, ok := b.Headers["x-last-death-reason"].(string); ok && l.reason != "" && reason != l.reason && b.Match != declare.MatchAnyWithX {
			return false, false
		}
		return true, len(b.Headers) == 0 && (b.Match == "" || b.Match == declare.MatchAll || b.Match == declare.MatchAllWithX)
	}
	return true, false // a plugin's, and ExchangeModulusHash
}

// topicMatches is the broker's matching of patterns: "*" is one word, "#" any
// number of them.
func topicMatches(pattern, key string) bool {
	p, k := strings.Split(pattern, "."), strings.Split(key, ".")
	if key == "" {
		k = nil
	}
	if pattern == "" {
		p = nil
	}
	// fits[j] is whether the pattern so far matches the first j words.
	fits := make([]bool, len(k)+1)
	fits[0] = true
	for _, word := range p {
		next := make([]bool, len(k)+1)
		switch word {
		case "#":
			any := false
			for j := range fits {
				any = any || fits[j]
				next[j] = any
			}
		default:
			for j := range k {
				next[j+1] = fits[j] && (word == "*" || word == k[j])
			}
		}
		fits = next
	}
	return fits[len(k)]
}

// deadFrom returns the queues that dead letters of a queue may reach.
func (r *routes) deadFrom(q liveQueue, reason string) map[string]bool {
	exchange, key, ok := q.deadLetters()
	if !ok {
		return nil
	}
	return r.reach(exchange, deadLetter{key, reason})
}

// feeders are the queues whose dead letters may reach name.
func (r *routes) feeders(name string) []liveQueue {
	if r.fed == nil {
		r.fed = map[string][]liveQueue{}
		for _, q := range r.sorted() {
			for to := range r.deadFrom(q, "") {
				r.fed[to] = append(r.fed[to], q)
			}
		}
	}
	return r.fed[name]
}

// bindingsTo are the bindings of a queue.
func (r *routes) bindingsTo(queue string) []declare.Binding {
	if r.byQueue == nil {
		r.byQueue = map[string][]declare.Binding{}
		for _, b := range r.s.Bindings {
			if b.Queue != "" {
				r.byQueue[b.Queue] = append(r.byQueue[b.Queue], b)
			}
		}
	}
	return r.byQueue[queue]
}

// leadsTo reports whether dead letters of from may reach to, in any number of steps.
func (r *routes) leadsTo(from, to string) bool {
	seen := map[string]bool{}
	var visit func(string) bool
	visit = func(name string) bool {
		if seen[name] {
			return false
		}
		seen[name] = true
		next := r.deadFrom(r.queues[name], "")
		if next[to] {
			return true
		}
		for n := range next {
			if visit(n) {
				return true
			}
		}
		return false
	}
	return visit(from)
}

func (r *routes) sorted() []liveQueue {
	if r.order != nil {
		return r.order
	}
	list := make([]liveQueue, 0, len(r.queues))
	for _, q := range r.queues {
		list = append(list, q)
	}
	slices.SortFunc(list, func(a, b liveQueue) int { return strings.Compare(a.Name, b.Name) })
	r.order = list
	return list
}

func (r *routes) sortedExchanges() []liveExchange {
	list := make([]liveExchange, 0, len(r.exchanges))
	for _, x := range r.exchanges {
		list = append(list, x)
	}
	slices.SortFunc(list, func(a, b liveExchange) int { return strings.Compare(a.Name, b.Name) })
	return list
}
