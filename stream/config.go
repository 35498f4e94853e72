package stream

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/retry"
)

// Config configures [Consume]. The zero value handles the whole stream from its beginning, saves
// no position, and stops at the first message that fails five times.
type Config struct {
	// Consumer is the name under which the position is saved. It must be unique for each stream
	// among all users of a store. Required with Offsets.
	Consumer string
	// Offsets stores the position. Default: nil, and each Consume starts at From.
	Offsets OffsetStore
	// From is where to start if no position is saved. If it is Last, Next, Since, or Ago, Consume
	// saves the offset it stands for before the first delivery. Default: the oldest message.
	From Offset
	// Filter selects messages. Default: all.
	Filter Filter

	// SaveEvery is the number of handled messages after which the position is saved, in parallel
	// with the handling of further messages. When twice as many are unsaved, the consumer waits
	// for the store. With 1 it waits after each message. Default: 1,000.
	SaveEvery int
	// SaveInterval is the longest time between handling a message and saving its position.
	// Default: 1 s.
	SaveInterval time.Duration

	// Attempts is how often the handler is called for a failing message, including the first
	// time. Default: 5.
	Attempts int
	// Backoff is the pause before each further attempt. It blocks all later messages. Default:
	// 100 ms, doubled each time, at most 10 s.
	Backoff retry.Backoff
	// GiveUpAfter limits the time from a message's first failure in this Consume to its last
	// attempt, even if it has attempts left. Default: no limit.
	GiveUpAfter time.Duration
	// Rules treat some errors differently, as those of a retry.Policy do. MaxRetries counts the
	// attempts after the first. With retry.ActionDeadLetter, Failed decides. Default: none.
	Rules []retry.ErrorRule
	// Failed is what happens to a message that isn't retried any more. Default: FailedForward if
	// FailedQueue is set, or else FailedStop.
	Failed Failed
	// FailedQueue is the queue that FailedForward publishes copies to.
	FailedQueue string

	// Prefetch is how many messages may wait in memory, up to 10,000. Default: 1,000.
	Prefetch int
	// PrefetchBytes limits the encoded bytes of the messages that wait in memory. A larger message
	// is received alone. Default: 64 MiB.
	PrefetchBytes int
	// Grace is how long a handler may continue after Consume's ctx is canceled. Then its own ctx
	// is canceled. A handler that ignores this is abandoned 5 s later. Default: 30 s.
	Grace time.Duration
	// Logger logs what no call returns. Default: slog.Default().
	Logger *slog.Logger

	policy inside.Policy
}

// Failed is what happens to a message that isn't retried any more. See [Config.Failed]. The zero
// value, "", means FailedForward if Config.FailedQueue is set, or else FailedStop.
type Failed string

const (
	// FailedStop stops Consume with a [*HandlerError].
	FailedStop Failed = "stop"
	// FailedSkip logs the error and continues with the next message.
	FailedSkip Failed = "skip"
	// FailedForward publishes a copy to [Config.FailedQueue], and continues when the broker has
	// confirmed the copy, however long that takes. A consumer of that queue can use retry.With. It
	// is FailedStop for a message that is larger than client.Config.MaxMessageSize.
	FailedForward Failed = "forward"
)

const (
	maxPrefetch      = 10_000
	maxPrefetchBytes = math.MaxInt32
	maxSaveEvery     = 1_000_000
	maxConsumer      = 255 // bytes
)

