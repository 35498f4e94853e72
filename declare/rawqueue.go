package declare

import (
	"errors"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
)

// RawQueue is a queue with exactly the arguments that are sent. Use it for queue types of
// plugins. Prefer [QuorumQueue], [ClassicQueue], and [Stream] otherwise: a RawQueue doesn't
// require a dead-letter target. An import returns one if these types can't express a queue.
//
// Arguments that RabbitMQ knows must have values that it can read, because it silently uses its
// default for others.
type RawQueue struct {
	// Name is the name of the queue, with the rules of [QuorumQueue.Name]. Required.
	Name string
	// Durable, AutoDelete, and Exclusive are those of AMQP 0-9-1. The broker deletes an exclusive
	// queue with the connection that declared it.
	Durable, AutoDelete, Exclusive bool
	// Arguments include x-queue-type; without it the queue has the virtual host's default type.
	// The map is neither changed nor kept.
	Arguments map[string]any
}

var _ Queue = RawQueue{}

// Address returns the address for publishing to the queue and consuming from it.
func (q RawQueue) Address() address.Address { return address.Queue(q.Name) }

// Validate returns all errors in q, joined; each one is an *[argument.Error].
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
