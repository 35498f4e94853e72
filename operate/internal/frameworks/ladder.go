package frameworks

import (
	"strings"

	"github.com/hopback/hopback/declare"
)

// ladder is a row of delay queues. Each holds a message for twice as long as the one below. NServiceBus, Celery, and hopback declare one. A message's routing key has a bit for each
// level: where it is 1, the message waits in the level's queue, and otherwise passes by.
type ladder struct {
	levels []*queue // highest first
	// exit is the exchange that level 0 passes messages on to.
	exit string
	// spill is the levels' alternate exchange, or "".
	spill string
}

// findLadders finds the ladders by their shape.
func (v *view) findLadders() []*ladder {
	below := map[string]bool{} // levels that another one leads to
	for _, q := range v.queues {
		if q.isLevel = v.level(q); q.isLevel {
			below[q.deadTo] = true
		}
	}
	var found []*ladder
	for _, top := range v.queues {
		if !top.isLevel || below[top.name] {
			continue
		}
		l := &ladder{spill: v.xOf[top.name].alternate}
		for q := top; q != nil && q.isLevel; q = v.queueOf[l.exit] {
			q.isLevel = false // a cycle has no top; this also ends a walk into another ladder
			l.levels, l.exit = append(l.levels, q), q.deadTo
		}
		if len(l.levels) > 1 {
			found = append(found, l)
		}
	}
	return found
}

// level reports whether q is a level of a ladder: a delay queue with a topic exchange of the same
// name, which sends 1s to q and 0s to where q dead-letters.
func (v *view) level(q *queue) bool {
	x := v.xOf[q.name]
	if x == nil || x.kind != string(declare.ExchangeTopic) || !q.delays() || len(x.outs) > 64 {
		return false
	}
	var waits, passes bool
	for _, b := range x.outs {
		waits = waits || b.Queue == q.name && bit(b.Key, '1')
		passes = passes || b.Exchange == q.deadTo && bit(b.Key, '0')
	}
	// The bindings that pass messages by may be gone.
	return waits && (passes || v.queueOf[q.deadTo] != nil && v.xOf[q.deadTo] != nil)
}

// bit reports whether key matches one bit of a row: stars, the bit, and a hash.
func bit(key string, value byte) bool {
	for strings.HasPrefix(key, "*.") {
		key = key[2:]
	}
	return len(key) == 3 && key[0] == value && key[1:] == ".#"
}

// add adds the levels, with the exchange below them, to m.
func (l *ladder) add(m *match) {
	for _, q := range l.levels {
		m.addQueue(q)
		m.addExchange(q.name)
	}
	m.addExchange(l.exit)
}

// named reports whether all levels are called by the prefix and a number, and returns what comes
// before the prefix.
func (l *ladder) named(prefix string) (before string, ok bool) {
	for i, q := range l.levels {
		at := strings.LastIndex(q.name, prefix)
		if at < 0 || !digits(q.name[at+len(prefix):]) {
			return "", false
		}
		if i > 0 && q.name[:at] != before {
			return "", false
		}
		before = q.name[:at]
	}
	return before, true
}

// digits reports whether s is a short number.
func digits(s string) bool {
	if s == "" || len(s) > 15 {
		return false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}
