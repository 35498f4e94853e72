package declare

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
)

// Queue is a queue in a [Topology]: a [QuorumQueue], [ClassicQueue], [Stream], or [RawQueue].
// Other packages can't implement it.
type Queue interface {
	// Address returns the address for publishing to the queue and consuming from it.
	Address() address.Address
	// Validate returns all errors in the queue, joined; each one is an *[argument.Error].
	Validate() error

	// declaration returns what is sent; errs lists what is wrong with it.
	declaration() (body map[string]any, errs []error)
}

// Limit is the delivery limit of a quorum queue: how often a message may be redelivered. A limit
// of N allows N+1 deliveries. Zero means the broker's default, which is 20 unless a policy sets
// another one.
type Limit int64

const (
	// Unlimited allows any number of redeliveries. Use it for a dead-letter queue: a dead letter
	// keeps its delivery count.
	Unlimited Limit = -1

	// NoRedelivery allows one delivery: a message that returns is dead-lettered. It is sent as 0,
	// because the value 0 means "not set" here.
	NoRedelivery Limit = -2
)

// Overflow is what a full queue does.
type Overflow string

const (
	// OverflowDropHead removes the oldest message: the broker dead-letters it at most once, or
	// drops it. It is the broker's default.
	OverflowDropHead Overflow = "drop-head"
	// OverflowRejectPublish refuses new messages: the publisher gets the outcome rejected.
	OverflowRejectPublish Overflow = "reject-publish"
)

// LeaderLocator is how the broker chooses the node that leads a new queue.
type LeaderLocator string

const (
	// LeaderClientLocal chooses the node that the declaring client is connected to. It is the
	// broker's default.
	LeaderClientLocal LeaderLocator = "client-local"
	// LeaderBalanced chooses a node that leads few queues.
	LeaderBalanced LeaderLocator = "balanced"
)

// RetryKind selects the returned messages that a queue delays: see [DelayedRetry].
type RetryKind string

const (
	// RetryAll delays every returned message.
	RetryAll RetryKind = "all"
	// RetryFailed delays messages that failed: the consumer settled them as modified with
	// delivery-failed, or its connection was lost.
	RetryFailed RetryKind = "failed"
	// RetryReturned delays messages that were returned without a failure.
	RetryReturned RetryKind = "returned"
)

// DelayedRetry makes the broker wait before it delivers a message again: Min times the number of
// deliveries so far, at most Max. The zero value disables it. It needs RabbitMQ 4.3. Older
// brokers accept the arguments and deliver at once, and don't compare them if the queue exists.
// For retries with a policy per error, use package retry instead.
type DelayedRetry struct {
	// Kind selects the returned messages that are delayed. Required if Min or Max is set.
	Kind RetryKind
	// Min is the first delay, in whole milliseconds up to ten years. Required.
	Min time.Duration
	// Max limits the delay, in whole milliseconds up to ten years. Default: Min, so every delay
	// is the same.
	Max time.Duration
}

