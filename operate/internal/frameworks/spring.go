package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

// spring recognizes the RabbitMQ binder of Spring Cloud Stream
// (RabbitExchangeQueueProvisioner.java, 4.1), and anonymous queues of Spring AMQP:
//
//	<destination>               topic exchange
//	<destination>.<group>       queue            bound by "#"; dead-letters, under its name, to
//	DLX                         direct exchange
//	<destination>.<group>.dlq   queue            with dlqTtl and dlqDeadLetterExchange, delays and
//	                                             returns messages
//	<destination>.anonymous.…   queue            without a group
//
// A prefix and the name of the dead-letter exchange are configurable.
func (v *view) spring() []*match {
	m := newMatch()
	m.central = true
	m.cure = "Set max-attempts: 1 and republish-to-dlq: false: a message that fails is then rejected, and the central retrier delays it. The binder's queues can be quorum queues: quorum.enabled and dlqQuorum.enabled."
	for _, q := range v.free() {
		if dlq := v.springDLQ(q); dlq != nil {
			v.addSpring(m, q, dlq)
		} else if anonymous(q.name) {
			m.certain = true
			m.addQueue(q)
			if m.because == "" {
				m.because = fmt.Sprintf("the queue %s has the name of an anonymous consumer", short(q.name))
			}
		}
	}
	if m.because == "" {
		return nil
	}
	for _, q := range v.free() { // groups without a dead-letter queue
		if at := destination(q); at != "" && m.exchanges[at] {
			m.addQueue(q)
		}
	}
	return []*match{m}
}

// springDLQ is the dead-letter queue of q, or nil. The partitions of a group share one.
func (v *view) springDLQ(q *queue) *queue {
	if !q.deadLetters || q.deadKey == "" || !v.isExchange(q.deadTo, string(declare.ExchangeDirect)) {
		return nil
	}
	base := q.name
	if at := strings.LastIndexByte(base, '-'); at > 0 && digits(base[at+1:]) && v.queueOf[base+".dlq"] == nil {
		base = base[:at]
	}
	if dlq := v.queueOf[base+".dlq"]; dlq != nil && !dlq.claimed && v.bound(dlq.name, q.deadTo, q.deadKey) {
		return dlq
	}
	return nil
}

func (v *view) addSpring(m *match, q, dlq *queue) {
	m.addQueue(q)
	m.addQueue(dlq)
	m.addExchange(q.deadTo)
	m.addExchange(dlq.deadTo)
	at := destination(q)
	m.addExchange(at)
	m.certain = m.certain || at != "" && strings.HasSuffix(q.deadTo, "DLX")
	if m.because == "" {
		m.because = fmt.Sprintf("the queue %s dead-letters through %s to %s", short(q.name), short(q.deadTo), short(dlq.name))
	}
	if dlq.delays() {
		m.variant = "retry by dead-letter queue"
	}
}

// destination is the topic exchange that q is bound to as a group, or "".
func destination(q *queue) string {
	for _, b := range q.bindings {
		if b.Source != "" && strings.HasPrefix(q.name, b.Source+".") {
			return b.Source
		}
	}
	return ""
}

// anonymous reports whether a name ends as Spring's anonymous queues do: with a UUID of 22
// characters in URL-safe base64.
func anonymous(name string) bool {
	for _, before := range []string{".anonymous.", "spring.gen-"} {
		at := strings.LastIndex(name, before)
		if at >= 0 && (before[0] == '.' || at == 0) && len(name)-at-len(before) == 22 {
			return true
		}
	}
	return false
}
