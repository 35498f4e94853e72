package retry

import (
	"errors"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/deathlog"
	"github.com/hopback/hopback/internal/outcome"
)

// Annotations with a message's history, beside client.AnnotationReason and
// client.AnnotationError. Each is bounded, and overwritten at every failure, so a
// message doesn't grow however often it fails or is replayed.
//
// Times are milliseconds since 1970, as an int64. They are the broker's time with
// StrategyNative or Policy.GiveUpAfter, if the worker may ask for it
// (client.Start.BrokerTime). Otherwise they are the worker's.
const (
	// AnnotationRetries is how often the message was retried, an int64.
	AnnotationRetries = "x-opt-hopback-retries"
	// AnnotationErrorType is the Go type of the error, a string.
	AnnotationErrorType = "x-opt-hopback-error-type"
	// AnnotationFirstFailure and AnnotationLastFailure are the times of the message's
	// first and last failure.
	AnnotationFirstFailure = "x-opt-hopback-first-failure"
	AnnotationLastFailure  = "x-opt-hopback-last-failure"
	// AnnotationQueue is the work queue that the message was handled from, a string.
	AnnotationQueue = "x-opt-hopback-queue"
	// AnnotationExchange and AnnotationRoutingKey are where the message was
	// published to before its first retry, strings.
	AnnotationExchange   = "x-opt-hopback-exchange"
	AnnotationRoutingKey = "x-opt-hopback-routing-key"
	// AnnotationWorker is Policy.Worker, a string.
	AnnotationWorker = "x-opt-hopback-worker"
	// AnnotationDelay is the delay before the retry in milliseconds, an int64. The delay
	// queues of StrategyDeadLetter are bound by it.
	AnnotationDelay = "x-opt-hopback-delay"
	// AnnotationDelayAsked is the delay that the handler asked for, and AnnotationDelayLeft
	// what will be left of it after AnnotationDelay, in milliseconds, int64s. Only messages
	// that pass several delay queues have them. See After.
	AnnotationDelayAsked = "x-opt-hopback-delay-asked"
	AnnotationDelayLeft  = "x-opt-hopback-delay-left"
	// AnnotationHistory holds all of this in one annotation, on the copies of
	// StrategyRepublish, whose retries CountProperty counts. It is a string that holds a
	// JSON object with the members queue, error, type, first, last, delay, asked, left, worker,
	// attempts, exchange and key. Members without a value are left out. Where a message has other annotations
	// as well, those are newer.
	AnnotationHistory = "x-opt-hopback-history"
	// AnnotationDeliveryTime is RabbitMQ's own annotation, a time: the queue doesn't
	// deliver the message before it. RabbitMQ below 4.3 ignores it.
	AnnotationDeliveryTime = "x-opt-delivery-time"
)

// maxOrigin bounds what is copied from a hostile annotation.
const maxOrigin = 1024

// originOf maps our annotations to RabbitMQ's, which hold how a message was last
// routed. RabbitMQ overwrites its own when the message passes a delay queue.
var originOf = [...]struct{ own, brokers string }{
	{AnnotationExchange, "x-exchange"},
	{AnnotationRoutingKey, "x-routing-key"},
}

// past is a message's record of earlier failures. It is read before the handler runs: a
// handler that changes the message's maps must not reset the count of retries.
type past struct {
	count int
	first time.Time // zero if it has never failed
	// compact is its AnnotationHistory. parsed is the same once it was parsed, which
	// happens only after a failure.
	compact string
	parsed  *compactHistory
	// failedIn is set by Central alone: the delivery isn't the one that failed.
	failedIn *failedIn
}

// failedIn is where a message failed, and how it had been routed there: in the order of
// originOf.
type failedIn struct {
	queue  string
	first  bool // the broker's history has this failure alone
	routed [len(originOf)]origin
}

// origin is an exchange or a routing key that a message was published with.
type origin struct {
	known bool
	text  string
	value any // text, where there is one to use again
}

