package client

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/message"
)

// instrumentHooks calls an Instrument. A nil one calls nothing. Callers on the way of a message
// ask for nil themselves, so that it costs a comparison.
type instrumentHooks struct {
	in     instrument.Instrument
	log    *slog.Logger
	Server atomic.Pointer[string] // see instrument.Sending
}

// Connected notes the endpoint that the Conn has connected to.
func (h *instrumentHooks) Connected(server string) {
	if h != nil {
		h.Server.Store(&server)
	}
}

func newInstrumentHooks(in instrument.Instrument, log *slog.Logger) *instrumentHooks {
	if in == nil {
		return nil
	}
	return &instrumentHooks{in: in, log: log}
}

func (h *instrumentHooks) Connect(stats func() instrument.Stats) (closed func()) {
	if h == nil {
		return nil
	}
	defer caught(h.log, "Connect")
	return h.in.Connect(stats)
}

func (h *instrumentHooks) Closed(closed func()) {
	if closed != nil {
		defer caught(h.log, "Connect's result")
		closed()
	}
}

// observedPublish is a message of Publish that an Instrument follows.
type observedPublish struct {
	sent *message.Sending
	by   instrument.Publication
}

// Publish begins to follow a message that isn't checked yet.
func (h *instrumentHooks) Publish(ctx context.Context, to address.Address, m *amqp.Message) (p observedPublish) {
	p.sent = message.PooledSending(to, m, h.Server.Load())
	defer caught(h.log, "Publish")
	p.by = h.in.Publish(ctx, p.sent)
	return p
}

func (h *instrumentHooks) Published(p observedPublish, err error) {
	h.report(p.by, err)
	if err == nil { // otherwise the message may still be on its way
		p.sent.Recycle()
	}
}

func (h *instrumentHooks) report(p instrument.Publication, err error) {
	if p != nil {
		defer caught(h.log, "Publication.Published")
		p.Published(err)
	}
}

// publishingAll is a call of PublishAll that an Instrument follows. A nil *publishingAll
// calls nothing.
type publishingAll struct {
	hooks *instrumentHooks
	by    instrument.Batch
	each  []instrument.Publication
}

// PublishAll begins to follow a call with n messages. It returns nil if nobody follows it.
func (h *instrumentHooks) PublishAll(ctx context.Context, to address.Address, n int) *publishingAll {
	if h == nil {
		return nil
	}
	defer caught(h.log, "PublishAll")
	if by := h.in.PublishAll(ctx, to, n); by != nil {
		return &publishingAll{hooks: h, by: by, each: make([]instrument.Publication, n)}
	}
	return nil
}

// Publish begins to follow the i-th message, which isn't checked yet.
func (p *publishingAll) Publish(i int, to address.Address, m *amqp.Message) {
	if p != nil {
		defer caught(p.hooks.log, "Batch.Publish")
		p.each[i] = p.by.Publish(message.NewSending(to, m, p.hooks.Server.Load()))
	}
}

// Published reports the result of the i-th message.
func (p *publishingAll) Published(i int, err error) {
	if p != nil {
		p.hooks.report(p.each[i], err)
	}
}

func (p *publishingAll) End(err error) {
	if p != nil {
		defer caught(p.hooks.log, "Batch.Published")
		p.by.Published(err)
	}
}

func (h *instrumentHooks) SettledRange(n int) {
	defer caught(h.log, "SettledRange")
	h.in.SettledRange(n)
}

// Handle begins to follow a delivery. It returns the ctx for its handler, and nil if nobody
// follows it.
func (h *instrumentHooks) Handle(ctx context.Context, d instrument.Delivery) (with context.Context, o *observedDelivery) {
	with = ctx
	defer caught(h.log, "Handle")
	inner, handling := h.in.Handle(ctx, d)
	if inner != nil {
		with = inner
	}
	if handling != nil {
		o = &observedDelivery{by: handling, log: h.log, Ctx: with, server: h.Server.Load()}
	}
	return with, o
}

// caught is deferred around each call of an Instrument.
func caught(log *slog.Logger, call string) {
	if p := recover(); p != nil {
		log.Error("hopback: Config.Instrument panicked", "call", call, "panic", p)
	}
}

// observedDelivery is a delivery's Handling. A nil one calls nothing.
type observedDelivery struct {
	by     instrument.Handling
	log    *slog.Logger
	Ctx    context.Context // the handler's
	server *string
}

func (o *observedDelivery) Decided(d instrument.Decision) {
	defer caught(o.log, "Handling.Decided")
	o.by.Decided(d)
}

func (o *observedDelivery) Handled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Handled")
		o.by.Handled(err)
	}
}

// Forwarding returns the message to send: a copy of m, because the caller may use m again.
func (o *observedDelivery) Forwarding(to address.Address, m *amqp.Message) (with *amqp.Message) {
	with = m // after a panic
	defer caught(o.log, "Handling.Forwarding")
	c := *m
	o.by.Forwarding(message.NewSending(to, &c, o.server))
	return &c
}

func (o *observedDelivery) Forwarded(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Forwarded")
		o.by.Forwarded(err)
	}
}

// maxSettling bounds what an Instrument adds to a settlement.
const maxSettling = 1024

// Settling returns the annotations that the Instrument adds to a settlement: nil if that
// carries none.
func (o *observedDelivery) Settling(s instrument.Settlement) (added amqp.Annotations) {
	defer caught(o.log, "Handling.Settling")
	all := o.by.Settling(s)
	if s.Kind != instrument.SettlementModified {
		return nil
	}
	size := 0
	for k, v := range all {
		if message.Addable(k, v, maxSettling) && strings.HasPrefix(k, "x-") {
			if added == nil {
				added = amqp.Annotations{}
			}
			size += len(k) + len(v)
			added[message.BoxedKey(k)] = v
		}
	}
	if size > maxSettling {
		o.log.Error("hopback: Config.Instrument adds too much to a settlement; nothing is added", "bytes", size)
		return nil
	}
	return added
}

func (o *observedDelivery) Settled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Settled")
		o.by.Settled(err)
	}
}
