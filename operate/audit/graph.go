package audit

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/values"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/rules"
)

// Mermaid returns s as a Mermaid flowchart, which GitHub renders as a picture. Use it in
// documentation.
//
//   - Work queues, the retry cycle, and dead-letter queues have a box each.
//   - Solid arrows are bindings, with their keys. Dotted arrows are what the broker does with a
//     message that is dead-lettered or matches no binding.
//   - A worker closes the cycle: it consumes from a work queue, and only workers publish to an
//     exchange in front of delay queues.
func Mermaid(s check.Snapshot) string {
	return "flowchart LR\n" + newGraph(s).write(notation{
		open:  func(g group) string { return fmt.Sprintf("    subgraph %s[\"%s\"]\n", g.id, g.title) },
		close: "    end\n",
		node: func(n node) string {
			return n.id + n.shape.left + strings.Join(mermaidLines(n.lines), "<br/>") + n.shape.right + "\n"
		},
		edge: func(e edge) string {
			arrow := "-->"
			if e.dotted {
				arrow = "-.->"
			}
			if e.label != "" {
				arrow += `|"` + strings.Join(mermaidLines(strings.Split(e.label, "\n")), "<br/>") + `"|`
			}
			return fmt.Sprintf("    %s %s %s\n", e.from, arrow, e.to)
		},
	})
}

// DOT returns the graph of [Mermaid] in the language of Graphviz. Render it with dot
// -Tsvg.
func DOT(s check.Snapshot) string {
	head := "digraph topology {\n    rankdir=LR;\n    node [fontname=\"sans-serif\"];\n    edge [fontname=\"sans-serif\", fontsize=10];\n"
	return head + newGraph(s).write(notation{
		open: func(g group) string {
			return fmt.Sprintf("    subgraph cluster_%s {\n        label=%s;\n", g.id, dotText(g.title))
		},
		close: "    }\n",
		node: func(n node) string {
			return fmt.Sprintf("%s [shape=%s, label=%s];\n", n.id, n.shape.dot, dotText(strings.Join(n.lines, "\n")))
		},
		edge: func(e edge) string {
			style := "solid"
			if e.dotted {
				style = "dashed"
			}
			return fmt.Sprintf("    %s -> %s [style=%s, label=%s];\n", e.from, e.to, style, dotText(e.label))
		},
	}) + "}\n"
}

// notation is a language for graphs.
type notation struct {
	open  func(group) string // the beginning of a box
	close string             // its end
	node  func(node) string
	edge  func(edge) string
}

// write writes the groups with their nodes, and the edges.
func (g *graph) write(in notation) string {
	var b strings.Builder
	for _, group := range groups {
		nodes := g.in(group.id)
		if len(nodes) == 0 {
			continue
		}
		indent := "    "
		if group.title != "" {
			b.WriteString(in.open(group))
			indent += "    "
		}
		for _, n := range nodes {
			b.WriteString(indent + in.node(n))
		}
		if group.title != "" {
			b.WriteString(in.close)
		}
	}
	for _, e := range g.edges {
		b.WriteString(in.edge(e))
	}
	return b.String()
}

// group is a box in the picture.
type group struct{ id, title string }

// groups are in the order in which they are drawn, from left to right.
var groups = []group{
	{"publish", ""},
	{"work", "work"},
	{"retry", "retry"},
	{"given_up", "given up"}, // "end" would end Mermaid's subgraph
}

// shape is how a kind of node is drawn, by Mermaid and by Graphviz.
type shape struct{ prefix, left, right, dot string }

var (
	queueShape    = shape{"q_", `[("`, `")]`, "cylinder"}
	exchangeShape = shape{"x_", `{{"`, `"}}`, "hexagon"}
	workerShape   = shape{"w_", `(["`, `"])`, "box"}
)

type node struct {
	id, group string
	lines     []string
	shape     shape
	// Within a group, the order in which a message passes; delay queues by their delay.
	stage stage
	delay int64
}