func (c Config) withDefaults() (Config, error) {
	at := argument.Root("Config")
	for _, f := range []struct {
		name   string
		n, max int
	}{{"Prefetch", c.Prefetch, maxPrefetch}, {"PrefetchBytes", c.PrefetchBytes, maxPrefetchBytes}, {"SaveEvery", c.SaveEvery, maxSaveEvery}, {"Attempts", c.Attempts, 1 << 30}} {
		if f.n < 0 || f.n > f.max {
			return c, argument.At(at.Field(f.name), argument.CodeOutOfRange, f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", f.max))
		}
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"SaveInterval", c.SaveInterval}, {"Grace", c.Grace}} {
		if f.d < 0 {
			return c, argument.At(at.Field(f.name), argument.CodeOutOfRange, f.d, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	if err := c.From.validate(at.Field("From")); err != nil {
		return c, err
	}
	if err := c.Filter.validate(at.Field("Filter")); err != nil {
		return c, err
	}
	if err := c.checkNames(at); err != nil {
		return c, err
	}
	c.Prefetch = orDefault(c.Prefetch, 1000)
	c.PrefetchBytes = orDefault(c.PrefetchBytes, 64<<20)
	c.SaveEvery = orDefault(c.SaveEvery, 1000)
	c.Attempts = orDefault(c.Attempts, 5)
	c.SaveInterval = orDefault(c.SaveInterval, time.Second)
	c.Grace = orDefault(c.Grace, 30*time.Second)
	if c.Backoff == nil {
		c.Backoff = retry.Exponential(100*time.Millisecond, 2).Cap(10 * time.Second)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	retries := c.Attempts - 1
	if retries == 0 {
		retries = retry.NoRetries
	}
	var err error
	policy := retry.Policy{MaxRetries: retries, Backoff: c.Backoff, GiveUpAfter: c.GiveUpAfter, Rules: c.Rules}
	c.policy, err = inside.InPlace(retry.With(policy)(nil))
	if bad, ok := errors.AsType[*argument.Error](err); ok {
		here := *bad
		here.Path = append(slices.Clone(at), bad.Path[1:]...)
		return c, &here
	}
	return c, err
}

// checkNames also sets the default of Failed.
func (c *Config) checkNames(at argument.Path) error {
	switch {
	case isNil(c.Offsets):
		return argument.At(at.Field("Offsets"), argument.CodeMissing, nil, "is a nil pointer", "leave it out, or make one, such as &stream.MemoryStore{}")
	case c.Offsets != nil && c.Consumer == "":
		return argument.At(at.Field("Consumer"), argument.CodeMissing, nil, "is empty", "set the name under which the position is saved")
	case c.Offsets == nil && c.Consumer != "":
		return argument.At(at.Field("Offsets"), argument.CodeMissing, nil, "is nil, so the position of the named consumer isn't saved", "set it, for example to a *stream.FileStore, or leave Consumer out")
	case len(c.Consumer) > maxConsumer || !utf8.ValidString(c.Consumer):
		return argument.At(at.Field("Consumer"), argument.CodeMalformed, c.Consumer, "is too long, or isn't valid UTF-8", fmt.Sprintf("use at most %d bytes", maxConsumer))
	}
	switch c.Failed {
	case "":
		c.Failed = FailedStop
		if c.FailedQueue != "" {
			c.Failed = FailedForward
		}
	case FailedForward, FailedStop, FailedSkip:
	default:
		return argument.At(at.Field("Failed"), argument.CodeUnknown, string(c.Failed), "is unknown", "use stream.FailedStop, stream.FailedSkip, or stream.FailedForward")
	}
	switch {
	case c.Failed == FailedForward && c.FailedQueue == "":
		return argument.At(at.Field("FailedQueue"), argument.CodeMissing, nil, "is empty", "set the queue for failed messages")
	case c.Failed != FailedForward && c.FailedQueue != "":
		return argument.At(at.Field("FailedQueue"), argument.CodeConflict, c.FailedQueue, "has no effect with this value of Failed", "leave it out, or leave Failed out")
	case c.Failed == FailedForward:
		return address.Queue(c.FailedQueue).Validate()
	}
	return nil
}

// isNil reports whether s is a nil pointer in an interface that isn't nil.
func isNil(s OffsetStore) bool {
	v := reflect.ValueOf(s)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

func orDefault[T int | time.Duration](v, byDefault T) T {
	if v == 0 {
		return byDefault
	}
	return v
}
