package frameworks

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/hopback/hopback/declare"
)

// handBuilt is the name for retries that teams build themselves from RabbitMQ's parts. Variants
// tell the patterns apart. examples/p1 to p8 show each of them, and what replaces it.
const handBuilt = "hand-built retries"

const handBuiltCure = "Its workers reject what fails, or can: the central retrier then delays it, by a retry policy, and keeps what used up its retries."

// handBuilt recognizes patterns among the queues that are no framework's.
func (v *view) handBuilt() []*match {
	var found []*match
	for _, find := range []func() *match{v.topicDelays, v.countedDelays, v.unknownLadders, v.plugin, v.waitQueues, v.requeueQueue, v.messageTTL} {
		if m := find(); m != nil {
			m.central, m.cure = true, handBuiltCure+m.cure
			v.claim(m)
			found = append(found, m)
		}
	}
	return found
}

// topicDelays: delay queues that all work queues share. A worker publishes with the key
// delay.<ms>.<queue>.
func (v *view) topicDelays() *match {
	m, back := newMatch(), map[string]bool{}
	for _, q := range v.free() {
		key := "delay." + strconv.FormatInt(q.ttl, 10) + ".#"
		for _, b := range q.bindings {
			if q.delays() && b.Key == key && v.isExchange(b.Source, string(declare.ExchangeTopic)) && v.isExchange(q.deadTo, string(declare.ExchangeTopic)) {
				m.certain, back[q.deadTo] = true, true
				m.because = fmt.Sprintf("the delay queue %s is bound to %s by %s, and passes messages on to %s", short(q.name), short(b.Source), short(key), short(q.deadTo))
				m.addQueue(q)
				m.addExchange(b.Source)
				m.addExchange(q.deadTo)
			}
		}
	}
	if m.because == "" {
		return nil
	}
	m.variant = "topic delay queues"
	m.cure = " hopback's workers can share these queues with yours."
	for name := range back {
		for _, b := range v.xOf[name].outs {
			if b.Queue != "" && b.Key == "*.*."+b.Queue {
				m.queues[b.Queue] = true
			}
		}
	}
	return m
}

// countedDelays: a headers exchange routes to a delay queue by a header that a process counts up.
func (v *view) countedDelays() *match {
	m, headers := newMatch(), map[string]string{} // by exchange
	for _, q := range v.free() {
		for _, b := range q.bindings {
			name, count := counted(b)
			if q.delays() && name != "" && count >= 0 && v.isExchange(b.Source, string(declare.ExchangeHeaders)) {
				headers[b.Source] = name
				m.certain = m.certain || name == "count"
				m.because = fmt.Sprintf("the delay queue %s is bound to %s by the header %s", short(q.name), short(b.Source), short(name))
				m.addQueue(q)
				m.addExchange(b.Source)
				m.addExchange(q.deadTo)
			}
		}
	}
	if m.because == "" {
		return nil
	}
	m.variant = "headers exchange with a counter"
	for source, header := range headers {
		for _, b := range v.xOf[source].outs {
			if name, _ := counted(b); b.Queue != "" && name == header {
				m.queues[b.Queue] = true
			}
		}
	}
	for _, q := range v.free() {
		for _, b := range q.bindings {
			if m.exchanges[b.Source] && headers[b.Source] == "" { // where the delay queues return to
				m.addQueue(q)
				m.addExchange(q.deadTo)
			}
		}
	}
	return m
}

// counted is the header and the value of a binding by one number.
func counted(b declare.Binding) (name string, count int64) {
	if len(b.Headers) != 1 {
		return "", 0
	}
	for k, v := range b.Headers {
		if n, ok := v.(int64); ok {
			return k, n
		}
	}
	return "", 0
}

func (v *view) unknownLadders() *match {
	m := newMatch()
	for _, l := range v.ladders {
		if l.levels[0].claimed {
			continue
		}
		m.variant = "ladder of delay queues"
		m.because = fmt.Sprintf("the queues %s to %s are a ladder of delays", short(l.levels[0].name), short(l.levels[len(l.levels)-1].name))
		l.add(m)
	}
	if m.because == "" {
		return nil
	}
	return m
}