// stage is how far along the path of a message something is. Pictures are laid out from the first
// one on, and edges against the order are drawn as coming back.
type stage int

const (
	stagePublished stage = iota
	stageWaiting
	stageWorked
	stageEntering
	stageDelayed
	stageReturning
	stageDying
	stageDead
)

// kindWorker is a Resource that no broker has.
const kindWorker = "worker"

type edge struct {
	from, to, label string
	dotted          bool
}

type graph struct {
	*rules.Routes
	nodes []node
	ids   map[declare.Resource]string
	taken map[string]bool
	edges []edge
	drawn map[edge]bool
}

func newGraph(s check.Snapshot) *graph {
	rules.Sort(&s)
	g := &graph{Routes: rules.NewRoutes(context.Background(), s), ids: map[declare.Resource]string{}, taken: map[string]bool{}, drawn: map[edge]bool{}}
	end := g.endOfLine()
	used := map[string]bool{}
	for _, b := range s.Bindings {
		used[b.Source], used[b.Exchange] = true, true
	}
	for _, q := range g.Sorted() {
		exchange, _, _ := q.DeadLetters()
		used[exchange] = true
	}
	for _, x := range g.SortedExchanges() {
		used[x.Alternate] = true
	}
	cycle := g.cycleExchanges()
	entries := g.entries(cycle)
	for _, x := range g.SortedExchanges() {
		if names.Reserved(x.Name) && !used[x.Name] {
			continue
		}
		n := node{group: "publish", shape: exchangeShape, lines: []string{x.Name, string(x.Type)}}
		switch {
		case slices.Contains(entries, x.Name):
			n.group, n.stage = "retry", stageEntering
		case cycle[x.Name]:
			n.group, n.stage = "retry", stageReturning
		case g.onlyTo(x.Name, end):
			n.group, n.stage = "given_up", stageDying
		}
		g.add(rules.ExchangeResource(x.Name), n)
	}
	for _, q := range g.Sorted() {
		n := node{group: "work", shape: queueShape, stage: stageWaiting, lines: []string{q.Name}}
		switch {
		case q.HasTTL() && q.Delays():
			ms, _ := q.Number("x-message-ttl")
			n.group, n.lines = "retry", append(n.lines, "holds for "+span(time.Duration(ms)*time.Millisecond))
			n.stage, n.delay = stageDelayed, ms
		case end[q.Name]:
			n.group, n.stage = "given_up", stageDead
		}
		if limit, ok := q.Number("x-delivery-limit"); ok && limit >= 0 {
			n.lines = append(n.lines, fmt.Sprintf("delivery limit %d", limit))
		}
		g.add(rules.QueueResource(q.Name), n)
	}
	g.draw(entries)
	g.arrange()
	return g
}

