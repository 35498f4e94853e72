package inside

import "github.com/Azure/go-amqp"

// Names is what package retry knows of a dead letter that package desk replays. See NamesOf.
type Names interface {
	// Copy returns a copy of a dead letter without its history of failures and waits: its
	// retries count from 0, and retry.Policy.GiveUpAfter counts from its next failure. The
	// copy keeps all that client.Copy keeps, and the exchange and the routing key that the
	// message was first published with. The dead letter isn't changed.
	Copy(dead *amqp.Message) *amqp.Message
	// Failed reports whether anything but a dead letter's own annotations, which its sender
	// may have written, shows that it failed in queue. in is the queue that it is in now.
	Failed(dead *amqp.Message, in, queue string) bool
	// Published is whether the broker's history of a dead letter shows that it was published
	// to exchange with key before it came to queue.
	Published(dead *amqp.Message, queue, exchange, key string) Answer
}

// Answer is what a broker's history says.
type Answer uint8

// The answers. Unknown means that the history doesn't have it any more: a copy starts a new
// history.
const (
	AnswerUnknown Answer = iota
	AnswerYes
	AnswerNo
)
