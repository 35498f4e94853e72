package client

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/link"

	"github.com/hopback/hopback/internal/failure"
)

// PublisherConfig configures a [Publisher]. The zero value is ready to use.
type PublisherConfig struct {
	// Codec encodes values into message bodies. A value of type *[Message] is sent without a
	// codec. Default: [JSONCodec].
	Codec Codec
	// Pending limits how many messages may wait to be sent. When it is reached, Publish blocks
	// for as long as its ctx allows. Messages that were sent but not yet confirmed aren't
	// counted (RabbitMQ allows 170 of them). Default: 256.
	Pending int
	// PendingBytes limits the bytes of messages that wait to be sent or confirmed. When it is
	// reached, Publish blocks for as long as its ctx allows. Sizes are estimates. A larger
	// message is sent alone. Callers are served in the order of their calls. Default: 64 MiB.
	PendingBytes int
	// NoResend disables automatic resending. Set it if a duplicate is worse than an error: when
	// the connection, session, or link is lost before the broker has confirmed a message,
	// Publish then returns [ErrOutcomeUnknown]. By default, the publisher sends the message
	// again on the next link, with the same message-id, while the ctx of the call lasts. It
	// sends such messages in their original order and before all others. The broker may then
	// store a message twice.
	NoResend bool
	// Copies declares that the messages are copies of other users' messages, made with [Copy].
	// Then a user-id that isn't the connection's user moves to [AnnotationUserID]. By default,
	// such a message fails with [ErrUserID].
	Copies bool
}

// Publisher sends values of type T to one address: a queue, or an exchange with a routing key.
// Open it once and share it: it is safe for concurrent use, and sends the messages of many
// callers at once. It survives the loss of its connection.
type Publisher[T any] struct {
	core  *publisher
	codec Codec
}

// NewPublisher opens a [Publisher] for the address to. If to is the zero Address, each message
// names its own address: see [PublishTo].
//
// It returns when the broker has accepted the link. While the connection is being rebuilt, it
// waits until ctx ends. The errors:
//
//   - [*argument.Error]: conn, to, or cfg is invalid, or the codec can't encode a T.
//   - [ErrNotFound]: the exchange or queue doesn't exist.
//   - [ErrUnauthorized]: the user lacks the permission to write to it.
//   - [ErrRefused]: the broker refuses the link for another reason.
//   - [ErrSessionLimit]: all sessions of [Config.MaxConnections] connections are in use.
//   - [ErrNotSent]: ctx ended first.
//   - [ErrClosed]: the connection is closed.
func NewPublisher[T any](ctx context.Context, conn *Conn, to address.Address, cfg PublisherConfig) (*Publisher[T], error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
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
	if err := checkEncode[T](cfg.Codec); err != nil {
		return nil, err
	}
	core, err := newPublisher(ctx, conn, to, target, senderConfig{Depth: cfg.Pending, Bytes: int64(cfg.PendingBytes), Resend: !cfg.NoResend, Copies: cfg.Copies})
	if err != nil {
		return nil, err
	}
	return &Publisher[T]{core: core, codec: cfg.Codec}, nil
}

// Publish sends v and waits for the broker's confirmation. It returns nil only when the broker
// has accepted the message; for a quorum queue, a majority of its replicas then has it. For high
// throughput, call it from many goroutines, or use [Publisher.PublishAll].
//
// Each edit is called on the message before it is checked and sent. Use it to set properties,
// headers, or annotations. Header and Properties are never nil, and the message-id is already
// set to a random value. A nil edit is skipped.
//
// If the broker doesn't confirm a message for 30 s, Publish sends it again on another session,
// with the same message-id, unless [PublisherConfig.NoResend] is set. Time during alarms doesn't
// count.
//
// [SafeToRetry] reports whether you can publish the value again without a duplicate, and
// [WorthRetrying] whether that can succeed. The errors:
//
//   - [*argument.Error]: nothing was sent. v can't be encoded, or the message is invalid.
//   - [ErrNotSent]: nothing was sent. ctx ended first, or the publisher is closed. During an
//     outage, the error includes its cause, such as [ErrAuthentication].
//   - [ErrClosed]: the publisher is closed. The error also matches ErrNotSent or
//     ErrOutcomeUnknown.
//   - [ErrTooLarge]: nothing was sent.
//   - [ErrNotFound]: nothing was sent. The exchange or queue no longer exists.
//   - [ErrUnauthorized]: not stored. The user lacks the permission to write there, or to publish
//     with this routing key to this topic exchange.
//   - [ErrSessionLimit]: nothing was sent. After a reconnect the connection has fewer sessions,
//     all of them are in use, and no further connection can be opened.
//   - [ErrUserID]: not stored. The message's user-id isn't the connection's user.
//   - [ErrUnroutable]: not stored. No queue is bound for the routing key.
//   - [ErrRefused]: at least one queue rejected the message, with the broker's reason if it
//     sends one. Or nothing was sent, because the broker refuses the link.
//   - [ErrOutcomeUnknown]: the message was sent, but ctx ended before the confirmation. Or the
//     link was lost, and NoResend is set or the broker refuses a new link; the error then
//     includes that cause.
func (p *Publisher[T]) Publish(ctx context.Context, v T, edit ...func(*Message)) error {
	m, err := p.message(v)
	if err != nil {
		return err
	}
	for _, e := range edit {
		if e != nil {
			e(m)
		}
	}
	return p.core.publish(ctx, m)
}

