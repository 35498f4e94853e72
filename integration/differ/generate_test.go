package differ

import (
	"fmt"
	"math/rand/v2"
)

// generate makes the sequence of a seed: some queues, exchanges and links, and then anything.
func generate(seed uint64) sequence {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 1)), burst: 4}
	g.expedited, g.poison, g.spread = g.in(6), g.in(12), g.in(4)
	var s sequence
	add := func(op operation) { s = append(s, op) }
	for i := range 1 + g.IntN(3) {
		add(g.queue(fmt.Sprintf("@q%d", i)))
	}
	for i := range g.IntN(3) {
		add(g.exchange(fmt.Sprintf("@x%d", i)))
		add(g.binding())
	}
	for range 1 + g.IntN(2) {
		add(g.sender())
	}
	for range 1 + g.IntN(2) {
		r := g.receiver()
		add(r)
		add(credit{Link: r.Link, N: uint32(g.IntN(6))})
	}
	for len(s) < 60 {
		add(g.operation())
	}
	return s
}

type generator struct {
	*rand.Rand
	expedited bool
	// poison are messages over which consumers' sessions crash. What else is on the connection
	// may or may not be told then, so senders and receivers are apart.
	poison bool
	// spread are receivers over several sessions of a connection. Then none is cut: in which order
	// they requeue what they hold is anybody's guess.
	spread bool
	// burst is how many messages are published at once. Where a queue may be full it is one: a
	// session learns of that when it learns of it, and what a queue drops and dead-letters comes
	// to another one before or behind what the session publishes there.
	burst int
}

