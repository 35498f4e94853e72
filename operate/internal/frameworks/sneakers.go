package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

const sneakersCure = "Its worker rejects to retry, so the central retrier can replace the Maxretry handler."

// sneakers recognizes the Maxretry handler of Sneakers and Kicks
// (lib/sneakers/handlers/maxretry.rb, Kicks 3.0):
//
//	<queue>                 queue                  dead-letters to
//	<queue>-retry           topic exchange, queue  bound by "#"; delays, then dead-letters to
//	<queue>-retry-requeue   topic exchange         bound by "#" to <queue>
//	<queue>-error           topic exchange, queue  for messages that used up their retries
//
// The names of all but the first are configurable.
func (v *view) sneakers() []*match {
	m := newMatch()
	m.central, m.cure = true, sneakersCure
	for _, retry := range v.free() {
		back := v.xOf[retry.deadTo]
		if !retry.delays() || retry.hasDeadKey || back == nil || back.kind != string(declare.ExchangeTopic) || back.name == retry.name ||
			!v.isExchange(retry.name, string(declare.ExchangeTopic)) || !v.bound(retry.name, retry.name, "#") {
			continue
		}
		base, named := strings.CutSuffix(retry.name, "-retry")
		m.certain = m.certain || named && back.name == retry.name+"-requeue"
		if m.because == "" {
			m.because = fmt.Sprintf("the queue %s delays what its own exchange gets, and passes it on to %s", short(retry.name), short(back.name))
		}
		m.addQueue(retry)
		m.addExchange(retry.name)
		if !m.exchanges[back.name] { // several queues may share it
			m.addExchange(back.name)
			v.sneakersWorkers(m, retry, back)
		}
		if v.isExchange(base+"-error", string(declare.ExchangeTopic)) {
			m.addExchange(base + "-error")
			m.queues[base+"-error"] = true
		}
	}
	if m.because == "" {
		return nil
	}
	if v.isExchange("sneakers", string(declare.ExchangeDirect)) {
		m.addExchange("sneakers")
	}
	return []*match{m}
}

// sneakersWorkers adds the queues that get messages back.
func (v *view) sneakersWorkers(m *match, retry *queue, back *exchange) {
	for _, b := range back.outs {
		work := v.queueOf[b.Queue]
		if b.Queue == "" || work == nil || m.queues[work.name] {
			continue
		}
		m.addQueue(work)
		if !work.deadLetters {
			m.cure = fmt.Sprintf("The queue %s has no dead-letter exchange, so what its worker rejects is lost, not retried: declare it with x-dead-letter-exchange %s, or set that by a policy. ", short(work.name), short(retry.name)) + sneakersCure
		}
	}
}
