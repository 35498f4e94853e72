package declare

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
	"github.com/hopback/hopback/internal/names"
)

// DeadLetterTarget is where a queue's dead letters go: messages that a consumer rejects, that
// expire, or that exceed the delivery limit.
//
// Set one of these:
//
//   - Exchange, and a RoutingKey if it should replace each message's own.
//   - RoutingKey alone, which is the name of a queue: see [ToQueue].
//   - [Drop], if the broker should drop the messages.
//
// The zero value is an error, because RabbitMQ would silently drop the messages.
type DeadLetterTarget struct {
	// Exchange is the exchange that receives dead letters. Empty means the default exchange,
	// which needs a RoutingKey. You can declare the exchange after the queue.
	Exchange string

	// RoutingKey replaces the routing key of dead letters. Default: "", each message keeps its
	// own key.
	RoutingKey string

	// AtMostOnce publishes each dead letter once without waiting for a confirmation, which is
	// RabbitMQ's default. The dead letter is lost if the exchange, the binding, or the target
	// queue is missing or full. AtMostOnce sends no argument, so it fits queues that were
	// declared without a strategy.
	//
	// By default dead-lettering is at least once: the queue keeps a dead letter until every
	// target queue has confirmed it. No message is lost if the exchange, the binding, or the
	// target queue is missing or full. On an idle broker this costs no measurable time. The side
	// effects:
	//
	//   - The queue refuses new messages when it is full: Overflow is set to
	//     [OverflowRejectPublish].
	//   - Dead letters count toward its MaxLength until they are confirmed.
	//   - When 32 dead letters can't be delivered, they block all others. So give the dead-letter
	//     exchange an alternate exchange, and don't limit the length of the target queue.
	AtMostOnce bool

	drop bool
}

// Drop lets the broker drop a queue's dead letters, which is RabbitMQ's default. Use it for a
// dead-letter queue, whose messages people handle.
func Drop() DeadLetterTarget { return DeadLetterTarget{drop: true} }

// ToQueue sends dead letters to a queue, through the default exchange.
func ToQueue(name string) DeadLetterTarget { return DeadLetterTarget{RoutingKey: name} }

// IsZero reports whether d is the zero value, which is an error in a queue.
func (d DeadLetterTarget) IsZero() bool { return d == DeadLetterTarget{} }

// IsDrop reports whether the broker drops dead letters.
func (d DeadLetterTarget) IsDrop() bool { return d.drop }

// atLeastOnce is RabbitMQ's word for the default.
const atLeastOnce = "at-least-once"

func (d DeadLetterTarget) problems(at argument.Path) []error {
	switch {
	case d.IsZero():
		return []error{argument.At(at, argument.CodeMissing, nil, "isn't set, so the broker would silently drop messages that are rejected, expire, or exceed a limit",
			"set an exchange or a queue for them, or use declare.Drop()")}
	case d.drop && d != Drop():
		return []error{argument.At(at, argument.CodeConflict, nil, "is Drop with an exchange, a routing key, or AtMostOnce",
			"use declare.Drop() alone, or a DeadLetterTarget without it")}
	case d.drop:
		return nil
	case d.Exchange == "" && d.RoutingKey == "":
		return []error{argument.At(at.Field("RoutingKey"), argument.CodeMissing, nil, "is empty, and so is",
			"set an exchange, or use declare.ToQueue with a queue's name").And(at.Field("Exchange"))}
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
		errs = append(errs, argument.At(at.Field("RoutingKey"), argument.CodeTooLong, d.RoutingKey, "is longer than the name of a queue can be", "use the name of the queue"))
	}
	return errs
}