// messageOf is d's message for this package, which reads what may be folded by package
// deathlog.
func messageOf(d *client.Delivery) *client.Message { return d.Message() }

func pastOf(m *client.Message) past {
	compact, _ := m.Annotations[AnnotationHistory].(string)
	return past{count: Count(m), first: firstFailure(m), compact: compact}
}

// queue is the queue that the message failed in.
func (p past) queue(d *client.Delivery) string {
	if p.failedIn != nil {
		return p.failedIn.queue
	}
	return d.Queue()
}

// read returns p with its compact form parsed.
func (p past) read() past {
	if p.compact == "" || p.parsed != nil {
		return p
	}
	t := readCompact(p.compact)
	p.parsed = &t
	if p.first.IsZero() {
		p.first = millis(t.First)
	}
	return p
}

// account is the record of a failure.
type account struct {
	retries     int
	first, last int64 // milliseconds; 0 for none
	queue       string
	worker      any // a string, as the next ones
	text        string
	kind        any // nil if there is no error
	origin      [len(originOf)]origin
	was         past
	attempts    string // see AnnotationAttempts; "" if there are none before this one
	// asked and left are AnnotationDelayAsked and AnnotationDelayLeft. hadLeft says that the
	// message has them already, so they must be overwritten.
	asked, left int64
	hadLeft     bool
}

// waits notes that a queue holds the message for some time of its delay.
func (a *account) waits(what decision, held time.Duration) {
	left := max(what.delay-held, 0)
	a.asked, a.left = 0, left.Milliseconds()
	if left > 0 || what.whole > 0 {
		a.asked = max(what.whole, what.delay).Milliseconds()
	}
}

// account makes one. was.count is the count after the failure.
func (pl *plan) account(d *client.Delivery, err error, was past, now time.Time) account {
	was = was.read()
	a := account{retries: was.count, last: now.UnixMilli(), queue: was.queue(d), worker: pl.workerValue, was: was}
	a.first = a.last
	if first := since(was.first, now); first.Before(now) {
		a.first = first.UnixMilli()
	}
	if err != nil {
		a.text, a.kind = client.ErrorText(err), errorType(err)
	}
	a.hadLeft = d.Annotation(AnnotationDelayLeft) != nil || was.parsed != nil && (was.parsed.Left != 0 || was.parsed.Asked != 0)
	a.attempts = attemptsBefore(messageOf(d), was.parsed, a.text, err == nil)
	seen := was.published(&pl.names, d)
	for i, o := range originOf {
		from := origin{}
		if !seen {
			from.value = d.Annotation(o.own)
		}
		from.text, from.known = from.value.(string)
		switch {
		case from.known:
		case !seen && was.parsed != nil && was.parsed.origin(i) != nil:
			from = origin{known: true, text: *was.parsed.origin(i)}
		case was.failedIn != nil:
			from = was.failedIn.routed[i]
		default:
			from.value = d.Annotation(o.brokers)
			from.text, from.known = from.value.(string)
		}
		if from.known && utf8.ValidString(from.text) && len(from.text) <= maxOrigin {
			a.origin[i] = from
		}
	}
	return a
}

// published reports whether the broker shows how d was first published. Then nobody but the
// sender can have written where it came from before. A message that came back from a delay or
// a replay shows only how it came back.
func (p past) published(n *Names, d *client.Delivery) bool {
	queue := p.queue(d)
	if p.failedIn != nil {
		by := &p.failedIn.routed
		return p.failedIn.first && !n.brings(by[0].text) && (by[0].text != "" || by[1].text != queue)
	}
	exchange, ok := d.Annotation(originOf[0].brokers).(string)
	switch {
	case !ok || n.brings(exchange) || d.Annotation(deathlog.Key) != nil:
		return false
	case exchange != "":
		return true
	}
	key, _ := d.Annotation(originOf[1].brokers).(string)
	return key != queue
}

