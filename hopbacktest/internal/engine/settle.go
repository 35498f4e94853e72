package engine

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// Settle settles deliveries with the outcome of a disposition. Those that are settled
// already are ignored. A fault has ended the session.
func (s *Session) Settle(deliveries []*Delivery, state any) *Fault {
	b := s.conn.b
	b.lock()
	defer b.unlock()
	if s.over {
		return nil
	}
	do, fault := b.outcome(state)
	if fault != nil {
		held := false
		for _, d := range deliveries {
			held = held || d.entry != nil
		}
		if !held { // RabbitMQ doesn't look at the outcome then
			return nil
		}
		return s.fail(fault)
	}
	for _, d := range deliveries {
		if d.entry == nil || d.Consumer.session != s {
			continue
		}
		q, e, late := d.Consumer.queue, d.entry, d.revoked
		q.release(d)
		if q.gone {
			continue
		}
		switch {
		case late:
			q.activate()
		case q.frozen > 0:
			q.owed = append(q.owed, func() { do(q, e) })
		default:
			do(q, e)
		}
		q.touch()
	}
	for _, d := range deliveries {
		if d.entry == nil && d.Consumer.session == s {
			d.Consumer.quiesced(returns(state))
		}
	}
	return nil
}

// returns says whether an outcome gives a message back to its queue.
func returns(state any) bool {
	switch state := state.(type) {
	case *frames.Released:
		return true
	case *frames.Modified:
		return !state.UndeliverableHere
	}
	return false
}

// outcome is what an outcome does to a message of a queue.
func (b *Broker) outcome(state any) (func(*queue, *entry), *Fault) {
	switch state := state.(type) {
	case *frames.Accepted:
		return func(q *queue, e *entry) {
			q.b.log(q, logAccepted, e.msg)
			q.forget(e)
		}, nil
	case *frames.Rejected:
		return func(q *queue, e *entry) { q.discard(e, true, nil) }, nil
	case *frames.Released:
		return func(q *queue, e *entry) {
			if !b.version.newer && q.quorum() && q.limit < 0 {
				q.requeue(e)
				return
			}
			q.requeueUnsettled(e, false, nil)
		}, nil
	case *frames.Modified:
		added := make(frames.Map, 0, len(state.Annotations))
		poisoned := false
		for _, a := range state.Annotations {
			key, ok := a.Key.(frames.Symbol)
			if !ok || !strings.HasPrefix(string(key), "x-") {
				return nil, internalError("{function_clause,[{rabbit_amqp_session,'-settle_op_from_outcome/1-fun-0-',[%v]}]}", a.Key)
			}
			if _, text := a.Value.(string); key == deferralToken && !text && b.version.newest {
				return nil, &Fault{ScopeSession, &frames.Error{
					Condition: "amqp:invalid-field", Description: deferralToken + " must be of AMQP type utf8, got: " + term(a.Value),
				}}
			}
			v, ok := inferred(a.Value)
			poisoned = poisoned || !ok
			added = append(added, frames.Entry{Key: key, Value: v})
		}
		added = with(nil, added)
		if len(added) > 0 && b.overfull() {
			return nil, &Fault{ScopeSession, &frames.Error{
				Condition: "amqp:resource-limit-exceeded", Description: "this broker has reached its configured limit",
			}}
		}
		return func(q *queue, e *entry) {
			anns := added
			if !q.quorum() {
				anns = nil
			} else {
				e.poisoned = e.poisoned || poisoned
				q.poison = q.poison || poisoned
			}
			if state.UndeliverableHere {
				q.discard(e, state.DeliveryFailed, anns)
			} else {
				q.requeueUnsettled(e, state.DeliveryFailed, anns)
			}
		}, nil
	}
	text := fmt.Sprintf("%T", state)
	if state == nil {
		text = "undefined"
	}
	return nil, &Fault{ScopeSession, &frames.Error{Condition: "amqp:invalid-field", Description: "Unrecognised state: " + text + " in DISPOSITION"}}
}

func internalError(format string, args ...any) *Fault {
	return &Fault{ScopeSession, &frames.Error{Condition: "amqp:internal-error", Description: fmt.Sprintf(format, args...)}}
}

