package declare

import (
	"errors"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
)

// OverflowRejectPublishDLX refuses new messages and dead-letters them. Only classic queues
// support it.
const OverflowRejectPublishDLX Overflow = "reject-publish-dlx"

// ClassicQueue is a queue on one node. It is unavailable while that node is down, and lost with
// it. It dead-letters at most once: a dead letter is lost if its target is missing or full. Use
// it for messages that may be lost, and for priorities. Use [QuorumQueue] for everything else.
//
// Name and DeadLetter are required. The zero value of every other field means the broker's
// default, which a policy may set.
type ClassicQueue struct {
	// Name is the name of the queue, with the rules of [QuorumQueue.Name]. Required.
	Name string

	// DeadLetter is where rejected, expired, and overflowing messages go. [Drop] lets the broker
	// drop them. Its AtMostOnce must be set, since a classic queue supports nothing else.
	// Required.
	DeadLetter DeadLetterTarget

	// MessageTTL, Expires, MaxLength, and MaxLengthBytes are the same as in a [QuorumQueue].
	MessageTTL                time.Duration
	Expires                   time.Duration
	MaxLength, MaxLengthBytes int64

	// Overflow is what a full queue does: OverflowDropHead, OverflowRejectPublish, or
	// OverflowRejectPublishDLX. Default: OverflowDropHead.
	Overflow Overflow

	// MaxPriority is the highest priority, 1 to 255; RabbitMQ recommends at most 10. Default: 0,
	// no priorities.
	MaxPriority int

	// SingleActiveConsumer delivers to one consumer at a time. Default: false.
	SingleActiveConsumer bool

	// LeaderLocator chooses the node that holds the queue. Default: the broker's.
	LeaderLocator LeaderLocator

	// Version is the version of the storage, 1 or 2. Default: 0, which means 2.
	Version int

	// AutoDelete deletes the queue, with its messages, when its last consumer leaves. Default:
	// false.
	AutoDelete bool
	// Transient makes a queue that is lost when the broker restarts. RabbitMQ has deprecated
	// transient queues that aren't exclusive, and may refuse them. Default: false.
	Transient bool

	// Arguments are further arguments, with the rules of [QuorumQueue.Arguments].
	Arguments map[string]any
}

var _ Queue = ClassicQueue{}

// Address returns the address for publishing to the queue and consuming from it.
func (q ClassicQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate returns all errors in q, joined; each one is an *[argument.Error].
func (q ClassicQueue) Validate() error {
	_, errs := q.declaration()
	return errors.Join(errs...)
}

func (q ClassicQueue) path() argument.Path { return names.Label("ClassicQueue", q.Name) }

func (q ClassicQueue) declaration() (map[string]any, []error) {
	c := &collector{at: q.path(), args: map[string]any{"x-queue-type": queuearg.Classic}}
	c.fail(names.CheckOwn(c.at.Field("Name"), q.Name, "choose another name"))
	c.errs = append(c.errs, q.DeadLetter.problems(c.at.Field("DeadLetter"))...)
	if d := q.DeadLetter; !d.IsZero() && !d.drop {
		c.args["x-dead-letter-exchange"] = d.Exchange
		if d.RoutingKey != "" {
			c.args["x-dead-letter-routing-key"] = d.RoutingKey
		}
		if !d.AtMostOnce {
			c.bad("DeadLetter.AtMostOnce", argument.CodeUnsupported, nil, "isn't set, and a classic queue can't dead-letter at least once", "use a QuorumQueue, or set it")
		}
	}
	c.millis("MessageTTL", "x-message-ttl", q.MessageTTL)
	c.millis("Expires", "x-expires", q.Expires)
	c.positive("MaxLength", "x-max-length", q.MaxLength)
	c.positive("MaxLengthBytes", "x-max-length-bytes", q.MaxLengthBytes)
	c.within("MaxPriority", "x-max-priority", int64(q.MaxPriority), 1, 255)
	c.within("Version", "x-queue-version", int64(q.Version), 1, 2)
	switch q.Overflow {
	case "":
	case OverflowDropHead, OverflowRejectPublish, OverflowRejectPublishDLX:
		c.args["x-overflow"] = string(q.Overflow)
	default:
		c.bad("Overflow", argument.CodeUnknown, string(q.Overflow), "isn't an overflow behavior of a classic queue", "use declare.OverflowDropHead, declare.OverflowRejectPublish, or declare.OverflowRejectPublishDLX")
	}
	if q.SingleActiveConsumer {
		c.args["x-single-active-consumer"] = true
	}
	c.leader(q.LeaderLocator)
	c.further(queuearg.Classic, q.Arguments)
	return map[string]any{"durable": !q.Transient, "exclusive": false, "auto_delete": q.AutoDelete, "arguments": c.args}, c.errs
}
