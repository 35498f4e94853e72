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
	"github.com/hopback/hopback/internal/instrumented"
	"github.com/hopback/hopback/internal/publish"
)

// PublisherConfig configures a Publisher. The zero value is ready to use.
type PublisherConfig struct {
	// Codec encodes values into message bodies. A value that is a *Message is sent
	// as it is. Default: JSONCodec.
	Codec Codec
	// Pending is how many messages may wait to be sent. Beyond that Publish blocks
	// within its ctx. Messages that were sent and not answered come on top (RabbitMQ
	// allows 170). Default: 256.
	Pending int
	// PendingBytes is how many bytes of messages may be queued or unanswered. Beyond
	// that Publish blocks within its ctx. Sizes are estimates. A larger message is
	// sent alone. Callers are served in the order of their calls. Default: 64 MiB.
	PendingBytes int
	// NoResend reports a message as ErrOutcomeUnknown when its connection, session or
	// link is lost before the broker has answered. By default the message is sent
	// again on the next link, with the same message-id, while its caller's ctx lasts.
	// Messages are sent again in their first order, and before all others. The broker
	// may then store one twice.
	NoResend bool
	// Copies says that messages are copies of messages that others have published, made
	// with Copy. A user-id that isn't the connection's own user is moved to
	// AnnotationUserID then. Without Copies such a message is refused with ErrUserID.
	Copies bool
}

// Publisher sends values of type T to one address. It is safe for concurrent use, and
// the messages of many callers are under way at once. It survives the loss of its
// connection.
type Publisher[T any] struct {
	core  *publisher
	codec Codec
}

// NewPublisher opens a publisher for to, or for the address that each message
// names in its To property if to is the zero Address (see PublishTo).
//
// It returns when the broker has accepted the link. While the connection is being
// rebuilt it waits, within ctx. The errors:
//
//	*argument.Error      conn, to or cfg can't be used, or the codec can't encode a T
//	ErrNotFound          the exchange or queue is missing
//	ErrUnauthorized      the user lacks the permission to write to it
//	ErrRefused           the broker refuses the link for another reason
//	ErrSessionLimit      Config.MaxConnections connections carry all the sessions they can
//	ErrNotSent           ctx ended first
//	ErrClosed            the connection is closed
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
	core, err := newPublisher(ctx, conn, to, target, publish.SenderConfig{Depth: cfg.Pending, Bytes: int64(cfg.PendingBytes), Resend: !cfg.NoResend, Copies: cfg.Copies})
	if err != nil {
		return nil, err
	}
	return &Publisher[T]{core: core, codec: cfg.Codec}, nil
}

// Publish sends v and waits for the broker's answer. It returns nil only when the
// broker has accepted the message, which for a quorum queue means that a majority
// of its replicas has it.
//
// edit is called on the message before it is checked and sent. It sets properties,
// headers or annotations. Header and Properties aren't nil, and the message-id is
// random. A nil edit is skipped.
//
// The errors, by what is certain afterwards:
//
//	*argument.Error      nothing was sent: v can't be encoded, or the message can't be carried
//	ErrNotSent           nothing was sent: ctx ended first, or the publisher is closed. In an
//	                     outage its cause is in the error, such as ErrAuthentication
//	ErrClosed            the publisher is closed; the error also matches ErrNotSent or ErrOutcomeUnknown
//	ErrTooLarge          nothing was sent
//	ErrNotFound          nothing was sent: the exchange or queue is gone
//	ErrUnauthorized      nothing was sent: the user lacks the permission to write there
//	ErrSessionLimit      nothing was sent: the connection is back with fewer sessions, all of
//	                     them taken, and no further connection can be opened
//	ErrUserID            not stored: the message's user-id isn't the connection's user
//	ErrUnroutable        not stored: no queue is bound for the routing key
//	ErrRefused           refused by at least one queue, with the broker's reason if it gives one; or
//	                     nothing was sent, because the broker refuses the link
//	ErrOutcomeUnknown    it was sent, and ctx ended before the answer. Or its link was lost, and
//	                     NoResend is set or the broker refuses another link, which is the cause
//
// SafeToRetry reports whether sending again can't make a duplicate.
//
// A message without an answer for 30 s is sent again on another session, with the same
// message-id, unless NoResend is set. The time of alarms doesn't count.
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

