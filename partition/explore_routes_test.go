package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/phash2"
)

// routing is as much of a broker as the routes of a group need. It answers the requests of
// package declare, and routes messages by exchanges and bindings.
type routing struct {
	exchanges map[string]string // their types
	alternate map[string]string
	queues    map[string]bool
	bindings  map[route]bool
}

type route struct{ source, exchange, queue, key string }

func (b route) String() string { return b.source + ">" + b.exchange + b.queue + "/" + b.key }

// state is all that differs between two brokers.
func (x *routing) state() string {
	var all []string
	for name, kind := range x.exchanges {
		all = append(all, name+":"+kind)
	}
	for b := range x.bindings {
		all = append(all, b.String())
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func (x *routing) request(method, path string, body any) (int, any) {
	m, _ := body.(map[string]any)
	text := func(name string) string { s, _ := m[name].(string); return s }
	switch kind, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/"); {
	case method == "GET" && strings.HasPrefix(path, "/bindings?"):
		q, _ := url.ParseQuery(strings.TrimPrefix(path, "/bindings?"))
		if x.bindings[route{q.Get("src"), q.Get("dste"), q.Get("dstq"), q.Get("key")}] {
			return 200, []any{map[string]any{"arguments": map[string]any{}}}
		}
		return 200, []any{}
	case method == "GET" && kind == "queues":
		if !x.queues[rest] {
			return 404, "queue not found"
		}
		return 200, map[string]any{"name": rest, "type": "quorum", "message_count": uint64(1), "consumer_count": uint32(0), "arguments": map[string]any{}, "durable": true}
	case method == "PUT" && kind == "exchanges":
		switch is, exists := x.exchanges[rest]; {
		case exists && is != text("type"):
			return 409, fmt.Sprintf("inequivalent arg 'type' for exchange '%s' in vhost '/': received '%s' but current is '%s'", rest, text("type"), is)
		case !exists:
			x.exchanges[rest] = text("type")
			args, _ := m["arguments"].(map[string]any)
			x.alternate[rest], _ = args["alternate-exchange"].(string)
		}
		return 204, nil
	case method == "DELETE" && kind == "exchanges":
		delete(x.exchanges, rest)
		delete(x.alternate, rest)
		for b := range x.bindings {
			if b.source == rest || b.exchange == rest {
				delete(x.bindings, b)
			}
		}
		return 204, nil
	case method == "POST" && path == "/bindings":
		b := route{text("source"), text("destination_exchange"), text("destination_queue"), text("binding_key")}
		if x.exchanges[b.source] == "" || x.exchanges[b.exchange] == "" && !x.queues[b.queue] {
			return 400, "no exchange or queue"
		}
		x.bindings[b] = true
		return 204, nil
	case method == "DELETE" && kind == "bindings":
		q, _ := url.ParseQuery(strings.ReplaceAll(rest, ";", "&"))
		delete(x.bindings, route{q.Get("src"), q.Get("dste"), q.Get("dstq"), q.Get("key")})
		return 204, nil
	default:
		panic(method + " " + path)
	}
}

// route returns the queues that a message with the key reaches from an exchange.
func (x *routing) route(exchange, key string, visited map[string]bool) (queues []string) {
	if visited[exchange] || x.exchanges[exchange] == "" {
		return nil
	}
	visited[exchange] = true
	var from []route
	for b := range x.bindings {
		if b.source == exchange {
			from = append(from, b)
		}
	}
	slices.SortFunc(from, func(a, b route) int { return strings.Compare(a.exchange+a.queue, b.exchange+b.queue) })
	switch x.exchanges[exchange] {
	case string(declare.ExchangeModulusHash):
		if len(from) > 0 {
			n := phash2.Strings(key) % uint32(len(from))
			from = from[n : n+1]
		}
	case string(declare.ExchangeTopic):
		from = slices.DeleteFunc(from, func(b route) bool { return b.key != "#" && b.key != key })
	}
	if len(from) == 0 {
		return x.route(x.alternate[exchange], key, visited)
	}
	for _, b := range from {
		if b.queue != "" {
			queues = append(queues, b.queue)
		} else {
			queues = append(queues, x.route(b.exchange, key, visited)...)
		}
	}
	slices.Sort(queues)
	return slices.Compact(queues)
}

// actor is a process whose requests wait until they are chosen.
type actor struct {
	name  string
	do    func(context.Context, declare.Requester) error
	calls chan call
	stop  context.CancelFunc
	next  *call
	done  error // once next is nil
	past  string
	ended bool
}

type call struct {
	method, path string
	body         any
	answer       chan func() (int, any, error)
	end          error // the actor has ended
}

var errCrash = errors.New("crashed")

func (a *actor) Request(_ context.Context, method, path string, body any) (int, any, error) {
	c := call{method: method, path: path, body: body, answer: make(chan func() (int, any, error))}
	a.calls <- c
	return (<-c.answer)()
}

// start runs the actor until its first request.
func (a *actor) start() {
	a.calls, a.past, a.ended = make(chan call), "", false
	ctx, stop := context.WithCancel(context.Background())
	a.stop = stop
	go func() { a.calls <- call{end: cmpErr(a.do(ctx, a))} }()
	a.wait()
}

var errNone = errors.New("done")

// cmpErr makes the end of an actor without an error one.
func cmpErr(err error) error {
	if err == nil {
		return errNone
	}
	return err
}

func (a *actor) wait() {
	c := <-a.calls
	if c.end != nil {
		a.next, a.ended, a.done = nil, true, c.end
		a.stop()
		return
	}
	a.next = &c
}

// step has the broker answer the actor's request.
func (a *actor) step(x *routing) {
	c := a.next
	status, reply := x.request(c.method, c.path, c.body)
	a.past += fmt.Sprint(" ", status)
	if found, ok := reply.([]any); ok {
		a.past += fmt.Sprint("/", len(found))
	}
	c.answer <- func() (int, any, error) { return status, reply, nil }
	a.wait()
}

// crash ends the actor. Its request may have been carried out.
func (a *actor) crash(x *routing, carriedOut bool) {
	if carriedOut {
		x.request(a.next.method, a.next.path, a.next.body)
	}
	a.stop()
	for !a.ended {
		a.next.answer <- func() (int, any, error) { return 0, nil, errCrash }
		a.wait()
	}
}

// reshards is a small world in which a group moves from two partitions to three.
type reshards struct {
	before  bool // the group was declared before the exchange Name.now existed
	old     bool // a worker of the old generation looks after the routes, too
	young   bool // and one of the new generation, once Reshard has redirected the messages
	imports bool // somebody imports the definitions that were exported before, once messages are redirected
	crashes int
	// wrong and wrongOld, if set, replace what Reshard does first, and what the old worker does.
	wrong    func(ctx context.Context, m declare.Requester, from, to Group) error
	wrongOld func(ctx context.Context, m declare.Requester, w *worker) error
}

var routedKeys = func() (keys []string) {
	for i := range 8 {
		keys = append(keys, fmt.Sprint("key", i))
	}
	return keys
}()

func (w reshards) explore(runs int) (explore.Report, error) {
	return explore.All(runs, func(r *explore.Run) error { return w.run(r) })
}

func (w reshards) run(r *explore.Run) error {
	from, to := Group{Name: "g", Partitions: 2, Generation: 1, Window: 1}, Group{Name: "g", Partitions: 3, Generation: 2, Window: 1}
	x := &routing{exchanges: map[string]string{}, alternate: map[string]string{}, queues: map[string]bool{"audit": true}, bindings: map[route]bool{}}
	var exported []func()
	for _, g := range []Group{from, to} {
		t, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
		if err != nil {
			return err
		}
		if g.Generation == 1 && w.before {
			t.Exchanges = t.Exchanges[:len(t.Exchanges)-1]
			t.Bindings[0], t.Bindings = g.behindFront(), append(t.Bindings[:1], t.Bindings[2:]...)
		}
		for _, e := range t.Exchanges {
			add := func() {
				if x.exchanges[e.Name] == "" {
					x.exchanges[e.Name], x.alternate[e.Name] = string(e.Type), e.AlternateExchange
				}
			}
			add()
			exported = append(exported, add)
		}
		for _, q := range t.Queues {
			x.queues[q.Address().QueueName()] = true
		}
		for _, b := range append(t.Bindings, declare.Binding{Source: "g", Queue: "audit"}) {
			add := func() { x.bindings[route{b.Source, b.Exchange, b.Queue, b.Key}] = true }
			add()
			exported = append(exported, add)
		}
		if g.Generation == 1 && !w.imports {
			exported = nil
		}
		if g.Generation == 2 {
			exported = exported[:len(exported)-len(t.Exchanges)-len(t.Bindings)-1] // only generation 1 was exported
		}
	}
	redirect := w.wrong
	if redirect == nil {
		redirect = func(ctx context.Context, m declare.Requester, from, to Group) error { return from.redirect(ctx, m, to) }
	}
	reshard := &actor{name: "reshard", do: func(ctx context.Context, m declare.Requester) error { return redirect(ctx, m, from, to) }}
	upkeep := func(name string, g Group) *actor {
		worker := &worker{group: g, log: slog.New(slog.DiscardHandler)}
		return &actor{name: name, do: func(ctx context.Context, m declare.Requester) error {
			if w.wrongOld != nil && g.Generation == 1 {
				return w.wrongOld(ctx, m, worker)
			}
			return worker.keepRoutes(ctx, m, func(Group, declare.QueueInfo) error { return nil })
		}}
	}
	actors := []*actor{reshard}
	reshard.start()
	if w.old {
		a := upkeep("old worker", from)
		a.start()
		actors = append(actors, a)
	}
	defer func() {
		for _, a := range actors {
			if !a.ended {
				a.crash(x, false)
			}
		}
	}()
	crashes, moved, redirected, disturbed := w.crashes, map[string]bool{}, false, false
	for {
		if err := w.check(x, moved, &disturbed); err != nil {
			return err
		}
		if r.Seen(func() string {
			state := fmt.Sprint(x.state(), len(exported), crashes, redirected, len(moved), disturbed)
			for _, a := range actors {
				state += fmt.Sprint(" | ", a.name, a.ended, a.past)
			}
			return state
		}) {
			return nil
		}
		var can []func()
		for _, a := range actors {
			if a.ended {
				continue
			}
			can = append(can, func() {
				r.Say("%s: %s %s %v", a.name, a.next.method, a.next.path, a.next.body)
				a.step(x)
			})
			for _, carriedOut := range []bool{false, true} {
				if crashes > 0 && (!carriedOut || a.next.method != "GET") {
					can = append(can, func() {
						r.Say("%s crashes; carried out: %v: %s %s", a.name, carriedOut, a.next.method, a.next.path)
						crashes--
						a.crash(x, carriedOut)
						if a == reshard {
							a.start()
						}
					})
				}
			}
		}
		if len(exported) > 0 && redirected {
			can = append(can, func() {
				r.Say("import")
				disturbed = true
				exported[0]()
				exported = exported[1:]
			})
		}
		if len(can) == 0 {
			return w.final(x, reshard)
		}
		can[r.Pick(len(can))]()
		if reshard.ended && !redirected {
			redirected = true
			if reshard.done != errNone {
				return reshard.done
			}
			if w.young {
				a := upkeep("new worker", to)
				a.start()
				actors = append(actors, a)
			}
		}
	}
}

// check is what holds in every state: each key has one route, and none that has moved comes back.
func (w reshards) check(x *routing, moved map[string]bool, disturbed *bool) error {
	for _, key := range routedKeys {
		to := slices.DeleteFunc(x.route("g", key, map[string]bool{}), func(q string) bool { return q == "audit" })
		if len(to) != 1 {
			return fmt.Errorf("%s is routed to %q: %s", key, to, x.state())
		}
		if young := strings.HasPrefix(to[0], "g.2."); young {
			moved[key] = true
		} else if moved[key] && !*disturbed {
			return fmt.Errorf("%s has moved, and is routed to %s: %s", key, to, x.state())
		}
	}
	return nil
}

// final is what holds at the end.
func (w reshards) final(x *routing, reshard *actor) error {
	if reshard.done != errNone {
		return reshard.done
	}
	for _, key := range routedKeys {
		if to := slices.DeleteFunc(x.route("g", key, map[string]bool{}), func(q string) bool { return q == "audit" }); !strings.HasPrefix(to[0], "g.2.") {
			return fmt.Errorf("%s is routed to %s at the end: %s", key, to, x.state())
		}
	}
	return nil
}

// A group is resharded while workers of both generations look after the routes, Reshard is
// interrupted at any request and called again, and old definitions are imported.
func TestExploreRoutes(t *testing.T) {
	t.Parallel()
	if explore.UnderRace {
		t.Skip("one goroutine explores, in which the race detector finds nothing")
	}
	for name, w := range map[string]reshards{
		"Reshard crashes twice":                          {crashes: 2},
		"Reshard of an older group crashes twice":        {crashes: 2, before: true},
		"with a worker of the new generation":            {crashes: 1, young: true},
		"with workers of both generations":               {crashes: 1, young: true, old: true},
		"with a worker of both, of an older group":       {young: true, old: true, before: true},
		"before old definitions are imported":            {crashes: 1, imports: true},
		"old definitions, and a worker":                  {crashes: 1, young: true, imports: true},
		"old definitions of an older group, and workers": {young: true, old: true, imports: true, before: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			report, err := w.explore(200_000)
			require.NoError(t, err)
			assert.True(t, report.Complete)
			t.Logf("REPORT explore routes, %s: %s", name, report)
		})
	}
}

