package engine

import "time"

// Config says which broker it is. The zero value is RabbitMQ 4.3.6 with the user guest,
// whose password is guest, and the virtual host "/".
type Config struct {
	// Version is "4.4.0", "4.3.6", or "4.0.5", or the same shortened to "4.4", "4.3", and "4.0".
	// Default: "4.3.6".
	Version string
	// Node is the name of the node. Default: "rabbit@memory".
	Node string
	// Nodes are the names of all nodes of the cluster. They are names only: leaders
	// can be moved among them. Default: Node alone.
	Nodes []string
	// DeadLetterRetry is how long the at-least-once dead-letter worker waits before it
	// sends a message again that it could not hand over. Default: 180 s.
	DeadLetterRetry time.Duration
	// ConsumerTimeout is how long a delivery may stay unsettled, on 4.3. Default: 30 min.
	ConsumerTimeout time.Duration
	// MaxMessageSize is the largest message in bytes. Default: 16 MiB.
	MaxMessageSize int
	// MaxMessages and MaxBytes limit what all queues hold together. A message beyond
	// them is rejected with amqp:resource-limit-exceeded, and a modified outcome that adds
	// annotations ends its session. Bytes are those of memory that messages and their
	// annotations take. Defaults: 10,000,000 and 1 GiB.
	MaxMessages int
	MaxBytes    int64
	// MaxLog is how many entries the event log keeps. The oldest are dropped. Default:
	// 10,000. Negative: none.
	MaxLog int
}
