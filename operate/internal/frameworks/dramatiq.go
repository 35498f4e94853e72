package frameworks

import (
	"fmt"
	"strings"
)

// dramatiq recognizes Dramatiq's queues (dramatiq/brokers/rabbitmq.py, version 1.17). Delayed
// messages wait in its workers' memory, not in the broker:
//
//	<queue>, <queue>.DQ   queue   dead-letter to
//	<queue>.XQ            queue   drops messages after 7 days
func (v *view) dramatiq() []*match {
	m := newMatch()
	m.central = true
	m.cure = "Set max_retries=0 for the actors: a message that fails is then rejected, and the central retrier can use <queue>.XQ as its failed queue. Delays longer than the broker's consumer timeout come back early and repeat, because workers hold delayed messages unacknowledged."
	for _, q := range v.free() {
		base, ok := strings.CutSuffix(q.name, ".XQ")
		work := v.queueOf[base]
		if !ok || work == nil || work.claimed || !work.deadLetters || work.deadTo != "" || work.deadKey != q.name {
			continue
		}
		delayed := v.queueOf[base+".DQ"]
		if delayed != nil && delayed.deadKey == q.name {
			m.certain = true
			m.addQueue(delayed)
		}
		if m.because == "" {
			m.because = fmt.Sprintf("the queue %s dead-letters to %s", short(base), short(q.name))
			if m.certain {
				m.because += fmt.Sprintf(", as %s does", short(delayed.name))
			}
		}
		m.addQueue(work)
		m.addQueue(q)
	}
	if m.because == "" {
		return nil
	}
	return []*match{m}
}
