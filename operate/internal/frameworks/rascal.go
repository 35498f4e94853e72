package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

// rascal recognizes the retries that Rascal's documentation configures
// (examples/advanced/config.js, version 20). A republished message carries the name of its queue
// as a further routing key:
//
//	delay                topic exchange
//	delay:<n>            queue             bound by "delay.<n>"; delays, then dead-letters to
//	retry                topic exchange    returns by "<queue>.#"
//	dead_letters         topic exchange    what is rejected for good
//
// All names are the user's own. A namespace comes before them, with a colon.
func (v *view) rascal() []*match {
	m := newMatch()
	m.central = true
	m.cure = `Use the strategy "nack" alone: the central retrier then delays what is rejected.`
	back := map[string]bool{} // exchanges that return by "<queue>.#"
	for _, q := range v.free() {
		for _, b := range q.bindings {
			if b.Key == q.name+".#" && v.isExchange(b.Source, string(declare.ExchangeTopic)) {
				back[b.Source] = true
			}
		}
	}
	for _, q := range v.free() {
		if !q.delays() || q.hasDeadKey || !v.isExchange(q.deadTo, string(declare.ExchangeTopic)) {
			continue
		}
		for _, b := range q.bindings {
			delay, named := strings.CutPrefix(unspaced(q.name, b.Source), "delay:")
			named = named && b.Key == "delay."+delay && strings.HasSuffix(b.Source, "delay")
			if !v.isExchange(b.Source, string(declare.ExchangeTopic)) || !named && !back[q.deadTo] {
				continue
			}
			m.certain = m.certain || named
			if m.because == "" {
				m.because = fmt.Sprintf("the delay queue %s passes messages on to the topic exchange %s", short(q.name), short(q.deadTo))
				if back[q.deadTo] {
					m.because += ", which returns them by their queue's name"
				}
			}
			m.addQueue(q)
			m.addExchange(b.Source)
			m.addExchange(q.deadTo)
		}
	}
	if m.because == "" {
		return nil
	}
	v.rascalWork(m)
	return []*match{m}
}

// unspaced is a queue's name without the namespace that its exchange's name has, too.
func unspaced(name, source string) string {
	if space, ok := strings.CutSuffix(source, "delay"); ok {
		return strings.TrimPrefix(name, space)
	}
	return name
}

// rascalWork adds the queues that get messages back, and where they dead-letter to.
func (v *view) rascalWork(m *match) {
	for _, q := range v.free() {
		for _, b := range q.bindings {
			if b.Key != q.name+".#" || !m.exchanges[b.Source] {
				continue
			}
			m.addQueue(q)
			if x := v.xOf[q.deadTo]; x != nil && q.deadLetters && !m.exchanges[x.name] {
				m.addExchange(x.name)
				for _, dead := range x.outs {
					if dead.Queue != "" {
						m.queues[dead.Queue] = true
					}
				}
			}
		}
	}
}
