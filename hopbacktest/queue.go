package hopbacktest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing/synctest"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/message"
)

// Queue refers to a queue of a Broker by its name. The queue doesn't have to exist: if it
// doesn't, methods that return an error return one that matches [ErrNoQueue]. A Queue is safe
// for concurrent use.
type Queue struct {
	b           *Broker
	vhost, name string
}

// Queue returns the queue with this name in the virtual host "/".
func (b *Broker) Queue(name string) *Queue { return b.QueueIn("/", name) }

// QueueIn returns the queue with this name in a virtual host.
func (b *Broker) QueueIn(vhost, name string) *Queue { return &Queue{b, vhost, name} }

// ErrNoQueue means that the queue doesn't exist. Match it with errors.Is.
var ErrNoQueue = errors.New("hopbacktest: no such queue")

func missing(err error) error {
	if errors.Is(err, engine.ErrMissing) {
		return fmt.Errorf("%w: %w", ErrNoQueue, err)
	}
	return err
}

// Counts are the numbers of a queue's messages, by state, and of its consumers.
type Counts struct {
	// Ready is the number of messages that can be delivered.
	Ready int
	// Unacknowledged is the number of messages that consumers hold.
	Unacknowledged int
	// Delayed is the number of messages that wait for their delivery time, as with
	// retry.StrategyNative.
	Delayed int
	// DeadLettering is the number of messages that wait until their dead-letter target has
	// confirmed them.
	DeadLettering int
	// Messages is the sum of all of these.
	Messages  int
	Consumers int
}

// Name returns the queue's name.
func (q *Queue) Name() string { return q.name }

// Exists reports whether the queue exists.
func (q *Queue) Exists() bool {
	_, err := q.b.engine.Queue(q.vhost, q.name)
	return err == nil
}

// Counts returns the numbers of messages and consumers. If the queue doesn't exist, all are 0.
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

// Leader returns the name of the node that leads the queue.
func (q *Queue) Leader() string {
	i, _ := q.b.engine.Queue(q.vhost, q.name)
	return i.Leader
}

// Message is a message in a queue.
type Message struct {
	// Message is the message as a consumer receives it. It is nil if go-amqp can't decode
	// it.
	*client.Message
	// State is "ready", "unacknowledged", "delayed", or "dead-lettering": see [Counts].
	State string
	// Due is when a delayed message becomes ready.
	Due time.Time
	// Expires is when the message's time to live ends, or zero for never. The message leaves
	// the queue at that time, or later, when it reaches the queue's head.
	Expires time.Time
	// Reason is why a message is being dead-lettered.
	Reason string
}

// ID returns the message-id as text.
func (m Message) ID() string {
	if m.Message == nil || m.Properties == nil || m.Properties.MessageID == nil {
		return ""
	}
	return fmt.Sprint(m.Properties.MessageID)
}

// Messages returns all messages of the queue and leaves them there. Ready messages come first,
// in the order of delivery. If the queue doesn't exist, the result is empty.
func (q *Queue) Messages() []Message {
	infos, err := q.b.engine.Messages(q.vhost, q.name)
	if err != nil {
		return nil
	}
	all := make([]Message, len(infos))
	for i, info := range infos {
		all[i] = found(info)
	}
	return all
}

// Message returns the queue's message with a message-id, such as "order-7", and reports whether there is one. It leaves
// the message there. Other than [Queue.Messages] it decodes nothing else, so it is fast in a queue with thousands.
//
//   - The id is a value of [Event].MessageID. A nil one finds nothing.
//   - Of several messages, it returns the first one of Messages.
//   - It doesn't find an id of more than 300 bytes.
func (q *Queue) Message(id any) (Message, bool) {
	info, ok := q.b.engine.Message(q.vhost, q.name, id)
	if !ok {
		return Message{}, false
	}
	return found(info), true
}

func found(i engine.MessageInfo) Message {
	return Message{Message: decoded(i.Message), State: i.State, Due: i.Due, Expires: i.Expires, Reason: i.Reason}
}

