package client

import (
	"context"
	"log/slog"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/outcome"

	"github.com/hopback/hopback/internal/consume"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/instrumented"
	"github.com/hopback/hopback/internal/publish"
)

// asked is what a Preparer requested from its consumer.
type asked struct {
	order    func(*Delivery) (string, bool) // nil: none
	forwards []address.Address
	gate     *consume.Gate // nil: the consumer isn't gated
}

// consuming is one call of Consume. The core receives deliveries and settles them; the user's
// Handler, order function, and hooks process them.
type consuming struct {
	core    *consume.Consumer
	handler Handler
	order   func(*Delivery) (string, bool)
	control *Control
	hooks   *instrumented.Hooks // nil: no Instrument
	log     *slog.Logger
	queue   string
	conn    *Conn // nil in tests
}

func newConsuming(queue, source string, h Handler, cfg ConsumerConfig, a asked, hooks *instrumented.Hooks, deps consume.ConsumerDeps) *consuming {
	follow := cfg.Control
	if follow == nil { // a gated consumer
		follow = &Control{}
	}
	k := &consuming{handler: h, order: a.order, control: cfg.Control, hooks: hooks, log: deps.Log.With("queue", queue), queue: queue}
	deps.Arrived, deps.Follow, deps.Gate = k.arrived, follow.follow, follow.gate
	k.core = consume.NewConsumer(consume.ConsumerSettings{
		Queue: queue, Source: source, Concurrency: cfg.Concurrency, Prefetch: cfg.Prefetch, Near: cfg.near,
		Grace: cfg.Grace, ForwardPatience: cfg.ForwardPatience, ConsumerTimeout: cfg.ConsumerTimeout,
		Properties: cfg.linkProperties(), Ordered: a.order != nil, Forwards: a.forwards,
		NoIsolation: cfg.NoIsolation, OnActive: cfg.OnActive, OnGone: cfg.OnGone, Gate: a.gate,
	}, deps)
	return k
}

func (k *consuming) Shut(ctx context.Context) error { return k.core.Shut(ctx) }
func (k *consuming) Count(all *instrument.Stats)    { k.core.Count(all) }
func (k *consuming) arrived(m *Message, at time.Time) *consume.Delivery {
	c := &consumed{of: k}
	c.delivery = Delivery{message: m, queue: k.queue, received: at, state: &c.state}
	c.state.Handled = c
	return &c.state
}

// consumed is a delivery of a consumer: the user's view and the core's state in one allocation.
// It is the core's handled.
type consumed struct {
	delivery Delivery
	state    consume.Delivery
	ctx      deliveryContext
	of       *consuming
	// result is the handler's error, and after Decide the outcome that it stands for.
	result error
	again  *inside.Again // of the handler's last call; nil: it wasn't called before
}

// Lane calls the function of Start.Order.
func (c *consumed) Lane() (key string, ok bool) { return c.of.order(&c.delivery) }

// Observe reports the delivery to the Instrument.
func (c *consumed) Observe(ctx context.Context) context.Context {
	if c.of.hooks == nil {
		return ctx
	}
	ctx = c.delivery.follow(ctx, c.of.hooks)
	c.state.Follow(c.delivery.observed)
	return ctx
}

// Handle runs the handler and turns a panic or Goexit into an error.
func (c *consumed) Handle(ctx context.Context) {
	c.ctx = deliveryContext{Context: ctx, delivery: &c.delivery, again: c.again}
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		c.result = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
		if value == nil {
			if c.delivery.lastWord != nil {
				c.result = c.delivery.lastWord
			}
			c.state.Exited()
		}
	})
	c.result = c.of.handler.Handle(&c.ctx, &c.delivery)
	returned = true
}

// Decide resolves the handler's result.
func (c *consumed) Decide() consume.Decision {
	c.state.HandlerResult(c.result)
	if c.result == nil {
		return consume.Decision{Kind: consume.DecisionAccept}
	}
	if again, ok := c.result.(*inside.Again); ok {
		c.again = again
		return consume.Decision{Kind: consume.DecisionAgain, Delay: again.Delay, Annotations: again.Annotations}
	}
	o := OutcomeOf(c.result)
	c.result = o
	if dead, ok := o.(DeadLetter); ok {
		c.logDeadLetter(dead)
	}
	r := c.resolve(o)
	if r.Refused != nil {
		c.of.log.ErrorContext(c.state.LogCtx(), "hopback: an outcome can't be carried out; another one replaces it", "message_id", publish.MessageID(c.delivery.message), "outcome", ErrorText(o), "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	return c.decided(r)
}

func (c *consumed) resolve(o Outcome) Resolution {
	p, ok := o.(Park)
	if !ok || c.of.conn == nil {
		return resolve(o)
	}
	return p.resolve(context.WithoutCancel(&c.ctx), c.state.Parks(), c.of.conn.Broker(), c.of.conn.brokerTime)
}

// Undecodable dead-letters the message.
func (c *consumed) Undecodable(err error) consume.Decision {
	dead := DeadLetter{Reason: ReasonUndecodable, Err: err}
	c.state.HandlerResult(dead)
	return c.decided(dead.resolve())
}

// Unsendable is what Forward.Unsendable says.
func (c *consumed) Unsendable(why error) consume.Decision {
	return c.decided(c.forward().Unsendable(why))
}

// Unaccepted is what Forward.Unaccepted says.
func (c *consumed) Unaccepted(why error) consume.Decision {
	return c.decided(c.forward().Unaccepted(why))
}

// forward is the outcome that the core is carrying out.
func (c *consumed) forward() Forward {
	f, _ := c.result.(Forward)
	return f
}

// decided returns r for the core.
func (c *consumed) decided(r Resolution) consume.Decision {
	if r.Kind == ResolutionForward && r.Refused != nil {
		c.result = r.Forward // the Else of the Forward before
	}
	return consume.Decision{
		Kind: consume.DecisionKind(r.Kind), Failed: r.Failed, DeadLetter: r.DeadLetter, Annotations: r.Annotations, Reason: string(r.Reason), ErrorText: r.Error,
		To: r.Forward.To, Copy: r.Forward.Message, Refused: r.Refused,
	}
}

func (c *consumed) logDeadLetter(o DeadLetter) {
	if p, ok := outcome.Find[*failure.PanicError](o.Err); ok && p != nil {
		c.of.log.ErrorContext(c.state.LogCtx(), "hopback: a handler panicked; the message is dead-lettered", "message_id", publish.MessageID(c.delivery.message), "panic", ErrorText(p), "stack", string(p.Stack))
		return
	}
	c.of.log.WarnContext(c.state.LogCtx(), "hopback: a message is dead-lettered", "message_id", publish.MessageID(c.delivery.message), "reason", failure.Clip(string(o.Reason), 255), "error", ErrorText(o.Err))
}
