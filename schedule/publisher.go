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
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/oldbroker"
)

// PublisherConfig configures a [Publisher]. The zero value is ready to use.
type PublisherConfig struct {
	client.PublisherConfig
	// Names are the names of the ladder. Default: the ladder that all services share.
	Names Names
	// Claimable makes messages wait in [Names.ClaimableQueue], where a client.Claimer can cancel, run,
	// or reschedule each by its ID. It needs RabbitMQ 4.4, [ClaimableTopology] instead of the ladder,
	// and a running [Dispatch] with DispatchConfig.Claimable, which parks the messages and publishes
	// them when they are due. Default: false.
	Claimable bool
	// Ladder makes messages wait in the ladder even if their queue could hold them. Set it while
	// nodes of a cluster still run RabbitMQ 4.3 or earlier, or the feature flag rabbitmq_4.4.0 isn't
	// enabled: until then a queue can deliver a message for later at once, though the node that the
	// publisher is connected to runs 4.4. Default: on RabbitMQ 4.4 a quorum queue holds its messages.
	Ladder bool
}

// Publisher publishes values of type T that are delivered later. It is safe for concurrent use,
// and survives the loss of its connection.
type Publisher[T any] struct {
	core  *client.Publisher[*client.Message]
	conn  *client.Conn
	codec client.Codec
	to    string // empty: each message has its target
	names Names
	// ladder is PublisherConfig.Ladder.
	ladder bool
	// claimable is PublisherConfig.Claimable.
	claimable bool
	holders   *holders
}

// Scheduled is a scheduled message. Pass it to [Cancel].
type Scheduled struct {
	// ID is the message-id.
	ID string
	// Due is the delivery time, in whole milliseconds: for [At] by the broker's clock, and for
	// [After] by this host's.
	Due time.Time
}

// NewPublisher opens a publisher for messages to the address to. If to is the zero Address, each
// message needs its To property (see client.PublishTo).
//
// The ladder must exist, unless cfg.Claimable is set: see [Topology]. On RabbitMQ 4.4, messages to
// quorum queues don't need it. The target may be created later, unless it holds its messages itself.
// The errors are those of
// client.NewPublisher.
func NewPublisher[T any](ctx context.Context, conn *client.Conn, to address.Address, cfg PublisherConfig) (*Publisher[T], error) {
	if err := cfg.Names.check(argument.Root("PublisherConfig").Field("Names")); err != nil {
		return nil, err
	}
	p := &Publisher[T]{conn: conn, codec: cfg.Codec, names: cfg.Names, ladder: cfg.Ladder, claimable: cfg.Claimable, holders: &holders{}}
	if p.codec == nil {
		p.codec = client.JSONCodec{}
	}
	// A *client.Message is sent unchanged.
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
	if cfg.Claimable {
		if b := brokerOf(ctx, conn); b.Version != "" && oldbroker.Of(b.AtLeast).LacksTokens {
			_ = core.Close(ctx)
			return nil, noTokens("PublisherConfig.Claimable", b)
		}
	}
	p.core = core
	return p, nil
}

// Publish schedules v for the time when, and waits until the broker has stored it. It returns the
// ID and the due time, for [Cancel].
//
// Each edit is called on the message before it is checked and sent, to set properties, headers,
// or annotations. A nil edit is skipped. The message-id is random unless an edit sets one; it
// must be a string of 1 to 512 bytes.
//
// The errors are those of client.Publisher.Publish. In addition:
//
//   - client.ErrNotFound means that the ladder isn't declared.
//   - An *argument.Error also means that when is zero or more than 366 days ahead, or that the
//     message has an annotation that this package writes.
//   - After client.ErrOutcomeUnknown the message may be scheduled, with the ID and time that are
//     returned.
//
// Edge cases:
//
//   - A ttl starts when the message is delivered to its target, not now. A message with a ttl or
//     a priority goes through [Dispatch].
//   - [At] uses the broker's clock. That takes a request to the broker, whose answer is valid for
//     10 minutes, and the permissions that client.Conn.BrokerTime lists. Without them, At uses
//     this host's clock.
//   - A message that is sent again after a lost connection keeps its original delay. So it is
//     late by the time in between.
func (p *Publisher[T]) Publish(ctx context.Context, when When, v T, edit ...func(*client.Message)) (Scheduled, error) {
	c := p.clock(ctx, when.kind == atTime || p.claimable)
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
	r, err := p.prepare(ctx, m, due, when.kind)
	if err != nil {
		return Scheduled{}, err
	}
	return Scheduled{ID: r.id, Due: due}, p.hinted(p.core.Publish(ctx, m, func(m *client.Message) { p.enter(m, r, c.passed()) }))
}

