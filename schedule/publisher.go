package schedule

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// PublisherConfig configures a Publisher. The zero value is ready to use.
type PublisherConfig struct {
	client.PublisherConfig
	// Names are those of the ladder. Default: the ladder that all services share.
	Names Names
}

// Publisher publishes values of type T that are delivered later. It is safe for concurrent
// use, and survives the loss of its connection.
type Publisher[T any] struct {
	core  *client.Publisher[*client.Message]
	conn  *client.Conn
	codec client.Codec
	to    string // empty: each message names its own
	names Names
}

// Scheduled is a message that the broker holds for later.
type Scheduled struct {
	// ID is the message-id.
	ID string
	// Due is when it is to be delivered, in whole milliseconds: for At by the broker's clock,
	// and for After by this host's.
	Due time.Time
}

// NewPublisher opens a publisher whose messages are delivered to to. If to is the zero
// Address each message names its own in its To property (see client.PublishTo).
//
// The target needn't exist yet. The ladder must: see Topology. The errors are those of
// client.NewPublisher.
func NewPublisher[T any](ctx context.Context, conn *client.Conn, to address.Address, cfg PublisherConfig) (*Publisher[T], error) {
	if err := cfg.Names.check(argument.Root("PublisherConfig").Field("Names")); err != nil {
		return nil, err
	}
	p := &Publisher[T]{conn: conn, codec: cfg.Codec, names: cfg.Names}
	if p.codec == nil {
		p.codec = client.JSONCodec{}
	}
	// A *client.Message is sent as it is.
	if k, ok := p.codec.(client.TypeChecker); ok && reflect.TypeFor[T]() != reflect.TypeFor[*client.Message]() {
		if err := k.CheckEncode(reflect.TypeFor[T]()); err != nil {
			return nil, argument.New("value", reflect.TypeFor[T]().String(), "can't be encoded", "publish values of another type, or use another PublisherConfig.Codec").Because(err)
		}
	}
	if !to.IsZero() {
		var err error
		if p.to, err = to.Build(); err != nil {
			return nil, err
		}
	}
	core, err := client.NewPublisher[*client.Message](ctx, conn, address.Address{}, cfg.PublisherConfig)
	if err != nil {
		return nil, err
	}
	p.core = core
	return p, nil
}

// Publish sends v, to be delivered when when says, and waits until the broker has stored
// it.
//
// edit is called on the message before it is checked and sent. It sets properties, headers
// or annotations. A nil edit is skipped. The message-id is random unless an edit sets one;
// it must be a string of 1 to 512 bytes. A ttl counts from when the message is delivered
// to its target, not from now. Such a message, and one with a priority of its own, comes
// by way of Dispatch.
//
// At goes by the broker's clock. That takes a question to the broker, whose answer holds
// for 10 minutes, and the permissions that client.Conn.BrokerTime names. Without them
// it goes by this host's clock.
//
// The errors are those of client.Publisher.Publish. ErrNotFound means that the ladder isn't
// declared. An *argument.Error is also returned for a When that is zero or more than
// 366 days ahead, and for an annotation that this package writes. After ErrOutcomeUnknown
// the message may be scheduled, with the ID and time that are returned.
//
// A message that is sent again after a lost connection keeps the delay that it was first
// sent with. So it is late by as long as that took.
func (p *Publisher[T]) Publish(ctx context.Context, when When, v T, edit ...func(*client.Message)) (Scheduled, error) {
	c := p.clock(ctx, when.kind == atTime)
	due, err := when.due(argument.Root("when"), c.now())
	if err != nil {
		return Scheduled{}, err
	}
	m, err := p.message(v)
	if err != nil {
		return Scheduled{}, err
	}
	for _, e := range edit {
		if e != nil {
			e(m)
		}
	}
	r, err := p.prepare(m, due)
	if err != nil {
		return Scheduled{}, err
	}
	return Scheduled{ID: r.id, Due: due}, hinted(p.core.Publish(ctx, m, func(m *client.Message) { p.enter(m, r, c.now()) }))
}