// Each of these steps in the wrong order loses messages, or sends them back, in some state.
func TestExploreRoutesFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	for name, w := range map[string]reshards{
		"the old binding goes before the new one comes": {wrong: func(ctx context.Context, m declare.Requester, from, to Group) error {
			return errors.Join(from.adopt(ctx, m), declare.DeleteBinding(ctx, m, from.behindNow()), to.adopt(ctx, m), from.seal(ctx, m, to))
		}},
		"an older group has two routes": {before: true, wrong: func(ctx context.Context, m declare.Requester, from, to Group) error {
			return errors.Join(replace(ctx, m, declare.Exchange{Name: from.now(), Type: declare.ExchangeModulusHash}),
				to.adopt(ctx, m), declare.DeleteBinding(ctx, m, declare.Binding{Source: from.Name, Exchange: from.hash()}), from.seal(ctx, m, to))
		}},
		"a Reshard that is called again ends early": {crashes: 1, wrong: func(ctx context.Context, m declare.Requester, from, to Group) error {
			if moved, err := bound(ctx, m, to.behindNow()); moved || err != nil {
				return err
			}
			return from.redirect(ctx, m, to)
		}},
		"an old worker repairs what a Reshard has removed since it asked": {old: true, wrongOld: func(ctx context.Context, m declare.Requester, w *worker) error {
			if moved, err := bound(ctx, m, Group{Name: w.group.Name, Generation: 2}.behindNow()); moved || err != nil {
				return err
			}
			return w.repair(ctx, m)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := w.explore(200_000)
			require.Error(t, err)
			t.Log(err)
		})
	}
}
