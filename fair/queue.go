package fair

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Queue is a queue that is shared fairly. Its publishers need Name only; its workers need all
// fields, with the same values.
type Queue struct {
	// Name is the name of the main queue, and the beginning of all other names. At most 200 bytes.
	// Required.
	Name string
	// Lanes is how many lanes there are for noisy tenants, 1 to 16. Noisy tenants in different lanes
	// don't delay each other. Each costs a worker two session slots. It can't be changed later:
	// declaring the topology again with another number fails with declare.ErrConflict. Default: 4.
	Lanes int
}

const (
	defaultLanes = 4
	maxLanes     = 16
	maxName      = 200 // bytes, so that there is room for what follows the name
	// maxTenant is AMQP 0-9-1's limit for a routing key, in bytes.
	maxTenant = 255
	// argLanes is an argument of a lane: the number of lanes. RabbitMQ keeps arguments that it doesn't
	// know.
	argLanes = "x-hopback-lanes"
)

func (q Queue) withDefaults() (Queue, error) {
	at := argument.Root("Queue")
	q.Lanes = cmp.Or(q.Lanes, defaultLanes)
	var errs []error
	if q.Lanes < 1 || q.Lanes > maxLanes {
		errs = append(errs, argument.At(at.Field("Lanes"), argument.CodeOutOfRange, q.Lanes, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxLanes)))
	}
	if len(q.Name) > maxName {
		errs = append(errs, argument.At(at.Field("Name"), argument.CodeTooLong, nil, fmt.Sprintf("is %d bytes long", len(q.Name)), fmt.Sprintf("use at most %d bytes", maxName)))
	}
	if err := address.Queue(q.Name).Validate(); err != nil {
		errs = append(errs, err)
	}
	return q, errors.Join(errs...)
}

// in is the exchange that publishers use, sort one for each lane, and rest where messages go that
// no lane is bound to.
func (q Queue) in() string        { return q.Name + ".in" }
func (q Queue) sort(i int) string { return fmt.Sprintf("%s.sort.%d", q.Name, i) }
func (q Queue) rest() string      { return q.Name + ".rest" }
func (q Queue) lane(i int) string { return fmt.Sprintf("%s.bulk.%d", q.Name, i) }
func (q Queue) onward(i int) string {
	if i+1 < q.Lanes {
		return q.sort(i + 1)
	}
	return q.rest()
}

// diversion is the binding by which RabbitMQ routes a tenant's messages to a lane.
func (q Queue) diversion(tenant string, lane int) declare.Binding {
	return declare.Binding{Source: q.sort(lane), Queue: q.lane(lane), Key: tenant}
}

// To returns an edit that addresses a message to the queue, on behalf of a tenant: it sets the
// message's To, and the tenant as its group-id. Use it with a publisher of the zero Address. A
// tenant is valid UTF-8 of at most 255 bytes; with another one, Publish returns an
// [*argument.Error]. The empty name is a tenant like any other.
func (q Queue) To(tenant string) func(*client.Message) {
	to := address.Exchange(q.in(), tenant)
	if len(tenant) > maxTenant {
		to = address.Address{}
	}
	address := client.PublishTo(to)
	return func(m *client.Message) {
		address(m)
		if m.Properties.To != nil && tenant != "" {
			m.Properties.GroupID = &tenant
		}
	}
}

// Queues returns the names of the main queue and of its lanes.
func (q Queue) Queues() []string {
	q, err := q.withDefaults()
	if err != nil {
		return nil
	}
	names := []string{q.Name}
	for i := range q.Lanes {
		names = append(names, q.lane(i))
	}
	return names
}

// Topology returns the exchanges, queues, and bindings of the queue, and those that p needs to retry its
// messages: see [retry.Topology]. work has what the main queue and its lanes have in common; its
// Name stays empty. The errors are *[argument.Error]s.
//
//	Name.in      fanout  for publishers; leads to
//	Name.sort.0  direct  routes by the tenants' names to Name.bulk.0, and all else to
//	Name.sort.1  direct  and so on; the last one routes all else to
//	Name.rest    fanout  leads to
//	Name         queue   dead-letters as retry.Topology says
//	Name.bulk.0  queue   a lane; dead-letters as Name does, into the same dead-letter queue
//
// Bind other queues to the exchange Name.in only, where they get copies. A queue that is bound to a
// sort exchange takes away the messages that it matches; hopback topology verify and hopback doctor
// report it.
func (q Queue) Topology(p retry.Policy, work declare.QuorumQueue) (declare.Topology, error) {
	q, err := q.withDefaults()
	if err == nil {
		err = errors.Join(checkQueue(work), checkPolicy(argument.Root("Policy"), p))
	}
	if err != nil {
		return declare.Topology{}, err
	}
	work.Name = q.Name
	queues := []declare.QuorumQueue{work}
	t, err := retry.Topology(p, work)
	if err != nil {
		return declare.Topology{}, err
	}
	for _, d := range t.Queues { // the lanes dead-letter under the main queue's name
		if d, ok := d.(declare.QuorumQueue); ok && d.Name == q.Name {
			work.DeadLetter = d.DeadLetter
		}
	}
	given := work.Arguments
	for i := range q.Lanes {
		work.Name = q.lane(i)
		work.Arguments = map[string]any{argLanes: int64(q.Lanes)}
		for k, v := range given {
			work.Arguments[k] = v
		}
		queues = append(queues, work)
	}
	if t, err = retry.Topology(p, queues...); err != nil {
		return declare.Topology{}, err
	}
	t.Exchanges = append(t.Exchanges, declare.Exchange{Name: q.in(), Type: declare.ExchangeFanout}, declare.Exchange{Name: q.rest(), Type: declare.ExchangeFanout})
	t.Bindings = append(t.Bindings, declare.Binding{Source: q.rest(), Queue: q.Name}, declare.Binding{Source: q.in(), Exchange: q.sort(0)})
	for i := range q.Lanes {
		t.Exchanges = append(t.Exchanges, declare.Exchange{Name: q.sort(i), Type: declare.ExchangeDirect, AlternateExchange: q.onward(i)})
	}
	return t, t.Validate()
}

// checkQueue refuses what keeps workers from sharing.
func checkQueue(q declare.QuorumQueue) error {
	at := argument.Root("QuorumQueue")
	var errs []error
	if q.Name != "" {
		errs = append(errs, argument.At(at.Field("Name"), argument.CodeUnsupported, q.Name, "is set, but there are several queues", "leave it empty; Queue.Name is the beginning of their names"))
	}
	if q.SingleActiveConsumer {
		errs = append(errs, argument.At(at.Field("SingleActiveConsumer"), argument.CodeUnsupported, nil, "is set, so one worker would get all messages", "leave it out; for order by key, use package partition"))
	}
	return errors.Join(errs...)
}

// checkPolicy refuses a strategy that loses track of the lane: what a lane dead-letters for a retry
// would return to the main queue.
func checkPolicy(at argument.Path, p retry.Policy) error {
	if p.Strategy == retry.StrategyDeadLetter {
		return argument.At(at.Field("Strategy"), argument.CodeUnsupported, string(p.Strategy), "isn't possible with lanes, which dead-letter under the main queue's name", "use the strategy native, auto, or republish")
	}
	return nil
}