// one is one of several, or, rarely, one of those that are odd.
func one[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

func (g *generator) in(n int) bool { return g.IntN(n) == 0 }

func (g *generator) aQueue() string     { return fmt.Sprintf("@q%d", g.IntN(3)) }
func (g *generator) anExchange() string { return fmt.Sprintf("@x%d", g.IntN(3)) }
func (g *generator) aSender() string    { return fmt.Sprintf("s%d", g.IntN(2)) }
func (g *generator) aReceiver() string  { return fmt.Sprintf("r%d", g.IntN(3)) }

func (g *generator) aSession(sends bool) string {
	c := g.IntN(2)
	if g.poison {
		c = map[bool]int{false: 0, true: 1}[sends]
	}
	if !sends && !g.spread {
		return fmt.Sprintf("c%d.1", c)
	}
	return fmt.Sprintf("c%d.%d", c, g.IntN(3))
}

func (g *generator) aKey() string { return one(g, "a", "b", "a.b", "a.b.c", "", g.aQueue()) }

func (g *generator) aTime() int64 {
	if g.expedited && g.in(2) {
		return brief
	}
	return long
}

func (g *generator) queue(name string) declare {
	d := declare{Queue: name}
	if g.in(12) {
		d.Kind = one(g, "classic", "classic", "none", "bogus")
	}
	if g.in(40) {
		d.AutoDelete = true
	}
	if g.in(40) {
		d.Exclusive = true
	}
	if g.in(60) {
		d.Transient = true
	}
	a := args{}
	if g.in(3) {
		a["x-delivery-limit"] = one[any](g, int64(0), int64(1), int64(2), int32(3), int64(-1))
	}
	if g.in(2) {
		if a["x-dead-letter-exchange"] = one(g, "", "", "@x0", "@x1", "@none"); a["x-dead-letter-exchange"] == "" || g.in(2) {
			a["x-dead-letter-routing-key"] = one(g, g.aQueue(), g.aKey())
		}
		if g.in(4) {
			a["x-dead-letter-strategy"] = one(g, "at-least-once", "at-least-once", "at-most-once")
			if !g.in(4) {
				a["x-overflow"] = "reject-publish"
			}
		}
	}
	if g.in(6) {
		a["x-max-length"] = int64(g.IntN(4))
	}
	if g.in(10) {
		a["x-max-length-bytes"] = int64(g.IntN(200))
	}
	if g.in(8) {
		a["x-overflow"] = one(g, "drop-head", "reject-publish", "reject-publish", "reject-publish-dlx")
	}
	if g.in(8) || g.expedited && g.in(3) {
		a["x-message-ttl"] = g.aTime()
	}
	if g.in(20) {
		a["x-expires"] = int64(long)
	}
	if g.in(8) {
		a["x-single-active-consumer"] = true
	}
	if g.in(20) || g.expedited && g.in(4) {
		a["x-delayed-retry-type"] = one(g, "disabled", "all", "failed", "returned")
		a["x-delayed-retry-min"] = g.aTime()
		a["x-delayed-retry-max"] = int64(long)
	}
	if g.in(15) {
		name := one(g, "x-delivery-limit", "x-max-length", "x-message-ttl", "x-overflow", "x-dead-letter-strategy", "x-dead-letter-exchange",
			"x-single-active-consumer", "x-unknown", "x-max-priority", "x-queue-mode", "x-delayed-retry-type", "x-max-length-bytes", "x-queue-leader-locator")
		a[name] = one[any](g, "2", "text", int64(-2), int64(0), true, 1.5, []byte("b"), uint8(3), nil)
	}
	if len(a) > 0 {
		d.Arguments = a
	}
	limited := a["x-max-length"] != nil || a["x-max-length-bytes"] != nil
	if limited && a["x-dead-letter-exchange"] != nil || a["x-overflow"] == "reject-publish" || a["x-overflow"] == "reject-publish-dlx" {
		g.burst = 1
	}
	return d
}

func (g *generator) exchange(name string) declareExchange {
	d := declareExchange{Exchange: name, Type: one(g, "direct", "fanout", "topic", "topic", "headers", "x-modulus-hash")}
	if g.in(5) {
		d.Arguments = args{"alternate-exchange": one(g, g.anExchange(), g.anExchange(), "@none", "amq.fanout")}
	}
	switch g.IntN(40) {
	case 0:
		d.Type = "bogus"
	case 1:
		d.Internal = true
	case 2:
		d.AutoDelete = true
	case 3:
		d.Transient = true
	case 4:
		d.Arguments = args{one(g, "alternate-exchange", "x-any"): one[any](g, int64(1), true, "text")}
	}
	return d
}

func (g *generator) binding() bind {
	b := bind{Source: g.anExchange(), Queue: g.aQueue(), Key: one(g, g.aKey(), g.aKey(), "#", "*", "a.*", "*.b", "#.b", "a.#", "a.#.c")}
	if g.in(5) {
		b.Queue, b.Exchange = "", g.anExchange()
	}
	if g.in(3) {
		b.Arguments = args{"x-match": one(g, "all", "any", "all-with-x", "any-with-x"), one(g, "k", "l", "x-k"): g.aValue()}
		if g.in(2) {
			b.Arguments[one(g, "k", "l", "x-k")] = g.aValue()
		}
		if g.in(8) {
			b.Arguments["x-match"] = one[any](g, "bogus", int64(1))
		}
	}
	if g.in(30) {
		b.Source = one(g, "@none", "", "amq.direct")
	}
	return b
}

func (g *generator) aValue() any { return one[any](g, "v", "v", "w", int64(1), true) }

func (g *generator) sender() send {
	s := send{Link: g.aSender(), On: g.aSession(true), To: "/queues/" + g.aQueue()}
	switch g.IntN(10) {
	case 0, 1, 2:
		s.To = "/exchanges/" + g.anExchange() + "/" + g.aKey()
	case 3:
		s.To = "/exchanges/" + g.anExchange()
	case 4, 5:
		s.To, s.Anonymous = "", true
	case 6:
		if g.in(4) {
			s.To = g.anAddress()
		}
	}
	s.Presettled = g.in(20)
	return s
}

func (g *generator) anAddress() string {
	return one(g, "/queues/@none", "/exchanges/@none/k", "/exchanges/@none", "/queues/", "/exchanges/", "/exchanges//k", "nonsense", "/queues/%40", "/queues/a%zz",
		"/exchanges/amq.direct/@none", "/queues/"+g.aQueue()+"/more", "/exchanges/"+g.anExchange()+"/k/more", "", "/exchanges/amq.default/"+g.aQueue())
}

func (g *generator) receiver() receive {
	r := receive{Link: g.aReceiver(), On: g.aSession(false), From: "/queues/" + g.aQueue()}
	if g.in(5) {
		r.Priority = one[int32](g, -1, 1, 2, 10)
	}
	r.Presettled = g.in(15)
	if g.in(30) {
		r.From = one(g, "/queues/@none", "/exchanges/@x0/k", "nonsense", "/queues/", "", "/queues/a%zz", "/queues/"+g.aQueue()+"/more", "/queues/%40")
	}
	return r
}

func (g *generator) message() message {
	m := message{}
	if g.in(2) {
		m.To = one(g, "/queues/"+g.aQueue(), "/queues/"+g.aQueue(), "/exchanges/"+g.anExchange()+"/"+g.aKey(), g.anAddress())
	}
	if g.in(3) {
		m.Durable = true
	}
	if g.in(4) {
		m.Priority = 1 + one(g, 0, 3, 4, 5, 9, 31, 200)
	}
	if g.in(8) || g.expedited && g.in(3) {
		m.TTL = uint32(g.aTime())
	}
	if g.in(20) {
		m.Count = uint32(g.IntN(4))
	}
	if g.in(5) {
		m.Properties = args{one(g, "k", "l", "x-k"): g.aValue(), one(g, "m", "k"): one[any](g, nil, 1.5, uint8(7), []byte("b"), "v")}
	}
	if g.in(6) {
		m.Annotations = args{one(g, "x-k", "x-own", "x-opt-own"): one[any](g, "v", int64(7), true, int32(3), []any{"a", int64(1)}, args{"k": "v"}, []byte("b"))}
	}
	if g.poison && g.in(10) {
		m.Annotations = args{"x-k": one[any](g, 1.5, nil)}
	}
	if g.in(30) {
		m.Annotations = args{"x-cc": one[any](g, []any{"a", g.aQueue()}, []any{}, "a", []any{int64(1)})}
	}
	if g.in(20) {
		m.Annotations = args{"x-opt-delivery-time": one[any](g, after(g.aTime()), after(g.aTime()), after(-1000), "soon", int64(5))}
	}
	switch g.IntN(40) {
	case 0:
		m.Size = 70_000
	case 1:
		m.Size = 200_000
	case 2, 3, 4:
		m.Size = g.IntN(300)
	case 5:
		m.Value = one[any](g, "text", int64(1), nil, []any{"a"}, args{"k": "v"})
	case 6:
		m.Subject = "subject"
	case 7:
		if g.in(3) {
			m.Raw = one(g, []byte{}, []byte{1, 2, 3}, []byte{0, 0x53, 0x70, 0x45})
		}
	}
	return m
}

func (g *generator) outcome() outcome {
	switch g.IntN(12) {
	case 0, 1, 2:
		return outcome{}
	case 3, 4:
		return outcome{Kind: "released"}
	case 5:
		return outcome{Kind: "rejected"}
	case 6:
		return outcome{Kind: "rejected", Error: "no"}
	}
	o := outcome{Kind: "modified", Failed: g.in(2), Undeliverable: g.in(4)}
	if g.in(4) {
		o.Annotations = args{one(g, "x-k", "x-opt-own", "x-l"): one[any](g, "v", "v", int64(2), true, []any{"a"}, args{"k": "v"}, int32(3), []byte("b"))}
	}
	if g.in(10) || g.expedited && g.in(4) {
		o.Annotations = args{"x-opt-delivery-time": after(g.aTime())}
		if g.in(2) {
			o.Annotations["x-opt-deferral-token"] = one[any](g, "t0", "t0", "t1", "t1", "t2", []byte("t0"), int64(7))
		}
	}
	if g.poison && g.in(10) {
		o.Annotations = args{one(g, "no-x", "x-bad"): one[any](g, nil, 1.5)}
	}
	if g.in(100) {
		return outcome{Kind: "none"}
	}
	return o
}

// operation is any one.
func (g *generator) operation() operation {
	switch n := g.IntN(100); {
	case n < 25:
		p := publish{Link: g.aSender(), Count: 1 + g.IntN(g.burst), Settled: g.in(8), Message: g.message()}
		if g.in(15) {
			p.Frames = 2 + g.IntN(3)
		}
		switch p.Message.Annotations["x-k"].(type) {
		case nil, float64:
			if len(p.Message.Annotations) > 0 && g.poison {
				p.Count = 1 // a consumer gets those behind it before its session has crashed, or doesn't
			}
		}
		return p
	case n < 50:
		s := settle{Link: g.aReceiver(), First: g.IntN(2), Outcome: g.outcome(), Unsettled: g.in(20)}
		s.Last = s.First + g.IntN(3)
		return s
	case n < 62:
		c := credit{Link: g.aReceiver(), N: uint32(g.IntN(6)), Drain: g.in(4)}
		if g.in(5) {
			c.Tokens = one(g, []any{"t0"}, []any{"t0"}, []any{"t1"}, []any{"t1", "t0"}, []any{"none", "t2"}, []any{"t0", int64(1)})
		}
		return c
	case n < 67:
		return g.receiver()
	case n < 71:
		return g.sender()
	case n < 76:
		return detach{Link: one(g, g.aReceiver(), g.aReceiver(), g.aSender()), Keep: g.in(5)}
	case n < 78:
		return again{Link: g.aReceiver(), N: g.IntN(3), Outcome: g.outcome()}
	case n < 80:
		return endSession{g.aSession(g.in(2))}
	case n < 83 && g.spread:
		return endSession{g.aSession(false)}
	case n < 82:
		return cut{one(g, "c0", "c1")}
	case n < 83:
		return hangUp{one(g, "c0", "c1")}
	case n < 86:
		return g.queue(g.aQueue())
	case n < 88:
		return g.exchange(g.anExchange())
	case n < 92:
		return g.binding()
	case n < 93:
		return unbind(g.binding())
	case n < 95:
		return inspect{one(g, g.aQueue(), "@none")}
	case n < 97:
		return purge{one(g, g.aQueue(), g.aQueue(), "@none")}
	case n < 99:
		return deleteQueue{one(g, g.aQueue(), g.aQueue(), "@none")}
	}
	return deleteExchange{one(g, g.anExchange(), "@none", "amq.direct", "amq.default")}
}
