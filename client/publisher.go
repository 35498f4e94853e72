package client

import (
	"context"
	"fmt"
	"maps"
	"time"

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
	// PendingBytes is how many bytes of messages may be queued or unanswered before
	// Publish blocks within its ctx; the sizes are estimates. A message that is
	// larger by itself is taken when it is alone. Callers are served in their order,
	// so that small messages don't starve a large one. Default: 64 MiB.
	PendingBytes int
	// NoResend has a message that was sent and not answered when its connection,
	// session or link was lost reported as ErrOutcomeUnknown at once. By default it
	// is sent again, with the same message-id, on the next link, before all that
	// hasn't been sent yet and in the order of the first time, as long as its
	// caller's ctx lasts: it may then be stored twice, and won't be missing.
	NoResend bool
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
	if cfg.PendingBytes < 0 {
		return nil, argument.New("PublisherConfig.PendingBytes", cfg.PendingBytes, "is negative", "use 0 for the default of 64 MiB")
	}
	if cfg.Pending == 0 {
		cfg.Pending = 256
	}
	if cfg.PendingBytes == 0 {
		cfg.PendingBytes = 64 << 20
	}
	if cfg.Codec == nil {
		cfg.Codec = JSONCodec{}
	}
	core, err := newPublisher(ctx, conn, target, senderConfig{depth: cfg.Pending, bytes: int64(cfg.PendingBytes), resend: !cfg.NoResend})
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
//	ErrOutcomeUnknown    it was sent, and ctx ended before the answer; or the link was lost, and
//	                     NoResend is set, or the broker refuses another: that is the cause then
//
// SafeToRetry tells whether sending again can make a duplicate.
func (p *Publisher[T]) Publish(ctx context.Context, v T, edit ...func(*Message)) error {
	m, err := p.prepare(v, edit)
	if err != nil {
		return err
	}
	return p.core.s.do(ctx, m)
}

// PublishAll publishes vs in their order, many of them under way at once, and waits
// for the broker's answers. It returns nil only when the broker has accepted all of
// them. What fails doesn't keep the others back: the error is then a *BatchError,
// which tells each value that wasn't accepted by its index, and errors.Is looks into
// all of them. Once ctx has ended, or while the broker refuses the publisher's link,
// no more of vs are sent, and what hasn't left is told as such.
//
// edit is as for Publish, and called for each message, in order, before it is sent.
//
// Order: the messages come to each queue in the order of vs, those of them that are
// sent again after a reconnect included, as far as their first copies go; one that is
// refused or unroutable leaves a gap, since those behind it are on their way already.
func (p *Publisher[T]) PublishAll(ctx context.Context, vs []T, edit ...func(*Message)) error {
	if len(vs) == 0 {
		return nil
	}
	b := newBatch(p.core.s, len(vs))
	if err := p.core.s.enter(); err != nil {
		b.rest(0, err)
		return b.err()
	}
	defer p.core.s.exit()
	for i, v := range vs {
		if err := b.ended(ctx); err != nil {
			b.rest(i, err)
			break
		}
		m, err := p.prepare(v, edit)
		if err != nil {
			b.failed(i, m, err)
			continue
		}
		b.put(ctx, i, m)
	}
	b.wait(ctx)
	return b.err()
}

// Blocked says whether the broker takes no messages for the time being, and since
// when. RabbitMQ doesn't while it has a memory or disk alarm. Publish waits then,
// within its ctx.
func (p *Publisher[T]) Blocked() (since time.Time, blocked bool) {
	in := p.core.s.intake.Load()
	if in == nil {
		return time.Time{}, false
	}
	now := in.now()
	return now.since, now.blocked
}

// prepare makes a message of v that may be sent. With an error it may be nil.
func (p *Publisher[T]) prepare(v T, edit []func(*Message)) (*Message, error) {
	m, err := p.message(v)
	if err != nil {
		return nil, err
	}
	complete(m)
	for _, e := range edit {
		if e != nil {
			e(m)
		}
	}
	complete(m) // an edit may have taken away what must be there
	if p.core.s.target == "" && (m.Properties.To == nil || *m.Properties.To == "") {
		return m, argument.New("message Properties.To", nil, "is missing", "this publisher has no address of its own: set one with client.PublishTo")
	}
	return m, Validate(m)
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

// Close waits until all that was handed to Publish and PublishAll is answered, within
// ctx, and closes the link. When ctx ends the rest is cut off, and the error says so.
// Publish returns ErrClosed from then on. Close returns in whatever state the
// connection is: while it is being rebuilt, too, or the broker has an alarm.
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

func newPublisher(ctx context.Context, conn *Conn, target string, cfg senderConfig) (*publisher, error) {
	p := &publisher{conn: conn}
	cfg.backoff, cfg.tell = conn.cfg.Reconnect, conn.tellUser
	p.s = newSender("publish", target, cfg, conn.openSession, func(s session, _ bool) { closeSession(s) })
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
