package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
)

// view is a snapshot with indexes. It has the arguments of declarations, and no policies:
// frameworks declare, operators set policies.
type view struct {
	queues    []*queue
	exchanges []*exchange
	queueOf   map[string]*queue
	xOf       map[string]*exchange
	bindings  map[route]bool
	ladders   []*ladder
}

// route is a binding without its arguments.
type route struct{ source, key, queue string }

// queue is a queue. A dead-letter routing key may be empty and still be set.
type queue struct {
	name, kind       string
	passing          bool // not durable, auto-delete, or exclusive
	deadLetters      bool
	deadTo, deadKey  string
	hasDeadKey       bool
	ttl, expires     int64 // in milliseconds; 0 if not set
	bindings         []declare.Binding
	claimed, isLevel bool
}

// exchange is an exchange. ins and outs are its bindings.
type exchange struct {
	name, kind, alternate string
	durable               bool
	ins, outs             []declare.Binding
	claimed               bool
}

func newView(s check.Snapshot) *view {
	v := &view{queueOf: map[string]*queue{}, xOf: map[string]*exchange{}, bindings: map[route]bool{}}
	for _, info := range s.Queues {
		q := &queue{name: info.Name, kind: info.Type, passing: !info.Durable || info.AutoDelete || info.Exclusive}
		q.deadTo, q.deadLetters = info.Arguments["x-dead-letter-exchange"].(string)
		q.deadKey, q.hasDeadKey = info.Arguments["x-dead-letter-routing-key"].(string)
		q.ttl, _ = info.Arguments["x-message-ttl"].(int64)
		q.expires, _ = info.Arguments["x-expires"].(int64)
		v.queues, v.queueOf[q.name] = append(v.queues, q), q
	}
	for _, info := range s.Exchanges {
		x := &exchange{name: info.Name, kind: string(info.Type), durable: info.Durable}
		x.alternate, _ = info.Arguments["alternate-exchange"].(string)
		v.exchanges, v.xOf[x.name] = append(v.exchanges, x), x
	}
	for _, b := range s.Bindings {
		if x := v.xOf[b.Source]; x != nil {
			x.outs = append(x.outs, b)
		}
		if q := v.queueOf[b.Queue]; b.Queue != "" && q != nil {
			q.bindings = append(q.bindings, b)
			v.bindings[route{b.Source, b.Key, b.Queue}] = true
		}
		if x := v.xOf[b.Exchange]; b.Exchange != "" && x != nil {
			x.ins = append(x.ins, b)
		}
	}
	v.ladders = v.findLadders()
	return v
}

// claim hides what m contains from later recognizers.
func (v *view) claim(m *match) {
	for name := range m.queues {
		if q := v.queueOf[name]; q != nil {
			q.claimed = true
		}
	}
	for name := range m.exchanges {
		if x := v.xOf[name]; x != nil {
			x.claimed = true
		}
	}
}

func (v *view) hasQueue(name string) bool    { return v.queueOf[name] != nil }
func (v *view) hasExchange(name string) bool { return v.xOf[name] != nil && name != "" }

// isExchange reports whether there is such an exchange, of such a type, that is nobody's yet.
func (v *view) isExchange(name, kind string) bool {
	x := v.xOf[name]
	return x != nil && x.kind == kind && !x.claimed
}

// free are the queues that are nobody's yet.
func (v *view) free() []*queue {
	var list []*queue
	for _, q := range v.queues {
		if !q.claimed {
			list = append(list, q)
		}
	}
	return list
}

// bound reports whether a queue is bound to an exchange with a key.
func (v *view) bound(queue, source, key string) bool { return v.bindings[route{source, key, queue}] }

// delays reports whether q holds messages for a time and then passes them on.
func (q *queue) delays() bool { return q.ttl > 0 && q.deadLetters }

func (m *match) addQueue(q *queue) { m.queues[q.name] = true }

// addExchange adds an exchange, but not one that every virtual host has.
func (m *match) addExchange(name string) {
	if name != "" && !strings.HasPrefix(name, "amq.") {
		m.exchanges[name] = true
	}
}

// short is a name in quotes. Names may have 255 bytes of anything.
func short(name string) string { return fmt.Sprintf("%.80q", name) }