// QuorumQueue is a replicated, durable queue. RabbitMQ keeps its messages when a node is lost.
// Use it for work queues and dead-letter queues. Name and DeadLetter are required. The zero value
// of every other field means the broker's default, which a policy may set.
type QuorumQueue struct {
	// Name is 1 to 255 bytes of UTF-8 without line breaks. It can't start with "amq.". Required.
	Name string

	// DeliveryLimit is how often a message may be redelivered before it is dead-lettered; N
	// allows N+1 deliveries. See [Limit], [Unlimited], and [NoRedelivery]. Default: the broker's,
	// 20.
	DeliveryLimit Limit

	// DeadLetter is where dead letters go. [Drop] lets the broker drop them. Required.
	DeadLetter DeadLetterTarget

	// MessageTTL is how long a message may wait in the queue, in whole milliseconds up to ten
	// years. Default: no limit.
	MessageTTL time.Duration

	// Expires deletes the queue, with its messages, after this long without a consumer or other
	// use, in whole milliseconds up to ten years. Default: never.
	Expires time.Duration

	// MaxLength limits the number of messages, and MaxLengthBytes the bytes of their bodies.
	// Default: no limit.
	MaxLength, MaxLengthBytes int64

	// Overflow is what a full queue does. At-least-once dead-lettering needs
	// [OverflowRejectPublish], which is then the default; any other value is an error, because
	// the broker would silently dead-letter at most once.
	Overflow Overflow

	// SingleActiveConsumer delivers to one consumer at a time. When that one leaves, another one
	// takes over. Default: false.
	SingleActiveConsumer bool

	// InitialGroupSize is the number of replicas at first. Default: three, or one on each node of
	// a smaller cluster.
	InitialGroupSize int

	// TargetGroupSize is the number of replicas up to which the broker adds more later, if it is
	// configured to. Default: it adds none.
	TargetGroupSize int

	// PlacementTag is the key of a node tag, such as "zone": the broker spreads the replicas over
	// the values that nodes have for it (node_tags.zone in rabbitmq.conf). If no node has the tag, it
	// has no effect. It needs RabbitMQ 4.4. Earlier versions would ignore it, so [Apply] returns an
	// *[argument.Error] there. Default: the broker's. A policy with member-placement-tag takes
	// precedence.
	PlacementTag string

	// LeaderLocator chooses the node that leads the queue. Default: [LeaderClientLocal].
	LeaderLocator LeaderLocator

	// ConsumerTimeout is how long a consumer may keep a delivery unsettled before the broker
	// revokes it, in whole milliseconds. Over AMQP 1.0 it needs RabbitMQ 4.3. Default: the
	// broker's, 30 minutes.
	ConsumerTimeout time.Duration

	// ConsumerDisconnectedTimeout is how long the broker waits for a consumer on a lost node
	// before it delivers that consumer's messages to others, in whole milliseconds. It needs
	// RabbitMQ 4.3. Default: the broker's.
	ConsumerDisconnectedTimeout time.Duration

	// DelayedRetry makes the broker wait before each redelivery. It needs RabbitMQ 4.3. Default:
	// no delay.
	DelayedRetry DelayedRetry

	// Arguments are for arguments without a field. Keys start with "x-". Values are strings,
	// bools, integers, floats, or lists of these. The map is neither changed nor kept.
	Arguments map[string]any
}

var _ Queue = QuorumQueue{}

// Address returns the address for publishing to the queue and consuming from it.
func (q QuorumQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate returns all errors in q, joined; each one is an *[argument.Error].
func (q QuorumQueue) Validate() error {
	_, errs := q.declaration()
	return errors.Join(errs...)
}

func (q QuorumQueue) path() argument.Path { return names.Label("QuorumQueue", q.Name) }

func (q QuorumQueue) declaration() (map[string]any, []error) {
	c := &collector{at: q.path(), args: map[string]any{"x-queue-type": queuearg.Quorum}}
	c.fail(names.CheckOwn(c.at.Field("Name"), q.Name, "choose another name"))
	q.limits(c)
	q.deadLetter(c)
	q.placement(c)
	q.delayedRetry(c)
	c.further(queuearg.Quorum, q.Arguments)
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
		c.bad("DeliveryLimit", argument.CodeOutOfRange, int64(q.DeliveryLimit), "is negative", "use a number above zero, declare.Unlimited, or declare.NoRedelivery")
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
	c.errs = append(c.errs, d.problems(c.at.Field("DeadLetter"))...)
	overflow := q.Overflow
	if !d.IsZero() && !d.drop {
		c.args["x-dead-letter-exchange"] = d.Exchange
		if d.RoutingKey != "" {
			c.args["x-dead-letter-routing-key"] = d.RoutingKey
		}
		if !d.AtMostOnce {
			c.args["x-dead-letter-strategy"] = atLeastOnce
			if overflow == "" {
				overflow = OverflowRejectPublish
			}
			if overflow != OverflowRejectPublish {
				c.bad("Overflow", argument.CodeConflict, string(overflow), "makes the broker silently dead-letter at most once",
					"leave it empty, or set DeadLetter.AtMostOnce")
			}
		}
	}
	switch overflow {
	case "":
	case OverflowDropHead, OverflowRejectPublish:
		c.args["x-overflow"] = string(overflow)
	default:
		c.bad("Overflow", argument.CodeUnknown, string(overflow), "isn't an overflow behavior of a quorum queue", "use declare.OverflowDropHead or declare.OverflowRejectPublish")
	}
}

func (q QuorumQueue) placement(c *collector) {
	if q.SingleActiveConsumer {
		c.args["x-single-active-consumer"] = true
	}
	c.positive("InitialGroupSize", "x-quorum-initial-group-size", int64(q.InitialGroupSize))
	c.positive("TargetGroupSize", "x-quorum-target-group-size", int64(q.TargetGroupSize))
	switch {
	case q.PlacementTag == "":
	case !utf8.ValidString(q.PlacementTag):
		c.bad("PlacementTag", argument.CodeMalformed, q.PlacementTag, "isn't valid UTF-8", "use the key of a node tag")
	default:
		c.args["x-member-placement-tag"] = q.PlacementTag
	}
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
		c.bad("DelayedRetry.Kind", argument.CodeUnknown, string(d.Kind), "is unknown", "use declare.RetryAll, declare.RetryFailed, or declare.RetryReturned")
	}
	if d.Min == 0 {
		c.bad("DelayedRetry.Min", argument.CodeMissing, nil, "isn't set, so the broker wouldn't delay any message", "set the first delay")
	}
	if d.Max != 0 && d.Max < d.Min {
		c.bad("DelayedRetry.Max", argument.CodeConflict, d.Max, "is shorter than", "leave it out, or use at least as long a delay").And(c.path("DelayedRetry.Min"))
	}
	c.millis("DelayedRetry.Min", "x-delayed-retry-min", d.Min)
	c.millis("DelayedRetry.Max", "x-delayed-retry-max", d.Max)
}

