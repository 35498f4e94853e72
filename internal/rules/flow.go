package rules

import (
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
)

// flow is where dead letters of queues go. Queues that dead-letter alike share what is known about
// their targets, so it takes time in proportion to queues and bindings, and not to their product.
type flow struct {
	fed    map[string][]*flowGroup // by the queues that they reach
	part   map[string]int          // by queue: those of one part lead to each other
	looped map[int]bool            // parts with a cycle
}

// flowGroup is queues with the same dead-letter exchange and key.
type flowGroup struct {
	from []Queue // sorted
	to   map[string]bool
	// counting are at most two of the queues that counts selects, of different parts. For
	// a queue of any part, one of another part is among them if there is any.
	counting []Queue
}

// flowOf follows dead letters of a reason between the queues that are kept. counts selects those
// that flowGroup.counting is about; nil for none.
func (r *Routes) flowOf(reason string, keep, counts func(Queue) bool) *flow {
	f := &flow{fed: map[string][]*flowGroup{}, part: map[string]int{}, looped: map[int]bool{}}
	kept := slices.DeleteFunc(slices.Clone(r.Sorted()), func(q Queue) bool { return !keep(q) })
	index := make(map[string]int, len(kept)) // queues are the first nodes, and groups the others
	edges := make([][]int, len(kept))
	var groups []*flowGroup
	groupAt := map[DeadLetterTo]int{}
	for i, q := range kept {
		index[q.Name] = i
		exchange, key, ok := q.DeadLetters()
		if !ok {
			continue
		}
		to := DeadLetterTo{Exchange: exchange, Keyed: key != nil}
		if key != nil {
			to.Key = *key
		}
		at, known := groupAt[to]
		if !known {
			if r.Stopped() {
				return f
			}
			at = len(groups)
			groupAt[to] = at
			groups = append(groups, &flowGroup{to: r.Reach(exchange, DeadLetter{Key: key, Reason: reason})})
		}
		groups[at].from = append(groups[at].from, q)
		edges[i] = []int{len(kept) + at}
	}
	for _, g := range groups {
		var to []int
		for name := range g.to {
			f.fed[name] = append(f.fed[name], g)
			if i, ok := index[name]; ok {
				to = append(to, i)
			}
		}
		edges = append(edges, to)
	}
	parts, sizes := components(edges)
	for i, q := range kept {
		f.part[q.Name] = parts[i]
		f.looped[parts[i]] = sizes[parts[i]] > 1 // a cycle has a queue and a group
	}
	for _, g := range groups {
		for _, q := range g.from {
			if counts != nil && counts(q) && len(g.counting) < 2 && (len(g.counting) == 0 || f.part[g.counting[0].Name] != f.part[q.Name]) {
				g.counting = append(g.counting, q)
			}
		}
	}
	return f
}

// components numbers the strongly connected components of a graph: parts is by node, and sizes by
// part. It is Tarjan's algorithm without recursion.
func components(edges [][]int) (parts, sizes []int) {
	const unseen, done = 0, -1
	parts = make([]int, len(edges))
	order, low := make([]int, len(edges)), make([]int, len(edges)) // order counts from 1
	var stack []int
	type visit struct{ node, next int }
	count := 0
	for root := range edges {
		if order[root] != unseen {
			continue
		}
		path := []visit{{root, 0}}
		for len(path) > 0 {
			v := &path[len(path)-1]
			if v.next == 0 {
				count++
				order[v.node], low[v.node] = count, count
				stack = append(stack, v.node)
			}
			if v.next < len(edges[v.node]) {
				to := edges[v.node][v.next]
				v.next++
				if order[to] == unseen {
					path = append(path, visit{to, 0})
				} else if order[to] != done {
					low[v.node] = min(low[v.node], order[to])
				}
				continue
			}
			node := v.node
			path = path[:len(path)-1]
			if len(path) > 0 {
				parent := path[len(path)-1].node
				low[parent] = min(low[parent], low[node])
			}
			if low[node] != order[node] {
				continue
			}
			sizes = append(sizes, 0)
			for {
				top := stack[len(stack)-1]
				stack = stack[:len(stack)-1]
				order[top], parts[top] = done, len(sizes)-1
				sizes[len(sizes)-1]++
				if top == node {
					break
				}
			}
		}
	}
	return parts, sizes
}

// deaths is the flow of dead letters of any reason.
func (r *Routes) deaths() *flow {
	if r.flow == nil {
		r.flow = r.flowOf("", func(Queue) bool { return true }, r.bringsCount)
	}
	return r.flow
}

// feeders are the queues whose dead letters may reach name. There may be many: ask no more of them
// than necessary.
func (r *Routes) feeders(name string) iter.Seq[Queue] {
	return func(yield func(Queue) bool) {
		for _, g := range r.deaths().fed[name] {
			for _, q := range g.from {
				if r.Stopped() || !yield(q) {
					return
				}
			}
		}
	}
}

