package client

import (
	"context"
	"log/slog"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/outcome"
)

// asked is what a Preparer has asked of its consumer.
type asked struct {
	order    func(*Delivery) (string, bool) // nil: none
	forwards []address.Address
}

// consuming is one call of Consume: the core gets deliveries and settles them, and what the
// user has given handles them.
type consuming struct {
	core    *consumer
	handler Handler
	order   func(*Delivery) (string, bool)
	control *Control
	hooks   *hooks // nil: no Instrument
	log     *slog.Logger
	queue   string
}

func newConsuming(queue, source string, h Handler, cfg ConsumerConfig, a asked, hooks *hooks, deps consumerDeps) *consuming {
	if cfg.Control == nil {
		cfg.Control = &Control{}
	}
	k := &consuming{handler: h, order: a.order, control: cfg.Control, hooks: hooks, log: deps.log.With("queue", queue), queue: queue}
	deps.arrived, deps.follow, deps.gate = k.arrived, cfg.Control.follow, cfg.Control.gate
	k.core = newConsumer(consumerSettings{
		queue: queue, source: source, concurrency: cfg.Concurrency, prefetch: cfg.Prefetch, near: cfg.near,
		grace: cfg.Grace, forwardPatience: cfg.ForwardPatience, consumerTimeout: cfg.ConsumerTimeout,
		properties: cfg.linkProperties(), ordered: a.order != nil, forwards: a.forwards,
		noQuarantine: cfg.NoQuarantine, onActive: cfg.OnActive, onGone: cfg.OnGone,
	}, deps)
	return k
}

func (k *consuming) shut(ctx context.Context) error { return k.core.shut(ctx) }
func (k *consuming) count(all *instrument.Stats)    { k.core.count(all) }
func (k *consuming) arrived(m *Message, at time.Time) *delivery {
	c := &consumed{of: k}
	c.delivery = Delivery{message: m, queue: k.queue, received: at, state: &c.state}
	c.state.handled = c
	return &c.state
}

// consumed is a delivery of a consumer: what the user sees of it, and what the core has, so
// that they are one allocation. It is the core's handled.
type consumed struct {
	delivery Delivery
	state    delivery
	ctx      deliveryContext
	of       *consuming
	// result is the handler's, and once that is decided, what it stands for.
	result error
}

// Lane calls the function of Start.Order.
func (c *consumed) Lane() (key string, ok bool) { return c.of.order(&c.delivery) }

// Observe has the Instrument follow the delivery.
func (c *consumed) Observe(ctx context.Context) context.Context {
	if c.of.hooks == nil {
		return ctx
	}
	ctx = c.delivery.follow(ctx, c.of.hooks)
	c.state.follow(c.delivery.observed)
	return ctx
}

// Handle runs the handler and turns whatever it does into an error.
func (c *consumed) Handle(ctx context.Context) {
	c.ctx = deliveryContext{Context: ctx, delivery: &c.delivery}
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		c.result = DeadLetter{Reason: ReasonPanicked, Err: &PanicError{Value: value, Stack: stack}}
		if value == nil {
			if c.delivery.lastWord != nil {
				c.result = c.delivery.lastWord
			}
			c.state.exited()
		}
	})
	c.result = c.of.handler.Handle(&c.ctx, &c.delivery)
	returned = true
}

// Decide resolves the handler's result.
func (c *consumed) Decide() decision {
	c.state.handlerResult(c.result)
	if c.result == nil {
		return decision{kind: decisionAccept}
	}
	o := OutcomeOf(c.result)
	c.result = o
	if dead, ok := o.(DeadLetter); ok {
		c.logDeadLetter(dead)
	}
	r := resolve(o)
	if r.Refused != nil {
		c.of.log.ErrorContext(c.state.logCtx(), "hopback: an outcome can't be carried out as it is", "message_id", messageID(c.delivery.message), "outcome", ErrorText(o), "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	return c.decided(r)
}

// Undecodable dead-letters the message.
func (c *consumed) Undecodable(err error) decision {
	dead := DeadLetter{Reason: ReasonUndecodable, Err: err}
	c.state.handlerResult(dead)
	return c.decided(dead.resolve())
}

// Unsendable is what Forward.Unsendable says.
func (c *consumed) Unsendable(why error) decision { return c.decided(c.forward().Unsendable(why)) }

// Unaccepted is what Forward.Unaccepted says.
func (c *consumed) Unaccepted(why error) decision { return c.decided(c.forward().Unaccepted(why)) }

// forward is the outcome that the core is carrying out.
func (c *consumed) forward() Forward {
	f, _ := c.result.(Forward)
	return f
}

// decided returns r for the core.
func (c *consumed) decided(r Resolution) decision {
	if r.Kind == ResolutionForward && r.Refused != nil {
		c.result = r.Forward // the Else of the Forward before
	}
	return decision{
		kind: decisionKind(r.Kind), failed: r.Failed, deadLetter: r.DeadLetter, annotations: r.Annotations, reason: string(r.Reason), errorText: r.Error,
		to: r.Forward.To, copy: r.Forward.Message, refused: r.Refused,
	}
}

func (c *consumed) logDeadLetter(o DeadLetter) {
	if p, ok := outcome.Find[*PanicError](o.Err); ok && p != nil {
		c.of.log.ErrorContext(c.state.logCtx(), "hopback: a handler panicked; the message is dead-lettered", "message_id", messageID(c.delivery.message), "panic", ErrorText(p), "stack", string(p.Stack))
		return
	}
	c.of.log.WarnContext(c.state.logCtx(), "hopback: a message is dead-lettered", "message_id", messageID(c.delivery.message), "reason", clip(string(o.Reason), 255), "error", ErrorText(o.Err))
}
