package hopbacktest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// Queue is a queue of a Broker, by its name. It need not exist. Its methods may be called
// concurrently.
type Queue struct {
	b           *Broker
	vhost, name string
}

// Queue returns the queue of that name in the virtual host "/".
func (b *Broker) Queue(name string) *Queue { return b.QueueIn("/", name) }

// QueueIn returns a queue of another virtual host.
func (b *Broker) QueueIn(vhost, name string) *Queue { return &Queue{b, vhost, name} }

// ErrNoQueue is in the error for a queue that doesn't exist.
var ErrNoQueue = errors.New("hopbacktest: no such queue")

func missing(err error) error {
	if errors.Is(err, engine.ErrMissing) {
		return fmt.Errorf("%w: %w", ErrNoQueue, err)
	}
	return err
}

// Counts are the messages of a queue by their state, and its consumers.
type Counts struct {
	// Ready messages can be delivered.
	Ready int
	// Unacknowledged messages are held by consumers.
	Unacknowledged int
	// Delayed messages wait for their time, as with retry.StrategyNative.
	Delayed int
	// DeadLettering messages wait until the next queue has them.
	DeadLettering int
	// Messages is the sum of all of these.
	Messages  int
	Consumers int
}

// Name is the queue's name.
func (q *Queue) Name() string { return q.name }

// Exists says whether there is such a queue.
func (q *Queue) Exists() bool {
	_, err := q.b.engine.Queue(q.vhost, q.name)
	return err == nil
}

// Counts counts messages and consumers. They are 0 where there is no such queue.
func (q *Queue) Counts() Counts {
	i, err := q.b.engine.Queue(q.vhost, q.name)
	if err != nil {
		return Counts{}
	}
	return Counts{
		Ready: i.Ready, Unacknowledged: i.Unacknowledged, Delayed: i.Delayed, DeadLettering: i.DeadLettering,
		Messages: i.Messages, Consumers: i.Consumers,
	}
}

// Leader is the node of the queue's leader.
func (q *Queue) Leader() string {
	i, _ := q.b.engine.Queue(q.vhost, q.name)
	return i.Leader
}

// MessageState is where a message is in its queue.
type MessageState string

// The states of a message. Counts tells what they mean.
const (
	Ready          MessageState = "ready"
	Unacknowledged MessageState = "unacknowledged"
	Delayed        MessageState = "delayed"
	DeadLettering  MessageState = "dead-lettering"
)

// Message is a message in a queue.
type Message struct {
	// Message is what a consumer would get, or has got. It is nil for a message that
	// go-amqp can't decode.
	*client.Message
	State MessageState
	// Due is when a delayed message is ready.
	Due time.Time
	// Expires is when the message's time ends. It leaves the queue then, or once it is at
	// the head of the queue. Zero: never.
	Expires time.Time
	// Reason is why a message is dead-lettered.
	Reason string
}

// ID is the message-id as text.
func (m Message) ID() string {
	if m.Message == nil || m.Properties == nil || m.Properties.MessageID == nil {
		return ""
	}
	return fmt.Sprint(m.Properties.MessageID)
}

// Messages returns all messages of the queue: first those that are ready, in the order in
// which they would be delivered. It takes none out. It is empty where there is no such
// queue.
func (q *Queue) Messages() []Message {
	infos, err := q.b.engine.Messages(q.vhost, q.name)
	if err != nil {
		return nil
	}
	all := make([]Message, len(infos))
	for i, info := range infos {
		all[i] = Message{Message: decoded(info.Message), State: MessageState(info.State), Due: info.Due, Expires: info.Expires, Reason: info.Reason}
	}
	return all
}

// decoded is m as go-amqp shows it.
func decoded(m *frames.Message) *client.Message {
	b, err := m.Append(nil)
	if err != nil || !frames.Readable(b) {
		return nil
	}
	var theirs client.Message
	if theirs.UnmarshalBinary(b) != nil {
		return nil
	}
	return &theirs
}

// Forget drops the queue with all that is in it, as if it had never been. Its consumers'
// links are detached.
func (q *Queue) Forget() error { return missing(q.b.engine.ForgetQueue(q.vhost, q.name)) }

