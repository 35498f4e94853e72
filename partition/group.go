package partition

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
)

// Group is a group of partitions. Its publishers need Name only; its workers need all fields, with
// the same values.
type Group struct {
	// Name is the name of the exchange to publish to, and the beginning of all other names.
	// Required.
	Name string
	// Partitions is the number of partitions, 1 to 1,000. At most so many workers have something
	// to do. It can be changed only with [Reshard]. Required.
	Partitions int
	// Window is how many deliveries a worker holds of each of its partitions: those in handlers,
	// those that wait for their turn, and those that wait for a retry. All workers of a group need
	// the same value, because RabbitMQ keeps the order of returned messages only for a consumer
	// that takes all of them at once. It is an argument of the queues, so it can be changed only
	// with [Reshard]. Default: 100. The most: 256, because a consumer can't take more at once.
	Window int
	// Generation is how often the group was resharded, plus one. Default: 1.
	Generation int
}

const (
	maxPartitions  = 1000
	maxWindow      = 256 // RabbitMQ gives a queue more credit only piece by piece
	maxGenerations = 1000
	defaultWindow  = 100
	// disconnectedTimeout is how long RabbitMQ keeps the partitions of workers whose node is down. Its own
	// default is a minute.
	disconnectedTimeout = 5 * time.Second
	maxName             = 200 // bytes, so that there is room for what follows the name
)

// Arguments of a partition's queue. RabbitMQ keeps arguments that it doesn't know, and refuses to
// declare the queue again with other values (TestPartitionsAreArguments).
const (
	argPartitions = "x-hopback-partitions"
	argWindow     = "x-hopback-window"
)

func (g Group) withDefaults() (Group, error) {
	at := argument.Root("Group")
	if g.Window == 0 {
		g.Window = defaultWindow
	}
	if g.Generation == 0 {
		g.Generation = 1
	}
	var errs []error
	for _, f := range []struct {
		name   string
		n, max int
	}{{"Partitions", g.Partitions, maxPartitions}, {"Window", g.Window, maxWindow}, {"Generation", g.Generation, maxGenerations}} {
		if f.n < 1 || f.n > f.max {
			errs = append(errs, argument.At(at.Field(f.name), argument.CodeOutOfRange, f.n, "is out of range", fmt.Sprintf("use 1 to %d", f.max)))
		}
	}
	if len(g.Name) > maxName {
		errs = append(errs, argument.At(at.Field("Name"), argument.CodeTooLong, nil, fmt.Sprintf("is %d bytes long", len(g.Name)), fmt.Sprintf("use at most %d bytes", maxName)))
	}
	if err := (declare.Exchange{Name: g.Name}).Validate(); err != nil {
		errs = append(errs, err)
	}
	return g, errors.Join(errs...)
}

// Address returns the address for publishing a message with a key. All messages of a key go to
// one partition.
func (g Group) Address(key string) address.Address { return address.Exchange(g.Name, key) }

// Queues returns the names of the partitions' queues, in their order.
func (g Group) Queues() []string {
	g, err := g.withDefaults()
	if err != nil {
		return nil
	}
	names := make([]string, g.Partitions)
	for i := range names {
		names[i] = g.queue(i)
	}
	return names
}

// queue is the name of a partition's queue. The exchange sorts the names as strings, so they have
// the same length.
func (g Group) queue(i int) string { return fmt.Sprintf("%s.%d.%03d", g.Name, g.Generation, i) }

// hash is the exchange of a generation.
func (g Group) hash() string { return fmt.Sprintf("%s.%d", g.Name, g.Generation) }

// now is the exchange that leads to the generation in use. It is behind the one that publishers
// use, so a queue that others bind to that one gets copies and takes nothing away. A modulus-hash
// exchange routes each message by exactly one of its bindings. So [Reshard] can add the binding of
// the next generation and then remove the one before it: each key moves once, no message gets two
// copies, and none is without a route (TestModulusHashLeadsToExchanges).
//
// Package pause binds it to another exchange to pause the group.
func (g Group) now() string { return inside.NowExchange(g.Name) }

// after is the exchange that led to the generations after this one before [Group.now] existed. It
// is still the alternate exchange of the one before, which can't be changed in place, and routes
// what would otherwise have no route.
func (g Group) after() string { return fmt.Sprintf("%s.after.%d", g.Name, g.Generation) }

// front is the exchange that publishers use, and for a later generation the one that led to it
// before [Group.now] existed.
func (g Group) front() string {
	if g.Generation == 1 {
		return g.Name
	}
	return fmt.Sprintf("%s.after.%d", g.Name, g.Generation-1)
}

