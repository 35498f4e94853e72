package declare

import (
	"errors"
	"time"

	"github.com/hopback/hopback/address"
)

// RejectPublishDLX refuses new messages and dead-letters them. Only classic
// queues know it.
const RejectPublishDLX Overflow = "reject-publish-dlx"

// ClassicQueue is a queue on one node: it is gone while that node is, and with it
// for good. It dead-letters at most once, so that a dead message is lost when what
// comes next is missing or full. Take it for what may be lost, and for priorities;
// [QuorumQueue] for the rest.
//
// The zero value of each field means the broker's default (which a policy may
// set), but for Name and DeadLetter, which must be given.
type ClassicQueue struct {
	// Name of the queue, as that of a QuorumQueue.
	Name string

	// DeadLetter is where rejected, expired and overflowing messages go. It must
	// be answered, if need be with [Drop], and its Strategy must be [AtMostOnce]:
	// the only one that a classic queue has.
	DeadLetter DeadLetter

	// MessageTTL, Expires, MaxLength and MaxLengthBytes are as in a QuorumQueue.
	MessageTTL                time.Duration
	Expires                   time.Duration
	MaxLength, MaxLengthBytes int64

	// Overflow is what a full queue does: DropHead (the default), RejectPublish
	// or RejectPublishDLX.
	Overflow Overflow

	// MaxPriority is the highest of the priorities that the queue tells apart, 1
	// to 255; RabbitMQ recommends at most 10. Zero: no priorities.
	MaxPriority int

	// SingleActiveConsumer delivers to one consumer at a time.
	SingleActiveConsumer bool

	// LeaderLocator chooses the node that has the queue.
	LeaderLocator LeaderLocator

	// Version is that of the storage, 1 or 2. Zero: the default, which is 2.
	Version int

	// AutoDelete deletes the queue when its last consumer goes. Such a queue, or
	// one that is Transient, loses messages by design.
	AutoDelete bool
	// Transient is gone after the broker's restart. RabbitMQ means to do away
	// with transient queues that aren't exclusive, and may refuse them.
	Transient bool

	// Arguments are further ones, as in a QuorumQueue.
	Arguments map[string]any
}

var _ Queue = ClassicQueue{}

// Address is where messages for the queue are sent and received.
func (q ClassicQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate reports everything that is wrong with q, joined; each part is an
// *[argument.Error].
func (q ClassicQueue) Validate() error {
	_, errs := q.declaration()
	return errors.Join(errs...)
}

func (q ClassicQueue) label() string { return label("ClassicQueue", q.Name) }

func (q ClassicQueue) declaration() (map[string]any, []error) {
	c := &collector{label: q.label(), args: map[string]any{"x-queue-type": typeClassic}}
	c.fail(checkOwnName(c.label+".Name", q.Name, "choose another name"))
	c.errs = append(c.errs, q.DeadLetter.problems(c.label+".DeadLetter")...)
	if d := q.DeadLetter; !d.IsZero() && !d.drop {
		c.args["x-dead-letter-exchange"] = d.Exchange
		if d.RoutingKey != "" {
			c.args["x-dead-letter-routing-key"] = d.RoutingKey
		}
		if d.Strategy == AtLeastOnce {
			c.bad("DeadLetter.Strategy", d.Strategy, "is more than a classic queue can do", "use a QuorumQueue, or set it to declare.AtMostOnce")
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
	case DropHead, RejectPublish, RejectPublishDLX:
		c.args["x-overflow"] = string(q.Overflow)
	default:
		c.bad("Overflow", string(q.Overflow), "is none that a classic queue knows", "use declare.DropHead, declare.RejectPublish or declare.RejectPublishDLX")
	}
	if q.SingleActiveConsumer {
		c.args["x-single-active-consumer"] = true
	}
	c.leader(q.LeaderLocator)
	c.further(typeClassic, q.Arguments)
	return map[string]any{"durable": !q.Transient, "exclusive": false, "auto_delete": q.AutoDelete, "arguments": c.args}, c.errs
}
