package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// Publisher is a link on which a client sends.
type Publisher struct {
	// Tag is the wire's.
	Tag any

	session  *Session
	attach   *frames.Attach
	exchange string
	// key is the link's routing key. A link without an address has none: each message
	// tells its own.
	key       string
	keys      []string
	anonymous bool
	queue     string // of an address /queues/:q
	drops     *queue // a queue that is deleted with the link
	open      bool
	waiting   []*pending
	untaken   int    // outcomes that the wire hasn't taken
	known     uint64 // the topology that targets are of
	targets   []*queue
}

// pending is a message that not every queue has confirmed yet.
type pending struct {
	p         *Publisher
	id        uint32
	settled   bool
	queues    []*queue
	confirmed bool // by one queue
}

// Attach is the broker's answer to the attach frame, without name and handle.
func (p *Publisher) Attach() *frames.Attach { return p.attach }

// Unconfirmed is how many messages have no outcome yet, or one that wasn't taken. RabbitMQ
// grants the link no more credit while there are too many.
func (p *Publisher) Unconfirmed() int {
	b := p.session.conn.b
	b.lock()
	defer b.unlock()
	return len(p.waiting) + p.untaken
}

// Close closes the link at the client's wish. Its messages in flight have no
// outcome any more.
func (p *Publisher) Close() {
	b := p.session.conn.b
	b.lock()
	defer b.unlock()
	p.close()
	delete(p.session.publishers, p)
}

func (p *Publisher) close() {
	if !p.open {
		return
	}
	p.open, p.waiting = false, nil
	if p.drops != nil && !p.drops.gone {
		p.session.conn.b.deleteQueue(p.drops)
	}
}

// Publish takes an encoded message, which is the engine's from now on. Its outcome comes
// as an event Confirmed with this id, unless it is settled already. Outcomes come in
// any order.
func (p *Publisher) Publish(id uint32, settled bool, payload []byte) *Fault {
	b := p.session.conn.b
	m, err := parse(payload, &b.version)
	b.lock()
	defer b.unlock()
	switch {
	case !p.open || p.session.over:
		return nil
	case err != nil:
		return p.unparsed(err)
	case len(payload) > b.cfg.MaxMessageSize:
		text := fmt.Sprintf("message size (%d bytes) > maximum message size (%d bytes)", len(payload), b.cfg.MaxMessageSize)
		return p.session.fail(&Fault{ScopeSession, &frames.Error{Condition: "amqp:link:message-size-exceeded", Description: text}})
	}
	targets, fault := p.route(id, settled, m)
	if fault != nil || targets == nil {
		return fault
	}
	if len(targets) == 0 {
		if !settled {
			p.confirm(id, released)
		}
		return nil
	}
	if b.overfull() {
		if !settled {
			p.confirm(id, rejection("memory", "this broker has reached its configured limit"))
		}
		return nil
	}
	var open *pending
	for _, q := range targets {
		if q.frozen > 0 || q.silent > 0 {
			if open == nil {
				open = &pending{p: p, id: id, settled: settled, queues: slices.Clone(targets)}
				p.waiting = append(p.waiting, open)
			}
		}
	}
	if open != nil {
		for _, q := range targets {
			q.receive(m, p.session, func(taken bool) { open.answered(q, taken) })
		}
		return nil
	}
	refused := (*queue)(nil)
	for _, q := range targets {
		if !q.enqueue(m, p.session) {
			refused = q
		}
	}
	switch {
	case settled:
	case refused != nil:
		p.confirm(id, b.rejected(refused))
	default:
		p.confirm(id, accepted)
	}
	return nil
}

// unparsed ends the link over a message that can't be read. RabbitMQ 4.0's session crashes.
func (p *Publisher) unparsed(err error) *Fault {
	if !p.session.conn.b.version.newer {
		return p.fail("amqp:internal-error", err.Error())
	}
	reason := err.Error()
	if errors.Is(err, frames.ErrMalformed) {
		reason = "{not_a_message_section,{position,0}}"
	}
	return p.fail("amqp:decode-error", "failed to parse message: "+reason)
}

// receive is enqueue for a queue that may be frozen or silent.
func (q *queue) receive(m *message, from any, answer func(taken bool)) {
	if q.frozen > 0 {
		q.backlog = append(q.backlog, func() { q.receive(m, from, answer) })
		return
	}
	taken := q.enqueue(m, from)
	switch {
	case answer == nil:
	case taken && q.silent > 0:
		q.unconfirmed = append(q.unconfirmed, answer)
	default:
		answer(taken)
	}
}

// answered notes a queue's answer.
func (o *pending) answered(q *queue, taken bool) {
	if !slices.Contains(o.p.waiting, o) {
		return
	}
	o.queues = slices.DeleteFunc(o.queues, func(other *queue) bool { return other == q })
	o.confirmed = o.confirmed || taken
	switch {
	case !taken:
		o.finish(q.b.rejected(q))
	case len(o.queues) == 0:
		o.finish(accepted)
	}
}