// arrange sorts nodes and edges by the order in which a message passes them.
func (g *graph) arrange() {
	compare := func(a, b node) int { return cmp.Or(cmp.Compare(a.stage, b.stage), cmp.Compare(a.delay, b.delay)) }
	slices.SortStableFunc(g.nodes, compare)
	nodes := map[string]node{}
	for _, n := range g.nodes {
		nodes[n.id] = n
	}
	slices.SortStableFunc(g.edges, func(a, b edge) int {
		// Edges of dead letters are drawn after all others of their queue.
		leaves := func(e edge) int {
			if e.dotted && nodes[e.from].stage != stageDelayed {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(leaves(a), leaves(b)), compare(nodes[a.from], nodes[b.from]), compare(nodes[a.to], nodes[b.to]))
	})
}

func (g *graph) add(t declare.Resource, n node) {
	// Names can have anything in them. What is left of this one makes an id that
	// doesn't change when something else is added.
	id := n.shape.prefix + notInID.ReplaceAllString(values.Cut(t.Name, 64), "_")
	n.id = id
	for i := 2; g.taken[n.id]; i++ {
		n.id = fmt.Sprintf("%s_%d", id, i)
	}
	g.taken[n.id] = true
	g.ids[t] = n.id
	g.nodes = append(g.nodes, n)
}

var notInID = regexp.MustCompile(`[^A-Za-z0-9]+`)

func (g *graph) in(group string) []node {
	return slices.DeleteFunc(slices.Clone(g.nodes), func(n node) bool { return n.group != group })
}

// link draws an edge; a thing that doesn't exist is drawn as missing.
func (g *graph) link(from, to declare.Resource, label string, dotted bool) {
	for _, t := range []declare.Resource{from, to} {
		if _, ok := g.ids[t]; !ok {
			missing := node{group: "given_up", shape: queueShape, stage: stageDead, lines: []string{t.Name, "missing!"}}
			if t.Kind == "exchange" {
				missing.shape = exchangeShape
			}
			g.add(t, missing)
		}
	}
	e := edge{g.ids[from], g.ids[to], label, dotted}
	if !g.drawn[e] {
		g.drawn[e] = true
		g.edges = append(g.edges, e)
	}
}

func (g *graph) draw(entries []string) {
	for _, b := range g.Snapshot.Bindings {
		to := rules.QueueResource(b.Queue)
		if b.Queue == "" {
			to = rules.ExchangeResource(b.Exchange)
		}
		label := b.Key
		for _, k := range values.SortedKeys(b.Headers) {
			if label != "" {
				label += "\n"
			}
			label += fmt.Sprintf("%s=%v", k, b.Headers[k])
		}
		g.link(rules.ExchangeResource(b.Source), to, label, false)
	}
	for _, q := range g.Sorted() {
		exchange, key, ok := q.DeadLetters()
		if !ok {
			continue
		}
		label := "dead letters"
		if q.Delays() {
			label = "time is up"
		}
		switch {
		case exchange != "":
			g.link(rules.QueueResource(q.Name), rules.ExchangeResource(exchange), label, true)
		case key != nil:
			g.link(rules.QueueResource(q.Name), rules.QueueResource(*key), label, true)
		}
	}
	for _, x := range g.SortedExchanges() {
		if x.Alternate != "" {
			g.link(rules.ExchangeResource(x.Name), rules.ExchangeResource(x.Alternate), "no binding", true)
		}
	}
	for _, entry := range entries {
		for _, work := range g.workOf(entry) {
			worker := declare.Resource{Kind: kindWorker, Name: work}
			if _, there := g.ids[worker]; !there {
				g.add(worker, node{group: "work", shape: workerShape, stage: stageWorked, lines: []string{"worker of " + work}})
			}
			g.link(rules.QueueResource(work), worker, "delivery", false)
			g.link(worker, rules.ExchangeResource(entry), g.retryLabel(entry, work), false)
		}
	}
}

// retryLabel says what a worker publishes to an entry, with its key where there is
// one delay only.
func (g *graph) retryLabel(entry, work string) string {
	const fails = "fails"
	list := g.BySource[entry]
	if before, ok := strings.CutSuffix(list[0].Key, ".#"); ok && len(list) == 1 {
		return fails + ": " + before + "." + work
	}
	return fails
}

// endOfLine are the queues without a path back into the cycle: those that only receive dead
// letters, and whose own dead letters reach only such queues.
func (g *graph) endOfLine() map[string]bool {
	// A queue to which a delay queue sends by a binding is a work queue; by an
	// alternate exchange only, the end of the line.
	back, aside := map[string]bool{}, map[string]bool{}
	followed := map[string]bool{}
	for _, q := range g.Sorted() {
		exchange, key, ok := q.DeadLetters()
		switch {
		case !ok || !q.Delays():
		case exchange == "" && key != nil:
			back[*key] = true
		default:
			g.behind(exchange, back, followed)
		}
	}
	followed = map[string]bool{}
	for _, x := range g.SortedExchanges() {
		if x.Alternate != "" {
			g.behind(x.Alternate, aside, followed)
		}
	}
	end := map[string]bool{}
	for _, q := range g.Sorted() {
		if q.Delays() || !g.IsFed(q.Name) && !aside[q.Name] {
			continue
		}
		end[q.Name] = !back[q.Name]
	}
	return end
}

// behind adds the queues that are bound to an exchange, at some remove.
func (g *graph) behind(exchange string, into, followed map[string]bool) {
	if followed[exchange] {
		return
	}
	followed[exchange] = true
	for _, b := range g.BySource[exchange] {
		if b.Queue != "" {
			into[b.Queue] = true
		} else {
			g.behind(b.Exchange, into, followed)
		}
	}
}

// onlyTo reports whether an exchange leads to the end of the line and nowhere
// else.
func (g *graph) onlyTo(exchange string, end map[string]bool) bool {
	reached := g.Reach(exchange, rules.DeadLetter{})
	for q := range reached {
		if !end[q] {
			return false
		}
	}
	return len(reached) > 0
}

// cycleExchanges are those in front of and behind delay queues.
func (g *graph) cycleExchanges() map[string]bool {
	cycle := map[string]bool{}
	for _, b := range g.Snapshot.Bindings {
		if q, ok := g.Queues[b.Queue]; ok && q.Delays() {
			cycle[b.Source] = true
		}
	}
	for _, q := range g.Sorted() {
		if exchange, _, ok := q.DeadLetters(); ok && q.Delays() && exchange != "" {
			cycle[exchange] = true
		}
	}
	return cycle
}

// entries are the exchanges of the cycle that the broker itself sends nothing to.
func (g *graph) entries(cycle map[string]bool) []string {
	fed := map[string]bool{}
	for _, q := range g.Sorted() {
		exchange, _, _ := q.DeadLetters()
		fed[exchange] = true
	}
	for _, x := range g.Exchanges {
		fed[x.Alternate] = true
	}
	for _, b := range g.Snapshot.Bindings {
		fed[b.Exchange] = true
	}
	var list []string
	for x := range cycle {
		if !fed[x] {
			list = append(list, x)
		}
	}
	slices.Sort(list)
	return list
}

// workOf are the queues that messages sent to an entry return to.
func (g *graph) workOf(entry string) []string {
	found := map[string]bool{}
	seen := map[string]bool{}
	var follow func(exchange string)
	follow = func(exchange string) {
		if seen[exchange] {
			return
		}
		seen[exchange] = true
		for _, b := range g.BySource[exchange] {
			q, ok := g.Queues[b.Queue]
			switch {
			case b.Exchange != "":
				follow(b.Exchange)
			case ok && q.Delays():
				if next, _, has := q.DeadLetters(); has {
					follow(next)
				}
			case ok:
				found[q.Name] = true
			}
		}
	}
	follow(entry)
	var list []string
	for q := range found {
		list = append(list, q)
	}
	slices.Sort(list)
	return list
}

// mermaidText escapes what ends a quoted text or begins markup.
func mermaidText(s string) string {
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == '#' && !strings.Contains(s[i:], ";"):
			b.WriteRune(r) // only with a semicolon it is the beginning of a code
		case strings.ContainsRune("\"#<>&`\\", r) || r < ' ':
			if r < ' ' {
				r = '\uFFFD'
			}
			fmt.Fprintf(&b, "#%d;", r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func mermaidLines(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = mermaidText(l)
	}
	return out
}

func dotText(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\x00", "\uFFFD").Replace(s) + `"`
}

// span is a duration without the zeros that Go writes behind it: 10m, not 10m0s.
func span(d time.Duration) string {
	s := d.String()
	if d%time.Minute == 0 {
		s = strings.TrimSuffix(s, "0s")
	}
	if d%time.Hour == 0 {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
