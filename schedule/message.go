package schedule

import (
	"context"
	"crypto/rand"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/failure"
)

// reserved are annotations that the caller's message must not have.
var reserved = []string{annotation.Due, annotation.To, annotation.TTL, annotation.Priority, annotation.DeliveryTime}

const (
	defaultPriority = 4
	maxID           = 512
)

// route is the path of a message.
type route struct {
	id    string
	due   time.Time
	queue string // the queue that may be bound to the ladder; empty: through Dispatch
	// to is the queue that holds the message itself until its time; the zero Address: none. ttl
	// and priority are then those of the message, and ahead is how far the broker's clock is ahead
	// of the one that due is by.
	to       address.Address
	ahead    time.Duration
	ttl      time.Duration
	priority uint8
}

// prepare makes a message ready for the ladder, or for the queue that holds it, except for its
// entry.
func (p *Publisher[T]) prepare(ctx context.Context, m *client.Message, due time.Time, kind whenKind) (route, error) {
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	if m.Properties.MessageID == nil {
		m.Properties.MessageID = rand.Text()
	}
	id, ok := m.Properties.MessageID.(string)
	if !ok || id == "" || len(id) > maxID || !utf8.ValidString(id) {
		return route{}, argument.New("message Properties.MessageID", m.Properties.MessageID, "isn't a string of 1 to 512 bytes of UTF-8", "leave it out for a random one")
	}
	for _, key := range reserved {
		if _, has := m.Annotations[key]; has {
			return route{}, argument.At(argument.Root("message").Field("Annotations").Key(key), argument.CodeReserved, nil, "is set, and this package uses it for the time or target of a message", "leave it out; to schedule a received message again, delete it from a client.Copy")
		}
	}
	to := p.to
	if to == "" {
		if m.Properties.To == nil || *m.Properties.To == "" {
			return route{}, argument.New("message Properties.To", nil, "is missing", "this publisher has no address: set one with client.PublishTo")
		}
		to = *m.Properties.To
	}
	target, err := address.Parse(to)
	if err != nil {
		return route{}, err
	}
	if p.names.owns(target) {
		return route{}, argument.New("message Properties.To", to, "is part of the ladder itself", "set the address of the message's target")
	}
	if m.Header == nil {
		m.Header = &client.Header{Durable: true, Priority: defaultPriority}
	}
	r := route{id: id, due: due, ttl: m.Header.TTL, priority: m.Header.Priority}
	if target.IsQueue() && m.Header.TTL == 0 && m.Header.Priority == defaultPriority && bindable(target.QueueName()) {
		r.queue = target.QueueName()
	}
	if m.Annotations == nil {
		m.Annotations = map[any]any{}
	}
	m.Annotations[annotation.To] = to
	m.Annotations[annotation.Due] = due.UnixMilli()
	// Settings that make a message leave a queue before others must not be in the ladder.
	if ttl := m.Header.TTL; ttl != 0 {
		if ttl < 0 || ttl.Milliseconds() > maxTTL {
			return route{}, argument.New("message Header.TTL", ttl, "is out of range", "use 0 (none) to 49 days")
		}
		m.Annotations[annotation.TTL] = max(ttl.Milliseconds(), 1)
	}
	if m.Header.Priority != defaultPriority {
		m.Annotations[annotation.Priority] = int64(m.Header.Priority)
	}
	m.Header = &client.Header{Durable: true, Priority: defaultPriority}
	// The inner publisher has no address, and refuses a message without one.
	if err := client.Validate(m); err != nil {
		return route{}, err
	}
	if p.claimable {
		return r, nil
	}
	// RabbitMQ counts a ttl from the publishing, and it has a limit.
	fits := r.ttl == 0 || (r.ttl+time.Until(due)+time.Hour).Milliseconds() <= maxTTL
	if target.IsQueue() && fits && !p.ladder && p.holders.holds(ctx, p.conn, target.QueueName()) {
		r.to = target
		if kind == afterTime { // the ladder needs no clock for it, but RabbitMQ holds a message by its own
			read, err := p.readClock(ctx)
			if err != nil {
				r.to = address.Address{}
			}
			r.ahead = read.Broker.Sub(read.Own)
		}
	}
	if ctx.Err() != nil { // the broker may not have been asked
		return route{}, failure.Ended("publish", to, failure.ErrNotSent, ctx)
	}
	return r, nil
}

// maxTTL is AMQP's, in milliseconds.
const maxTTL = 1<<32 - 1

// enter sends m to the queue that holds it until its time, or into the ladder, for the rest of its
// delay.
func (p *Publisher[T]) enter(m *client.Message, r route, now time.Time) {
	if p.claimable {
		client.PublishTo(address.Queue(p.names.ClaimableQueue()))(m)
		return
	}
	if !r.to.IsZero() {
		// In milliseconds, rounded up: a time on the wire has no more digits, and a message is never early.
		m.Annotations[annotation.DeliveryTime] = r.due.Add(r.ahead).Add(time.Millisecond - 1).Truncate(time.Millisecond)
		m.Header = &client.Header{Durable: true, Priority: r.priority}
		if r.ttl > 0 {
			m.Header.TTL = r.ttl + max(r.due.Sub(now), 0)
		}
		delete(m.Annotations, annotation.TTL)
		delete(m.Annotations, annotation.Priority)
		client.PublishTo(r.to)(m)
		return
	}
	client.PublishTo(p.names.entry(r.due.Sub(now), r.queue))(m)
}

// restored returns a copy of a message from the ladder in the form that its publisher passed in,
// and its target.
func restored(m *client.Message) (*client.Message, address.Address, error) {
	s, ok := m.Annotations[annotation.To].(string)
	if !ok {
		return nil, address.Address{}, argument.New("message Annotations["+annotation.To+"]", m.Annotations[annotation.To], "isn't an address", "publish scheduled messages with schedule.Publisher")
	}
	to, err := address.Parse(s)
	if err != nil {
		return nil, to, err
	}
	c := client.Copy(m)
	if ms, ok := m.Annotations[annotation.TTL].(int64); ok && ms > 0 && ms <= maxTTL {
		c.Header.TTL = time.Duration(ms) * time.Millisecond
	}
	if n, ok := m.Annotations[annotation.Priority].(int64); ok && n >= 0 && n <= 255 {
		c.Header.Priority = uint8(n)
	}
	delete(c.Annotations, annotation.TTL)
	delete(c.Annotations, annotation.Priority)
	client.PublishTo(to)(c)
	return c, to, nil
}
