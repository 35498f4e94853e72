package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

const delayedType = "x-delayed-message"

// massTransit recognizes MassTransit's endpoints
// (MassTransit.RabbitMqTransport/…/RabbitMqErrorSettings.cs and others, version 8):
//
//	<Namespace>:<Type>     fanout exchange          bound to the endpoints that consume the type
//	<endpoint>             fanout exchange, queue
//	<endpoint>_error       fanout exchange, queue   messages whose consumer failed
//	<endpoint>_skipped     fanout exchange, queue   messages that no consumer handles
//	<endpoint>_delay       x-delayed-message        delayed redelivery
func (v *view) massTransit() []*match {
	m := newMatch()
	m.cure = "MassTransit retries by itself, and publishes what fails to the _error queue. Without the delayed-message plugin, use one of its schedulers for delayed redelivery. Declare quorum queues with SetQuorumQueue, and a delivery limit of -1: otherwise the broker drops a message that comes back 20 times."
	for _, q := range v.free() {
		for _, suffix := range []string{"_error", "_skipped"} {
			base, ok := strings.CutSuffix(q.name, suffix)
			if !ok || !v.pair(q.name) || !v.pair(base) {
				continue
			}
			m.certain = true
			if m.because == "" {
				m.because = fmt.Sprintf("the endpoint %s and %s are each an exchange and a queue", short(base), short(q.name))
			}
			for _, name := range []string{base, q.name} {
				m.queues[name] = true
				m.addExchange(name)
			}
		}
	}
	v.massTransitTypes(m)
	for name := range m.queues {
		if v.isExchange(name+"_delay", delayedType) {
			m.variant = "delayed redelivery"
			m.addExchange(name + "_delay")
		}
	}
	if m.because == "" {
		return nil
	}
	v.addTypes(m)
	for _, x := range v.exchanges {
		if strings.HasPrefix(x.name, "MassTransit:") && !x.claimed {
			m.addExchange(x.name)
		}
	}
	return []*match{m}
}

// massTransitTypes adds endpoints by the exchanges of types that are bound to them.
func (v *view) massTransitTypes(m *match) {
	own := m.certain
	for _, x := range v.exchanges {
		own = own || strings.HasPrefix(x.name, "MassTransit:") && x.kind == string(declare.ExchangeFanout) && !x.claimed
	}
	for _, x := range v.exchanges {
		if !v.pair(x.name) || m.exchanges[x.name] || strings.Contains(x.name, ":") {
			continue
		}
		for _, b := range x.ins {
			if strings.Contains(b.Source, ":") && v.isExchange(b.Source, string(declare.ExchangeFanout)) {
				m.certain = own
				m.addExchange(x.name)
				m.queues[x.name] = true
				if m.because == "" {
					m.because = fmt.Sprintf("the exchange of the type %s is bound to the endpoint %s", short(b.Source), short(x.name))
				}
				break
			}
		}
	}
}
