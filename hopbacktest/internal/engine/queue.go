package engine

import (
	"slices"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// The types of queues.
const (
	typeQuorum  = "quorum"
	typeClassic = "classic"
	typeStream  = "stream"
)

// queue is a queue of any type. The broker's lock guards it.
type queue struct {
	b          *Broker
	vhost      *vhost
	name       string
	kind       string
	durable    bool
	exclusive  *Connection
	autoDelete bool
	args       table
	leader     string
	policy     *policy
	gone       bool
	volatile   bool // see volatile
	settings

	ready     ready
	delayed   delayed
	bytes     int64 // of what is ready or delayed
	held      int   // unsettled deliveries
	heldBytes int64
	index     uint64 // of the last entry
	fresh     *entry // that has just come

	consumers []*Consumer // in the order of their attaching
	// cutOff is set when a consumer has ended without closing its link: it may come back. The next
	// consumer that closes its link resets it.
	cutOff    bool
	crashing  []*Session  // over a message
	together  []*Delivery // what has been delivered and is to be handed out
	service   service
	active    *Consumer // the single active one
	used      bool      // it has had a consumer
	idleSince int64     // since when nobody has used it, in ms

	enqueuers map[any]*enqueuer
	bindings  []*binding // whose destination it is
	worker    *worker    // of its at-least-once dead-lettering
	self      [1]*queue

	// frozen queues do nothing; silent ones don't confirm.
	frozen, silent int
	hung           bool     // it is frozen for good
	backlog        []func() // publishes
	owed           []func() // settlements
	unconfirmed    []func(bool)

	dirty  bool // it is to be looked at before the lock is released
	ttls   bool // a message with a ttl has been here
	poison bool // a poisoned message has
	// returned is set when messages have come back to a classic queue.
	returned bool
	timer    *time.Timer
	wakeAt   int64 // when the timer goes off, 0: never

	published, delivered uint64
}

// settings are what arguments and policy make of a queue.
type settings struct {
	maxLength, maxBytes int64 // -1: none
	reject              bool  // overflow is reject-publish or reject-publish-dlx
	rejectDead          bool  // reject-publish-dlx, of a classic queue
	limit               int64 // of deliveries; -1: none
	expires, ttl        int64 // in ms; -1: none
	deadExchange        string
	deadLetters         bool
	deadKey             string
	hasDeadKey          bool
	atLeastOnce         bool
	retry               retryKind
	retryMin, retryMax  int64
	single              bool
	consumerTimeout     int64
	maxPriority         int
}

type retryKind uint8

const (
	retryDisabled retryKind = iota
	retryAll
	retryFailed
	retryReturned
)

// entry is a message in a queue.
type entry struct {
	msg      *message
	index    uint64
	expiry   int64 // in ms; 0: never
	acquired uint32
	failed   uint32
	poisoned bool
	added    frames.Map // by modified outcomes
	weight   int64      // about what added takes in memory
}

// enqueuer is a session or a dead-letter worker that publishes to a queue with overflow
// reject-publish.
type enqueuer struct{ blocked bool }

func (q *queue) quorum() bool { return q.kind == typeQuorum }

// touch has the queue looked at before the lock is released.
func (q *queue) touch() {
	if !q.dirty {
		q.dirty = true
		q.b.dirty = append(q.b.dirty, q)
	}
}

// waiting is how many messages are ready.
func (q *queue) waiting() int { return q.ready.n }

func (q *queue) deadCount() (n int, bytes int64) {
	if q.worker == nil {
		return 0, 0
	}
	return q.worker.count(), q.worker.bytes
}

func (q *queue) overLimit() bool {
	if q.maxLength < 0 && q.maxBytes < 0 {
		return false
	}
	dead, deadBytes := q.deadCount()
	return q.maxLength >= 0 && int64(q.ready.n+q.delayed.len()+dead) > q.maxLength ||
		q.maxBytes >= 0 && q.bytes+deadBytes > q.maxBytes
}

// roomy says whether a queue that has been full takes messages again.
func (q *queue) roomy() bool {
	dead, deadBytes := q.deadCount()
	below := func(limit, n int64) bool { return limit < 0 || n <= limit*8/10 }
	return below(q.maxLength, int64(q.ready.n+q.delayed.len()+dead)) && below(q.maxBytes, q.bytes+deadBytes)
}

// enqueue takes a message, from a session or a worker, or from nil for at-most-once
// dead-lettering, which nothing rejects. It says whether it has.
func (q *queue) enqueue(m *message, from any) bool {
	if q.kind == typeClassic {
		if q.reject && from != nil && q.fullClassic(m) {
			if q.rejectDead {
				e := &entry{msg: m}
				q.deadLetter(e, reasonLength)
			}
			return false
		}
	} else if q.reject && from != nil && (q.maxLength >= 0 || q.maxBytes >= 0) {
		known := q.enqueuers[from]
		if known == nil {
			known = &enqueuer{blocked: q.overLimit()}
			if q.enqueuers == nil {
				q.enqueuers = map[any]*enqueuer{}
			}
			q.enqueuers[from] = known
		}
		if known.blocked {
			return false
		}
	}
	if q.volatile && !q.takesNow() {
		return true // and is dropped
	}
	e := &m.first
	if m.used {
		e = new(entry)
	}
	m.used = true
	q.index++
	*e = entry{msg: m, index: q.index, failed: m.count}
	if ttl := shorter(q.ttl, m.ttl); ttl >= 0 && !q.volatile {
		e.expiry = q.b.now() + max(ttl, 1)
		q.ttls = true
		q.wake(e.expiry)
	}
	q.poison = q.poison || m.poisoned
	q.bytes += q.size(m)
	q.b.count(1, m.weight)
	if at := m.deliveryTime(); at > q.b.now() && q.b.version.newest && q.quorum() && from != nil {
		q.b.log(q, logDelayed, m)
		q.delayed.push(at, e)
		q.wake(at)
	} else {
		q.ready.push(e)
	}
	q.fresh = e
	q.published++
	q.b.log(q, logPublished, m)
	q.touch()
	return true
}

// size is what a message counts for in the bytes of the queue. Classic queues don't count
// annotations.
func (q *queue) size(m *message) int64 {
	if q.kind == typeClassic {
		return int64(len(m.Bare))
	}
	return int64(m.size())
}

func (q *queue) fullClassic(m *message) bool {
	return q.maxLength >= 0 && int64(q.ready.n) >= q.maxLength ||
		q.maxBytes >= 0 && q.bytes+q.size(m) > q.maxBytes
}

// shorter is the smaller of two times. Either can be -1, which means none.
func shorter(a, b int64) int64 {
	if a < 0 || b >= 0 && b < a {
		return b
	}
	return a
}

// forget lets go of an entry that is ready or delayed no more, and not held either.
func (q *queue) forget(e *entry) { q.b.count(-1, -e.msg.weight-e.weight) }

// next takes the message that is to be delivered next.
func (q *queue) next() *entry {
	if q.ready.n == 0 {
		return nil
	}
	e := q.ready.pop()
	q.bytes -= q.size(e.msg)
	return e
}

// run does all that can be done now: it expires, delivers, dead-letters and enforces
// the limits.
func (q *queue) run() {
	q.dirty = false
	if q.gone || q.frozen > 0 || !q.b.running {
		return
	}
	if q.returned { // a classic queue drops what is too much before it delivers any of it
		q.returned = false
		q.enforce()
	}
	for {
		if q.ttls {
			q.expire(false)
		}
		q.deliverClaimed()
		if q.ready.n == 0 {
			break
		}
		c := q.service.next()
		if c == nil {
			break
		}
		q.deliver(c, q.next())
	}
	q.fresh = nil
	if len(q.together) > 0 {
		q.hand()
	}
	for len(q.crashing) > 0 {
		s := q.crashing[0]
		q.crashing = q.crashing[1:]
		s.conn.crash(s)
	}
	if q.worker != nil {
		q.worker.run()
	}
	q.enforce()
}

// enforce keeps the queue within its limits.
func (q *queue) enforce() {
	if q.maxLength < 0 && q.maxBytes < 0 {
		if q.enqueuers != nil {
			q.enqueuers = nil
		}
		return
	}
	if q.kind == typeStream {
		return
	}
	if !q.reject {
		var dropped []*entry
		for q.overLimit() {
			e := q.next()
			if e == nil {
				q.hang()
				break
			}
			q.forget(e)
			q.b.log(q, logDropped, e.msg)
			if !q.atLeastOnce {
				dropped = append(dropped, e)
			}
		}
		if q.quorum() && !q.b.version.newer { // it dead-letters the last one first
			slices.Reverse(dropped)
		}
		for _, e := range dropped {
			q.deadLetter(e, reasonLength)
		}
		if q.ttls { // what has expired may be the next one now
			q.wakeForTTL()
		}
		return
	}
	if q.kind == typeClassic {
		return
	}
	switch {
	case q.overLimit():
		for _, e := range q.enqueuers {
			e.blocked = true
		}
	case q.roomy():
		for _, e := range q.enqueuers {
			e.blocked = false
		}
	}
}

// hang is what becomes of a queue of RabbitMQ 4.3 or later that has more delayed messages than it
// may hold: it searches endlessly for one that it can drop, and does nothing else any more.
func (q *queue) hang() {
	if q.quorum() && q.b.version.newer && q.delayed.len() > 0 && !q.hung {
		q.hung = true
		q.frozen++
		q.b.log(q, logHung, nil)
	}
}

// purge drops what is ready, delayed or, on 4.3, waiting for its dead-lettering, and says
// how much that was.
func (q *queue) purge() int {
	n := 0
	for q.ready.n > 0 {
		q.forget(q.next())
		n++
	}
	q.ready.counter = 0 // RabbitMQ 4.0 starts over with its turns, too
	for {
		e := q.delayed.pop()
		if e == nil {
			break
		}
		q.bytes -= q.size(e.msg)
		q.forget(e)
		n++
	}
	if q.worker != nil && q.b.version.newer {
		n += q.worker.purge()
	}
	q.touch()
	return n
}
