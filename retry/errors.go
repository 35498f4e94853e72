package retry

import (
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
)

// Permanent marks err as an error that a retry can't fix. The message is dead-lettered at once,
// with [ReasonPermanent]. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &outcome.Permanent{Err: err}
}

// IsPermanent reports whether err, or an error in its chain, is marked with [Permanent]. It is
// for other middleware.
func IsPermanent(err error) bool {
	_, ok := errors.AsType[*outcome.Permanent](err)
	return ok
}

// After retries the message after d instead of the policy's delay. Use it when a service says how
// long to wait, for example with Retry-After. It counts as a retry: once the policy's retries are
// used up, the message is dead-lettered.
//
// The message never comes back before d. How much later it may come back depends on the strategy:
//
//   - StrategyNative delays it by exactly d.
//   - [Policy.AnyDelay] rounds d up by less than an eighth.
//   - StrategyRepublish and StrategyDeadLetter only have queues for the policy's delays. The
//     message passes several of them if d lies between two delays or is longer than the longest:
//     with delays of 10 s and 1 min, 11 min is eleven times 1 min. The last one is rounded up to
//     the next delay, if that adds no more than an eighth of d: 55 s becomes 1 min. A delay
//     shorter than a sixteenth of d isn't used as a part: with delays of 1 s and 1 h, 30 min
//     becomes 1 h.
//
// Between two delay queues the message goes through the work queue, behind the messages waiting
// there. This doesn't call the handler. A worker that doesn't use this package would handle it
// there too early. If your handler often asks for other delays, use StrategyNative or AnyDelay.
//
// A delay of more than 16 delay queues would be many messages for the broker. On RabbitMQ 4.3 and
// later, a quorum queue without a message TTL holds the message itself instead, as with StrategyNative.
// Elsewhere a message passes at most 256 delay queues, so with delays of 1 s, After(time.Hour) is cut
// short to 256 s, and the worker logs that once.
//
// A negative d is 0. err may be nil. It may be a [client.Outcome], which is then ignored:
// After(d, client.Requeue{}) retries after d.
func After(d time.Duration, err error) error { return &outcome.After{Delay: max(d, 0), Err: err} }

// Snooze delivers the message again after d, without counting a retry. Use it for a message that
// comes too early and hasn't failed. d is rounded as for [After]. The policy doesn't limit how
// often you can snooze a message, with one exception: once a message has failed,
// [Policy.GiveUpAfter] applies.
func Snooze(d time.Duration) error { return &outcome.After{Delay: max(d, 0), Snooze: true} }

// Discard drops the message on purpose: it is acknowledged and not kept anywhere. err says why,
// for middleware that logs. It may be nil: Discard(nil) is a non-nil error that discards.
//
// Discard is ignored if it is joined with another error or wrapped in [Permanent] or [After]: the
// other error decides.
func Discard(err error) error { return &outcome.Discard{Err: err} }

// unreadable stands for an error whose methods panic, such as a nil pointer whose methods don't
// expect one. It has its text and its type's name, and matches nothing.
type unreadable struct {
	text string
	kind string
}

func (e *unreadable) Error() string { return e.text }

// readable returns err, or what stands for it. v is what outcome.Read says of err.
func readable(err error, v outcome.Verdict) error {
	if !v.Unreadable && outcome.Answers(err) {
		return err
	}
	return &unreadable{text: client.ErrorText(err), kind: errorType(err)}
}
