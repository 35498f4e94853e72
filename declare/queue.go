package declare

import (
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// Queue is a queue that a [Topology] can hold: a [QuorumQueue], [ClassicQueue] or
// [Stream], or a [RawQueue] for what those can't say. The interface is sealed: a
// queue type belongs in this package, with its arguments typed and checked.
type Queue interface {
	// Address is where messages for the queue are sent and received.
	Address() address.Address
	// Validate reports everything that is wrong with the queue, joined;
	// each part is an *[argument.Error].
	Validate() error

	label() string
	// declaration is what is sent; errs is what is wrong with it.
	declaration() (body map[string]any, errs []error)
}

// Limit is a quorum queue's delivery limit: how often a message may come back.
// A limit of N allows N+1 deliveries. The zero value is the broker's default,
// which is 20, unless a policy says otherwise.
type Limit int64

const (
	// Unlimited never gives up on a message. Right for the queue at the end of
	// the line, since a message brings its count of deliveries along when it is
	// dead-lettered.
	Unlimited Limit = -1

	// NoRedelivery allows one delivery: whatever comes back is dead. (The
	// argument is 0, which in a Go struct has to mean "not set".)
	NoRedelivery Limit = -2
)

// Overflow is what a full queue does.
type Overflow string

const (
	// DropHead drops, or dead-letters at most once, the oldest message. It is
	// the broker's default.
	DropHead Overflow = "drop-head"
	// RejectPublish refuses new messages; the publisher's outcome is rejected.
	RejectPublish Overflow = "reject-publish"
)

// LeaderLocator is how the broker chooses the node that leads a new queue.
type LeaderLocator string

const (
	// ClientLocal takes the node that the declaring client is connected to. It
	// is the broker's default.
	ClientLocal LeaderLocator = "client-local"
	// Balanced takes a node that leads few queues.
	Balanced LeaderLocator = "balanced"
)

// RetryKind says which messages a queue holds back before it delivers them
// again, see [DelayedRetry].
type RetryKind string

const (
	// RetryAll delays every message that comes back.
	RetryAll RetryKind = "all"
	// RetryFailed delays those that count as a failed delivery: modified with
	// delivery-failed, or the consumer died.
	RetryFailed RetryKind = "failed"
	// RetryReturned delays those that were handed back without a failure.
	RetryReturned RetryKind = "returned"
)

// DelayedRetry lets the broker wait before it delivers a message again: Min
// times the number of deliveries so far, at most Max. It needs RabbitMQ 4.3;
// older ones accept it, deliver at once, and don't notice when the queue is
// declared without it. The zero value is off.
type DelayedRetry struct {
	// Kind of return that is delayed; required when Min or Max is set.
	Kind RetryKind
	// Min is the first delay, whole milliseconds, required.
	Min time.Duration
	// Max bounds the delay, whole milliseconds; zero means Min, so that every
	// delay is the same. Neither can be more than ten years.
	Max time.Duration
}

// QuorumQueue is a replicated, durable queue, the only type that RabbitMQ keeps
// through the loss of a node. The zero value of each field means the broker's
// default (which a policy may set), but for Name and DeadLetter, which must be
// given.
type QuorumQueue struct {
	// Name of the queue: 1 to 255 bytes of UTF-8 without line breaks, not
	// beginning with "amq.".
	Name string

	// DeliveryLimit is how often a message may come back before it is dead;
	// N allows N+1 deliveries. See [Limit], [Unlimited] and [NoRedelivery].
	DeliveryLimit Limit

	// DeadLetter is where the dead go. It must be answered, if need be with
	// [Drop].
	DeadLetter DeadLetter

	// MessageTTL is how long a message may wait in the queue, in whole
	// milliseconds up to ten years. Zero: for ever.
	MessageTTL time.Duration

	// Expires deletes the queue when it has had no consumer and no other use
	// for so long, in whole milliseconds up to ten years. Zero: never.
	Expires time.Duration

	// MaxLength is how many messages the queue holds, MaxLengthBytes how many
	// bytes of bodies. Zero: no limit.
	MaxLength, MaxLengthBytes int64

	// Overflow is what a full queue does. With dead-lettering at least once it
	// is RejectPublish, also when left empty; anything else is an error, since
	// the broker would fall back to at-most-once in silence.
	Overflow Overflow

	// SingleActiveConsumer delivers to one consumer at a time, the next one
	// taking over when it goes.
	SingleActiveConsumer bool

	// InitialGroupSize is on how many nodes the queue is replicated at first.
	// Zero: three, or as many as there are.
	InitialGroupSize int

	// TargetGroupSize is to how many nodes the broker lets the queue grow later,
	// where it is set up to do so. Zero: the queue doesn't grow by itself.
	TargetGroupSize int

	// LeaderLocator chooses the node that leads the queue.
	LeaderLocator LeaderLocator

	// ConsumerTimeout is how long a consumer may keep a delivery before the
	// broker takes it back, in whole milliseconds. Zero: the broker's default,
	// 30 minutes. Over AMQP 1.0 RabbitMQ knows such a timeout from 4.3 on.
	ConsumerTimeout time.Duration

	// ConsumerDisconnectedTimeout is how long the broker waits for a consumer whose
	// node it has lost before it delivers to others what that one holds, in whole
	// milliseconds; RabbitMQ 4.3. Zero: the broker's default.
	ConsumerDisconnectedTimeout time.Duration

	// DelayedRetry lets the broker wait before each redelivery; RabbitMQ 4.3.
	DelayedRetry DelayedRetry

	// Arguments are further ones, for what has no field yet. Keys begin with
	// "x-"; values are strings, bools, integers, floats or lists of these. The
	// map is never changed, and not kept.
	Arguments map[string]any
}

var _ Queue = QuorumQueue{}

// Address is where messages for the queue are sent and received.
func (q QuorumQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate reports everything that is wrong with q, joined; each part is an
// *[argument.Error].
func (q QuorumQueue) Validate() error {
	_, errs := q.declaration()
	return errors.Join(errs...)
}

func (q QuorumQueue) label() string { return label("QuorumQueue", q.Name) }

func (q QuorumQueue) declaration() (map[string]any, []error) {
	c := &collector{label: q.label(), args: map[string]any{"x-queue-type": typeQuorum}}
	c.fail(checkOwnName(c.label+".Name", q.Name, "choose another name"))
	q.limits(c)
	q.deadLetter(c)
	q.placement(c)
	q.delayedRetry(c)
	c.further(typeQuorum, q.Arguments)
	return map[string]any{
		"durable":     true,
		"exclusive":   false,
		"auto_delete": false,
		"arguments":   c.args,
	}, c.errs
}

func (q QuorumQueue) limits(c *collector) {
	switch {
	case q.DeliveryLimit == NoRedelivery:
		c.args["x-delivery-limit"] = int64(0)
	case q.DeliveryLimit < NoRedelivery:
		c.bad("DeliveryLimit", int64(q.DeliveryLimit), "is negative", "use a number above zero, declare.Unlimited or declare.NoRedelivery")
	case q.DeliveryLimit != 0:
		c.args["x-delivery-limit"] = int64(q.DeliveryLimit)
	}
	c.millis("MessageTTL", "x-message-ttl", q.MessageTTL)
	c.millis("Expires", "x-expires", q.Expires)
	c.millis("ConsumerTimeout", "x-consumer-timeout", q.ConsumerTimeout)
	c.millis("ConsumerDisconnectedTimeout", "x-consumer-disconnected-timeout", q.ConsumerDisconnectedTimeout)
	c.positive("MaxLength", "x-max-length", q.MaxLength)
	c.positive("MaxLengthBytes", "x-max-length-bytes", q.MaxLengthBytes)
}

func (q QuorumQueue) deadLetter(c *collector) {
	d := q.DeadLetter
	c.errs = append(c.errs, d.problems(c.label+".DeadLetter")...)
	overflow := q.Overflow
	if !d.IsZero() && !d.drop {
		c.args["x-dead-letter-exchange"] = d.Exchange
		if d.RoutingKey != "" {
			c.args["x-dead-letter-routing-key"] = d.RoutingKey
		}
		if d.Strategy == AtLeastOnce {
			c.args["x-dead-letter-strategy"] = d.Strategy.String()
			if overflow == "" {
				overflow = RejectPublish
			}
			if overflow != RejectPublish {
				c.bad("Overflow", string(overflow), "makes the broker dead-letter at most once, in silence",
					"leave Overflow empty, or set DeadLetter.Strategy to declare.AtMostOnce")
			}
		}
	}
	switch overflow {
	case "":
	case DropHead, RejectPublish:
		c.args["x-overflow"] = string(overflow)
	default:
		c.bad("Overflow", string(overflow), "is none that a quorum queue knows", "use declare.DropHead or declare.RejectPublish")
	}
}

func (q QuorumQueue) placement(c *collector) {
	if q.SingleActiveConsumer {
		c.args["x-single-active-consumer"] = true
	}
	c.positive("InitialGroupSize", "x-quorum-initial-group-size", int64(q.InitialGroupSize))
	c.positive("TargetGroupSize", "x-quorum-target-group-size", int64(q.TargetGroupSize))
	c.leader(q.LeaderLocator)
}

func (q QuorumQueue) delayedRetry(c *collector) {
	d := q.DelayedRetry
	if d == (DelayedRetry{}) {
		return
	}
	switch d.Kind {
	case RetryAll, RetryFailed, RetryReturned:
		c.args["x-delayed-retry-type"] = string(d.Kind)
	default:
		c.bad("DelayedRetry.Kind", string(d.Kind), "is unknown", "use declare.RetryAll, declare.RetryFailed or declare.RetryReturned")
	}
	if d.Min == 0 {
		c.bad("DelayedRetry.Min", nil, "isn't set, so the broker wouldn't delay at all", "give the first delay")
	}
	if d.Max != 0 && d.Max < d.Min {
		c.bad("DelayedRetry.Max", d.Max, "is shorter than Min", "leave it out, or give at least Min")
	}
	c.millis("DelayedRetry.Min", "x-delayed-retry-min", d.Min)
	c.millis("DelayedRetry.Max", "x-delayed-retry-max", d.Max)
}

// collector gathers a queue's arguments and everything that is wrong with them.
type collector struct {
	label string
	args  map[string]any
	errs  []error
}

func (c *collector) fail(err error) {
	if err != nil {
		c.errs = append(c.errs, err)
	}
}

func (c *collector) bad(field string, value any, problem, remedy string) {
	c.errs = append(c.errs, argument.New(c.label+"."+field, value, problem, remedy))
}

// maxMillis is ten years, the longest time to live that the broker accepts:
// more is refused with value_too_large.
const maxMillis = 315_360_000_000

func (c *collector) millis(field, key string, d time.Duration) {
	switch {
	case d == 0:
	case d < 0:
		c.bad(field, d, "is negative", "give a time above zero, or leave it out")
	case d%time.Millisecond != 0:
		c.bad(field, d, "isn't whole milliseconds, which is all that the broker can count", "round it with Round(time.Millisecond)")
	case d.Milliseconds() > maxMillis:
		c.bad(field, d, "is longer than ten years, the broker's limit", fmt.Sprintf("use at most %d hours", maxMillis*time.Millisecond/time.Hour))
	default:
		c.args[key] = d.Milliseconds()
	}
}

func (c *collector) positive(field, key string, n int64) {
	switch {
	case n < 0:
		c.bad(field, n, "is negative", "give a number above zero, or leave it out")
	case n > 0:
		c.args[key] = n
	}
}

func (c *collector) within(field, key string, n, least, most int64) {
	switch {
	case n == 0:
	case n < least || n > most:
		c.bad(field, n, "is out of range", fmt.Sprintf("use %d to %d, or leave it out", least, most))
	default:
		c.args[key] = n
	}
}

func (c *collector) leader(l LeaderLocator) {
	switch l {
	case "":
	case ClientLocal, Balanced:
		c.args["x-queue-leader-locator"] = string(l)
	default:
		c.bad("LeaderLocator", string(l), "is unknown", "use declare.ClientLocal or declare.Balanced")
	}
}

// further adds what has no field at a queue of the type.
func (c *collector) further(queueType string, args map[string]any) {
	c.errs = append(c.errs, addNormal(c.args, c.label+".Arguments", args, func(what, key string, v any) error {
		return refuseQueueArgument(queueType, what, key, v)
	})...)
}
