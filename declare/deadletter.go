package declare

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/internal/names"
	"github.com/hopback/hopback/internal/brokername"
)

// DeadLetterTarget says where a queue's dead messages go: those that a consumer
// rejects, that expire, or that exceed the delivery limit.
//
// The zero value is refused: RabbitMQ would silently drop such messages.
// Set an exchange; or a routing key alone, which the default exchange takes for a
// queue's name (see [ToQueue]); or use [Drop].
type DeadLetterTarget struct {
	// Exchange receives the dead messages. Empty means the default exchange, which
	// needs a RoutingKey. The exchange may be declared later than the queue.
	Exchange string

	// RoutingKey replaces the key of dead messages. Empty keeps each message's own
	// key.
	RoutingKey string

	// AtMostOnce publishes a dead letter once, which is RabbitMQ's default. It is lost if the
	// exchange, the binding or the target queue is missing or full. It sends no argument, so
	// it fits queues that were declared without a strategy.
	//
	// By default dead-lettering is at least once: the queue keeps a dead letter until every
	// target queue has confirmed it. No message is lost if the exchange, the binding or the
	// target queue is missing or full. The side effects: the queue refuses new messages when
	// it is full (Overflow [OverflowRejectPublish], which is set for you). Dead letters count toward
	// its MaxLength until they are confirmed. When 32 dead letters can't be delivered, all
	// others wait behind them: give the dead-letter exchange an alternate exchange, and the
	// target queue no MaxLength. On an idle broker it costs no measurable time.
	AtMostOnce bool

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

// atLeastOnce is RabbitMQ's word for the default.
const atLeastOnce = "at-least-once"

func (d DeadLetterTarget) problems(at argument.Path) []error {
	switch {
	case d.IsZero():
		return []error{argument.At(at, argument.CodeMissing, nil, "isn't set, so the broker would silently drop messages that are rejected, expire or exceed a limit",
			"name an exchange or a queue for them, or use declare.Drop()")}
	case d.drop && d != Drop():
		return []error{argument.At(at, argument.CodeConflict, nil, "is Drop with an exchange, a routing key or AtMostOnce",
			"use declare.Drop() alone, or a DeadLetterTarget without it")}
	case d.drop:
		return nil
	case d.Exchange == "" && d.RoutingKey == "":
		return []error{argument.At(at.Field("RoutingKey"), argument.CodeMissing, nil, "is empty, and so is",
			"name an exchange, or use declare.ToQueue with a queue's name").And(at.Field("Exchange"))}
	}
	var errs []error
	if d.Exchange != "" {
		if err := names.Check(at.Field("Exchange"), d.Exchange); err != nil {
			errs = append(errs, err)
		}
	}
	if err := names.CheckKey(at.Field("RoutingKey"), d.RoutingKey); err != nil {
		errs = append(errs, err)
	}
	if d.Exchange == "" && len(d.RoutingKey) > brokername.Max {
		errs = append(errs, argument.At(at.Field("RoutingKey"), argument.CodeTooLong, d.RoutingKey, "is longer than the name of a queue can be", "name the queue"))
	}
	return errs
}
