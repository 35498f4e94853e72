package declare

import (
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/internal/names"
)

// DeadLetterTarget says where a queue's dead messages go: those that a consumer
// rejects, that expire, or that exceed the delivery limit.
//
// The zero value is refused: RabbitMQ would drop such messages without a trace.
// Set an exchange; or a routing key alone, which the default exchange takes for a
// queue's name (see [ToQueue]); or use [Drop].
type DeadLetterTarget struct {
	// Exchange receives the dead messages. Empty means the default exchange, which
	// needs a RoutingKey. The exchange may be declared later than the queue.
	Exchange string

	// RoutingKey replaces the key of dead messages. Empty keeps each message's own
	// key.
	RoutingKey string

	// Strategy is whether the broker waits for confirms. The zero value is
	// [AtLeastOnce].
	Strategy DeadLetterStrategy

	drop bool
}

// Drop lets the broker drop a queue's dead messages, which is RabbitMQ's default.
// Use it for a dead-letter queue, whose messages people look at.
func Drop() DeadLetterTarget { return DeadLetterTarget{drop: true} }

// ToQueue sends dead messages to a queue, by the default exchange.
func ToQueue(name string) DeadLetterTarget { return DeadLetterTarget{RoutingKey: name} }

// IsZero reports whether d is the zero value, which is refused.
func (d DeadLetterTarget) IsZero() bool { return d == DeadLetterTarget{} }

// IsDrop reports whether dead messages are dropped.
func (d DeadLetterTarget) IsDrop() bool { return d.drop }

// DeadLetterStrategy is whether a queue keeps a dead message until its copy is
// confirmed.
type DeadLetterStrategy uint8

const (
	// AtLeastOnce, the default, keeps a dead message until every target queue has
	// confirmed it. A missing exchange, a missing binding and a full target queue
	// lose nothing.
	//
	// It has a price. The queue refuses new messages when it is full (Overflow
	// [RejectPublish], which is set for you). Dead messages count toward its
	// MaxLength until they are confirmed. When 32 dead messages can't be
	// delivered, all others wait behind them: give the dead-letter exchange an
	// alternate exchange, and the target queue no MaxLength. On an idle broker it
	// costs no measurable time.
	AtLeastOnce DeadLetterStrategy = iota

	// AtMostOnce is RabbitMQ's default: a dead message is published once. It is
	// lost if the exchange, the binding or the target queue is missing or full. It
	// sends no argument, so it fits queues that were declared without a strategy.
	AtMostOnce
)

// String is the broker's word for s.
func (s DeadLetterStrategy) String() string {
	switch s {
	case AtLeastOnce:
		return "at-least-once"
	case AtMostOnce:
		return "at-most-once"
	}
	return "unknown strategy"
}

func (d DeadLetterTarget) problems(label string) []error {
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
		if err := names.Check(label+".Exchange", d.Exchange); err != nil {
			errs = append(errs, err)
		}
	}
	if err := names.CheckKey(label+".RoutingKey", d.RoutingKey); err != nil {
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
