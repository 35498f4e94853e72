package client

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/sendview"
)

// hooks calls an Instrument. A nil *hooks calls nothing. Callers on the way of a message
// ask for nil themselves, so that it costs a comparison.
type hooks struct {
	in     instrument.Instrument
	log    *slog.Logger
	server atomic.Pointer[string] // see instrument.Sending
}

// connected notes the endpoint that the Conn has connected to.
func (h *hooks) connected(server string) {
	if h != nil {
		h.server.Store(&server)
	}
}

func newHooks(in instrument.Instrument, log *slog.Logger) *hooks {
	if in == nil {
		return nil
	}
	return &hooks{in: in, log: log}
}

func (h *hooks) connect(stats func() instrument.Stats) (closed func()) {
	if h == nil {
		return nil
	}
	defer caught(h.log, "Connect")
	return h.in.Connect(stats)
}

func (h *hooks) closed(closed func()) {
	if closed != nil {
		defer caught(h.log, "Connect's result")
		closed()
	}
}

// publishing is a message of Publish that an Instrument follows.
type publishing struct {
	sent *sendview.Sending
	by   instrument.Publication
}

// publish begins to follow a message that isn't checked yet.
func (h *hooks) publish(ctx context.Context, to address.Address, m *amqp.Message) (p publishing) {
	p.sent = sendview.Pooled(to, m, h.server.Load())
	defer caught(h.log, "Publish")
	p.by = h.in.Publish(ctx, p.sent)
	return p
}

func (h *hooks) published(p publishing, err error) {
	h.report(p.by, err)
	if err == nil { // otherwise the message may still be on its way
		p.sent.Recycle()
	}
}

func (h *hooks) report(p instrument.Publication, err error) {
	if p != nil {
		defer caught(h.log, "Publication.Published")
		p.Published(err)
	}
}

// publishingAll is a call of PublishAll that an Instrument follows. A nil *publishingAll
// calls nothing.
type publishingAll struct {
	hooks *hooks
	by    instrument.Batch
	each  []instrument.Publication
}

// publishAll begins to follow a call with n messages. It returns nil if nobody follows it.
func (h *hooks) publishAll(ctx context.Context, to address.Address, n int) *publishingAll {
	if h == nil {
		return nil
	}
	defer caught(h.log, "PublishAll")
	if by := h.in.PublishAll(ctx, to, n); by != nil {
		return &publishingAll{hooks: h, by: by, each: make([]instrument.Publication, n)}
	}
	return nil
}

// publish begins to follow the i-th message, which isn't checked yet.
func (p *publishingAll) publish(i int, to address.Address, m *amqp.Message) {
	if p != nil {
		defer caught(p.hooks.log, "Batch.Publish")
		p.each[i] = p.by.Publish(sendview.New(to, m, p.hooks.server.Load()))
	}
}

// published reports the result of the i-th message.
func (p *publishingAll) published(i int, err error) {
	if p != nil {
		p.hooks.report(p.each[i], err)
	}
}

func (p *publishingAll) end(err error) {
	if p != nil {
		defer caught(p.hooks.log, "Batch.Published")
		p.by.Published(err)
	}
}

// settledRange is nil where nobody is told.
func (h *hooks) settledRange() func(n int) {
	if h == nil {
		return nil
	}
	return func(n int) {
		defer caught(h.log, "SettledRange")
		h.in.SettledRange(n)
	}
}

// handle begins to follow a delivery. It returns the ctx for its handler, and nil if nobody
// follows it.
func (h *hooks) handle(ctx context.Context, d instrument.Delivery) (with context.Context, o *observed) {
	with = ctx
	defer caught(h.log, "Handle")
	inner, handling := h.in.Handle(ctx, d)
	if inner != nil {
		with = inner
	}
	if handling != nil {
		o = &observed{by: handling, log: h.log, ctx: with, server: h.server.Load()}
	}
	return with, o
}