// annotations returns a with an annotation for each value.
func (a *account) annotations() map[string]any {
	h := make(map[string]any, 13) // as many as there can be, with those of a strategy
	h[AnnotationRetries] = int64(a.retries)
	if a.last != 0 {
		h[AnnotationLastFailure] = a.last
	}
	switch {
	case a.first == 0:
	case a.first == a.last:
		h[AnnotationFirstFailure] = h[AnnotationLastFailure]
	default:
		h[AnnotationFirstFailure] = a.first
	}
	h[AnnotationQueue], h[AnnotationWorker] = a.queue, a.worker
	if a.kind != nil {
		h[client.AnnotationError], h[AnnotationErrorType] = a.text, a.kind
	}
	if a.asked != 0 || a.hadLeft {
		h[AnnotationDelayAsked], h[AnnotationDelayLeft] = a.asked, a.left
	}
	if a.attempts != "" {
		h[AnnotationAttempts] = a.attempts
	}
	for i, o := range originOf {
		switch from := &a.origin[i]; {
		case from.value != nil:
			h[o.own] = from.value
		case from.known:
			h[o.own] = from.text
		}
	}
	return h
}

// history returns the annotations for a failure. was.count is the count after it.
func (pl *plan) history(d *client.Delivery, err error, was past, now time.Time) map[string]any {
	a := pl.account(d, err, was, now)
	return a.annotations()
}

// keyValues has the keys of annotations as values of type any, which saves an
// allocation for each copy.
var keyValues = func() map[string]any {
	m := map[string]any{}
	for _, k := range []string{
		client.AnnotationReason, client.AnnotationError, AnnotationRetries, AnnotationErrorType, AnnotationFirstFailure,
		AnnotationLastFailure, AnnotationQueue, AnnotationExchange, AnnotationRoutingKey, AnnotationWorker, AnnotationDelay,
		AnnotationHistory, AnnotationAttempts, AnnotationDelayAsked, AnnotationDelayLeft,
	} {
		m[k] = k
	}
	return m
}()

// story returns the history of a message that waits although it hasn't failed.
func (pl *plan) story(d *client.Delivery, was past, now time.Time) account {
	a := pl.account(d, nil, was, now)
	a.last = 0
	if a.was.first.IsZero() {
		a.first = 0
	}
	return a
}

// errorType returns the name of the error's type, without the wrappers of this
// package. It is a string.
func errorType(err error) any {
	for {
		switch e := err.(type) {
		case *outcome.Permanent:
			err = e.Err
			continue
		case *outcome.After:
			if e.Err != nil {
				err = e.Err
				continue
			}
			return "retry.After"
		case *unreadable:
			return e.kind
		case *Rejected:
			if e.ErrorType != "" {
				return e.ErrorType
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

// typeNames caches the names of error types. A program has a bounded number.
var typeNames sync.Map

// firstFailure returns the time of m's first failure, or the zero time.
func firstFailure(m *client.Message) time.Time { return millis(m.Annotations[AnnotationFirstFailure]) }

// millis reads a time that anybody may have written: milliseconds, or an AMQP
// timestamp. Any other value, and a time after the year 9999, is the zero time.
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

// heldUntil returns until when StrategyNative had a queue hold m, and for how long. Both
// are zero if it hadn't.
func heldUntil(m *client.Message) (due time.Time, asked time.Duration) {
	due = millis(m.Annotations[AnnotationDeliveryTime])
	if due.IsZero() || m.Annotations[client.AnnotationReason] == reasonRetry {
		return time.Time{}, 0 // in the latter case it comes from a delay queue, and the time is an older one
	}
	ms, _ := m.Annotations[AnnotationDelay].(int64)
	if ms <= 0 || ms > maxDelay.Milliseconds() {
		return time.Time{}, 0 // not set by us
	}
	return due, time.Duration(ms) * time.Millisecond
}

var errEarly = errors.New("delivered before its time: the clocks differ, or the broker ignores x-opt-delivery-time")