// IsFed reports whether dead letters may reach a queue, and firstFeeder is a queue that they come
// from, by name the first.
func (r *Routes) IsFed(name string) bool { return len(r.deaths().fed[name]) > 0 }

func (r *Routes) FirstFeeder(name string) (first Queue) {
	for _, g := range r.deaths().fed[name] {
		if first.Name == "" || g.from[0].Name < first.Name {
			first = g.from[0]
		}
	}
	return first
}

// countedFeeder is a queue that doesn't get dead letters of q, and whose dead letters reach q with
// their delivery count: by name the first.
func (r *Routes) countedFeeder(q Queue) (first Queue, ok bool) {
	f := r.deaths()
	for _, g := range f.fed[q.Name] {
		for _, from := range g.counting {
			if f.part[from.Name] != f.part[q.Name] && (!ok || from.Name < first.Name) {
				first, ok = from, true
			}
		}
	}
	return first, ok
}

// topicIndex finds the bindings of a topic exchange that match a key, without comparing each.
type topicIndex struct {
	words map[string]*topicIndex
	ends  []declare.Binding
}

func (t *topicIndex) add(b declare.Binding) {
	at := t
	if b.Key != "" {
		for word := range strings.SplitSeq(b.Key, ".") {
			next := at.words[word]
			if next == nil {
				next = &topicIndex{}
				if at.words == nil {
					at.words = map[string]*topicIndex{}
				}
				at.words[word] = next
			}
			at = next
		}
	}
	at.ends = append(at.ends, b)
}

func (t *topicIndex) find(key string) (found []declare.Binding) {
	var words []string
	if key != "" {
		words = strings.Split(key, ".")
	}
	// at are the places that the words so far lead to.
	at := map[*topicIndex]bool{}
	t.enter(at)
	for _, word := range words {
		next := map[*topicIndex]bool{}
		for place, hash := range at {
			if hash {
				next[place] = true // "#" takes this word, too
			}
			names := []string{word, "*"}
			if word == "*" {
				names = names[1:]
			}
			for _, name := range names {
				if to := place.words[name]; to != nil && name != "#" {
					to.enter(next)
				}
			}
		}
		at = next
	}
	for place := range at {
		found = append(found, place.ends...)
	}
	return found
}

// enter adds a place, and those behind "#", which may take no word. The value says whether a place
// is behind "#", and so takes any word.
func (t *topicIndex) enter(at map[*topicIndex]bool) {
	if _, known := at[t]; !known {
		at[t] = false
	}
	for hash := t.words["#"]; hash != nil && !at[hash]; hash = hash.words["#"] {
		at[hash] = true
	}
}

// sure reports whether every dead letter sent to an exchange reaches a queue.
func (r *Routes) sure(exchange string, l DeadLetter) bool {
	if exchange == "" {
		_, ok := r.Queues[deref(l.Key)]
		return ok && l.Key != nil
	}
	at := DeadLetterTo{reason: l.Reason, Keyed: l.Key != nil, Key: deref(l.Key)}
	if r.certain[at] == nil {
		r.certain[at] = map[string]bool{}
	}
	certain := r.certain[at] // of this letter, by exchange
	if known, has := certain[exchange]; has {
		return known
	}
	// What is certain is so because of other exchanges: begin with none, until nothing changes.
	order := r.behind(exchange, l)
	for changed := true; changed && !r.Stopped(); {
		changed = false
		for _, x := range slices.Backward(order) {
			if !certain[x] && r.surely(x, l, certain) {
				certain[x], changed = true, true
			}
		}
	}
	for _, x := range order {
		if !certain[x] {
			certain[x] = false // this is known, too
		}
	}
	return certain[exchange]
}

func deref(key *string) string {
	if key == nil {
		return ""
	}
	return *key
}

// surely reports whether an exchange routes a dead letter to a queue, given which others do.
func (r *Routes) surely(exchange string, l DeadLetter, certain map[string]bool) bool {
	x, ok := r.Exchanges[exchange]
	if !ok {
		return exchange == "" && r.sure("", l)
	}
	leads := func(b declare.Binding) bool { return b.Queue != "" || certain[b.Exchange] }
	if x.Type == declare.ExchangeModulusHash && len(r.BySource[exchange]) > 0 {
		// It chooses one of its bindings, and nobody knows which.
		return !slices.ContainsFunc(r.BySource[exchange], func(b declare.Binding) bool { return !leads(b) })
	}
	for _, b := range r.Candidates(x, l) {
		if _, must := x.Matches(b, l); must && leads(b) {
			return true
		}
	}
	return x.Alternate != "" && certain[x.Alternate]
}

// behind are the exchanges that a dead letter may pass, from an exchange on, nearest first.
func (r *Routes) behind(exchange string, l DeadLetter) []string {
	list, seen := []string{exchange}, map[string]bool{exchange: true}
	add := func(x string) {
		if !seen[x] {
			seen[x] = true
			list = append(list, x)
		}
	}
	for i := 0; i < len(list) && !r.Stopped(); i++ {
		x, ok := r.Exchanges[list[i]]
		if !ok {
			continue
		}
		for _, b := range r.Candidates(x, l) {
			if b.Queue == "" {
				add(b.Exchange)
			}
		}
		if x.Alternate != "" {
			add(x.Alternate)
		}
	}
	return list
}

