package declare

import (
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// DeadLetter says where a queue's dead go: the messages that a consumer
// rejects, that expire, or that exceed the delivery limit.
//
// The zero value is no answer, and a queue without an answer is refused:
// RabbitMQ would drop such messages and tell nobody. Give an exchange, or a
// routing key alone (the default exchange, so the key is a queue's name, see
// [ToQueue]), or [Drop].
type DeadLetter struct {
	// Exchange that the dead are published to. Empty is the default exchange,
	// which needs a RoutingKey. It needn't exist yet when the queue is declared.
	Exchange string

	// RoutingKey that the dead are published with; empty keeps each message's
	// own. It is x-dead-letter-routing-key.
	RoutingKey string

	// Strategy is how much the broker does so that none of the dead is lost.
	// The zero value is [AtLeastOnce].
	Strategy Strategy

	drop bool
}

// Drop lets the broker throw a queue's dead away. It is what RabbitMQ does by
// default, and has to be said in words here. Fitting for the queue at the end
// of the line, whose messages people look at.
func Drop() DeadLetter { return DeadLetter{drop: true} }

// ToQueue dead-letters straight into a queue, by the default exchange.
func ToQueue(name string) DeadLetter { return DeadLetter{RoutingKey: name} }

// IsZero reports whether nothing has been answered.
func (d DeadLetter) IsZero() bool { return d == DeadLetter{} }

// IsDrop reports whether the dead are thrown away.
func (d DeadLetter) IsDrop() bool { return d.drop }

// Strategy is how a quorum queue hands its dead on.
type Strategy uint8

const (
	// AtLeastOnce, the default, keeps a dead message until every target queue
	// has confirmed it. It holds through a missing exchange, a missing binding
	// and a full target queue.
	//
	// What it costs: the queue must refuse new messages when it is full
	// (Overflow [RejectPublish], chosen for you), the dead count toward its
	// MaxLength until they are confirmed, and once 32 of them can't be
	// delivered, the others wait behind those: have an alternate exchange on
	// the dead-letter exchange, and no MaxLength on the target queue.
	// On an idle broker it takes no measurable time.
	AtLeastOnce Strategy = iota

	// AtMostOnce is RabbitMQ's own default: a dead message is published once
	// and forgotten, and lost when the exchange, the binding or the target
	// queue is missing or full. No argument is sent, so it also fits queues
	// that were declared by somebody who never thought of it.
	AtMostOnce
)

// String is the broker's word for s.
func (s Strategy) String() string {
	switch s {
	case AtLeastOnce:
		return "at-least-once"
	case AtMostOnce:
		return "at-most-once"
	}
	return "unknown strategy"
}

func (d DeadLetter) problems(label string) []error {
	switch {
	case d.IsZero():
		return []error{argument.New(label, nil, "isn't set, so rejected, expired and exceeding messages would be lost without a trace",
			"name an exchange or a queue for them, or say declare.Drop()")}
	case d.drop && d != Drop():
		return []error{argument.New(label, nil, "is Drop with an exchange, a routing key or a strategy",
			"take either declare.Drop() alone or a DeadLetter without it")}
	case d.drop:
		return nil
	case d.Exchange == "" && d.RoutingKey == "":
		return []error{argument.New(label+".RoutingKey", nil, "is empty, and so is Exchange",
			"name an exchange, or use declare.ToQueue with a queue's name")}
	}
	var errs []error
	if d.Exchange != "" {
		if err := checkName(label+".Exchange", d.Exchange); err != nil {
			errs = append(errs, err)
		}
	}
	if err := checkKey(label+".RoutingKey", d.RoutingKey); err != nil {
		errs = append(errs, err)
	}
	if d.Exchange == "" && len(d.RoutingKey) > address.MaxName {
		errs = append(errs, argument.New(label+".RoutingKey", d.RoutingKey, "is longer than a queue's name can be", "name the queue"))
	}
	if d.Strategy > AtMostOnce {
		errs = append(errs, argument.New(label+".Strategy", int(d.Strategy), "is no strategy", "use declare.AtLeastOnce or declare.AtMostOnce"))
	}
	return errs
}
