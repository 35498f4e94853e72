package retry

import (
	"errors"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
)

// Annotations that tell a message's history, beside client.AnnotationReason and
// client.AnnotationError. Each is overwritten rather than added to, and bounded,
// so that a message doesn't grow however often it fails or is replayed. Times are
// milliseconds since 1970 by the worker's clock, as an int64.
const (
	// AnnotationRetries is how often the message was retried, an int64.
	AnnotationRetries = "x-opt-hopback-retries"
	// AnnotationErrorType is the Go type of the error, a string.
	AnnotationErrorType = "x-opt-hopback-error-type"
	// AnnotationFirstFailure and AnnotationLastFailure are times.
	AnnotationFirstFailure = "x-opt-hopback-first-failure"
	AnnotationLastFailure  = "x-opt-hopback-last-failure"
	// AnnotationQueue is the queue that it was handled from, a string.
	AnnotationQueue = "x-opt-hopback-queue"
	// AnnotationExchange and AnnotationRoutingKey are where the message was
	// published to before its first retry, strings.
	AnnotationExchange   = "x-opt-hopback-exchange"
	AnnotationRoutingKey = "x-opt-hopback-routing-key"
	// AnnotationWorker is Policy.Worker, a string.
	AnnotationWorker = "x-opt-hopback-worker"
	// AnnotationDelay is how long the message was to wait, in milliseconds, an
	// int64. The delay queues of the DeadLetter strategy are bound for it.
	AnnotationDelay = "x-opt-hopback-delay"
	// AnnotationDeliveryTime is RabbitMQ's own: the time before which the queue
	// doesn't deliver the message, an int64. 4.3 and later heed it.
	AnnotationDeliveryTime = "x-opt-delivery-time"
)

// maxOrigin keeps a hostile annotation from travelling on.
const maxOrigin = 1024

// originOf maps our annotations to those in which RabbitMQ tells how a message
// was last routed. RabbitMQ overwrites its own on the way through a delay queue.
var originOf = [...]struct{ own, brokers string }{
	{AnnotationExchange, "x-exchange"},
	{AnnotationRoutingKey, "x-routing-key"},
}

// history is what is written about a failure.
func (pl *plan) history(d *client.Delivery, err error, count int, now time.Time) map[string]any {
	h := make(map[string]any, 12) // as many as there can be, with those of a strategy
	var last any = now.UnixMilli()
	h[AnnotationRetries] = int64(count)
	h[AnnotationFirstFailure], h[AnnotationLastFailure] = last, last
	if first := since(firstFailure(d.Message()), now); first.Before(now) {
		h[AnnotationFirstFailure] = first.UnixMilli()
	}
	h[AnnotationQueue], h[AnnotationWorker] = d.Queue(), pl.workerValue
	if err != nil {
		h[client.AnnotationError], h[AnnotationErrorType] = client.ErrorText(err), errorType(err)
	}
	for _, o := range originOf {
		v := d.Annotation(o.own)
		s, ok := v.(string)
		if !ok {
			v = d.Annotation(o.brokers)
			s, ok = v.(string)
		}
		if ok && utf8.ValidString(s) && len(s) <= maxOrigin {
			h[o.own] = v
		}
	}
	return h
}

// keyValues has the keys of annotations as values of type any, as a message wants
// them, so that they needn't be allocated for each copy.
var keyValues = func() map[string]any {
	m := map[string]any{}
	for _, k := range []string{
		client.AnnotationReason, client.AnnotationError, AnnotationRetries, AnnotationErrorType, AnnotationFirstFailure,
		AnnotationLastFailure, AnnotationQueue, AnnotationExchange, AnnotationRoutingKey, AnnotationWorker, AnnotationDelay,
	} {
		m[k] = k
	}
	return m
}()

// story is the history of a message that is to wait though it hasn't failed.
func (pl *plan) story(d *client.Delivery, count int, now time.Time) map[string]any {
	h := pl.history(d, nil, count, now)
	delete(h, AnnotationLastFailure)
	if firstFailure(d.Message()).IsZero() {
		delete(h, AnnotationFirstFailure)
	}
	return h
}

// errorType is the name of the type of the error below the wrappers of this package,
// a string.
func errorType(err error) any {
	for {
		switch e := err.(type) {
		case *permanentError:
			err = e.err
			continue
		case *afterError:
			if e.err != nil {
				err = e.err
				continue
			}
		}
		t := reflect.TypeOf(err)
		if t == nil {
			return "<nil>"
		}
		if name, ok := typeNames.Load(t); ok {
			return name
		}
		name := t.String()
		name = strings.ToValidUTF8(name[:min(len(name), 255)], "") // the cut may be in a character
		typeNames.Store(t, name)
		return name
	}
}

// typeNames has the names of the types of errors seen: a program has only so many.
var typeNames sync.Map

// firstFailure is the time of m's first failure; zero if it had none.
func firstFailure(m *client.Message) time.Time { return millis(m.Annotations[AnnotationFirstFailure]) }

