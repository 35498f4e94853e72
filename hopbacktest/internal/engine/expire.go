package engine

import "time"

// expire takes expired messages off the heads of the queue. RabbitMQ 4.3 looks at the
// head of each priority once the next message has expired, 4.0 at the next one only. At
// a timer, all is set.
func (q *queue) expire(all bool) {
	now := q.b.now()
	old := func(e *entry) bool { return e.expiry != 0 && e.expiry <= now }
	if !q.b.version.newer || !q.quorum() {
		for q.ready.n > 0 && old(q.ready.peek()) {
			q.expired(q.next())
		}
		return
	}
	if q.ready.n == 0 || !all && !old(q.ready.peek()) {
		return
	}
	take := func(r *ring[*entry]) {
		for r.len() > 0 && old(r.at(0)) {
			e := r.pop()
			q.ready.n--
			q.bytes -= q.size(e.msg)
			q.expired(e)
		}
	}
	take(&q.ready.returned)
	for i := len(q.ready.buckets) - 1; i >= 0; i-- {
		take(&q.ready.buckets[i])
	}
}

func (q *queue) expired(e *entry) {
	q.forget(e)
	q.b.log(q, logExpired, e.msg)
	q.deadLetter(e, reasonExpired)
}

// wake sets the queue's timer, unless it goes off earlier anyway.
func (q *queue) wake(at int64) {
	if q.gone || q.wakeAt != 0 && q.wakeAt <= at {
		return
	}
	q.wakeAt = at
	// The clock is read in whole milliseconds, which are rounded down.
	d := time.Until(time.UnixMilli(at).Add(-q.b.ahead))
	if q.timer == nil {
		q.timer = time.AfterFunc(d, q.tick)
	} else {
		q.timer.Reset(d)
	}
}

// wakeForTTL sets the timer for the messages that are next.
func (q *queue) wakeForTTL() {
	// One that has expired behind the next message waits for its turn; see expire.
	now, nextOnly := q.b.now(), !q.b.version.newer || !q.quorum()
	q.ready.heads(func(e *entry) {
		if e.expiry != 0 && (e.expiry > now || !nextOnly || e == q.ready.peek()) {
			q.wake(e.expiry)
		}
	})
}

// wakeForExpiry sets the timer for the end of an unused queue.
func (q *queue) wakeForExpiry() {
	if q.expires >= 0 && len(q.consumers) == 0 {
		q.wake(q.idleSince + q.expires + 1)
	}
}

// tick is what the timer does.
func (q *queue) tick() {
	b := q.b
	b.lock()
	defer b.unlock()
	if q.gone || q.wakeAt == 0 || !b.running {
		return
	}
	now := b.now()
	if q.wakeAt > now {
		at := q.wakeAt
		q.wakeAt = 0
		q.wake(at)
		return
	}
	q.wakeAt = 0
	if q.expires >= 0 && len(q.consumers) == 0 && now > q.idleSince+q.expires {
		b.log(q, logQueueExpired, nil)
		b.deleteQueue(q)
		return
	}
	if q.frozen == 0 {
		for next := q.delayed.next(); next != 0 && next <= now; next = q.delayed.next() {
			q.ready.requeue(q.delayed.pop())
		}
		if q.ttls {
			q.expire(true)
		}
		q.timeOut(now)
		q.run()
	}
	q.rearm()
}

// rearm finds when the timer has to go off next.
func (q *queue) rearm() {
	if q.gone {
		return
	}
	if q.ttls && q.frozen == 0 {
		q.wakeForTTL()
	}
	if at := q.delayed.next(); at != 0 && q.frozen == 0 {
		q.wake(at)
	}
	for _, c := range q.consumers {
		for d := c.oldest; d != nil; d = d.next {
			if !d.revoked {
				if d.deadline != 0 {
					q.wake(d.deadline)
				}
				break
			}
		}
	}
	q.wakeForExpiry()
}

// timeOut takes back what consumers have held too long. They get nothing more until they
// have settled it.
func (q *queue) timeOut(now int64) {
	if !q.b.version.newer {
		return
	}
	for _, c := range q.consumers {
		for d := c.oldest; d != nil; d = d.next {
			if d.revoked {
				continue
			}
			if d.deadline == 0 || d.deadline > now {
				break
			}
			d.revoked, c.timedOut = true, true
			c.late++
			q.held--
			q.heldBytes -= q.size(d.msg)
			q.b.log(q, logRevoked, d.msg)
			c.session.conn.emit(Event{Kind: EventRevoked, Session: c.session, Consumer: c, Delivery: d})
			q.requeueUnsettled(d.entry, false, nil)
		}
		if c.timedOut && q.active == c && c.held == c.late {
			q.active = nil
		}
	}
	q.activate()
}
