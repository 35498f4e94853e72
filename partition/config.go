package partition

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/retry"
)

// Config configures [Consume]. The zero value retries as the zero retry.Policy does, and handles
// messages of up to 16 keys at once.
type Config struct {
	// Worker is the name of this worker, which the others see. It decides which partitions the
	// worker prefers, so a name that stays the same over a restart, such as that of a Kubernetes
	// pod, gets much the same partitions again. At most 200 bytes. Default: the host's name.
	Worker string
	// Key returns the key of a message. Messages of a key must be in one partition. Key is called
	// while messages are received, so it must be fast. If it panics, the message is dead-lettered
	// with client.ReasonPanicked, also with BlockKey: it can't be handled in order. Default: the
	// routing key.
	Key func(*client.Delivery) string
	// Concurrency is how many handlers run at once in this worker, over all its partitions, up to
	// 10,000. Default: 16.
	Concurrency int
	// Retry decides whether a failed message is tried again, and when: MaxRetries, Backoff,
	// GiveUpAfter, and Rules. Its other fields are for retries through delay queues and have no
	// effect, except those that describe the worker. Delays above 24 hours are shortened to that.
	Retry retry.Policy
	// Failed is what happens to a message that isn't retried any more. Default: [SkipMessage].
	Failed Failed
	// OnAssigned, if not nil, is called when this worker begins to handle a partition, and when it
	// has stopped to. Calls come one at a time, in order. While OnAssigned runs, nothing else is
	// assigned, so it must be fast. Another worker gets the partition only after the call with
	// false, unless this worker has lost its connection.
	OnAssigned func(partition int, owned bool)
	// Grace is how long running handlers may continue when the worker gives up a partition, or
	// when ctx has ended. Then their own ctx ends. It is also how long a handover may take.
	// Default: 30 s.
	Grace time.Duration

	policy inside.Policy
}

// Failed is what happens to a message that isn't retried any more. The zero value, "", means
// SkipMessage.
type Failed string

const (
	// SkipMessage dead-letters the message with its reason and history. Then the next message of
	// its key is handled.
	SkipMessage Failed = "skip-message"
	// BlockKey keeps the message and tries it again every 5 minutes, until it succeeds or its
	// handler returns an outcome such as client.DeadLetter. Messages of its key wait, also after a
	// crash or a move to another worker; other keys continue. All that waits counts toward the
	// window: when nothing else has room in it, the partition stalls.
	BlockKey Failed = "block-key"
)

const (
	maxWorker          = 200
	maxConcurrency     = 10_000
	defaultConcurrency = 16
	defaultGrace       = 30 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	at := argument.Root("Config")
	if c.Worker == "" {
		c.Worker, _ = os.Hostname()
		c.Worker = cmp.Or(c.Worker, "worker")
		c.Worker = c.Worker[:min(len(c.Worker), maxWorker)]
	}
	c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
	c.Grace = cmp.Or(c.Grace, defaultGrace)
	c.Failed = cmp.Or(c.Failed, SkipMessage)
	if c.Key == nil {
		c.Key = routingKey
	}
	var errs []error
	if len(c.Worker) > maxWorker || !utf8.ValidString(c.Worker) {
		errs = append(errs, argument.At(at.Field("Worker"), argument.CodeMalformed, nil, "is too long, or isn't valid UTF-8", fmt.Sprintf("use at most %d bytes", maxWorker)))
	}
	if c.Concurrency < 1 || c.Concurrency > maxConcurrency {
		errs = append(errs, argument.At(at.Field("Concurrency"), argument.CodeOutOfRange, c.Concurrency, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxConcurrency)))
	}
	if c.Grace < 0 {
		errs = append(errs, argument.At(at.Field("Grace"), argument.CodeOutOfRange, c.Grace, "is negative", "use a positive duration, or 0 for the default"))
	}
	if c.Failed != SkipMessage && c.Failed != BlockKey {
		errs = append(errs, argument.At(at.Field("Failed"), argument.CodeUnknown, string(c.Failed), "is unknown", "use partition.SkipMessage or partition.BlockKey"))
	}
	policy, err := inside.InPlace(retry.With(c.Retry)(nil))
	if bad, ok := errors.AsType[*argument.Error](err); ok {
		here := *bad
		here.Path = append(slices.Clone(at.Field("Retry")), bad.Path[1:]...)
		err = &here
	}
	if err != nil {
		errs = append(errs, err)
	}
	c.policy = policy
	return c, errors.Join(errs...)
}

// routingKey is the default Key. A replayed dead letter came to its queue with the queue's name as
// its routing key, and brings the first one along. Other messages may, too: a copy has the
// annotations of the message that it was made of, which was of another key.
func routingKey(d *client.Delivery) string {
	key, _ := d.Annotation("x-routing-key").(string)
	if first, ok := d.Annotation(annotation.RoutingKey).(string); ok && key == d.Queue() {
		return first
	}
	return key
}