// plugin: the delayed-message exchange plugin.
func (v *view) plugin() *match {
	m := newMatch()
	for _, x := range v.exchanges {
		if x.kind != delayedType || x.claimed {
			continue
		}
		m.certain, m.variant = true, "delayed-message plugin"
		m.because = fmt.Sprintf("the exchange %s is of the type %s", short(x.name), delayedType)
		m.cure = " The plugin is archived, and keeps each waiting message on one node only."
		m.addExchange(x.name)
		for _, b := range x.outs {
			if b.Queue != "" {
				m.queues[b.Queue] = true
			}
		}
	}
	if m.because == "" {
		return nil
	}
	return m
}

// waitQueues: a work queue dead-letters to a delay queue, which returns messages.
func (v *view) waitQueues() *match {
	from := map[string]bool{}   // exchanges that work queues dead-letter to
	direct := map[string]bool{} // queues that they dead-letter to through the default exchange
	for _, q := range v.free() {
		if q.deadLetters && q.ttl == 0 {
			from[q.deadTo] = true
			direct[q.deadKey] = direct[q.deadKey] || q.deadTo == ""
		}
	}
	delete(from, "")
	m, waits := newMatch(), map[string]bool{}
	for _, q := range v.free() {
		if !q.delays() {
			continue
		}
		at := ""
		for _, b := range q.bindings {
			if from[b.Source] {
				at = b.Source
				waits[at] = true
			}
		}
		if at == "" && !direct[q.name] {
			continue
		}
		m.because = fmt.Sprintf("a work queue dead-letters to the delay queue %s, which passes messages on to %s", short(q.name), exchangeName(q.deadTo))
		m.addQueue(q)
		m.addExchange(at)
		m.addExchange(q.deadTo)
	}
	if m.because == "" {
		return nil
	}
	m.variant = "delay queue behind a dead-letter exchange"
	for _, q := range v.free() {
		if q.deadLetters && q.ttl == 0 && (waits[q.deadTo] || q.deadTo == "" && m.queues[q.deadKey]) {
			m.addQueue(q)
		}
	}
	return m
}

func exchangeName(name string) string {
	if name == "" {
		return "the default exchange"
	}
	return short(name)
}

// requeueQueue: a process consumes dead letters, and publishes them to their queue again at once.
func (v *view) requeueQueue() *match {
	m := newMatch()
	for _, q := range v.free() {
		if !strings.Contains(q.name, "requeue") || q.deadLetters {
			continue
		}
		for _, b := range q.bindings {
			if v.xOf[b.Source] != nil && !v.xOf[b.Source].claimed {
				m.exchanges[b.Source] = true
				m.queues[q.name] = true
			}
		}
	}
	work := false
	for _, q := range v.free() {
		if q.deadLetters && q.deadTo != "" && m.exchanges[q.deadTo] {
			work = true
			m.addQueue(q)
			m.because = fmt.Sprintf("the queue %s dead-letters to %s, which has a queue for requeueing", short(q.name), short(q.deadTo))
		}
	}
	if !work {
		return nil
	}
	m.variant = "requeue queue"
	return m
}

// messageTTL: messages with a time to live of their own wait in one queue for all delays.
func (v *view) messageTTL() *match {
	m := newMatch()
	for _, q := range v.free() {
		back := v.xOf[q.deadTo]
		if !q.deadLetters || q.ttl != 0 || back == nil || back.claimed || !waitName(q.name) {
			continue
		}
		for _, b := range q.bindings {
			if b.Source != back.name && v.xOf[b.Source] != nil {
				m.addQueue(q)
				m.addExchange(b.Source)
			}
		}
		if m.queues[q.name] && !m.exchanges[back.name] { // several queues may share it
			m.addExchange(back.name)
			m.because = fmt.Sprintf("the queue %s has no time to live, and dead-letters to %s", short(q.name), short(back.name))
			for _, to := range back.outs {
				if to.Queue != "" {
					m.queues[to.Queue] = true
				}
			}
		}
	}
	if m.because == "" {
		return nil
	}
	m.variant = "time to live of each message"
	m.certain = m.queues["work_queue"] && m.queues["retry_queue"] && m.exchanges["work_exchange"] && m.exchanges["retry_exchange"]
	m.cure = " A long delay blocks the shorter ones behind it: use a queue for each delay."
	return m
}

// waitName reports whether a name says that messages wait there.
func waitName(name string) bool {
	for _, word := range []string{"retry", "delay", "wait"} {
		if strings.Contains(strings.ToLower(name), word) {
			return true
		}
	}
	return false
}
