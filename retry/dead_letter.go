package retry

import (
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/historylog"
)

// Reasons for which this package dead-letters a message. client has others:
// client.ReasonUndecodable, ReasonPanicked and ReasonUnforwardable.
const (
	// ReasonExhausted: the policy's retries or its time are used up.
	ReasonExhausted client.Reason = "exhausted"
	// ReasonPermanent: the error is marked Permanent, or the policy doesn't retry it.
	ReasonPermanent client.Reason = "permanent"
	// ReasonRejected: a handler or another client rejected the message and gave no
	// reason.
	ReasonRejected client.Reason = "rejected"
)

// ReasonReplayed is no death. Package desk writes it to AnnotationReason when it moves a
// message from its dead-letter queue back to its work queue. DeadLetterOf then returns no Reason,
// until the message dies again.
const ReasonReplayed client.Reason = "replayed"

// Reasons that DeadLetterOf concludes from what the broker wrote. No worker gave these
// messages up.
const (
	// ReasonDeliveryLimit: the message reached its queue's delivery limit. Most
	// often its handler ended the process each time.
	ReasonDeliveryLimit client.Reason = "delivery-limit"
	// ReasonExpired: the message's time to live ended in the work queue.
	ReasonExpired client.Reason = "expired"
	// ReasonMaxLength: the work queue was full.
	ReasonMaxLength client.Reason = "max-length"
	// ReasonNoDelayQueue: the message was to be retried by StrategyDeadLetter, and no
	// delay queue took it, because the queue or its binding was gone. Replay it once
	// the topology is repaired.
	ReasonNoDelayQueue client.Reason = "no-delay-queue"
	// ReasonUnroutable: the message couldn't return after its delay, because its work
	// queue or a binding was gone. The parking queue holds such messages.
	ReasonUnroutable client.Reason = "unroutable"
)

// ReasonUnknownQueue is that of a message that Central can't return: the message doesn't
// tell which work queue it failed in, or it is one that Central isn't for.
const ReasonUnknownQueue client.Reason = "unknown-queue"

// DeadLetter is the history that a dead letter carries. A field is zero where the message
// doesn't have it: a message that the broker dead-lettered has an error only if it had
// failed before.
type DeadLetter struct {
	// Reason is one of this package's or client's reasons, or the handler's own. It is
	// empty if the message isn't dead.
	Reason    client.Reason
	Error     string // text of the last error, at most client.ErrorTextLimit bytes
	ErrorType string // Go type of the last error
	Retries   int
	// FirstFailure and LastFailure are times of this message's failures.
	FirstFailure, LastFailure time.Time
	// Queue is the queue that the message died in. Exchange and RoutingKey are those
	// that it was first published with.
	Queue, Exchange, RoutingKey string
	Worker                      string // Policy.Worker of the worker that failed last
}

// DeadLetterOf reads why m is dead. It never fails: a field is zero where an annotation is
// missing or has another type.
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
	// The broker knows better in which queue it died, unless it was brought on from
	// there; and it alone knows of deaths that no worker has seen.
	switch text("x-last-death-reason") {
	case "rejected":
		switch d.Reason = client.Reason(text(client.AnnotationReason)); d.Reason {
		case reasonRetry:
			d.Reason = ReasonNoDelayQueue
		case ReasonReplayed:
			if text("x-last-death-queue") != d.Queue && recorded(m, func(e historylog.DeadLettering) bool { return e.Queue == d.Queue }) {
				d.Reason, d.Queue = "", ""
				return d // it was moved out of its dead-letter queue
			}
			d.Reason = ReasonRejected // by another client, after that
		case "", reasonWaits:
			d.Reason = ReasonRejected
		}
	case "delivery_limit":
		d.Reason = ReasonDeliveryLimit
	case "expired":
		d.Reason = ReasonExpired
		if died := text("x-last-death-queue"); died != d.Queue && Count(m) > 0 && recorded(m, func(e historylog.DeadLettering) bool { return e.Queue == died && waitedFor(e, d.Queue) }) {
			d.Reason = ReasonUnroutable // in a delay queue
		}
	case "maxlen":
		d.Reason = ReasonMaxLength
	case "":
		// Central publishes what it gives up, so the broker has no account of it.
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
	return ok && delay <= delayDead && queue != "" && slices.ContainsFunc(deaths(m), func(d historylog.DeadLettering) bool {
		return d.Queue == queue || d.Queue == failed && d.RoutingKey == queue
	})
}

// recorded reports whether the broker's history has a death that is so. Annotations alone
// prove nothing: a sender may have written them. A message without a history may be an
// imported one, whose annotations are all that there is.
func recorded(m *client.Message, is func(historylog.DeadLettering) bool) bool {
	history := deaths(m)
	return len(history) == 0 || slices.ContainsFunc(history, is)
}

// waitedFor reports whether a message that expired with this death was on its way to queue:
// the routing key is the queue's name, or ends with it.
func waitedFor(d historylog.DeadLettering, queue string) bool {
	return queue != "" && (d.RoutingKey == queue || strings.HasSuffix(d.RoutingKey, "."+queue))
}

// givenUp reports whether a reason is that of a death, and not the mark of a retry or of a
// replay.
func givenUp(r client.Reason) bool {
	return r != "" && r != reasonRetry && r != reasonWaits && r != ReasonReplayed
}