// deleted notes that a queue which owed an answer was deleted.
func (o *pending) deleted(q *queue) {
	o.queues = slices.DeleteFunc(o.queues, func(other *queue) bool { return other == q })
	switch {
	case len(o.queues) > 0:
	case o.confirmed:
		o.finish(accepted)
	default:
		o.finish(released)
	}
}

func (o *pending) finish(state any) {
	o.p.waiting = slices.DeleteFunc(o.p.waiting, func(other *pending) bool { return other == o })
	if o.settled {
		state = nil // for the link's credit alone
	}
	o.p.confirm(o.id, state)
}

var (
	accepted any = &frames.Accepted{}
	released any = &frames.Released{}
)

func (p *Publisher) confirm(id uint32, state any) {
	p.untaken++
	p.session.conn.emit(Event{Kind: EventConfirmed, Session: p.session, Publisher: p, ID: id, State: state})
}

func rejection(reason, text string) any {
	return &frames.Rejected{Error: &frames.Error{
		Condition: "amqp:resource-limit-exceeded", Description: text,
		Info: frames.Map{{Key: frames.Symbol("reason"), Value: frames.Symbol(reason)}},
	}}
}

// rejected is the outcome of a message that a full queue didn't take.
func (b *Broker) rejected(q *queue) any {
	if !b.version.newer {
		return &frames.Rejected{}
	}
	return &frames.Rejected{Error: &frames.Error{
		Condition: "amqp:resource-limit-exceeded", Description: "queue '" + q.name + "' exceeded maximum length",
		Info: frames.Map{
			{Key: frames.Symbol("queue"), Value: q.name},
			{Key: frames.Symbol("reason"), Value: frames.Symbol("maxlen")},
		},
	}}
}

// fail ends the link.
func (p *Publisher) fail(condition frames.Symbol, text string) *Fault {
	f := &Fault{p.session.conn.b.linkScope(), &frames.Error{Condition: condition, Description: text}}
	if f.Ends == ScopeSession {
		return p.session.fail(f)
	}
	p.close()
	delete(p.session.publishers, p)
	return f
}

// route finds the queues of a message, and sets its exchange and keys. Targets are nil, and
// not empty, where the message has its outcome already.
func (p *Publisher) route(id uint32, settled bool, m *message) ([]*queue, *Fault) {
	s := p.session
	v := s.conn.vhost
	m.exchange, m.keys = p.exchange, p.keys
	if p.anonymous {
		to, err := addressOf(m)
		if err != nil {
			return nil, p.unroutable(id, settled, err)
		}
		if fault := s.permit(kindExchange, to.exchange, permissionWrite); fault != nil {
			return nil, fault
		}
		m.exchange, m.keys = to.exchange, []string{to.key}
	}
	if m.Properties != nil && field(m.Properties, fieldUserID) != nil {
		user, ok := m.property(fieldUserID).([]byte)
		if ok && string(user) != s.conn.user.name && !s.conn.user.impersonates() {
			return nil, p.fail("amqp:unauthorized-access",
				"user_id property set to '"+string(user)+"' but authenticated user was '"+s.conn.user.name+"'")
		}
	}
	cc, copied := m.sent.Get("x-cc")
	copied = copied && s.conn.b.version.newer
	if !copied && p.known == v.topology && p.targets != nil {
		return p.targets, nil
	}
	x := v.exchanges[m.exchange]
	switch {
	case x == nil:
		return nil, p.unroutable(id, settled, notFound("exchange", m.exchange, v.name))
	case p.anonymous && x.internal:
		return nil, p.fail("amqp:unauthorized-access", "forbidden to publish to internal exchange '"+x.name+"' in vhost '"+v.name+"'")
	}
	if copied {
		keys := slices.Clone(m.keys)
		list, ok := cc.(frames.List)
		for _, key := range list {
			text, isText := key.(string)
			ok = ok && isText
			keys = append(keys, text)
		}
		if !ok {
			return nil, p.unroutable(id, settled, &frames.Error{
				Condition: "amqp:invalid-field", Description: "bad value for 'x-cc' message-annotation: " + term(cc),
			})
		}
		m.keys = keys
	}
	if fault := s.permitTopics(x, m.keys, permissionWrite); fault != nil {
		return nil, fault
	}
	targets := v.route(x, m)
	if targets == nil {
		targets = none
	}
	for _, q := range targets {
		s.reached[q] = true
	}
	if !p.anonymous && len(m.keys) == 1 && !v.peeksAtHeaders(x) {
		p.known, p.targets = v.topology, targets
	}
	return targets, nil
}

var none = []*queue{}

// unroutable answers a message whose address is no good. A link that has an address ends,
// and so does one that has none, if the message is settled.
func (p *Publisher) unroutable(id uint32, settled bool, err *frames.Error) *Fault {
	if p.anonymous && !settled {
		p.confirm(id, &frames.Rejected{Error: err})
		return nil
	}
	if !settled {
		p.confirm(id, released)
	}
	p.close()
	delete(p.session.publishers, p)
	return &Fault{ScopeLink, err}
}

func notFound(kind, name, vhost string) *frames.Error {
	return &frames.Error{Condition: "amqp:not-found", Description: "no " + kind + " '" + name + "' in vhost '" + vhost + "'"}
}