// PublishAll schedules vs in order, as [Publisher.Publish] does, with many messages in flight at
// once. It calls when and edit for each value. The result has an element for each value.
//
// If one value can't be scheduled, nothing is sent, and the error is an *argument.Error. Any
// other error is that of client.Publisher.PublishAll: a *client.BatchError lists the values that
// the broker didn't accept. Messages with the same due time are delivered in any order.
func (p *Publisher[T]) PublishAll(ctx context.Context, vs []T, when func(v T) When, edit ...func(v T, m *client.Message)) ([]Scheduled, error) {
	if when == nil {
		return nil, argument.New("when", nil, "is nil", "pass a function that returns the delivery time of a value")
	}
	whens, at := make([]When, len(vs)), false
	for i, v := range vs {
		whens[i] = when(v)
		at = at || whens[i].kind == atTime
	}
	c := p.clock(ctx, at || p.claimable)
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
		r, err := p.prepare(ctx, m, due, whens[i].kind)
		if err != nil {
			return nil, err
		}
		all[i], ms[i], routes[m] = Scheduled{ID: r.id, Due: due}, m, r
	}
	return all, p.hinted(p.core.PublishAll(ctx, ms, func(given, m *client.Message) { p.enter(m, routes[given], c.passed()) }))
}

// Blocked reports whether the broker currently accepts no messages, and since when. See
// client.Publisher.Blocked.
func (p *Publisher[T]) Blocked() (since time.Time, blocked bool) { return p.core.Blocked() }

// Close waits until all messages are confirmed, or until ctx is done, and closes the link. See
// client.Publisher.Close.
func (p *Publisher[T]) Close(ctx context.Context) error { return p.core.Close(ctx) }

// message makes a message of v.
func (p *Publisher[T]) message(v T) (m *client.Message, err error) {
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("made the codec panic: %v", r), "fix the value's marshaler")
		}
	}()
	if given, ok := any(v).(*client.Message); ok {
		if given == nil {
			return nil, argument.New("message", nil, "is nil", "pass a message, such as client.NewMessage(body)")
		}
		// The edits and the ladder must not change the caller's message.
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

// clock counts from one reading of the broker's clock. It doesn't follow a step of this
// host's clock.
type clock struct{ read brokerclock.Reading }

// now returns the time, or a little later.
func (c clock) now() time.Time { return c.read.Broker.Add(time.Since(c.read.Own)) }

// passed returns the time, or a little earlier: what waits for the rest of its delay from then isn't early.
func (c clock) passed() time.Time { return c.now().Add(-c.read.Late) }

// clock returns the broker's clock if exact, or this host's if the broker can't be asked. The
// delay of an After is the same on both.
func (p *Publisher[T]) clock(ctx context.Context, exact bool) clock {
	if exact {
		if r, err := p.readClock(ctx); err == nil {
			return clock{r}
		}
	}
	now := time.Now()
	return clock{brokerclock.Reading{Own: now, Broker: now}}
}

// hinted adds the remedy to the error for a missing ladder.
func (p *Publisher[T]) hinted(err error) error {
	switch {
	case errors.Is(err, client.ErrNotFound) && p.claimable:
		return fmt.Errorf("schedule: the queue %q isn't declared in this virtual host; apply schedule.ClaimableTopology: %w", p.names.ClaimableQueue(), err)
	case errors.Is(err, client.ErrNotFound):
		return fmt.Errorf("schedule: the ladder isn't declared in this virtual host; apply schedule.Topology: %w", err)
	}
	return err
}