// PublishAll publishes vs in order, with many of them under way at once, and waits for
// the broker's answers. It returns nil only when the broker has accepted all of them.
// Otherwise it returns a *BatchError, which lists the values that were not accepted by
// index, each with an error as Publish returns it. errors.Is finds any of these.
//
// A value that fails doesn't stop the others. When ctx ends, or while the broker
// refuses the publisher's link, PublishAll sends no more, and reports the rest as not
// sent.
//
// edit is called for each value and its message, in order, before the message is
// checked and sent. It sets what depends on the value: a message-id, a priority, an
// address (client.PublishTo(address)(m)). A nil edit is skipped.
//
// The first copies of the messages reach each queue in the order of vs, even if some
// are sent again after a reconnect. A message that is refused or unroutable leaves a
// gap, because those behind it are already under way.
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

// Blocked reports whether the broker accepts no messages now, and since when. RabbitMQ
// accepts none while it has a memory or disk alarm. Publish then waits within its ctx.
func (p *Publisher[T]) Blocked() (since time.Time, blocked bool) {
	return p.core.s.Blocked()
}

// PublishTo returns an edit that sets the address of a message, for a publisher without
// an address of its own. The address stays in the message as its To property. An
// invalid address leaves To empty, which Publish refuses.
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

// CC returns an edit that gives a message further routing keys. The exchange routes the
// message by the publisher's key and by each of these. A queue gets it once, whichever keys
// match. The message is unroutable only if no key matches. Further queues are reached over
// the default exchange, too: a publisher to one queue with CC("other") also publishes to the
// queue "other".
//
// The keys stay in the message as its annotation "x-cc", a []any of strings. Without keys CC
// removes them. A Copy has none: it would be routed by them again.
//
// RabbitMQ below 4.1 ignores the annotation. Publish refuses it there with an
// *argument.Error, and nothing is sent. While the connection is being rebuilt the version
// isn't known, and Publish refuses nothing.
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

// checkCC refuses further routing keys that the broker can't read, or would ignore.
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

// Close waits within ctx until all messages of Publish and PublishAll are answered, and
// closes the link. If ctx ends first, Close cuts off the rest and returns an error:
// ErrOutcomeUnknown if some of it was sent, ErrNotSent if none was. Publish returns
// ErrClosed from then on. Close also returns while the connection is being rebuilt or
// the broker has an alarm.
func (p *Publisher[T]) Close(ctx context.Context) error { return p.core.Shut(ctx) }

// message makes a message of v. The result is never nil without an error.
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
		complete(m)
		return m, nil
	}
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("made the codec panic: %v", r), "fix the value's marshaller")
		}
	}()
	m = emptyMessage()
	if err := p.codec.Encode(v, m); err != nil {
		return nil, argument.New("value", fmt.Sprintf("%T", v), "can't be encoded", "fix the value, or use another Codec").Because(err)
	}
	complete(m)
	return m, nil
}

// publisher is what a Publisher has but for its type.
type publisher struct {
	conn     *Conn
	reserved *link.Reservation
	to       address.Address // zero: each message names its own
	s        *publish.Sender
	hooks    *instrumented.Hooks // nil: no Instrument
}

func newPublisher(ctx context.Context, conn *Conn, to address.Address, target string, cfg publish.SenderConfig) (*publisher, error) {
	p := &publisher{conn: conn, reserved: conn.pool.Reserve(publisherSessions), to: to, hooks: conn.hooks}
	cfg.Pause, cfg.Notify, cfg.Log, cfg.Outage = link.Backoff(conn.cfg.Reconnect).Pause, p.reserved.Notify, conn.log, p.reserved.Outage
	p.s = publish.NewSender("publish", target, cfg, p.reserved)
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

// check refuses a message that can't be carried.
func (p *publisher) check(m *Message) error {
	if p.to.IsZero() && publish.AddressOf(m) == "" {
		return argument.New("message Properties.To", nil, "is missing", "this publisher has no address of its own: set one with client.PublishTo")
	}
	if err := Validate(m); err != nil || len(m.Annotations) == 0 {
		return err
	}
	return checkCC(m.Annotations, p.conn)
}

// publish checks m, which the caller may have edited, and publishes it.
func (p *publisher) publish(ctx context.Context, m *Message) error {
	complete(m) // an edit may have removed what must be there
	var followed instrumented.Publishing
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

func (p *publisher) Shut(ctx context.Context) error {
	defer p.conn.leave(p)
	defer p.reserved.Release()
	return p.s.Close(ctx)
}

func (p *publisher) Count(all *instrument.Stats) {
	queued, unconfirmed := p.s.Count()
	all.Publishers = append(all.Publishers, instrument.PublisherStats{To: p.to, Queued: queued, Unconfirmed: unconfirmed})
}
