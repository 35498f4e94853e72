package declare

import (
	"errors"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// RawQueue is a queue by its bare arguments: what an import gives where
// [QuorumQueue], [ClassicQueue] and [Stream] can't say exactly the same, and for
// types of queues that come with plugins. Prefer those: this one asks no
// questions about dead letters.
//
// Arguments that RabbitMQ knows must still have values that it reads, since it
// takes others in silence and means its default.
type RawQueue struct {
	// Name of the queue, as that of a QuorumQueue.
	Name string
	// Durable, AutoDelete and Exclusive are as in AMQP. An exclusive queue lives
	// as long as the connection that declares it.
	Durable, AutoDelete, Exclusive bool
	// Arguments, x-queue-type among them; without that it is the virtual host's
	// default type. The map is never changed, and not kept.
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

func (q RawQueue) label() string { return label("RawQueue", q.Name) }

func (q RawQueue) declaration() (map[string]any, []error) {
	c := &collector{label: q.label(), args: map[string]any{}}
	c.fail(checkOwnName(c.label+".Name", q.Name, "choose another name"))
	queueType, _ := q.Arguments["x-queue-type"].(string)
	c.errs = append(c.errs, addNormal(c.args, c.label+".Arguments", q.Arguments, func(what, key string, v any) error {
		if _, known := queueArguments[key]; !known || queueType == "" {
			return nil
		}
		if problem, remedy, unknown := wrongArgument(queueType, key, v); problem != "" && !unknown {
			return argument.New(what, v, problem, remedy)
		}
		return nil
	})...)
	return map[string]any{"durable": q.Durable, "exclusive": q.Exclusive, "auto_delete": q.AutoDelete, "arguments": c.args}, c.errs
}
