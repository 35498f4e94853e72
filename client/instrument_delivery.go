package client

import (
	"context"
	"log/slog"
	"strings"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/keys"
	"github.com/hopback/hopback/internal/sendview"
)

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
	o.by.Forwarding(sendview.New(to, &c, o.server))
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
		if sendview.Addable(k, v, maxSettling) && strings.HasPrefix(k, "x-") {
			if added == nil {
				added = amqp.Annotations{}
			}
			size += len(k) + len(v)
			added[keys.Boxed(k)] = v
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