// Empty drops all messages, also those that consumers hold.
func (q *Queue) Empty() error { return missing(q.b.engine.EmptyQueue(q.vhost, q.name)) }

// MoveLeader moves the queue's leader to another node of Config.Nodes.
func (q *Queue) MoveLeader(node string) error {
	return missing(q.b.engine.MoveLeader(q.vhost, q.name, node))
}

// Freeze makes the queue do nothing until thaw is called, like a queue without a leader:
// what is published to it isn't answered, and nothing is delivered.
func (q *Queue) Freeze() (thaw func(), err error) {
	thaw, err = q.b.engine.Freeze(q.vhost, q.name)
	return thaw, missing(err)
}

// HoldConfirms makes the queue store and deliver what is published to it, and confirm
// nothing until release is called.
func (q *Queue) HoldConfirms() (release func(), err error) {
	release, err = q.b.engine.HoldConfirms(q.vhost, q.name)
	return release, missing(err)
}

// DetachConsumers ends the links of the queue's consumers with an error condition, such
// as "amqp:resource-deleted".
func (q *Queue) DetachConsumers(condition string) error {
	return missing(q.b.engine.DetachConsumers(q.vhost, q.name, condition))
}

// Await waits until cond is true of the queue's counts, or ctx ends.
func (q *Queue) Await(ctx context.Context, cond func(Counts) bool) error {
	return q.b.Await(ctx, func() bool { return cond(q.Counts()) })
}

// Await waits until cond is true, or ctx ends. It looks whenever something has changed in
// the broker.
func (b *Broker) Await(ctx context.Context, cond func() bool) error {
	for {
		changed := b.engine.Changed()
		if cond() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Event is something that has happened to a message or a queue.
type Event struct {
	Time time.Time
	// Kind is "published", "delivered", "accepted", "returned", "delayed", "expired",
	// "dead-lettered", "dropped", "taken back", "queue declared", "queue deleted", "queue
	// expired", "connected" or "disconnected".
	Kind         string
	VHost, Queue string
	// MessageID is nil for what isn't about a message, and for a message without one.
	MessageID any
}

// String is the event as one line.
func (e Event) String() string {
	text := e.Time.UTC().Format("2006-01-02 15:04:05.000 ") + e.Kind
	if e.Queue != "" {
		text += " " + e.Queue
	}
	if e.MessageID != nil {
		text += fmt.Sprintf(" message %v", e.MessageID)
	}
	return text
}

// Events returns the latest Config.MaxEvents events, oldest first.
func (b *Broker) Events() []Event {
	log := b.engine.Log()
	all := make([]Event, len(log))
	for i, e := range log {
		all[i] = Event(e)
	}
	return all
}

// Policy is a policy of RabbitMQ: settings of the queues and exchanges whose names match.
type Policy struct {
	// Pattern is a regular expression of names.
	Pattern string
	// ApplyTo is "all", "queues", "exchanges", "classic_queues" or "quorum_queues".
	// Default: "all".
	ApplyTo  string
	Priority int64
	// Definition has keys such as "max-length". Values are strings, booleans and whole
	// numbers.
	Definition map[string]any
	// Operator makes it an operator policy.
	Operator bool
}

// SetPolicy sets a policy of a virtual host.
func (b *Broker) SetPolicy(vhost, name string, p Policy) error {
	return b.engine.SetPolicy(vhost, name, engine.Policy(p))
}

// DeletePolicy removes a policy, and says whether there was one.
func (b *Broker) DeletePolicy(vhost, name string, operator bool) bool {
	return b.engine.DeletePolicy(vhost, name, operator)
}

// AddVHost adds a virtual host, to which guest has all permissions.
func (b *Broker) AddVHost(name string) { b.engine.PutVHost(name, engine.VHostConfig{}) }

// AddUser adds a user, or changes the password of one. tags are RabbitMQ's, such as
// "administrator".
func (b *Broker) AddUser(name, password string, tags ...string) {
	b.engine.PutUser(name, password, tags...)
}

// SetPermissions sets what a user may do in a virtual host: configure, write and read are
// regular expressions of names, and an empty one matches none.
func (b *Broker) SetPermissions(user, vhost, configure, write, read string) error {
	return b.engine.SetPermissions(user, vhost, engine.Permissions{Configure: configure, Write: write, Read: read})
}
