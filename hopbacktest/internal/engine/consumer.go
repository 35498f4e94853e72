package engine

import (
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// Consumer is a link on which a client receives.
type Consumer struct {
	// Tag is the wire's.
	Tag any

	session *Session
	queue   *queue
	name    string
	attach  *frames.Attach
	settled bool // what it gets is settled
	// dropsQueue is set for a link whose queue is deleted with it.
	dropsQueue bool
	serial     uint64 // in the order of attaching
	priority   int64
	timeout    int64 // in ms

	attached   bool
	untaken    int    // deliveries that the wire hasn't taken
	waiting    bool   // it is in the queue's service
	credit     uint32 // that is left
	count      uint32 // the link's delivery-count
	drain      bool
	draining   bool // the answer to a drain waits for the wire
	timedOut   bool // it holds messages that were revoked
	quiescing  bool // another one is to be the single active one
	unnotified bool // it isn't notified that it is no longer active
	ghost      bool // its link is gone, and the queue doesn't know
	nextID     uint64
	oldest     *Delivery // the unsettled deliveries, in their order
	newest     *Delivery
	held       int
	late       int // of those that were revoked
	active     bool
	notified   bool // the client knows active
	// claims are parked messages that it has claimed and not got yet, by token.
	claims map[string][]*delayItem
}

// Attach is the broker's answer to the attach frame, without name and handle.
func (c *Consumer) Attach() *frames.Attach { return c.attach }

// Delivery is a message that was given to a consumer.
type Delivery struct {
	Consumer *Consumer
	// Tag is the wire's.
	Tag any

	entry      *entry // nil once it is settled
	id         uint64
	prev, next *Delivery
	deadline   int64
	revoked    bool

	// What is written of it doesn't change.
	msg              *message
	added            frames.Map
	acquired, failed uint32
	redelivered      bool
	newer, quorum    bool
}

// Settled says whether the delivery is sent settled: then nobody settles it.
func (d *Delivery) Settled() bool { return d.Consumer.settled }

// DeliveryTag is what RabbitMQ puts into the transfer frame.
func (d *Delivery) DeliveryTag() []byte {
	if !d.quorum && d.Settled() { // a classic queue doesn't count what it needs no answer for
		return []byte{}
	}
	if d.id > 1<<32-1 {
		return []byte{byte(d.id >> 56), byte(d.id >> 48), byte(d.id >> 40), byte(d.id >> 32), byte(d.id >> 24), byte(d.id >> 16), byte(d.id >> 8), byte(d.id)}
	}
	return []byte{byte(d.id >> 24), byte(d.id >> 16), byte(d.id >> 8), byte(d.id)}
}

// deliver gives a message to a consumer. A session crashes over a poisoned message; by then
// the queue has given it all that it can have.
func (q *queue) deliver(c *Consumer, e *entry) {
	c.credit--
	c.count++
	q.delivered++
	d := q.hold(c, e)
	q.service.add(c)
	q.b.log(q, logDelivered, e.msg)
	switch {
	case slices.Contains(q.crashing, c.session):
	case c.ghost: // a session that is alive gives it back, and no other ever settles
		if !c.session.over {
			q.release(d)
			q.requeueUnsettled(e, false, nil)
		}
		return
	case q.poison && q.quorum(): // how the session gets it depends on what follows
		c.untaken++
		q.together = append(q.together, d)
		return
	case d.poisoned(): // a classic queue sends one by one: those before it have been written
		q.crashing = append(q.crashing, c.session)
		c.session.conn.written(func(d *Delivery) bool { return d.Consumer.session == c.session })
	default:
		c.untaken++
		c.session.conn.emit(Event{Kind: EventDelivered, Session: c.session, Consumer: c, Delivery: d})
	}
	if c.settled {
		q.release(d)
		q.forget(e)
	}
}

// poisoned says whether the session crashes that is to deliver it.
func (d *Delivery) poisoned() bool { return d.msg.poisoned || d.entry.poisoned }

// hand hands out what a quorum queue with poisoned messages has delivered. A consumer gets its
// messages in portions. A session that crashes over one has written the portions before, and
// nothing of that one. It never gets those behind: they aren't lost, even if they are settled.
func (q *queue) hand() {
	together := q.together
	q.together = nil
	late := map[*Delivery]bool{}
	for _, d := range together {
		c, e := d.Consumer, d.entry
		switch {
		case slices.Contains(q.crashing, c.session):
			c.untaken--
		case d.poisoned():
			c.untaken--
			q.crashing = append(q.crashing, c.session)
			own := slices.DeleteFunc(slices.Clone(together), func(other *Delivery) bool { return other.Consumer != c })
			from, to := q.portion(own, slices.Index(own, d))
			c.session.conn.written(func(d *Delivery) bool { return slices.Contains(own[:from], d) })
			for _, d := range own[to:] {
				late[d] = true
			}
		default:
			c.session.conn.emit(Event{Kind: EventDelivered, Session: c.session, Consumer: c, Delivery: d})
		}
		if c.settled && !late[d] {
			q.release(d)
			q.forget(e)
		}
	}
}

// portionSize ends a portion: RabbitMQ puts no further message into one of so many bytes.
const portionSize = 128_000

// portion finds the portion of the nth of what a consumer gets together. RabbitMQ fills them
// from the last message on, so that the first one is what is left.
func (q *queue) portion(all []*Delivery, n int) (from, to int) {
	to = len(all)
	bytes := int64(0)
	for from = len(all); from > 0; from-- {
		if bytes >= portionSize {
			if from <= n {
				return from, to
			}
			to, bytes = from, 0
		}
		bytes += q.size(all[from-1].msg)
	}
	return 0, to
}

// delivery is a message in the form in which it is delivered now.
func (q *queue) delivery(e *entry) *Delivery {
	acquired := e.acquired
	if acquired == 0 { // what it brought along by dead-lettering is shown in its place
		acquired = e.failed
	}
	return &Delivery{
		msg: e.msg, added: e.added, acquired: acquired, failed: e.failed, redelivered: acquired > 0,
		newer: q.b.version.newer, quorum: q.quorum(),
	}
}

// hold makes a delivery that its consumer has to settle.
func (q *queue) hold(c *Consumer, e *entry) *Delivery {
	d := q.delivery(e)
	d.Consumer, d.entry, d.id = c, e, c.nextID
	c.nextID++
	if q.kind == typeClassic { // it numbers its messages
		d.id = e.index - 1
		if c.settled && e == q.fresh {
			q.index-- // but not those that it doesn't have to keep
		}
	}
	if d.prev = c.newest; d.prev != nil {
		d.prev.next = d
	} else {
		c.oldest = d
	}
	c.newest = d
	c.held++
	q.held++
	q.heldBytes += q.size(e.msg)
	if q.b.version.newer && q.quorum() && !c.settled && q.consumerTimeout > 0 {
		d.deadline = q.b.now() + c.timeout
		q.wake(d.deadline)
	}
	return d
}

// release takes a delivery off its consumer.
func (q *queue) release(d *Delivery) {
	c := d.Consumer
	if d.prev != nil {
		d.prev.next = d.next
	} else {
		c.oldest = d.next
	}
	if d.next != nil {
		d.next.prev = d.prev
	} else {
		c.newest = d.prev
	}
	c.held--
	if !d.revoked {
		q.held--
		q.heldBytes -= q.size(d.msg)
	} else if c.late--; c.late == 0 {
		c.timedOut = false
		q.service.add(c)
	}
	d.entry, d.prev, d.next = nil, nil, nil
}

// quiesced has the next consumer become the single active one, if this one has settled all that
// it held while it gave way. If the last of it went back to the queue, RabbitMQ 4.3 doesn't tell
// this one; 4.0 forgets the next one, until a consumer comes or goes, or the session of a
// publisher ends.
func (c *Consumer) quiesced(returned bool) {
	if !c.quiescing || c.held > 0 {
		return
	}
	c.quiescing = false
	switch q := c.queue; {
	case !returned || !q.quorum():
		q.activate()
	case q.b.version.newer:
		c.unnotified = true
		q.activate()
		c.unnotified = false
	default:
		q.active = nil
	}
}

// maxTokens is how many tokens a flow frame may have.
const maxTokens = 256

// Tokens are those of the parked messages that the properties of a client's flow frame claim. They
// aren't looked at before RabbitMQ 4.4. A fault has ended the session.
func (c *Consumer) Tokens(properties frames.Map) ([]string, *Fault) {
	const key = "rabbitmq:deferral-tokens"
	b := c.session.conn.b
	v, ok := properties.Get(key)
	if !ok || !b.version.newest {
		return nil, nil
	}
	refused := func(format string, args ...any) ([]string, *Fault) {
		b.lock()
		defer b.unlock()
		text := key + " must " + fmt.Sprintf(format, args...)
		return nil, c.session.fail(&Fault{ScopeSession, &frames.Error{Condition: "amqp:invalid-field", Description: text}})
	}
	array, ok := v.(frames.Array)
	if !ok || array.Type != frames.CodeString32 {
		return refused("be an array of AMQP type utf8, got: %s", term(v))
	}
	if n := len(array.Elements); n > maxTokens {
		return refused("contain at most %d tokens, got: %d", maxTokens, n)
	}
	tokens := make([]string, len(array.Elements))
	for i, e := range array.Elements {
		tokens[i], _ = e.(string)
	}
	return tokens, nil
}

// Flow takes the link's fields of a client's flow frame: delivery-count, link-credit,
// drain, echo. The engine counts the credit. Messages that are parked under one of tokens are
// delivered first; other tokens are ignored.
func (c *Consumer) Flow(flow *frames.Flow, tokens ...string) {
	b := c.session.conn.b
	b.lock()
	defer b.unlock()
	if !c.attached {
		return
	}
	q := c.queue
	q.delayed.claim(c, tokens)
	c.credit = uint32(max(0, int32(flow.DeliveryCount.Or(0)+flow.LinkCredit.Or(0)-c.count)))
	c.drain, c.draining = flow.Drain, false
	q.service.add(c)
	q.run() // deliveries go before the answer
	if q.hung {
		return
	}
	if c.full() {
		c.draining = c.drain
	} else {
		c.drained()
	}
	// RabbitMQ 4.3 notifies each consumer of a quorum queue once that it is active.
	notified := q.b.version.newer && q.quorum() && !c.notified
	if (flow.Drain && !c.draining || flow.Echo || notified) && c.attached {
		c.notify(flow.Drain && !c.draining)
	}
	if q.single && (q.active != nil || q.b.version.newer) {
		q.activate()
	}
}

// full says whether the queue has messages for the consumer that wait until the wire has
// taken others.
func (c *Consumer) full() bool {
	return c.attached && c.credit > 0 && c.untaken >= maxUntaken && c.queue.ready.n > 0
}

// drained uses up the credit of a consumer that drains.
func (c *Consumer) drained() {
	if c.drain && c.queue.frozen == 0 && c.attached {
		c.count += c.credit
		c.credit = 0
	}
}

// taken notes that the wire has taken a delivery.
func (c *Consumer) taken() {
	c.untaken--
	if !c.attached || c.untaken != maxUntaken/2 {
		return
	}
	q := c.queue
	q.service.add(c)
	q.run()
	if c.draining && !c.full() {
		c.draining = false
		c.drained()
		c.notify(true)
	}
}

// notify emits the link's flow state.
func (c *Consumer) notify(drain bool) {
	q := c.queue
	available := uint32(q.waiting())
	if q.single && q.active != c && q.quorum() {
		available = 0
	}
	flow := &frames.Flow{
		DeliveryCount: frames.Some(c.count), LinkCredit: frames.Some(c.credit), Available: frames.Some(available), Drain: drain,
	}
	if active := !q.single || q.active == c; q.b.version.newer && q.quorum() && (!c.notified || c.active != active) {
		c.notified, c.active = true, active
		flow.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:active"), Value: active}}
	}
	c.session.conn.emit(Event{Kind: EventFlowed, Session: c.session, Consumer: c, Flow: flow})
}

// Close closes the link at the client's wish. Its unsettled deliveries go back to the
// queue. It has no events afterwards.
func (c *Consumer) Close() {
	b := c.session.conn.b
	b.lock()
	defer b.unlock()
	c.cancel(false)
	c.queue.cutOff = false
	delete(c.session.consumers, c)
}

// cancel takes the consumer off its queue. What it holds goes back, as failed if down.
func (c *Consumer) cancel(down bool) {
	if !c.attached {
		return
	}
	c.attached = false
	q := c.queue
	q.cutOff = true
	haunts := c.quiescing && c.held > c.late && q.quorum() && q.b.version.newer
	c.quiescing = false // the next one is activated when all is back
	q.consumers = slices.DeleteFunc(q.consumers, func(other *Consumer) bool { return other == c })
	if q.gone {
		return
	}
	for d := c.oldest; d != nil; d = c.oldest {
		e, back := d.entry, !d.revoked
		q.release(d)
		if back {
			// A classic queue takes a link's end for a failure, too.
			q.requeueUnsettled(e, down || q.kind == typeClassic, nil)
		}
	}
	c.session.conn.purge(func(e *Event) bool { return e.Consumer == c && !e.written })
	q.idleSince = q.b.now()
	q.delayed.release(c)
	if haunts {
		// With its last message RabbitMQ 4.3 makes it one of those that wait, and then forgets to
		// remove it there. It goes when its session does, if that is still to come.
		c.attached, c.ghost = true, true
		q.consumers = append(q.consumers, c)
		if !c.session.over {
			c.session.ghosts = append(c.session.ghosts, c)
		}
	}
	if q.active == c {
		q.active = nil
	}
	if q.active == nil {
		q.activate()
	}
	q.touch()
	if len(q.consumers) == 0 && (q.autoDelete || c.dropsQueue) {
		q.b.deleteQueue(q)
		return
	}
	q.wakeForExpiry()
}

// activate chooses the single active consumer, if the queue has one.
func (q *queue) activate() {
	if !q.single || q.gone {
		return
	}
	var best *Consumer
	for _, c := range q.consumers {
		asks := best != nil && best != q.active && c.credit > best.credit && q.quorum()
		if !c.timedOut && (best == nil || c.priority > best.priority || c.priority == best.priority && asks) {
			best = c
		}
	}
	switch was := q.active; {
	case best == was:
		return
	case was != nil && was.attached && !q.quorum(): // it stays until it goes
		return
	case was != nil && was.attached && !was.timedOut && (best == nil || best.priority <= was.priority):
		return
	case was != nil && was.attached && was.held > was.late:
		was.quiescing = true
		return
	default:
		q.active = best
		if q.b.version.newer && q.quorum() {
			for _, c := range []*Consumer{was, best} {
				if c != nil && c.attached && !c.unnotified {
					c.notify(c.drain)
				}
			}
		}
	}
	if q.active != nil {
		q.service.add(q.active)
	}
	q.touch()
}
