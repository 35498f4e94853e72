package frameworks

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/hopback/hopback/declare"
)

const (
	symfonyCure = "Set max_retries: 0 in the transport's retry_strategy: Messenger then rejects a message that fails, and the central retrier delays it. "
	day         = 24 * 60 * 60 * 1000
)

// symfony recognizes the AMQP transport of Symfony Messenger
// (Messenger/Bridge/Amqp/Transport/Connection.php, Symfony 7.4):
//
//	messages                                fanout exchange, queue
//	delays                                  direct exchange
//	delay_<exchange>_<key>_<ms>_<action>    queue, bound to delays by its own name;
//	                                        expires 10 s after its time to live, and dead-letters
//	                                        to the exchange, or for a retry to the queue
//
// action is "delay" or "retry". With daily_delay_queues, a date follows, and the queue expires a
// day later. The names of the exchange and what comes before the action are configurable.
func (v *view) symfony() []*match {
	m := newMatch()
	m.central, m.cure = true, symfonyCure
	for _, q := range v.free() {
		source, sure := v.symfonyDelay(q)
		if source == "" {
			continue
		}
		m.certain = m.certain || sure
		if m.because == "" {
			m.because = fmt.Sprintf("the delay queue %s is bound to %s by its own name", short(q.name), short(source))
			if q.expires > 0 {
				m.because += fmt.Sprintf(", and expires %d ms after its time to live", q.expires-q.ttl)
			}
		}
		m.addQueue(q)
		m.addExchange(source)
		m.addExchange(q.deadTo)
		if to := v.queueOf[q.deadKey]; q.deadTo == "" && to != nil && !m.queues[to.name] {
			m.addQueue(to)
			for _, b := range to.bindings {
				if strings.HasPrefix(q.name, "delay_"+b.Source+"_") {
					m.addExchange(b.Source)
				}
			}
		}
		if q.kind != "classic" {
			m.cure = symfonyCure + "Its delay queues must be classic, or set daily_delay_queues (Symfony 7.4): declaring a quorum queue again doesn't renew its lease, so it is deleted with the messages in it. "
		}
	}
	if m.because == "" && v.isExchange("delays", string(declare.ExchangeDirect)) && v.pair("messages") {
		m.because = `the exchanges "delays" and "messages" are its defaults`
		m.addExchange("delays")
		m.addExchange("messages")
	}
	if m.because == "" {
		return nil
	}
	for name := range m.exchanges {
		if x := v.xOf[name]; x != nil && x.kind == string(declare.ExchangeFanout) {
			for _, b := range x.outs {
				if b.Queue != "" {
					m.queues[b.Queue] = true
				}
			}
		}
	}
	m.cure = strings.TrimSpace(m.cure)
	return []*match{m}
}

// symfonyDelay returns the exchange to which a delay queue is bound, or "" if it isn't one.
func (v *view) symfonyDelay(q *queue) (source string, sure bool) {
	name := q.name
	if len(name) > 11 && strings.Count(name[len(name)-11:], "-") == 2 && name[len(name)-11] == '_' {
		name = name[:len(name)-11] // a date
	}
	action := strings.LastIndexByte(name, '_')
	if !q.delays() || !q.hasDeadKey || action < 0 || name[action:] != "_retry" && name[action:] != "_delay" {
		return "", false
	}
	lease := q.expires - q.ttl - 10_000
	expires := q.expires > 0 && (lease == 0 || lease == day)
	named := strings.HasSuffix(name[:action], "_"+strconv.FormatInt(q.ttl, 10))
	for _, b := range q.bindings {
		if b.Key == q.name && v.isExchange(b.Source, string(declare.ExchangeDirect)) && (expires || named) {
			return b.Source, expires
		}
	}
	return "", false
}
