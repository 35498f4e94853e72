package inside

import (
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/outcome"
)

// Policy decides about failed attempts, for a consumer in which messages wait for their next attempt. See InPlace.
type Policy interface {
	// Decide returns what to do after a handler's error that isn't an outcome.
	Decide(Attempt) Decision
	// Past reads a message's history.
	Past(m *amqp.Message) Past
	// History returns the annotations for a message that failed in queue and is dead-lettered or
	// requeued. retries is the count after the failure. first is when the message first failed; zero if
	// this is the first failure. delay is how long it waits for its next attempt. err may be nil.
	History(queue string, m *amqp.Message, retries int, first, now time.Time, delay time.Duration, err error) map[string]any
}

// Past is a message's history. Any sender may have forged it.
type Past struct {
	Retries int
	First   time.Time // when it first failed; zero: it hasn't
	// Last is when it last failed, and Delay how long it had to wait then. Both are zero if it was
	// replayed since.
	Last  time.Time
	Delay time.Duration
}

// Attempt is an attempt that failed.
type Attempt struct {
	Err  error
	Says outcome.Verdict // of Err
	// Retries is how many retries the message has had. First is when it first failed; it is
	// zero if this is its first failure.
	Retries    int
	First, Now time.Time
}

// Decision is what to do about it.
type Decision struct {
	// Discard: the message is acknowledged in spite of its error. Reason is why the message isn't
	// retried, and Err the error for its dead letter. Reason is empty for a retry.
	Discard bool
	Reason  string
	Err     error
	// Delay is how long a retry waits. Asked: the handler requested it. Counted: the retry counts
	// towards the policy's MaxRetries.
	Delay          time.Duration
	Asked, Counted bool
}