// PublishAll publishes vs in order and waits for the broker's confirmations. It sends without
// waiting for each confirmation, so it is much faster than one Publish after the other. It
// returns nil only when the broker has accepted all messages.
//
// Otherwise, it returns a *[BatchError], which lists the values that were not accepted by index,
// each with the error that Publish would return. errors.Is finds any of these errors.
//
//   - A value that fails doesn't stop the others.
//   - When ctx ends, or while the broker refuses the publisher's link, PublishAll sends no more
//     messages, and reports the rest as not sent.
//   - The first copies of the messages reach each queue in the order of vs, even if some are
//     sent again after a reconnect. A rejected or unroutable message leaves a gap: later ones
//     are already on the way.
//
// Each edit is called for each value and its message, in order, before the message is checked
// and sent. Use it to set what depends on the value: a message-id, a priority, or an address
// with client.PublishTo(address)(m). A nil edit is skipped.
func (p *Publisher[T]) PublishAll(ctx context.Context, vs []T, edit ...func(v T, m *Message)) error {
	if len(vs) == 0 {
		return nil
	}
	return p.core.publishAll(ctx, len(vs), func(i int) (*Message, error) {
		m, err := p.message(vs[i])
		if err != nil {
			return nil, err
		}
		for _, e := range edit {
			if e != nil {
				e(vs[i], m)
			}
		}
		return m, nil
	})
}

// Blocked reports whether the broker currently accepts no messages because of a memory or disk
// alarm, and since when. Publish then waits for as long as its ctx allows.
func (p *Publisher[T]) Blocked() (since time.Time, blocked bool) {
	return p.core.s.Blocked()
}

// PublishTo returns an edit that sets the address of a message. Use it with a publisher of the
// zero Address, for instance to choose the routing key per message. The address stays in the
// message as its To property. If to is invalid, the edit leaves To empty, and Publish returns an
// [*argument.Error].
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

// CC returns an edit that gives a message additional routing keys. The exchange routes the
// message by the publisher's key and by each of these. A queue gets the message once, even if
// several keys match. The message is unroutable only if no key matches.
//
//   - On the default exchange, a key is a queue's name: a publisher to one queue with
//     CC("other") also publishes to the queue "other".
//   - The keys stay in the message as its annotation "x-cc", a []any of strings. CC without keys
//     removes them. [Copy] omits them.
//   - RabbitMQ below 4.1 ignores the annotation, so Publish returns an [*argument.Error] there,
//     and nothing is sent. While the connection is being rebuilt, the version is unknown, and
//     Publish doesn't check it.
func CC(keys ...string) func(*Message) {
	list := make([]any, len(keys))
	for i, key := range keys {
		list[i] = key
	}
	return func(m *Message) {
		switch {
		case len(list) == 0:
			delete(m.Annotations, annotationCC)
		case m.Annotations == nil:
			m.Annotations = map[any]any{annotationCC: list}
		default:
			m.Annotations[annotationCC] = list
		}
	}
}

// checkCC refuses additional routing keys that the broker can't read, or would ignore.
func checkCC(annotations map[any]any, conn *Conn) error {
	const name = `message Annotations["x-cc"]`
	keys, ok := annotations[annotationCC]
	if !ok {
		if keys, ok = annotations[amqp.Symbol(annotationCC)]; !ok {
			return nil
		}
	}
	list, ok := keys.([]any)
	for _, key := range list {
		_, text := key.(string)
		ok = ok && text
	}
	if !ok {
		return argument.New(name, fmt.Sprintf("%T", keys), "is not a list of strings", "set it with client.CC")
	}
	return conn.refusesCC(name, len(list))
}