// decoded is m, decoded by go-amqp.
func decoded(m *frames.Message) *client.Message {
	b, err := m.Append(nil)
	var theirs message.Decoded
	if err != nil || theirs.Decode(b) != nil {
		return nil
	}
	return &theirs.Message
}

// Forget deletes the queue and all its messages, without dead-lettering them, and detaches
// its consumers' links.
func (q *Queue) Forget() error { return missing(q.b.engine.ForgetQueue(q.vhost, q.name)) }

// Empty drops all messages, including those that consumers hold.
func (q *Queue) Empty() error { return missing(q.b.engine.EmptyQueue(q.vhost, q.name)) }

// MoveLeader moves the queue's leader to a node of Config.Nodes.
func (q *Queue) MoveLeader(node string) error {
	err := q.b.engine.MoveLeader(q.vhost, q.name, node)
	if err != nil && q.Exists() {
		return argument.New("node", node, "isn't a node of the broker", "use one of Config.Nodes").Because(err)
	}
	return missing(err)
}

// Freeze stops the queue until thaw is called. Like a queue without a leader, it confirms and
// delivers nothing.
func (q *Queue) Freeze() (thaw func(), err error) {
	thaw, err = q.b.engine.Freeze(q.vhost, q.name)
	return thaw, missing(err)
}

// HoldConfirms holds back the queue's confirms until release is called. The queue still stores
// and delivers messages.
func (q *Queue) HoldConfirms() (release func(), err error) {
	release, err = q.b.engine.HoldConfirms(q.vhost, q.name)
	return release, missing(err)
}

// DetachConsumers detaches the queue's consumers with an error condition, such as
// "amqp:resource-deleted".
func (q *Queue) DetachConsumers(condition string) error {
	return missing(q.b.engine.DetachConsumers(q.vhost, q.name, condition))
}

// Await waits until cond returns true for the queue's counts. If ctx ends first, the error is
// ctx's cause.
func (q *Queue) Await(ctx context.Context, cond func(Counts) bool) error {
	return q.b.Await(ctx, func() bool { return cond(q.Counts()) })
}

// Await waits until cond returns true. It calls cond at the start, and again after every change
// in the broker. If ctx ends first, the error is ctx's cause.
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

// AwaitSettled waits until nothing is left to happen to the messages in the broker: none is ready in a queue
// that has a consumer, held by a consumer, delayed, due to expire as in a delay queue, or being
// dead-lettered. Then every message was acknowledged, or rests in a queue without a consumer, such as a
// dead-letter queue.
//
//   - In a testing/synctest bubble it is exact: first it lets all other goroutines run until only time
//     can wake them. So a consumer that a test has just started counts, and when AwaitSettled
//     returns, the handlers have returned as well.
//   - Outside of a bubble, start the consumers before: see [Counts].Consumers.
//   - A consumer that lost its connection counts as well, since it may come back.
//   - Messages that are still to be published don't count.
//   - If ctx ends first, the error matches ctx's cause, and names the queues. Time in a bubble may pass
//     without end, so use a ctx with a deadline.
func (b *Broker) AwaitSettled(ctx context.Context) error {
	for {
		if b.bubble != "" {
			if err := b.elsewhere(); err != nil {
				return err
			}
			b.settle()
		}
		changed := b.engine.Changed()
		left := b.unsettled()
		if left == "" {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return fmt.Errorf("hopbacktest: not all messages are settled: %s: %w", left, context.Cause(ctx))
		}
	}
}

// settle waits until all other goroutines of the bubble wait for time to pass. Two of them may not
// call synctest.Wait at once.
func (b *Broker) settle() {
	b.settling <- struct{}{}
	synctest.Wait()
	<-b.settling
}

// unsettled describes what AwaitSettled waits for; "" if there is nothing.
func (b *Broker) unsettled() string {
	if !b.Running() {
		return "the broker is stopped"
	}
	var left []string
	for _, q := range b.engine.Queues("") {
		if q.Unsettled > 0 {
			left = append(left, fmt.Sprintf("queue %q has %d ready, %d unacknowledged, %d delayed, %d being dead-lettered, and %d consumers",
				q.Name, q.Ready, q.Unacknowledged, q.Delayed, q.DeadLettering, q.Consumers))
		}
	}
	return strings.Join(left, "; ")
}

