package engine

import (
	"slices"
	"strconv"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// Connection is a client's connection. Its methods may be called concurrently.
type Connection struct {
	b        *Broker
	user     *User
	vhost    *vhost
	peer     Peer
	since    time.Time
	name     string
	ready    chan struct{}
	events   []Event
	signaled bool
	over     bool
	sessions []*Session
	queues   []*queue // exclusive ones
}

// Peer describes a client. The HTTP API shows it.
type Peer struct {
	ContainerID string
	Address     string // "127.0.0.1:50000"
	Local       string // "127.0.0.1:5672"
	Properties  frames.Map
}

// Connect opens a connection to a virtual host. The error closes the connection.
func (b *Broker) Connect(u *User, vhost string, peer Peer) (*Connection, *frames.Error) {
	b.lock()
	defer b.unlock()
	refuse := func(condition frames.Symbol, text string) (*Connection, *frames.Error) {
		return nil, &frames.Error{Condition: condition, Description: text}
	}
	v := b.vhosts[vhost]
	switch {
	case !b.running:
		return refuse("amqp:internal-error", "the broker is stopped")
	case v == nil:
		return refuse("amqp:unauthorized-access", "AMQP 1.0 connection failed: virtual host '"+vhost+"' does not exist")
	case b.users[u.name] != u || u.permissions[vhost] == nil:
		return refuse("amqp:unauthorized-access", "access to vhost '"+vhost+"' refused for user '"+u.name+"'")
	}
	count := func(of func(*Connection) bool) (n int64) {
		for _, c := range b.conns {
			if of(c) {
				n++
			}
		}
		return n
	}
	if limit, ok := v.limits["max-connections"]; ok && limit >= 0 && count(func(c *Connection) bool { return c.vhost == v }) >= limit {
		return refuse("amqp:resource-limit-exceeded", "access to vhost '"+vhost+"' refused for user '"+u.name+
			"': vhost connection limit ("+strconv.FormatInt(limit, 10)+") is reached")
	}
	if limit, ok := u.limits["max-connections"]; ok && limit >= 0 && count(func(c *Connection) bool { return c.user == u }) >= limit {
		return refuse("amqp:resource-limit-exceeded", "connection refused for user '"+u.name+
			"': user connection limit ("+strconv.FormatInt(limit, 10)+") is reached")
	}
	c := &Connection{b: b, user: u, vhost: v, peer: peer, since: time.Now(), ready: make(chan struct{}, 1)}
	c.name = orText(peer.Address, "127.0.0.1:"+strconv.FormatUint(40_000+b.next(), 10)) + " -> " + orText(peer.Local, "127.0.0.1:5672")
	b.conns = append(b.conns, c)
	b.log(nil, logConnected, nil)
	return c, nil
}

func orText(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// Name is what RabbitMQ calls the connection: "127.0.0.1:50000 -> 127.0.0.1:5672".
func (c *Connection) Name() string { return c.name }

// Ready has a value while there are events to take, and is closed with the connection,
// after its last event.
func (c *Connection) Ready() <-chan struct{} { return c.ready }

// Take appends the events that have come to events, in order, and returns them all.
func (c *Connection) Take(events []Event) []Event {
	c.b.lock()
	defer c.b.unlock()
	n := len(events)
	events = append(events, c.events...)
	clear(c.events)
	c.events = c.events[:0]
	c.signaled = false
	for _, e := range events[n:] {
		e.taken()
	}
	return events
}

// taken counts an event that has left the connection's list.
func (e *Event) taken() {
	switch e.Kind {
	case EventDelivered:
		e.Consumer.taken()
	case EventConfirmed:
		e.Publisher.untaken--
	}
}

// emit queues an event for the client.
func (c *Connection) emit(e Event) {
	if c.over || e.Consumer != nil && e.Consumer.ghost {
		return
	}
	c.events = append(c.events, e)
	if !c.signaled {
		c.signaled = true
		select {
		case c.ready <- struct{}{}:
		default:
		}
	}
}

// purge takes events back that are of no use any more.
func (c *Connection) purge(useless func(*Event) bool) {
	c.events = slices.DeleteFunc(c.events, func(e Event) bool {
		if !useless(&e) {
			return false
		}
		switch e.Kind {
		case EventDelivered:
			e.Consumer.untaken--
		case EventConfirmed:
			e.Publisher.untaken--
		}
		return true
	})
}

// Close closes the connection at the client's wish, or since the client is gone. Its
// unsettled deliveries go back to their queues. It has no events afterwards.
func (c *Connection) Close() {
	c.b.lock()
	defer c.b.unlock()
	if !c.over {
		c.events = nil
		c.end()
	}
}

// shut closes the connection with an error, at the broker's wish; nil stands for an end
// without a word.
func (c *Connection) shut(err *frames.Error) {
	if c.over {
		return
	}
	c.emit(Event{Kind: EventClosed, Err: err})
	c.end()
}

func (c *Connection) end() {
	c.over = true
	close(c.ready)
	for _, s := range slices.Clone(c.sessions) {
		s.end()
	}
	for _, q := range slices.Clone(c.queues) {
		c.b.deleteQueue(q)
	}
	c.b.conns = slices.DeleteFunc(c.b.conns, func(other *Connection) bool { return other == c })
	c.b.log(nil, logDisconnected, nil)
}

// written notes that no purge takes these deliveries back.
func (c *Connection) written(is func(*Delivery) bool) {
	for i := range c.events {
		if e := &c.events[i]; e.Kind == EventDelivered && is(e.Delivery) {
			e.written = true
		}
	}
}

// crash is what RabbitMQ does when a session's process ends unexpectedly: it closes the
// connection. The session confirms nothing any more.
func (c *Connection) crash(s *Session) {
	c.purge(func(e *Event) bool { return e.Kind == EventConfirmed && e.Session == s })
	c.shut(&frames.Error{Condition: "amqp:internal-error", Description: "Session error: function_clause"})
}

// Blocked says whether an alarm stops publishing now: a new session's incoming window
// is 0 then.
func (c *Connection) Blocked() bool {
	c.b.peek()
	defer c.b.mu.Unlock()
	return len(c.b.alarms) > 0
}

// Begin begins a session.
func (c *Connection) Begin() *Session {
	c.b.lock()
	defer c.b.unlock()
	s := &Session{conn: c, over: c.over, consumers: map[*Consumer]struct{}{}, publishers: map[*Publisher]struct{}{}, reached: map[*queue]bool{}, allowed: map[access]bool{}}
	if !c.over {
		c.sessions = append(c.sessions, s)
	}
	return s
}

// queueGone notifies the connection's publishers that a queue was deleted. RabbitMQ tells the
// sessions that have published to it, and those that consume from it.
func (c *Connection) queueGone(q *queue, consumes map[*Session]bool) {
	for _, s := range c.sessions {
		notified := consumes[s] || s.reached[q]
		delete(s.reached, q)
		for p := range s.publishers {
			for _, o := range slices.Clone(p.waiting) {
				if slices.Contains(o.queues, q) {
					o.deleted(q)
				}
			}
			if notified && p.queue == q.name {
				p.close()
				delete(s.publishers, p)
				c.emit(Event{Kind: EventDetached, Session: s, Publisher: p, Err: &frames.Error{Condition: "amqp:resource-deleted"}})
			}
		}
	}
}
