package retry

import (
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
)

// Permanent marks err as an error that no retry can cure: the message is dead-lettered
// at once, with ReasonPermanent. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &outcome.Permanent{Err: err}
}

// IsPermanent reports whether Permanent marked err or an error in its chain. It is for
// other middleware.
func IsPermanent(err error) bool {
	_, ok := errors.AsType[*outcome.Permanent](err)
	return ok
}

// After retries the message after d instead of the policy's delay: for example, after
// the time that a service asked for with Retry-After. It counts as a retry like any
// other: once those are used up, the message is dead-lettered.
//
// The message never comes back before d. StrategyNative holds it for d exactly. A Ladder
// rounds d up by less than an eighth. The delay queues of StrategyRepublish and
// StrategyDeadLetter hold messages for the policy's delays only, so the message passes several
// of them if d lies between two delays or beyond the longest: with delays of 10 s and 1 min, 11
// min is eleven times 1 min. The last one is rounded up to the next delay:
//
//   - Rounding up by an eighth of d takes no further queue: 55 s becomes 1 min.
//   - A delay below a sixteenth of d isn't used as a part: with delays of 1 s and 1 h, 30 min
//     becomes 1 h.
//
// Between two queues the message passes the work queue, behind the messages waiting there, and
// this doesn't call the handler. A worker that doesn't use this package gets it there too
// early. If your handler often asks for other delays, use StrategyNative or AnyDelay. A
// negative d is 0.
//
// err may be nil. It may be a client.Outcome, which is then ignored:
// After(d, client.Requeue{}) retries after d.
func After(d time.Duration, err error) error { return &outcome.After{Delay: max(d, 0), Err: err} }

// Snooze delivers the message again after d and doesn't count a retry. It is for a
// message that comes too early and hasn't failed. Only Policy.GiveUpAfter ends this,
// and only if the message failed before. d is rounded as for After.
func Snooze(d time.Duration) error { return &outcome.After{Delay: max(d, 0), Snooze: true} }

// Discard drops the message on purpose: it is accepted and not kept anywhere. err says why,
// for middleware that logs, and may be nil: Discard(nil) is a non-nil error that discards.
//
// Discard is ignored if it is joined with another error or wrapped in Permanent or
// After: the other error decides.
func Discard(err error) error { return &outcome.Discard{Err: err} }

// unreadable stands for an error that panics when it is looked into, such as a nil
// pointer whose methods don't expect one. It has its text and its type's name, and
// matches nothing.
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
