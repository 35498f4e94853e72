package retry

import (
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// DeadLetter is the history that a dead letter carries. See [DeadLetterOf]. A field is zero if
// the message doesn't carry it: for example, a message that the broker dead-lettered has an error
// only if it had failed before.
type DeadLetter struct {
	// Reason is one of those in [ReasonExhausted]'s table, or the handler's own. It is empty if the
	// message isn't a dead letter.
	Reason    client.Reason
	Error     string // text of the last error, at most client.ErrorTextLimit bytes
	ErrorType string // Go type of the last error
	Retries   int
	// FirstFailure and LastFailure are the times of this message's first and last failure.
	FirstFailure, LastFailure time.Time
	// Queue is the work queue that the message was dead-lettered in. Exchange and RoutingKey are
	// those that it was first published with.
	Queue, Exchange, RoutingKey string
	Worker                      string // Policy.Worker of the worker that failed last
}

// DeadLetterOf returns why m was dead-lettered. Use it in a consumer of a dead-letter queue. It
// never fails: a field is zero if the annotation is missing or has an unexpected type.
func DeadLetterOf(m *client.Message) DeadLetter {
	if m == nil {
		return DeadLetter{}
	}
	text := func(key string) string {
		s, _ := m.Annotations[key].(string)
		return s
	}
	t := historyOf(m)
	d := DeadLetter{
		Error: t.Error, ErrorType: t.Type,
		Retries:      Count(m),
		FirstFailure: millis(t.First), LastFailure: millis(t.Last),
		Queue: t.Queue, Worker: t.Worker,
	}
	if t.Exchange != nil {
		d.Exchange = *t.Exchange
	}
	if t.Key != nil {
		d.RoutingKey = *t.Key
	}
	// The broker's record of the queue takes precedence, unless the message was moved there. And
	// only the broker records dead-letterings that no worker has seen.
	switch text("x-last-death-reason") {
	case "rejected":
		switch d.Reason = client.Reason(text(client.AnnotationReason)); d.Reason {
		case reasonRetry:
			d.Reason = ReasonNoDelayQueue
		case ReasonReplayed:
			if text("x-last-death-queue") != d.Queue && recorded(m, func(e annotation.DeadLettering) bool { return e.Queue == d.Queue }) {
				d.Reason, d.Queue = "", ""
				return d // it was moved out of its dead-letter queue
			}
			d.Reason = ReasonRejected // another client rejected it after that
		case "", reasonWaits:
			d.Reason = ReasonRejected
		}
	case "delivery_limit":
		d.Reason = ReasonDeliveryLimit
	case "expired":
		d.Reason = ReasonExpired
		if died := text("x-last-death-queue"); died != d.Queue && Count(m) > 0 && recorded(m, func(e annotation.DeadLettering) bool { return e.Queue == died && waitedFor(e, d.Queue) }) {
			d.Reason = ReasonUnroutable // in a delay queue
		}
	case "maxlen":
		d.Reason = ReasonMaxLength
	case "":
		// Central publishes copies of what it dead-letters, so the broker has no record of it.
		if r := client.Reason(text(client.AnnotationReason)); t.Queue != "" && givenUp(r) {
			d.Reason = r
		}
	}
	if q := text("x-last-death-queue"); q != "" && d.Reason != ReasonUnroutable && !movedFrom(m, q, d.Queue) {
		d.Queue = q
	}
	return d
}

// movedFrom reports whether Central has moved m from the failed queue to a dead-letter queue,
// after it had failed in queue.
func movedFrom(m *client.Message, failed, queue string) bool {
	delay, ok := m.Annotations[annotation.Delay].(int64)
	return ok && delay <= delayDead && queue != "" && slices.ContainsFunc(deaths(m), func(d annotation.DeadLettering) bool {
		return d.Queue == queue || d.Queue == failed && d.RoutingKey == queue
	})
}

// recorded reports whether the broker's history has a matching dead-lettering. Annotations alone
// prove nothing: a sender could have written them. A message without a history may be an imported
// one, which has nothing but annotations.
func recorded(m *client.Message, is func(annotation.DeadLettering) bool) bool {
	history := deaths(m)
	return len(history) == 0 || slices.ContainsFunc(history, is)
}

// waitedFor reports whether a message that expired in a delay queue was on its way to queue: the
// routing key is the queue's name, or ends with it.
func waitedFor(d annotation.DeadLettering, queue string) bool {
	return queue != "" && (d.RoutingKey == queue || strings.HasSuffix(d.RoutingKey, "."+queue))
}

// givenUp reports whether a reason is one for dead-lettering, and not the mark of a retry or of a
// replay.
func givenUp(r client.Reason) bool {
	return r != "" && r != reasonRetry && r != reasonWaits && r != ReasonReplayed
}
