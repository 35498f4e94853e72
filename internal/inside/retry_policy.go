package inside

import (
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/outcome"
)

// Policy is what InPlace returns: what becomes of a failed attempt, for a consumer that handles its
// messages again in place.
type Policy interface {
	// Decide reads an error that isn't an outcome.
	Decide(Attempt) Decision
	// Past reads a message's history.
	Past(m *amqp.Message) Past
	// History returns the annotations of a message that failed in queue, for a dead letter, or for
	// a message that returns to the queue. retries is the count after the failure; first is zero if
	// it is the first. delay is how long the message waits for its next attempt. err may be nil.
	History(queue string, m *amqp.Message, retries int, first, now time.Time, delay time.Duration, err error) map[string]any
}

// Past is what a message's history says, which anybody may have written.
type Past struct {
	Retries int
	First   time.Time // when it first failed; zero: it hasn't
	// Last is when it last failed, and Delay how long it was to wait then, unless it was replayed
	// since.
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
	// Discard says that the message counts as handled. Reason is why it isn't retried, and Err
	// the error to give up with. Reason is empty for a retry.
	Discard bool
	Reason  string
	Err     error
	// A retry comes after Delay, which Asked says the handler named. Counted says that it uses
	// up one of the policy's retries.
	Delay          time.Duration
	Asked, Counted bool
}