// collector gathers a queue's arguments and everything that is wrong with them.
type collector struct {
	at   argument.Path
	args map[string]any
	errs []error
}

func (c *collector) fail(err error) {
	if err != nil {
		c.errs = append(c.errs, err)
	}
}

// bad adds an error for a field, such as DelayedRetry.Min.
func (c *collector) bad(field string, code argument.Code, value any, problem, remedy string) *argument.Error {
	e := argument.At(c.path(field), code, value, problem, remedy)
	c.errs = append(c.errs, e)
	return e
}

func (c *collector) path(field string) argument.Path {
	at := c.at
	for name := range strings.SplitSeq(field, ".") {
		at = at.Field(name)
	}
	return at
}

func (c *collector) millis(field, key string, d time.Duration) {
	switch {
	case d == 0:
	case d < 0:
		c.bad(field, argument.CodeOutOfRange, d, "is negative", "use a duration above zero, or leave it out")
	case d%time.Millisecond != 0:
		c.bad(field, argument.CodeNotWhole, d, "isn't a whole number of milliseconds, the broker's unit", "round it with Round(time.Millisecond)")
	case d.Milliseconds() > queuearg.MaxMillis:
		c.bad(field, argument.CodeOutOfRange, d, "is longer than ten years, the broker's limit", fmt.Sprintf("use at most %d hours", queuearg.MaxMillis*time.Millisecond/time.Hour))
	default:
		c.args[key] = d.Milliseconds()
	}
}

func (c *collector) positive(field, key string, n int64) {
	switch {
	case n < 0:
		c.bad(field, argument.CodeOutOfRange, n, "is negative", "use a number above zero, or leave it out")
	case n > 0:
		c.args[key] = n
	}
}

func (c *collector) within(field, key string, n, least, most int64) {
	switch {
	case n == 0:
	case n < least || n > most:
		c.bad(field, argument.CodeOutOfRange, n, "is out of range", fmt.Sprintf("use %d to %d, or leave it out", least, most))
	default:
		c.args[key] = n
	}
}

func (c *collector) leader(l LeaderLocator) {
	switch l {
	case "":
	case LeaderClientLocal, LeaderBalanced:
		c.args["x-queue-leader-locator"] = string(l)
	default:
		c.bad("LeaderLocator", argument.CodeUnknown, string(l), "is unknown", "use declare.LeaderClientLocal or declare.LeaderBalanced")
	}
}

// further adds what has no field at a queue of the type.
func (c *collector) further(queueType string, args map[string]any) {
	c.errs = append(c.errs, addNormal(c.args, c.at.Field("Arguments"), args, func(at argument.Path, key string, v any) error {
		return refuseQueueArgument(queueType, c.at, at, key, v)
	})...)
}
