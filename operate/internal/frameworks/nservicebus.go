package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

const nsbCure = "NServiceBus retries by itself. Set the delivery limit of its queues to -1, as NServiceBus.RabbitMQ 10 and later does: otherwise the broker drops a message that comes back 20 times before NServiceBus moves it to the error queue. Don't delete an endpoint while delayed messages for it wait, or give the delay-delivery exchange an alternate exchange with a queue: 32 of them block a level for all endpoints."

// nserviceBus recognizes NServiceBus.RabbitMQ's delay infrastructure (DelayInfrastructure.cs; v2
// since version 7) and its routing topologies (ConventionalRoutingTopology.cs,
// DirectRoutingTopology.cs):
//
//	nsb.v2.delay-level-27 … -00   topic exchange, queue   a ladder, down to
//	nsb.v2.delay-delivery         topic exchange          bound by "#.<endpoint>"
//	<endpoint>                    queue                   and, with conventional routing, a
//	                                                      fanout exchange of the same name
//	<Namespace>:<Type>            fanout exchange         conventional routing: bound to its
//	                                                      base types and to its subscribers
func (v *view) nserviceBus() []*match {
	m := newMatch()
	m.cure = nsbCure
	conventional, direct := v.nsbDelays(m), false
	if m.certain {
		for name := range m.queues {
			direct = direct || !m.exchanges[name]
		}
	} else {
		v.nsbTypes(m)
		if !m.certain {
			return nil
		}
		conventional = true
	}
	if conventional {
		m.variant = "conventional routing" + m.variant
	} else if direct {
		m.variant = "direct routing" + m.variant
	} else {
		m.variant = strings.TrimPrefix(m.variant, ", ")
	}
	for _, name := range []string{"error", "audit"} {
		if q := v.queueOf[name]; q != nil && !q.claimed {
			m.addQueue(q)
			if v.isExchange(name, string(declare.ExchangeFanout)) {
				m.addExchange(name)
			}
		}
	}
	v.addTypes(m)
	return []*match{m}
}

// nsbDelays adds the delay infrastructures and the endpoints bound to them. It reports whether
// endpoints have exchanges.
func (v *view) nsbDelays(m *match) (conventional bool) {
	for _, l := range v.ladders {
		_, two := l.named("nsb.v2.delay-level-")
		_, one := l.named("nsb.delay-level-")
		if !one && !two {
			continue
		}
		l.add(m)
		m.certain = true
		m.because = fmt.Sprintf("the queues %s to %s are the levels of its delay infrastructure", short(l.levels[0].name), short(l.levels[len(l.levels)-1].name))
		if one {
			m.variant = ", delay infrastructure v1"
			m.cure = "Its first delay infrastructure uses classic queues, which dead-letter at most once: upgrade to NServiceBus.RabbitMQ 7 or later, and run rabbitmq-transport delays migrate. " + nsbCure
		}
		exit := v.xOf[l.exit]
		if exit == nil {
			continue
		}
		for _, b := range exit.outs {
			if b.Exchange != "" {
				conventional = true
				m.addExchange(b.Exchange)
				m.queues[b.Exchange] = true
			} else {
				m.queues[b.Queue] = true
			}
		}
	}
	return conventional
}

// nsbTypes recognizes conventional routing by the exchanges of NServiceBus's own types: those of
// events are bound to them, and to the endpoints that subscribe.
func (v *view) nsbTypes(m *match) {
	for _, name := range []string{"NServiceBus:IEvent", "NServiceBus:ICommand", "NServiceBus:IMessage"} {
		if !v.isExchange(name, string(declare.ExchangeFanout)) {
			continue
		}
		m.certain = true
		m.because = fmt.Sprintf("the exchange %s is that of one of its types", short(name))
		m.addExchange(name)
		for _, in := range v.xOf[name].ins {
			x := v.xOf[in.Source]
			if x == nil || m.exchanges[x.name] {
				continue
			}
			m.addExchange(x.name)
			for _, b := range x.outs {
				if v.pair(b.Exchange) {
					m.addExchange(b.Exchange)
					m.queues[b.Exchange] = true
				}
			}
		}
	}
}

// pair reports whether there is a fanout exchange and a queue of the same name, bound to it. Both
// NServiceBus and MassTransit declare these for an endpoint.
func (v *view) pair(name string) bool {
	q := v.queueOf[name]
	return q != nil && !q.claimed && v.isExchange(name, string(declare.ExchangeFanout)) && v.bound(name, name, "")
}

// addTypes adds the exchanges of message types that lead to an exchange of m, and those that
// these lead to: a type's exchange is bound to those of its base types.
func (v *view) addTypes(m *match) {
	var next []string
	for name := range m.exchanges {
		next = append(next, name)
	}
	add := func(name string) {
		if strings.Contains(name, ":") && !m.exchanges[name] && v.isExchange(name, string(declare.ExchangeFanout)) {
			m.addExchange(name)
			next = append(next, name)
		}
	}
	for len(next) > 0 {
		x := v.xOf[next[len(next)-1]]
		next = next[:len(next)-1]
		if x == nil || x.kind != string(declare.ExchangeFanout) {
			continue
		}
		for _, b := range x.ins {
			add(b.Source)
		}
		if strings.Contains(x.name, ":") {
			for _, b := range x.outs {
				add(b.Exchange)
			}
		}
	}
}
