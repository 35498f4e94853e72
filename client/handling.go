package client

import (
	"context"
	"log/slog"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/client/internal/instrumented"
)

// addressOf is where a message of a publisher without an address goes.
func addressOf(m *Message) string {
	if m.Properties == nil || m.Properties.To == nil {
		return ""
	}
	return *m.Properties.To
}

// maxSettling bounds what an Instrument adds to a settlement.
const maxSettling = 1024

// caught is deferred around each call of an Instrument.
func caught(log *slog.Logger, call string) {
	if p := recover(); p != nil {
		log.Error("hopback: Config.Instrument panicked", "call", call, "panic", p)
	}
}

// observed is a delivery's Handling. A nil *observed calls nothing.
type observed struct {
	instrument.Handling
	log    *slog.Logger
	ctx    context.Context // the handler's
	server *string
}

func (o *observed) decided(d instrument.Decision) {
	defer caught(o.log, "Handling.Decided")
	o.Decided(d)
}

func (o *observed) handled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Handled")
		o.Handled(err)
	}
}

// forwarding returns the message to send: a copy of m, since whoever made m may use it
// again.
func (o *observed) forwarding(to address.Address, m *Message) (with *Message) {
	with = m // after a panic
	defer caught(o.log, "Handling.Forwarding")
	c := *m
	o.Forwarding(instrumented.New(to, &c, o.server))
	return &c
}

func (o *observed) forwarded(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Forwarded")
		o.Forwarded(err)
	}
}

func (o *observed) settled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Settled")
		o.Settled(err)
	}
}
