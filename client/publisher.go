package client

import (
	"context"
	"fmt"
	"maps"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// PublisherConfig is how to publish. The zero value is ready.
type PublisherConfig struct {
	// Codec makes message bodies of values. Default: JSONCodec. A value that is
	// a *Message itself is sent as it is, and the codec not asked.
	Codec Codec
	// Pending is how many messages may wait to be sent before Publish blocks
	// within its ctx. Messages on their way come on top (RabbitMQ allows 170).
	// Default: 256.
	Pending int
}

// Publisher sends values of type T to one address, with many callers' messages
// under way at once. It is safe for concurrent use, and outlives the loss of the
// connection.
type Publisher[T any] struct {
	core  *publisher
	codec Codec
}

// NewPublisher opens a publisher for to, or for the address that each message
// names in its To property if to is the zero Address (see PublishTo).
//
// It returns when the broker has taken the link: ErrNotFound for a missing
// exchange or queue, ErrUnauthorized for a missing permission. While the
// connection is being rebuilt it waits, within ctx.
func NewPublisher[T any](ctx context.Context, conn *Conn, to address.Address, cfg PublisherConfig) (*Publisher[T], error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "give the connection that client.Connect has returned")
	}
	target := ""
	if !to.IsZero() {
		var err error
		if target, err = to.Build(); err != nil {
			return nil, err
		}
	}
	if cfg.Pending < 0 {
		return nil, argument.New("PublisherConfig.Pending", cfg.Pending, "is negative", "use 0 for the default of 256")
	}
	if cfg.Pending == 0 {
		cfg.Pending = 256
	}
	if cfg.Codec == nil {
		cfg.Codec = JSONCodec{}
	}
	core, err := newPublisher(ctx, conn, target, cfg.Pending)
	if err != nil {
		return nil, err
	}
	return &Publisher[T]{core: core, codec: cfg.Codec}, nil
}

// Publish sends v and waits for the broker's answer. It returns nil only when the
// broker has accepted the message, which for a quorum queue means that a majority
// of its replicas has it.
//
// edit is called on the message before it is checked and sent, to set properties,
// headers or annotations; its Header and Properties are there, with a random
// message-id.
//
// The errors, by what is certain afterwards:
//
//	*argument.Error      nothing was sent: v can't be encoded, or the message can't be carried
//	ErrNotSent           nothing was sent: ctx ended first, or the publisher is closed
//	ErrTooLarge          nothing was sent
//	ErrNotFound          nothing was sent: the exchange or queue is gone
//	ErrUnroutable        not stored: no queue is bound for the routing key
//	ErrRefused           refused by at least one queue, with the broker's reason where it gives one
//	ErrOutcomeUnknown    it was sent, and ctx or the connection ended before the answer
//
// SafeToRetry tells whether sending again can make a duplicate.
func (p *Publisher[T]) Publish(ctx context.Context, v T, edit ...func(*Message)) error {
	m, err := p.message(v)
	if err != nil {
		return err
	}
	complete(m)
	for _, e := range edit {
		if e != nil {
			e(m)
		}
	}
	complete(m) // an edit may have taken away what must be there
	if p.core.s.target == "" && (m.Properties.To == nil || *m.Properties.To == "") {
		return argument.New("message Properties.To", nil, "is missing", "this publisher has no address of its own: set one with client.PublishTo")
	}
	return p.core.publish(ctx, m)
}

// PublishTo sets the address that a message is sent to by a publisher without one
// of its own. It stays in the message, as its To property. An invalid address
// leaves To empty, which Publish refuses.
func PublishTo(to address.Address) func(*Message) {
	s, err := to.Build()
	return func(m *Message) {
		if err != nil {
			properties(m).To = nil
			return
		}
		properties(m).To = &s
	}
}

// Close waits until all that was handed to Publish is answered, within ctx, and
// closes the link. Publish returns ErrClosed from then on.
func (p *Publisher[T]) Close(ctx context.Context) error { return p.core.shut(ctx) }

func (p *Publisher[T]) message(v T) (m *Message, err error) {
	if given, ok := any(v).(*Message); ok {
		if given == nil {
			return nil, argument.New("message", nil, "is nil", "give a message, such as client.NewMessage(body)")
		}
		// Neither what complete sets nor an edit must show in the caller's.
		m := new(*given)
		if given.Header != nil {
			m.Header = new(*given.Header)
		}
		if given.Properties != nil {
			m.Properties = new(*given.Properties)
		}
		m.Annotations = maps.Clone(given.Annotations)
		m.ApplicationProperties = maps.Clone(given.ApplicationProperties)
		return m, nil
	}
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("makes the codec panic: %v", r), "mend the value's marshaller")
		}
	}()
	m = emptyMessage()
	if err := p.codec.Encode(v, m); err != nil {
		return nil, argument.Wrap(err, "value", fmt.Sprintf("%T", v), "can't be encoded", "mend the value, or use another Codec")
	}
	return m, nil
}

// publisher is the untyped core of a Publisher.
type publisher struct {
	conn *Conn
	s    *sender
}

func newPublisher(ctx context.Context, conn *Conn, target string, pending int) (*publisher, error) {
	p := &publisher{conn: conn}
	p.s = newSender("publish", target, pending, conn.cfg.Reconnect, conn.tellUser, conn.openSession, func(s session, _ bool) { closeSession(s) })
	if err := conn.join(p); err != nil {
		p.s.cut()
		return nil, &Error{Op: "publish", Target: target, Kind: ErrClosed}
	}
	select {
	case err := <-p.s.first:
		if err != nil {
			p.abandon()
			return nil, err
		}
	case <-ctx.Done():
		p.abandon()
		return nil, ended("publish", target, ErrNotSent, ctx)
	}
	return p, nil
}

func (p *publisher) abandon() {
	p.s.cut()
	p.conn.leave(p)
}

func (p *publisher) publish(ctx context.Context, m *Message) error {
	if err := Validate(m); err != nil {
		return err
	}
	return p.s.do(ctx, m)
}

func (p *publisher) shut(ctx context.Context) error {
	defer p.conn.leave(p)
	return p.s.close(ctx)
}

// closeSession ends a session, without waiting long for a broker that is gone.
func closeSession(s session) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	s.close(ctx)
}