// millis reads a time that anybody may have written: milliseconds, or an AMQP
// timestamp. What is neither, or beyond the year 9999, is the zero time.
func millis(v any) time.Time {
	const last = 253402300799999
	switch v := v.(type) {
	case int64:
		if v > 0 && v <= last {
			return time.UnixMilli(v)
		}
	case uint64:
		if v > 0 && v <= last {
			return time.UnixMilli(int64(v))
		}
	case time.Time:
		if ms := v.UnixMilli(); ms > 0 && ms <= last {
			return v
		}
	}
	return time.Time{}
}

// Lane is why a message is in a dead-letter queue, in a word: client's Reasons and
// this package's where a worker gave it up, or one of the Lane constants where the
// broker did.
type Lane string

// The lanes of what a worker has given up: its Reason.
const (
	LaneExhausted     = Lane(ReasonExhausted)
	LanePermanent     = Lane(ReasonPermanent)
	LaneUndecodable   = Lane(client.ReasonUndecodable)
	LanePanicked      = Lane(client.ReasonPanicked)
	LaneUnforwardable = Lane(client.ReasonUnforwardable)
)

// The lanes of what the broker gives up by itself.
const (
	// LaneDeliveryLimit: delivered too often without being settled, mostly since
	// its handler took the process down.
	LaneDeliveryLimit Lane = "delivery-limit"
	// LaneExpired: its time to live ended in the work queue.
	LaneExpired Lane = "expired"
	// LaneMaxLength: the work queue was full.
	LaneMaxLength Lane = "max-length"
	// LaneRejected: rejected by a worker that gave no reason.
	LaneRejected Lane = "rejected"
	// LaneUnroutable: it couldn't be brought back after its delay, since its queue
	// or binding was gone. The parking queue holds these.
	LaneUnroutable Lane = "unroutable"
	// LaneNone: the message isn't dead.
	LaneNone Lane = ""
)

// Death is what a dead letter tells of itself. Fields that it doesn't tell are
// zero: a message that the broker gave up has an error only if it had failed
// before.
type Death struct {
	Lane      Lane
	Error     string // text of the last error, at most client.ErrorTextLimit bytes
	ErrorType string // its Go type
	Retries   int
	First     time.Time // of its failures
	Last      time.Time
	// Queue that it died in, Exchange and RoutingKey that it was first published
	// with.
	Queue, Exchange, RoutingKey string
	Worker                      string
}

// Autopsy reads why m is dead. It never fails: what is missing, or of a wrong
// type, is left zero.
func Autopsy(m *client.Message) Death {
	if m == nil {
		return Death{}
	}
	text := func(key string) string {
		s, _ := m.Annotations[key].(string)
		return s
	}
	d := Death{
		Error: text(client.AnnotationError), ErrorType: text(AnnotationErrorType),
		Retries: Count(m),
		First:   firstFailure(m), Last: millis(m.Annotations[AnnotationLastFailure]),
		Queue: text(AnnotationQueue), Exchange: text(AnnotationExchange), RoutingKey: text(AnnotationRoutingKey),
		Worker: text(AnnotationWorker),
	}
	// The broker knows better in which queue it died, unless it was brought on from
	// there; and it alone knows of deaths that no worker has seen.
	switch text("x-last-death-reason") {
	case "rejected":
		d.Lane = Lane(text(client.AnnotationReason))
		if d.Lane == "" || d.Lane == reasonRetry || d.Lane == reasonWaits {
			d.Lane = LaneRejected
		}
	case "delivery_limit":
		d.Lane = LaneDeliveryLimit
	case "expired":
		d.Lane = LaneExpired
		if died := text("x-last-death-queue"); died != d.Queue && Count(m) > 0 {
			d.Lane = LaneUnroutable // in a delay queue
		}
	case "maxlen":
		d.Lane = LaneMaxLength
	}
	if q := text("x-last-death-queue"); q != "" && d.Lane != LaneUnroutable {
		d.Queue = q
	}
	return d
}

// earlyBy is how much of its delay a message still has before it, when it was
// delivered too early, else 0: a broker that doesn't know x-opt-delivery-time delivers at
// once. Half of the delay is left to clocks that differ.
func earlyBy(m *client.Message, now time.Time) time.Duration {
	due := millis(m.Annotations[AnnotationDeliveryTime])
	if due.IsZero() {
		return 0
	}
	if m.Annotations[client.AnnotationReason] == reasonRetry {
		return 0 // it comes from a delay queue, and the time is an older one
	}
	asked, _ := m.Annotations[AnnotationDelay].(int64)
	if asked <= 0 || asked > maxDelay.Milliseconds() {
		return 0 // not set by us
	}
	left := due.Sub(now)
	if left < earlyTolerance || left*2 < time.Duration(asked)*time.Millisecond {
		return 0
	}
	return left
}

// earlyTolerance keeps small differences of clocks from looking like a broker
// that ignores the time.
const earlyTolerance = 200 * time.Millisecond

var errEarly = errors.New("delivered before its time: the broker ignored x-opt-delivery-time")