// mark notes that a message has been acquired, and what its consumer said of it.
func (e *entry) mark(failed bool, added frames.Map) {
	e.acquired++
	if failed {
		e.failed++
	}
	if len(added) > 0 {
		e.added = with(e.added, added)
	}
}

// mark is that of the entry, whose annotations count for what the broker may hold.
func (q *queue) mark(e *entry, failed bool, added frames.Map) {
	e.mark(failed, added)
	if len(added) > 0 {
		q.b.count(0, -e.weight)
		e.weight = weight(e.added)
		q.b.count(0, e.weight)
	}
}

// counts says whether the queue counts failed deliveries.
func (q *queue) counts() bool { return q.quorum() || q.b.version.newer }

// requeueUnsettled returns a message to its queue, or to where messages go that were delivered too
// often.
func (q *queue) requeueUnsettled(e *entry, failed bool, added frames.Map) {
	q.mark(e, failed && q.counts(), added)
	if !q.quorum() {
		q.bytes += q.size(e.msg)
		q.ready.requeue(e)
		q.returned = true
		q.touch()
		return
	}
	counted := e.acquired
	if q.b.version.newer {
		counted = e.failed
	}
	if q.limit >= 0 && int64(counted) > q.limit {
		q.forget(e)
		q.deadLetter(e, reasonLimit)
		q.touch()
		return
	}
	q.bytes += q.size(e.msg)
	if at, ok := q.delay(e, failed, added); ok {
		q.b.log(q, logDelayed, e.msg)
		v, _ := added.Get(deferralToken)
		if token, ok := v.(string); ok && q.b.version.newest && timed(added) == at {
			q.delayed.park(at, e, token)
		} else {
			q.delayed.push(at, e)
		}
		q.wake(at)
	} else {
		q.b.log(q, logReturned, e.msg)
		q.ready.requeue(e)
		if e.expiry != 0 {
			q.wake(e.expiry)
		}
	}
	q.touch()
}

// requeue puts a released message behind all others. RabbitMQ 4.0 does where there is no
// delivery limit.
func (q *queue) requeue(e *entry) {
	e.mark(false, nil)
	q.index++
	e.index = q.index
	q.bytes += q.size(e.msg)
	q.b.log(q, logReturned, e.msg)
	q.ready.buckets[0].push(e)
	q.ready.n++
	q.touch()
}

// delay says whether a message that comes back has to wait, and until when. RabbitMQ 4.0
// knows no delays.
func (q *queue) delay(e *entry, failed bool, added frames.Map) (int64, bool) {
	if !q.b.version.newer {
		return 0, false
	}
	if at := timed(added); at > q.b.now() {
		return at, true
	}
	switch q.retry {
	case retryAll:
	case retryFailed:
		if !failed {
			return 0, false
		}
	case retryReturned:
		if failed {
			return 0, false
		}
	default:
		return 0, false
	}
	return q.b.now() + min(q.retryMin*int64(max(1, e.failed)), q.retryMax), true
}

const (
	deliveryTime  = "x-opt-delivery-time"
	deferralToken = "x-opt-deferral-token"
)

// timed is the delivery time in ms that a modified outcome has set, 0 for none.
func timed(added frames.Map) int64 {
	v, _ := added.Get(deliveryTime)
	at, _ := v.(int64)
	return at
}

// deliveryTime is when a message that is published, or dead-lettered at least once, is to be
// delivered, in ms. 0 means at once, as anything that is no whole number does.
func (m *message) deliveryTime() int64 {
	v, ok := m.added.Get(deliveryTime)
	if !ok {
		if v, ok = m.sent.Get(deliveryTime); !ok {
			return 0
		}
	}
	if at, ok := v.(frames.Timestamp); ok {
		return int64(at)
	}
	switch n := reflect.ValueOf(v); {
	case n.CanInt():
		return n.Int()
	case n.CanUint():
		return int64(min(n.Uint(), math.MaxInt64))
	}
	return 0
}

// discard takes a message that its consumer doesn't want out of the queue.
func (q *queue) discard(e *entry, failed bool, added frames.Map) {
	q.mark(e, failed && q.counts(), added)
	q.forget(e)
	q.deadLetter(e, reasonRejected)
	q.touch()
}
