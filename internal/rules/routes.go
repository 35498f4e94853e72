package rules

import (
	"context"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
)

// Routes answers where messages go in a snapshot.
type Routes struct {
	ctx       context.Context // ends work that takes too long
	Snapshot  Snapshot
	Queues    map[string]Queue
	Exchanges map[string]Exchange
	BySource  map[string][]declare.Binding
	byKey     map[sourceKey][]declare.Binding // of direct exchanges
	bound     map[string]bool                 // queues with a binding

	// What was worked out before: many queues share a dead-letter exchange.
	order   []Queue
	reached map[DeadLetterTo]map[string]bool
	certain map[DeadLetterTo]map[string]bool
	topics  map[string]*topicIndex
	flow    *flow
	doubts  []doubt
	mind    map[string]bool
	lists   map[DeadLetterTo]*targets
	byQueue map[string][]declare.Binding
}

type sourceKey struct{ source, key string }

type DeadLetterTo struct {
	Exchange, Key, reason string
	Keyed                 bool
}

// Queue is a queue with what policies make of its arguments.
type Queue struct {
	declare.QueueInfo
	Args map[string]any
}

type Exchange struct {
	ExchangeInfo
	Alternate string
}

func NewRoutes(ctx context.Context, s Snapshot) *Routes {
	exact := s.compile()
	r := &Routes{ctx: ctx, Snapshot: s, Queues: map[string]Queue{}, Exchanges: map[string]Exchange{}, BySource: map[string][]declare.Binding{}, byKey: map[sourceKey][]declare.Binding{}, bound: map[string]bool{}, reached: map[DeadLetterTo]map[string]bool{}, certain: map[DeadLetterTo]map[string]bool{}, topics: map[string]*topicIndex{}, mind: map[string]bool{}, lists: map[DeadLetterTo]*targets{}}
	for _, q := range s.Queues {
		if r.Stopped() {
			return r
		}
		if !exact {
			r.doubtful(QueueResource(q.Name), q.Type)
		}
		r.Queues[q.Name] = Queue{q, s.effective("queue", q.Type, q.Name, q.Arguments)}
	}
	for _, x := range s.Exchanges {
		if r.Stopped() {
			return r
		}
		if !exact {
			r.doubtful(ExchangeResource(x.Name), "")
		}
		alternate, _ := s.effective("exchange", "", x.Name, x.Arguments)["alternate-exchange"].(string)
		r.Exchanges[x.Name] = Exchange{x, alternate}
	}
	for _, b := range s.Bindings {
		r.BySource[b.Source] = append(r.BySource[b.Source], b)
		if r.Exchanges[b.Source].Type == declare.ExchangeDirect {
			at := sourceKey{b.Source, b.Key}
			r.byKey[at] = append(r.byKey[at], b)
		}
		r.bound[b.Queue] = true
	}
	return r
}

// Stopped reports whether the time is up. What is worked out after that isn't complete.
func (r *Routes) Stopped() bool { return r.ctx.Err() != nil }

// absent reports whether an exchange certainly doesn't exist.
func (r *Routes) absent(exchange string) bool {
	_, exists := r.Exchanges[exchange]
	return !exists && !r.Snapshot.assumed
}

// Number is an argument that should be an integer.
func (q Queue) Number(key string) (int64, bool) {
	n, ok := q.Args[key].(int64)
	return n, ok
}

func (q Queue) Text(key string) (string, bool) {
	s, ok := q.Args[key].(string)
	return s, ok
}

// Passing is a queue that belongs to a connection, or goes with its consumers: it
// loses messages by design.
func (q Queue) Passing() bool { return q.Exclusive || q.AutoDelete || !q.Durable }

// DeadLetters is where dead letters go; ok is false when they are dropped.
func (q Queue) DeadLetters() (exchange string, key *string, ok bool) {
	exchange, ok = q.Text("x-dead-letter-exchange")
	if k, has := q.Text("x-dead-letter-routing-key"); has {
		key = &k
	}
	return exchange, key, ok
}

func (q Queue) HasTTL() bool {
	_, ok := q.Number("x-message-ttl")
	return ok
}

// Delays reports whether a queue only delays messages and then dead-letters them.
func (q Queue) Delays() bool {
	_, _, ok := q.DeadLetters()
	return ok && q.HasTTL() && q.Consumers == 0
}

