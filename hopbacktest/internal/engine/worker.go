package engine

import (
	"slices"
	"time"
)

// inFlight is how many dead letters a worker has in flight.
const inFlight = 32

// worker hands the dead letters of a queue on, each at least once. It keeps a letter
// until all queues that it is routed to have confirmed it, and tries again after
// Config.DeadLetterRetry.
type worker struct {
	q       *queue
	waiting ring[deadLetter]
	pending []*deadLetter
	bytes   int64
	timer   *time.Timer
	armed   bool
}

// deadLetter is a dead letter at its worker.
type deadLetter struct {
	entry  *entry
	reason string
	msg    *message // the message to send, nil before that
	// keys are the routing keys that it had in its queue.
	keys      []string
	sent      int64 // when it was last sent, 0: never
	unsettled []*queue
	rejected  []*queue
	settled   []*queue
}

func (w *worker) count() int { return w.waiting.len() + len(w.pending) }

func (w *worker) add(e *entry, reason string) {
	w.bytes += int64(e.msg.size())
	w.q.b.count(1, e.msg.weight+e.weight)
	w.waiting.push(deadLetter{entry: e, reason: reason, keys: e.msg.keys})
}

// drop forgets a dead letter that has arrived or isn't wanted any more.
func (w *worker) drop(l *deadLetter) {
	w.bytes -= int64(l.entry.msg.size())
	w.q.forget(l.entry)
}

func (w *worker) purge() int {
	n := w.count()
	for w.waiting.len() > 0 {
		l := w.waiting.pop()
		w.drop(&l)
	}
	for _, l := range w.pending {
		w.drop(l)
	}
	w.pending = nil
	return n
}

// run sends what may be sent now.
func (w *worker) run() {
	for len(w.pending) < inFlight && w.waiting.len() > 0 {
		l := w.waiting.pop()
		w.pending = append(w.pending, &l)
		w.send(&l)
	}
	w.arm()
}

// send sends a dead letter for the first time.
func (w *worker) send(l *deadLetter) {
	q := w.q
	l.msg = l.entry.copyFor()
	q.newDeadLetter(l.msg, l.reason)
	l.msg.used = false
	targets := w.targets(l)
	if len(targets) == 0 {
		return
	}
	l.sent = q.b.now()
	l.unsettled = slices.Clone(targets)
	w.publish(l, targets)
}

// targets are the queues that a dead letter is routed to now, without those that it would
// return from endlessly.
func (w *worker) targets(l *deadLetter) []*queue {
	x := w.q.vhost.exchanges[w.q.deadExchange]
	if x == nil {
		return nil
	}
	targets := w.q.vhost.route(x, l.msg)
	if l.reason == reasonRejected {
		return targets
	}
	return slices.DeleteFunc(slices.Clone(targets), func(q *queue) bool { return l.msg.cycles(q.name) })
}

func (w *worker) publish(l *deadLetter, targets []*queue) {
	for _, target := range targets {
		target.receive(l.msg, w, func(taken bool) { w.answered(l, target, taken) })
	}
}

// answered notes a target's confirmation or rejection.
func (w *worker) answered(l *deadLetter, target *queue, taken bool) {
	gone := func(q *queue) bool { return q == target }
	if !taken {
		if slices.ContainsFunc(l.unsettled, gone) {
			l.unsettled = slices.DeleteFunc(l.unsettled, gone)
			l.rejected = append(l.rejected, target)
		}
		return
	}
	l.unsettled = slices.DeleteFunc(l.unsettled, gone)
	l.rejected = slices.DeleteFunc(l.rejected, gone)
	l.settled = append(l.settled, target)
	if len(l.unsettled)+len(l.rejected) == 0 {
		w.done(l)
	}
}

func (w *worker) done(l *deadLetter) {
	i := slices.Index(w.pending, l)
	if i < 0 {
		return
	}
	w.pending = slices.Delete(w.pending, i, i+1)
	w.drop(l)
	w.q.touch()
}

// forgets notes that a target queue was deleted.
func (w *worker) forgets(target *queue) {
	for _, l := range w.pending {
		l.unsettled = slices.DeleteFunc(l.unsettled, func(q *queue) bool { return q == target })
	}
}

// arm sets the timer only while dead letters are in flight.
func (w *worker) arm() {
	switch {
	case len(w.pending) == 0:
		if w.armed {
			w.timer.Stop()
			w.armed = false
		}
	case !w.armed:
		w.armed = true
		if d := w.q.b.cfg.DeadLetterRetry; w.timer == nil {
			w.timer = time.AfterFunc(d, w.tick)
		} else {
			w.timer.Reset(d)
		}
	}
}

func (w *worker) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
	w.armed = false
}

func (w *worker) tick() {
	b := w.q.b
	b.lock()
	defer b.unlock()
	if !w.armed || w.q.gone || w.q.worker != w || !b.running {
		return
	}
	w.armed = false
	if w.q.frozen == 0 {
		w.again()
	}
	w.arm()
}

// again sends what was rejected, not confirmed in time, or never sent.
func (w *worker) again() {
	q := w.q
	x := q.vhost.exchanges[q.deadExchange]
	if x == nil {
		return
	}
	now, patience := q.b.now(), q.b.cfg.DeadLetterRetry.Milliseconds()
	for _, l := range slices.Clone(w.pending) {
		if l.sent != 0 && l.sent+patience > now {
			continue
		}
		m := *l.msg
		m.used, m.first = false, entry{}
		m.exchange, m.keys = q.deadExchange, l.keys
		if q.hasDeadKey {
			m.keys = []string{q.deadKey}
		}
		l.msg = &m
		routed := q.vhost.route(x, l.msg)
		if len(routed) == 0 && len(l.settled) > 0 {
			w.done(l)
			continue
		}
		var unsettled, targets []*queue
		for _, target := range routed {
			if slices.Contains(l.settled, target) {
				continue
			}
			unsettled = append(unsettled, target)
			// What a target hasn't answered yet, its client sends again by itself.
			waiting := slices.Contains(l.unsettled, target) && target.kind != typeClassic
			if !waiting && (l.reason == reasonRejected || !l.msg.cycles(target.name)) {
				targets = append(targets, target)
			}
		}
		if len(targets) == 0 {
			continue
		}
		l.sent, l.unsettled, l.rejected = now, unsettled, nil
		w.publish(l, targets)
	}
}
