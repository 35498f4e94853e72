package inside

import "github.com/Azure/go-amqp"

// Names is what package retry knows about dead letters, for package desk. See NamesOf.
type Names interface {
	// Copy returns a copy of a dead letter without its history: retries count from 0, and
	// retry.Policy.GiveUpAfter counts from the next failure. The copy keeps all that client.Copy
	// keeps, and the exchange and the routing key that the message was first published with. The
	// dead letter isn't changed.
	Copy(dead *amqp.Message) *amqp.Message
	// Failed reports whether it is certain that a dead letter failed in queue. Annotations that its
	// sender could have written don't count. in is the queue that it is in now.
	Failed(dead *amqp.Message, in, queue string) bool
	// Published returns whether a dead letter was published to exchange with key before it came to
	// queue, by the broker's history of it.
	Published(dead *amqp.Message, queue, exchange, key string) Answer
}

// Answer is an answer from the broker's history of a message.
type Answer uint8

// The answers. AnswerUnknown: the history doesn't go back that far, because a copy starts a new one.
const (
	AnswerUnknown Answer = iota
	AnswerYes
	AnswerNo
)