func (q Queue) atLeastOnce() bool {
	strategy, _ := q.Text("x-dead-letter-strategy")
	overflow, _ := q.Text("x-overflow")
	return q.Type == queuearg.Quorum && strategy == "at-least-once" && overflow == string(declare.OverflowRejectPublish)
}

// DeadLetter is what is known about a message: its key, if known, and why it was dead-lettered.
type DeadLetter struct {
	Key    *string
	Reason string // "expired", "rejected", "delivery_limit"; "" for any
}

// manyReached bounds what is remembered of a single key: there may be as many keys as queues.
const manyReached = 1000

// Reach returns the queues that a dead letter sent to an exchange may reach.
func (r *Routes) Reach(exchange string, l DeadLetter) map[string]bool {
	if l.Key != nil && !r.minds(exchange) {
		l.Key = nil
	}
	to := DeadLetterTo{Exchange: exchange, reason: l.Reason, Keyed: l.Key != nil}
	if l.Key != nil {
		to.Key = *l.Key
	}
	if found, ok := r.reached[to]; ok {
		return found
	}
	found := r.reachedBy(exchange, l)
	if l.Key == nil || len(found) <= manyReached {
		r.reached[to] = found
	}
	return found
}

// Candidates are the bindings that a dead letter may match. A direct exchange or a topic
// exchange can have thousands, so they are looked up by key.
func (r *Routes) Candidates(x Exchange, l DeadLetter) []declare.Binding {
	if x.Type == declare.ExchangeDirect && l.Key != nil {
		return r.byKey[sourceKey{x.Name, *l.Key}]
	}
	if x.Type == declare.ExchangeTopic && l.Key != nil && len(r.BySource[x.Name]) > fewBindings {
		index := r.topics[x.Name]
		if index == nil {
			index = &topicIndex{}
			for _, b := range r.BySource[x.Name] {
				index.add(b)
			}
			r.topics[x.Name] = index
		}
		return index.find(*l.Key)
	}
	return r.BySource[x.Name]
}

// fewBindings are compared one by one.
const fewBindings = 16

// Matches reports whether a dead letter may match a binding, and whether it must.
func (x Exchange) Matches(b declare.Binding, l DeadLetter) (may, must bool) {
	switch x.Type {
	case declare.ExchangeFanout:
		return true, true
	case declare.ExchangeDirect:
		if l.Key == nil {
			return true, false
		}
		return b.Key == *l.Key, b.Key == *l.Key
	case declare.ExchangeTopic:
		if b.Key == "#" {
			return true, true
		}
		if l.Key == nil {
			return true, false
		}
		yes := topicMatches(b.Key, *l.Key)
		return yes, yes
	case declare.ExchangeHeaders:
		if reason, ok := b.Headers["x-last-death-reason"].(string); ok && l.Reason != "" && reason != l.Reason && b.Match != declare.MatchAnyWithX {
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
func (r *Routes) deadFrom(q Queue, reason string) map[string]bool {
	exchange, key, ok := q.DeadLetters()
	if !ok {
		return nil
	}
	return r.Reach(exchange, DeadLetter{Key: key, Reason: reason})
}

// BindingsTo are the bindings of a queue.
func (r *Routes) BindingsTo(queue string) []declare.Binding {
	if r.byQueue == nil {
		r.byQueue = map[string][]declare.Binding{}
		for _, b := range r.Snapshot.Bindings {
			if b.Queue != "" {
				r.byQueue[b.Queue] = append(r.byQueue[b.Queue], b)
			}
		}
	}
	return r.byQueue[queue]
}

func (r *Routes) Sorted() []Queue {
	if r.order != nil {
		return r.order
	}
	list := make([]Queue, 0, len(r.Queues))
	for _, q := range r.Queues {
		list = append(list, q)
	}
	slices.SortFunc(list, func(a, b Queue) int { return strings.Compare(a.Name, b.Name) })
	r.order = list
	return list
}

func (r *Routes) SortedExchanges() []Exchange {
	list := make([]Exchange, 0, len(r.Exchanges))
	for _, x := range r.Exchanges {
		list = append(list, x)
	}
	slices.SortFunc(list, func(a, b Exchange) int { return strings.Compare(a.Name, b.Name) })
	return list
}