// Event is something that happened to a message, a queue, or a connection.
type Event struct {
	// Number counts the broker's events, from 1.
	Number uint64
	Time   time.Time
	// Kind is one of:
	//
	//   - of a message: "published", "delivered", "accepted", "returned", "delayed",
	//     "expired", "dead-lettered", "dropped", "revoked" (the consumer held it longer
	//     than Config.ConsumerTimeout).
	//   - of a queue: "queue declared", "queue deleted", "queue expired", "queue hangs". A
	//     queue of RabbitMQ 4.3 hangs if its overflow is drop-head and more of its messages are
	//     delayed than its max-length allows.
	//   - of a connection: "connected", "disconnected".
	Kind         string
	VHost, Queue string
	// MessageID is nil if the event isn't about a message, or the message has no ID.
	MessageID any
}

// String returns the event as one line.
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

// Events returns the latest events, oldest first, up to Config.MaxEvents.
func (b *Broker) Events() []Event { return b.EventsAfter(0) }

// EventsAfter returns the events with a higher number, oldest first, up to Config.MaxEvents. So a program
// that follows a busy broker reads each event once: it passes the Number of the last one that it has read, and 0 at
// the start. If the first event has a number beyond the next one, the broker has dropped those between them.
func (b *Broker) EventsAfter(number uint64) []Event {
	log := b.engine.Log(number)
	all := make([]Event, len(log))
	for i, e := range log {
		all[i] = Event(e)
	}
	return all
}

// Policy is a RabbitMQ policy. It sets arguments of the queues and exchanges whose names match.
type Policy struct {
	// Pattern is a regular expression that matches anywhere in a name.
	Pattern string
	// ApplyTo is "all", "queues", "exchanges", "classic_queues", "quorum_queues", or
	// "streams". Default: "all".
	ApplyTo  string
	Priority int64
	// Definition has the arguments without "x-", such as "max-length". Values are strings,
	// bools, and integers. It can't be empty.
	Definition map[string]any
	// Operator makes it an operator policy.
	Operator bool
}

// SetPolicy adds or replaces a policy of a virtual host. If RabbitMQ would refuse the policy,
// the error has RabbitMQ's text.
func (b *Broker) SetPolicy(vhost, name string, p Policy) error {
	return b.engine.SetPolicy(vhost, name, engine.Policy(p))
}

// DeletePolicy removes a policy, or an operator policy if operator is set. It reports
// whether there was one.
func (b *Broker) DeletePolicy(vhost, name string, operator bool) bool {
	return b.engine.DeletePolicy(vhost, name, operator)
}

// AddVHost adds a virtual host. The user guest gets all permissions for it.
func (b *Broker) AddVHost(name string) { b.engine.PutVHost(name, engine.VHostConfig{}) }

// AddUser adds a user, or replaces the password and the tags of an existing one. tags are
// RabbitMQ's user tags, such as "administrator". A new user has no permissions: see
// [Broker.SetPermissions].
func (b *Broker) AddUser(name, password string, tags ...string) {
	b.engine.PutUser(name, password, tags...)
}

// SetPermissions sets a user's permissions for a virtual host. configure, write, and read are
// regular expressions that match names; an empty one matches no name. It returns an error if an
// expression is malformed, or if the user or the virtual host doesn't exist.
func (b *Broker) SetPermissions(user, vhost, configure, write, read string) error {
	return b.engine.SetPermissions(user, vhost, engine.Permissions{Configure: configure, Write: write, Read: read})
}

// SetTopicPermissions sets the routing keys that a user may publish to a topic exchange (write),
// and bind its queues with (read), in addition to [Broker.SetPermissions]. Both are regular
// expressions; an empty one matches no key. As on RabbitMQ, a user without topic permissions for an
// exchange may use every key. It returns an error as SetPermissions does.
func (b *Broker) SetTopicPermissions(user, vhost, exchange, write, read string) error {
	return b.engine.SetTopicPermissions(user, vhost, exchange, engine.Permissions{Write: write, Read: read})
}
