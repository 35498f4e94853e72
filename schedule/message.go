package schedule

import (
	"crypto/rand"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// reserved are annotations that a message mustn't have.
var reserved = []string{annotation.Due, annotation.To, annotation.TTL, annotation.Priority, "x-opt-delivery-time"}

const (
	defaultPriority = 4
	maxID           = 512
)

// route is how a message goes.
type route struct {
	id    string
	due   time.Time
	queue string // the queue that may be bound to the ladder; empty: by way of Dispatch
}

// prepare makes a message ready for the ladder, but for its entry.
func (p *Publisher[T]) prepare(m *client.Message, due time.Time) (route, error) {
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	if m.Properties.MessageID == nil {
		m.Properties.MessageID = rand.Text()
	}
	id, ok := m.Properties.MessageID.(string)
	if !ok || id == "" || len(id) > maxID || !utf8.ValidString(id) {
		return route{}, argument.New("message Properties.MessageID", m.Properties.MessageID, "isn't a string of 1 to 512 bytes of UTF-8", "leave it out to have a random one")
	}
	for _, key := range reserved {
		if _, has := m.Annotations[key]; has {
			return route{}, argument.At(argument.Root("message").Field("Annotations").Key(key), argument.CodeReserved, nil, "is set, and says when or where a scheduled message goes", "leave it out; client.Copy and deleting it makes a message of a scheduled one")
		}
	}
	to := p.to
	if to == "" {
		if m.Properties.To == nil || *m.Properties.To == "" {
			return route{}, argument.New("message Properties.To", nil, "is missing", "this publisher has no address of its own: set one with client.PublishTo")
		}
		to = *m.Properties.To
	}
	target, err := address.Parse(to)
	if err != nil {
		return route{}, err
	}
	if p.names.owns(target) {
		return route{}, argument.New("message Properties.To", to, "is part of the ladder itself", "give the address that the message is for")
	}
	r := route{id: id, due: due}
	if m.Header == nil {
		m.Header = &client.Header{Durable: true, Priority: defaultPriority}
	}
	if target.IsQueue() && m.Header.TTL == 0 && m.Header.Priority == defaultPriority && bindable(target.QueueName()) {
		r.queue = target.QueueName()
	}
	if m.Annotations == nil {
		m.Annotations = map[any]any{}
	}
	m.Annotations[annotation.To] = to
	m.Annotations[annotation.Due] = due.UnixMilli()
	// Whatever makes a message leave a queue ahead of others has no place in the ladder.
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
	// The publisher has no address of its own, and refuses a message without one.
	if err := client.Validate(m); err != nil {
		return route{}, err
	}
	return r, nil
}

// maxTTL is AMQP's, in milliseconds.
const maxTTL = 1<<32 - 1

// enter sends m into the ladder, for what is left of its delay.
func (p *Publisher[T]) enter(m *client.Message, r route, now time.Time) {
	client.PublishTo(p.names.entry(r.due.Sub(now), r.queue))(m)
}

// restored is a copy of a message from the ladder as its publisher meant it, and where it
// belongs.
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
