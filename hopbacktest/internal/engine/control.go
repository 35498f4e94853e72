package engine

import (
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// What a test does to the broker.

// Alarm is the name of an alarm.
type Alarm string

// RabbitMQ's alarms.
const (
	AlarmMemory Alarm = "memory"
	AlarmDisk   Alarm = "disk"
)

// SetAlarm begins or ends an alarm.
func (b *Broker) SetAlarm(a Alarm, on bool) {
	b.lock()
	defer b.unlock()
	was := len(b.alarms) > 0
	if on {
		b.alarms[a] = true
	} else {
		delete(b.alarms, a)
	}
	is := len(b.alarms) > 0
	if was == is {
		return
	}
	kind := EventUnblocked
	if is {
		kind = EventBlocked
	}
	for _, c := range b.conns {
		c.emit(Event{Kind: kind})
	}
}

// Stop stops the broker: connections end without a word, and Connect and Authenticate
// fail until Start. What was confirmed stays; exclusive queues, and messages of classic
// queues that aren't durable, go. Time passes: messages that expire in between do so at the start.
func (b *Broker) Stop() {
	b.lock()
	defer b.unlock()
	b.stop()
}

func (b *Broker) stop() {
	if !b.running {
		return
	}
	for _, c := range slices.Clone(b.conns) {
		c.shut(nil)
	}
	b.running = false
	for _, v := range b.vhosts {
		for _, q := range v.sortedQueues() {
			q.halt()
			// Messages that weren't confirmed to the publisher aren't stored.
			q.backlog, q.unconfirmed = nil, nil
			q.settleOwed()
			switch {
			case !q.durable:
				b.deleteQueue(q)
			case q.kind == typeClassic:
				q.forgetTransient()
			}
		}
		for _, x := range v.sortedExchanges() {
			if !x.durable {
				v.deleteExchange(x)
			}
		}
	}
}

// forgetTransient drops the messages that a restart doesn't leave.
func (q *queue) forgetTransient() {
	var kept []*entry
	for q.ready.n > 0 {
		e := q.next()
		if e.msg.durable {
			kept = append(kept, e)
		} else {
			q.forget(e)
		}
	}
	for _, e := range kept {
		q.bytes += q.size(e.msg)
		q.ready.push(e)
	}
}

// Start starts it again.
func (b *Broker) Start() {
	b.lock()
	defer b.unlock()
	if b.running || b.closed {
		return
	}
	b.running = true
	for _, v := range b.vhosts {
		for _, q := range v.queues {
			q.frozen, q.silent, q.hung, q.enqueuers = 0, 0, false, nil
			for _, c := range slices.Clone(q.consumers) { // ghosts
				c.cancel(true)
			}
			q.idleSince = b.now()
			if w := q.worker; w != nil {
				w.restart()
			}
			q.touch()
			q.rearm()
		}
	}
}

// SetVersion makes a stopped broker another version from its next start on. Queues of 4.0 don't become
// newer ones.
func (b *Broker) SetVersion(full string) {
	b.lock()
	defer b.unlock()
	b.version = versionOf(full)
}

// TransientQueues are the names of queues that RabbitMQ 4.4 refuses: they are neither durable nor exclusive.
func (b *Broker) TransientQueues() (names []string) {
	b.peek()
	defer b.mu.Unlock()
	for _, v := range b.vhosts {
		for _, q := range v.sortedQueues() {
			if !q.durable && q.exclusive == nil {
				names = append(names, q.name)
			}
		}
	}
	return names
}

// restart makes a worker start over: everything in flight is sent again.
func (w *worker) restart() {
	for i := len(w.pending) - 1; i >= 0; i-- {
		l := w.pending[i]
		w.waiting.pushFront(deadLetter{entry: l.entry, reason: l.reason, keys: l.keys})
	}
	w.pending = nil
}

// Running is false between Stop and Start.
func (b *Broker) Running() bool {
	b.peek()
	defer b.mu.Unlock()
	return b.running
}

// find returns a queue by name.
func (b *Broker) find(vhost, queue string) (*queue, error) {
	if v := b.vhosts[vhost]; v != nil && v.queues[queue] != nil {
		return v.queues[queue], nil
	}
	return nil, fmt.Errorf("%w: queue %q in virtual host %q", ErrMissing, queue, vhost)
}

// ForgetQueue drops a queue with all that is in it, as if it had never been. Links on it are
// detached.
func (b *Broker) ForgetQueue(vhost, queue string) error {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, queue)
	if err == nil {
		b.deleteQueue(q)
	}
	return err
}

// EmptyQueue drops what is in a queue, also what consumers hold, and leaves the queue.
func (b *Broker) EmptyQueue(vhost, queue string) error {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, queue)
	if err == nil {
		q.drain()
	}
	return err
}

// MoveLeader moves a queue's leader to another node. Consumers and publishers stay attached,
// as with RabbitMQ; what was delivered and not settled stays with its consumer. The dead-letter
// worker starts over: everything in flight is sent again.
func (b *Broker) MoveLeader(vhost, queue, node string) error {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, queue)
	if err != nil {
		return err
	}
	if !slices.Contains(b.cfg.Nodes, node) {
		return fmt.Errorf("%w: node %q", ErrMissing, node)
	}
	q.leader = node
	if q.worker != nil {
		q.worker.restart()
	}
	q.touch()
	return nil
}

// Freeze makes a queue do nothing, as one without a leader, until thaw is called. What
// is published to it until then is neither stored nor answered; settlements wait, too.
func (b *Broker) Freeze(vhost, name string) (thaw func(), err error) {
	return b.hold(vhost, name, func(q *queue) *int { return &q.frozen }, func(q *queue) {
		q.settleOwed()
		backlog := q.backlog
		q.backlog = nil
		for _, do := range backlog {
			do()
		}
		q.touch()
		q.rearm()
	})
}

// settleOwed does the settlements that came while the queue was frozen.
func (q *queue) settleOwed() {
	owed := q.owed
	q.owed = nil
	for _, do := range owed {
		do()
	}
}

// HoldConfirms makes a queue store and deliver what is published to it, and confirm
// nothing until release is called.
func (b *Broker) HoldConfirms(vhost, name string) (release func(), err error) {
	return b.hold(vhost, name, func(q *queue) *int { return &q.silent }, func(q *queue) {
		held := q.unconfirmed
		q.unconfirmed = nil
		for _, answer := range held {
			answer(true)
		}
	})
}

func (b *Broker) hold(vhost, name string, count func(*queue) *int, end func(*queue)) (func(), error) {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, name)
	if err != nil {
		return nil, err
	}
	*count(q)++
	done := false
	return func() {
		b.lock()
		defer b.unlock()
		if done || q.gone || *count(q) == 0 {
			return
		}
		done = true
		if *count(q)--; *count(q) == 0 {
			end(q)
		}
	}, nil
}

// DetachConsumers ends all links of consumers of a queue, with a condition such as
// "amqp:resource-deleted". The queue stays.
func (b *Broker) DetachConsumers(vhost, queue string, condition string) error {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, queue)
	if err != nil {
		return err
	}
	for _, c := range slices.Clone(q.consumers) {
		c.cancel(false)
		c.session.detached(c, &frames.Error{Condition: frames.Symbol(condition)})
	}
	return nil
}

// CloseConnection closes a connection by its name, as an administrator does. It says
// whether there was one.
func (b *Broker) CloseConnection(name, reason string) bool {
	b.lock()
	defer b.unlock()
	for _, c := range b.conns {
		if c.name == name {
			c.shut(connectionForced(reason))
			return true
		}
	}
	return false
}
