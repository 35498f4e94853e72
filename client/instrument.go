package client

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
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

func (h *hooks) publish(ctx context.Context, s instrument.Sending) instrument.Publication {
	defer caught(h.log, "Publish")
	return h.in.Publish(ctx, s)
}

func (h *hooks) published(p instrument.Publication, err error) {
	if p != nil {
		defer caught(h.log, "Publication.Published")
		p.Published(err)
	}
}

func (h *hooks) publishAll(ctx context.Context, to address.Address, n int) instrument.Batch {
	if h == nil {
		return nil
	}
	defer caught(h.log, "PublishAll")
	return h.in.PublishAll(ctx, to, n)
}

func (h *hooks) publishOf(b instrument.Batch, s instrument.Sending) instrument.Publication {
	defer caught(h.log, "Batch.Publish")
	return b.Publish(s)
}

func (h *hooks) publishedAll(b instrument.Batch, err error) {
	if b != nil {
		defer caught(h.log, "Batch.Published")
		b.Published(err)
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
		o = &observed{handling, h.log, with, h.server.Load()}
	}
	return with, o
}
