package declare

import (
	"errors"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/internal/names"
	"github.com/hopback/hopback/declare/internal/queuearg"
)

// RawQueue is a queue with its arguments as they are sent. An import returns one
// where [QuorumQueue], [ClassicQueue] and [Stream] can't express the same. Use it
// for queue types of plugins. Prefer the others elsewhere: a RawQueue needs no
// dead-letter target.
//
// Arguments that RabbitMQ knows must have values that it reads: the broker
// silently uses its default for others.
type RawQueue struct {
	// Name of the queue, as that of a QuorumQueue.
	Name string
	// Durable, AutoDelete and Exclusive are as in AMQP 0-9-1. An exclusive queue
	// lives as long as the connection that declares it.
	Durable, AutoDelete, Exclusive bool
	// Arguments include x-queue-type; without it the queue has the virtual host's
	// default type. The map is neither changed nor kept.
	Arguments map[string]any
}

var _ Queue = RawQueue{}

// Address is where messages for the queue are sent and received.
func (q RawQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate reports everything that is wrong with q, joined; each part is an
// *[argument.Error].
func (q RawQueue) Validate() error {
	_, errs := q.declaration()
	return errors.Join(errs...)
}

func (q RawQueue) path() argument.Path { return names.Label("RawQueue", q.Name) }

func (q RawQueue) declaration() (map[string]any, []error) {
	c := &collector{at: q.path(), args: map[string]any{}}
	c.fail(names.CheckOwn(c.at.Field("Name"), q.Name, "choose another name"))
	queueType, _ := q.Arguments["x-queue-type"].(string)
	c.errs = append(c.errs, addNormal(c.args, c.at.Field("Arguments"), q.Arguments, func(at argument.Path, key string, v any) error {
		if _, known := queuearg.Known[key]; !known || queueType == "" {
			return nil
		}
		if problem, remedy, unknown := queuearg.Wrong(queueType, key, v); problem != "" && !unknown {
			return argument.At(at, argument.CodeUnsupported, v, problem, remedy)
		}
		return nil
	})...)
	return map[string]any{"durable": q.Durable, "exclusive": q.Exclusive, "auto_delete": q.AutoDelete, "arguments": c.args}, c.errs
}
