package engine

import "time"

// What a test does to the broker.

// Alarm is the name of an alarm.
type Alarm string

// RabbitMQ's alarms.
const (
	MemoryAlarm Alarm = "memory"
	DiskAlarm   Alarm = "disk"
)

// SetAlarm begins or ends an alarm.
func (b *Broker) SetAlarm(a Alarm, on bool) {}

// Stop stops the broker: connections end without a word, and Connect and Authenticate
// fail until Start. What was confirmed stays; exclusive and non-durable things go.
func (b *Broker) Stop() {}

// Start starts it again.
func (b *Broker) Start() {}

// Running is false between Stop and Start.
func (b *Broker) Running() bool { return false }

// ForgetQueue drops a queue with all that is in it, as if it had never been. Links on it are
// detached. It reports whether there was one.
func (b *Broker) ForgetQueue(vhost, queue string) bool { return false }

// MoveLeader moves a queue's leader to another node. Consumers and publishers stay attached,
// as with RabbitMQ; what was delivered and not settled stays with its consumer.
func (b *Broker) MoveLeader(vhost, queue, node string) error { return nil }

// Withhold makes a queue keep its confirmations, and what it would deliver, to itself until release
// is called, as a queue without a leader does.
func (b *Broker) Withhold(vhost, queue string) (release func(), err error) { return func() {}, nil }

// Entry is a line of the event log.
type Entry struct {
	Time  time.Time
	Kind  string // "published", "delivered", "accepted", "expired", "dead-lettered", ...
	VHost string
	Queue string
	Text  string
}

// Log returns the log's entries, oldest first.
func (b *Broker) Log() []Entry { return nil }