// minds reports whether the key of a message that is sent to an exchange may matter.
func (r *Routes) minds(exchange string) bool {
	yes, known := r.mind[exchange]
	if !known {
		passed := r.behind(exchange, DeadLetter{})
		yes = slices.ContainsFunc(passed, func(name string) bool {
			x := r.Exchanges[name]
			return name == "" || x.Type == declare.ExchangeDirect && len(r.BySource[name]) > 0 ||
				x.Type == declare.ExchangeTopic && slices.ContainsFunc(r.BySource[name], func(b declare.Binding) bool { return b.Key != "#" })
		})
		for _, name := range passed {
			if !yes {
				r.mind[name] = false // what comes behind it was looked at, too
			}
		}
		r.mind[exchange] = yes
	}
	return yes
}

// targets are the queues that dead letters may reach, in the order of their names: those with
// consumers, and those with a message TTL, too.
type targets struct{ All, Consumed, Delaying []string }

// TargetsOf are the targets of a queue. Queues that dead-letter alike share them.
func (r *Routes) TargetsOf(q Queue, reason string) *targets {
	exchange, key, ok := q.DeadLetters()
	if !ok {
		return &targets{}
	}
	at := DeadLetterTo{Exchange: exchange, Keyed: key != nil, Key: deref(key), reason: reason}
	if r.lists[at] == nil {
		t := &targets{All: slices.Sorted(maps.Keys(r.deadFrom(q, reason)))}
		for _, name := range t.All {
			if r.Queues[name].Consumers > 0 {
				t.Consumed = append(t.Consumed, name)
			}
			if r.Queues[name].HasTTL() {
				t.Delaying = append(t.Delaying, name)
			}
		}
		r.lists[at] = t
	}
	return r.lists[at]
}

// reachedBy collects where a dead letter may go, without recursion: chains of exchanges can be long.
func (r *Routes) reachedBy(exchange string, l DeadLetter) map[string]bool {
	found, seen := map[string]bool{}, map[string]bool{}
	waiting := []string{exchange}
	for len(waiting) > 0 && !r.Stopped() {
		name := waiting[len(waiting)-1]
		waiting = waiting[:len(waiting)-1]
		if seen[name] {
			continue
		}
		seen[name] = true
		x, ok := r.Exchanges[name]
		switch {
		case name == "":
			if _, exists := r.Queues[deref(l.Key)]; exists && l.Key != nil {
				found[*l.Key] = true
			}
			continue
		case !ok:
			continue
		}
		certain := x.Type == declare.ExchangeModulusHash && len(r.BySource[name]) > 0
		for _, b := range r.Candidates(x, l) {
			may, must := x.Matches(b, l)
			certain = certain || must
			if _, exists := r.Queues[b.Queue]; may && b.Queue != "" && exists {
				found[b.Queue] = true
			} else if may && b.Queue == "" && !seen[b.Exchange] {
				waiting = append(waiting, b.Exchange)
			}
		}
		if !certain && x.Alternate != "" {
			waiting = append(waiting, x.Alternate)
		}
	}
	if len(found) == 0 && !r.Stopped() {
		// Nor does a message reach a queue from an exchange on its way. Long chains need that.
		at := DeadLetterTo{reason: l.Reason, Keyed: l.Key != nil, Key: deref(l.Key)}
		for at.Exchange = range seen {
			r.reached[at] = found
		}
	}
	return found
}

// endOfLine reports whether a queue gets dead letters that another queue gave up. What comes out
// of a delay queue is still on its way.
func (c *Checker) endOfLine(queue string) bool {
	for from := range c.feeders(queue) {
		if !from.Delays() {
			return true
		}
	}
	return false
}

// WaitName is a name that says that messages wait in a queue.
var WaitName = regexp.MustCompile(`(?i)delay|retry|retries|wait|hold|backoff|postpone|defer|sleep`)

// bringsCount reports whether a queue's dead letters bring a delivery count along: what comes out of
// a delay queue wasn't delivered there.
func (r *Routes) bringsCount(q Queue) bool {
	return q.Type == queuearg.Quorum && !q.HasTTL() && !(r.WaitsWithoutTTL(q) && WaitName.MatchString(q.Name))
}

// WaitsWithoutTTL is a queue that messages can leave only by an expiration of their own: it
// dead-letters, has no message TTL, and as far as can be seen no consumer.
func (r *Routes) WaitsWithoutTTL(q Queue) bool {
	exchange, _, ok := q.DeadLetters()
	return ok && !q.HasTTL() && q.Consumers == 0 && !q.Passing() && q.Type != queuearg.Stream && r.Exchanges[exchange].Type != declare.ExchangeHeaders
}
