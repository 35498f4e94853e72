package engine

// deadLetter sends a message that has left its queue on, if the queue has a dead-letter
// exchange, or hands it to the queue's worker, if that sends it at least once.
func (q *queue) deadLetter(e *entry, reason string) {
	if !q.deadLetters {
		q.b.log(q, logDropped, e.msg)
		return
	}
	if q.atLeastOnce && reason != reasonLength {
		q.b.log(q, logDead, e.msg)
		q.worker.add(e, reason)
		q.touch()
		return
	}
	x := q.vhost.exchanges[q.deadExchange]
	if x == nil {
		q.b.log(q, logDropped, e.msg)
		return
	}
	q.b.log(q, logDead, e.msg)
	m := e.copyFor()
	q.newDeadLetter(m, reason)
	for _, target := range q.vhost.route(x, m) {
		if reason == reasonRejected || !m.cycles(target.name) {
			q.b.onward = append(q.b.onward, onward{m, target})
		}
	}
}

// onward is a dead letter on its way. A queue looks at each that comes before the next one
// does: if it can't keep them, they go on in the order in which they came.
type onward struct {
	m  *message
	to *queue
}

// newDeadLetter makes a message a dead letter of the queue.
func (q *queue) newDeadLetter(m *message, reason string) {
	keys := m.keys
	m.die(q.name, reason, q.b.now())
	if q.hasDeadKey {
		keys = []string{q.deadKey}
	}
	m.keys, m.exchange = keys, q.deadExchange
}