// PublishAll publishes vs in order, as Publish does, with many of them under way at once.
// when is called for each value, and so is edit. If one of them can't be scheduled, nothing
// is sent, and the error is an *argument.Error.
//
// Any other error is that of client.Publisher.PublishAll: a *client.BatchError lists the
// values that were not accepted. The result has an element for each value. Messages that
// are due at the same time are delivered in any order.
func (p *Publisher[T]) PublishAll(ctx context.Context, vs []T, when func(v T) When, edit ...func(v T, m *client.Message)) ([]Scheduled, error) {
	if when == nil {
		return nil, argument.New("when", nil, "is nil", "give a function that returns when a value is to be delivered")
	}
	whens, at := make([]When, len(vs)), false
	for i, v := range vs {
		whens[i] = when(v)
		at = at || whens[i].kind == atTime
	}
	c := p.clock(ctx, at)
	began := c.now()
	all, ms := make([]Scheduled, len(vs)), make([]*client.Message, len(vs))
	routes := make(map[*client.Message]route, len(vs))
	for i, v := range vs {
		due, err := whens[i].due(argument.Root("when").Call(i), began)
		if err != nil {
			return nil, err
		}
		m, err := p.message(v)
		if err != nil {
			return nil, err
		}
		for _, e := range edit {
			if e != nil {
				e(v, m)
			}
		}
		r, err := p.prepare(m, due)
		if err != nil {
			return nil, err
		}
		all[i], ms[i], routes[m] = Scheduled{ID: r.id, Due: due}, m, r
	}
	return all, hinted(p.core.PublishAll(ctx, ms, func(given, m *client.Message) { p.enter(m, routes[given], c.now()) }))
}

// Blocked reports whether the broker accepts no messages now, and since when; see
// client.Publisher.Blocked.
func (p *Publisher[T]) Blocked() (since time.Time, blocked bool) { return p.core.Blocked() }

// Close waits within ctx until all messages are answered, and closes the link; see
// client.Publisher.Close.
func (p *Publisher[T]) Close(ctx context.Context) error { return p.core.Close(ctx) }

// message makes a message of v.
func (p *Publisher[T]) message(v T) (m *client.Message, err error) {
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("made the codec panic: %v", r), "fix the value's marshaller")
		}
	}()
	if given, ok := any(v).(*client.Message); ok {
		if given == nil {
			return nil, argument.New("message", nil, "is nil", "give a message, such as client.NewMessage(body)")
		}
		// The edits and the ladder must not show in the caller's.
		m = new(*given)
		if given.Header != nil {
			m.Header = new(*given.Header)
		}
		m.Properties = &client.Properties{}
		if given.Properties != nil {
			*m.Properties = *given.Properties
		}
		m.Annotations = maps.Clone(given.Annotations)
		m.ApplicationProperties = maps.Clone(given.ApplicationProperties)
		return m, nil
	}
	m = client.NewMessage(nil)
	m.Data = nil
	if err := p.codec.Encode(v, m); err != nil {
		return nil, argument.New("value", fmt.Sprintf("%T", v), "can't be encoded", "fix the value, or use another Codec").Because(err)
	}
	return m, nil
}

// clock counts from one answer about the broker's time. It doesn't follow a step of this
// host's clock.
type clock struct{ broker, asked time.Time }

func (c clock) now() time.Time { return c.broker.Add(time.Since(c.asked)) }

// clock returns the broker's clock if exact, or if it can't be had this host's. The delay
// of an After is the same by both.
func (p *Publisher[T]) clock(ctx context.Context, exact bool) clock {
	if exact {
		if now, err := p.conn.BrokerTime(ctx); err == nil {
			// It is ahead by at most a millisecond, and by what a message takes to the
			// broker, which this one takes, too.
			return clock{now.Add(-time.Millisecond), time.Now()}
		}
	}
	now := time.Now()
	return clock{now, now}
}

// hinted says what to do about a ladder that isn't there.
func hinted(err error) error {
	if errors.Is(err, client.ErrNotFound) {
		return fmt.Errorf("schedule: the ladder isn't declared in this virtual host; declare schedule.Topology: %w", err)
	}
	return err
}