// Close waits until the broker has confirmed or rejected all messages of Publish and PublishAll,
// and closes the link. Later calls of Publish return [ErrClosed]. A [Conn.Close] closes its
// publishers, too.
//
// If ctx ends first, Close aborts the rest and returns an error: [ErrOutcomeUnknown] if some
// messages were already sent and have no answer, [ErrNotSent] if none was sent. It doesn't matter
// whether their callers still wait. Close also works while the connection is being rebuilt or the
// broker has an alarm.
//
// A message whose caller has left isn't sent again. If the connection is lost while only such
// messages have no answer, Close returns nil: their callers got [ErrOutcomeUnknown] when they left.
func (p *Publisher[T]) Close(ctx context.Context) error { return p.core.Shut(ctx) }

// message encodes v. The result is never nil without an error.
func (p *Publisher[T]) message(v T) (m *Message, err error) {
	if given, ok := any(v).(*Message); ok {
		if given == nil {
			return nil, argument.New("message", nil, "is nil", "pass a message, such as client.NewMessage(body)")
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
		complete(m)
		return m, nil
	}
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("made the codec panic: %v", r), "fix its marshaler or the codec")
		}
	}()
	m = emptyMessage()
	if err := p.codec.Encode(v, m); err != nil {
		return nil, argument.New("value", fmt.Sprintf("%T", v), "can't be encoded", "fix the value, or use another Codec").Because(err)
	}
	complete(m)
	return m, nil
}

// publisher is the part of a Publisher that doesn't depend on its type.
type publisher struct {
	conn     *Conn
	reserved *link.Reservation
	to       address.Address // zero: each message names its own
	s        *sender
	hooks    *instrumentHooks // nil: no Instrument
}

func newPublisher(ctx context.Context, conn *Conn, to address.Address, target string, cfg senderConfig) (*publisher, error) {
	p := &publisher{conn: conn, reserved: conn.pool.Reserve(publisherSessions), to: to, hooks: conn.hooks}
	cfg.Pause, cfg.Notify, cfg.Log, cfg.Outage = conn.cfg.Reconnect.Pause, conn.events.of(p.reserved), conn.log, p.reserved.Outage
	p.s = newSender("publish", target, cfg, p.reserved)
	if err := conn.join(p); err != nil {
		p.s.Cut()
		p.reserved.Release()
		return nil, &failure.Error{Op: "publish", Target: target, Kind: failure.ErrClosed}
	}
	if err := p.s.Opened(ctx); err != nil {
		p.s.Cut()
		p.reserved.Release()
		p.conn.leave(p)
		return nil, err
	}
	return p, nil
}

// check refuses an invalid message.
func (p *publisher) check(m *Message) error {
	if p.to.IsZero() && addressOf(m) == "" {
		return argument.New("message Properties.To", nil, "is missing", "give NewPublisher an address, or set one per message with client.PublishTo")
	}
	if err := Validate(m); err != nil || len(m.Annotations) == 0 {
		return err
	}
	return checkCC(m.Annotations, p.conn)
}

// publish checks m, which the caller may have edited, and publishes it.
func (p *publisher) publish(ctx context.Context, m *Message) error {
	complete(m) // an edit may have removed what must be there
	var followed observedPublish
	if p.hooks != nil {
		followed = p.hooks.Publish(ctx, p.to, m)
	}
	err := p.check(m)
	if err == nil {
		err = p.s.Do(ctx, m)
	}
	if p.hooks != nil {
		p.hooks.Published(followed, err)
	}
	return err
}

// publishAll is publish for n messages, which message returns one after the other.
func (p *publisher) publishAll(ctx context.Context, n int, message func(i int) (*Message, error)) error {
	followed := p.hooks.PublishAll(ctx, p.to, n)
	err := batchError(n, p.s.DoAll(ctx, n, func(i int) (*Message, error) {
		m, err := message(i)
		if err != nil {
			return nil, err
		}
		complete(m)
		followed.Publish(i, p.to, m)
		return m, p.check(m)
	}, followed.Published))
	followed.End(err)
	return err
}

// Expire is called by Conn.Close when its ctx has ended, before the connections are gone.
func (p *publisher) Expire() { p.s.Expire() }

func (p *publisher) Shut(ctx context.Context) error {
	defer p.conn.leave(p)
	defer p.reserved.Release()
	return p.s.Close(ctx)
}

func (p *publisher) Count(all *instrument.Stats) {
	queued, unconfirmed := p.s.Count()
	all.Publishers = append(all.Publishers, instrument.PublisherStats{To: p.to, Queued: queued, Unconfirmed: unconfirmed})
}
