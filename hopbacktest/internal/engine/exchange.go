package engine

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/hopback/hopback/internal/phash2"
)

// exchange is an exchange of any type.
type exchange struct {
	name, kind                    string
	durable, autoDelete, internal bool
	args                          table
	policy                        *policy
	alternate                     string
	hasAlternate                  bool
	bindings                      []*binding // whose source it is
	incoming                      []*binding // whose destination it is

	direct map[string][]*binding
	topics *topic
	sorted []*binding // by destination
	stale  bool       // direct, topics, and sorted must be rebuilt
	// cache has the queues of routing keys, as of a topology.
	cache   map[string][]*queue
	cached  uint64
	headers bool // what it routes depends on more than the key, as of cached
}

// The types of exchanges.
const (
	typeDirect  = "direct"
	typeFanout  = "fanout"
	typeTopic   = "topic"
	typeHeaders = "headers"
	// typeRandom routes to one of its queues.
	typeRandom = "x-local-random"
	// typeModulus routes to one of its bindings, chosen by a hash of the routing keys. It is in the
	// core from RabbitMQ 4.3 on.
	typeModulus = "x-modulus-hash"
)

// binding is a binding to a queue or to an exchange.
type binding struct {
	source *exchange
	queue  *queue
	target *exchange
	key    string
	args   table
}

func (b *binding) destination() (kind, name string) {
	if b.queue != nil {
		return kindQueue, b.queue.name
	}
	return kindExchange, b.target.name
}

func (b *binding) same(other *binding) bool {
	return b.source == other.source && b.queue == other.queue && b.target == other.target && b.key == other.key && b.args.equal(other.args)
}

// index has the exchange find its bindings by key.
func (x *exchange) index() {
	x.direct, x.topics, x.sorted, x.stale = nil, nil, nil, false
	switch x.kind {
	case typeDirect:
		x.direct = map[string][]*binding{}
		for _, b := range x.bindings {
			x.direct[b.key] = append(x.direct[b.key], b)
		}
	case typeTopic:
		x.topics = new(topic)
		for _, b := range x.bindings {
			x.topics.add(words(b.key), b)
		}
	case typeModulus:
		x.sorted = slices.SortedFunc(slices.Values(x.bindings), func(a, b *binding) int {
			aKind, aName := a.destination()
			bKind, bName := b.destination()
			return cmp.Or(strings.Compare(aKind, bKind), strings.Compare(aName, bName))
		})
	}
}

// matches calls f with the bindings that a message goes through.
func (x *exchange) matches(m *message, headers func() map[string]any, f func(*binding)) {
	if x.stale {
		x.index()
	}
	switch x.kind {
	case typeFanout:
		for _, b := range x.bindings {
			f(b)
		}
	case typeDirect:
		for _, key := range m.keys {
			for _, b := range x.direct[key] {
				f(b)
			}
		}
	case typeTopic:
		for _, key := range m.keys {
			x.topics.match(words(key), map[place]bool{}, f)
		}
	case typeRandom:
		if len(x.bindings) > 0 {
			f(x.bindings[rand.IntN(len(x.bindings))])
		}
	case typeModulus:
		if n := uint32(len(x.sorted)); n > 0 {
			f(x.sorted[phash2.Strings(m.keys...)%n])
		}
	case typeHeaders:
		for _, b := range x.bindings {
			if b.matchesHeaders(headers()) {
				f(b)
			}
		}
	}
}

// topic is a word of topic bindings, and what may come behind it.
type topic struct {
	words map[string]*topic
	ends  []*binding
}

func (t *topic) add(words []string, b *binding) {
	if len(words) == 0 {
		t.ends = append(t.ends, b)
		return
	}
	next := t.words[words[0]]
	if next == nil {
		next = new(topic)
		if t.words == nil {
			t.words = map[string]*topic{}
		}
		t.words[words[0]] = next
	}
	next.add(words[1:], b)
}

// place is a word of topic bindings, and how much of a key is left there.
type place struct {
	at   *topic
	left int
}

// match calls f with the bindings that match. One may come several times. Behind a # each
// place is gone through once: several of them would have more ways than anybody can go.
func (t *topic) match(words []string, seen map[place]bool, f func(*binding)) {
	if many := t.words["#"]; many != nil {
		for i := range len(words) + 1 {
			p := place{many, len(words) - i}
			if seen[p] {
				break // and so are those behind it
			}
			seen[p] = true
			many.match(words[i:], seen, f)
		}
	}
	if len(words) == 0 {
		for _, b := range t.ends {
			f(b)
		}
		return
	}
	if next := t.words[words[0]]; next != nil && words[0] != "#" && words[0] != "*" {
		next.match(words[1:], seen, f)
	}
	if any := t.words["*"]; any != nil {
		any.match(words[1:], seen, f)
	}
}

// matchesHeaders compares the binding's arguments with a message's headers.
func (b *binding) matchesHeaders(headers map[string]any) bool {
	match, _ := b.args.get("x-match")
	kind, _ := match.value.(string)
	any, withX := strings.HasPrefix(kind, "any"), strings.HasSuffix(kind, "-with-x")
	for _, a := range b.args {
		if a.name == "x-match" || !withX && strings.HasPrefix(a.name, "x-") {
			continue
		}
		v, there := headers[a.name]
		matches := there && (a.kind == argVoid || equalHeader(a.value, v))
		if any && matches {
			return true
		}
		if !any && !matches {
			return false
		}
	}
	return !any
}

// words are those of a topic key. An empty one has none.
func words(key string) []string {
	if key == "" {
		return nil
	}
	return strings.Split(key, ".")
}