// inUse is the binding that everything passes, behindNow the one that leads to this generation,
// and behindFront the one that did so before [Group.now] existed.
func (g Group) inUse() declare.Binding { return declare.Binding{Source: g.Name, Exchange: g.now()} }
func (g Group) behindNow() declare.Binding {
	return declare.Binding{Source: g.now(), Exchange: g.hash()}
}
func (g Group) behindFront() declare.Binding {
	return declare.Binding{Source: g.front(), Exchange: g.hash()}
}

func (g Group) members() string { return fmt.Sprintf("%s.%d.members", g.Name, g.Generation) }

// opened is the queue that says that a later generation may be consumed.
func (g Group) opened() string { return fmt.Sprintf("%s.%d.opened", g.Name, g.Generation) }

// Topology returns the exchanges, queues, and bindings of the group. q has what all queues of the
// partitions have in common, such as DeadLetter, which is required. Its Name stays empty, and
// SingleActiveConsumer is always set. These fields have another meaning here:
//
//   - DeliveryLimit is how many workers a message may crash before it isn't retried any more: see
//     [Config.Failed]. At least 5, the default is 20; declare.Unlimited: any number. Lost connections
//     don't count. RabbitMQ's own limit is off, because it counts those, and a crash for each message
//     that the worker holds.
//   - ConsumerDisconnectedTimeout is 5 s by default, so that the partitions of a worker whose node is
//     down have another owner soon.
//
// The errors are *[argument.Error]s. The topology doesn't contain the dead-letter exchange, nor
// the queue behind it.
//
//	publishers ──▶ Name (fanout) ──▶ Name.now ──▶ Name.1 (x-modulus-hash) ──▶ Name.1.000, …
//	                  │                 └─ after Reshard ──▶ Name.2 (x-modulus-hash) ──▶ …
//	                  └──▶ queues that others bind: they get copies
//
// Bind other queues to the exchange Name only. Each exchange after it routes a message by one of
// its bindings, so one more would take its share of the messages.
func (g Group) Topology(q declare.QuorumQueue) (declare.Topology, error) {
	g, err := g.withDefaults()
	if err == nil {
		err = checkQueue(q)
	}
	if err != nil {
		return declare.Topology{}, err
	}
	t := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: g.front(), Type: declare.ExchangeFanout, AlternateExchange: g.after()},
			{Name: g.hash(), Type: declare.ExchangeModulusHash},
			{Name: g.members(), Type: declare.ExchangeFanout},
		},
		Bindings: []declare.Binding{g.behindFront()},
	}
	if g.Generation == 1 {
		t.Exchanges = append(t.Exchanges, declare.Exchange{Name: g.now(), Type: declare.ExchangeModulusHash})
		t.Bindings = []declare.Binding{g.inUse(), g.behindNow()}
	}
	given := q.Arguments
	q.SingleActiveConsumer = true
	limit := int64(cmp.Or(q.DeliveryLimit, defaultLimit))
	q.DeliveryLimit = declare.Unlimited // RabbitMQ's counts lost connections: see poisons
	q.ConsumerDisconnectedTimeout = cmp.Or(q.ConsumerDisconnectedTimeout, disconnectedTimeout)
	for i := range g.Partitions {
		q.Name = g.queue(i)
		q.Arguments = map[string]any{argPartitions: int64(g.Partitions), argWindow: int64(g.Window), argLimit: limit}
		for k, v := range given {
			q.Arguments[k] = v
		}
		t.Queues = append(t.Queues, q)
		t.Bindings = append(t.Bindings, declare.Binding{Source: g.hash(), Queue: q.Name})
	}
	return t, t.Validate()
}

// checkQueue refuses what loses messages or their order.
func checkQueue(q declare.QuorumQueue) error {
	at := argument.Root("QuorumQueue")
	var errs []error
	refuse := func(field string, value any, problem, remedy string) {
		errs = append(errs, argument.At(at.Field(field), argument.CodeUnsupported, value, problem, remedy))
	}
	if q.Name != "" {
		refuse("Name", q.Name, "is set, but each partition has its own queue", "leave it empty; the group's name is the beginning of the queues' names")
	}
	if q.DeadLetter == declare.Drop() {
		refuse("DeadLetter", nil, "drops dead letters, so a message that isn't retried any more would be lost", "name a dead-letter exchange")
	}
	if q.MessageTTL != 0 {
		refuse("MessageTTL", q.MessageTTL, "removes messages from the middle of their key's order", "leave it out")
	}
	if q.Expires != 0 {
		refuse("Expires", q.Expires, "deletes a partition that has no worker", "leave it out")
	}
	if q.DelayedRetry != (declare.DelayedRetry{}) {
		refuse("DelayedRetry", nil, "lets later messages overtake a returned one", "use Config.Retry, which keeps the order")
	}
	if q.DeliveryLimit == declare.NoRedelivery {
		refuse("DeliveryLimit", int64(q.DeliveryLimit), "dead-letters a partition's messages when a worker crashes", "use declare.Unlimited, or leave it out")
	}
	return errors.Join(errs...)
}
