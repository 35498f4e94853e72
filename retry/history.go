package retry

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/outcome"
)

// maxOrigin bounds what is copied from a hostile annotation.
const maxOrigin = 1024

// originOf maps our annotations to RabbitMQ's, which hold how a message was last
// routed. RabbitMQ overwrites its own when the message passes a delay queue.
var originOf = [...]struct{ own, brokers string }{
	{annotation.Exchange, "x-exchange"},
	{annotation.RoutingKey, "x-routing-key"},
}

// past is a message's record of earlier failures. It is read before the handler runs: a
// handler that changes the message's maps must not reset the count of retries.
//
// It belongs to a queue: a message that a handler forwards to another queue, as a copy, starts over
// there. A message that names no queue, as those of other systems do, is counted wherever it is.
type past struct {
	// in is the queue to read it for; "": any. named is the queue that the message names, and key is the key that
	// RabbitMQ has routed it by.
	in, named, key string
	count          int
	// others is the count that other systems write, too, and base how much of it doesn't count.
	others, base int
	first        time.Time // zero if it has never failed
	// compact is its annotation.History. parsed is the same once it was parsed, which
	// happens only after a failure.
	compact string
	parsed  *compactHistory
	// failedIn is set by Central alone: the delivery isn't the one that failed.
	failedIn *failedIn
}

// failedIn is where a message failed, and how it had been routed there, in the order of originOf.
type failedIn struct {
	queue  string
	first  bool // the broker's history has this failure alone
	routed [len(originOf)]origin
}

// origin is an exchange or a routing key that a message was published with.
type origin struct {
	known bool
	text  string
}

// messageOf is d's message, with the parts that annotation.DeadLetterings reads.
func messageOf(d *client.Delivery) *client.Message { return d.Message() }

// pastOf reads m's record for a queue; "": for any.
func pastOf(m *client.Message, queue string) past {
	compact, _ := m.Annotations[annotation.History].(string)
	named, _ := m.Annotations[annotation.Queue].(string)
	key, _ := m.Annotations["x-routing-key"].(string)
	_, others := counters(m)
	return past{in: queue, named: named, key: key, count: Count(m), others: others, first: millis(m.Annotations[annotation.Older.First]), compact: compact}
}

// queue is the queue that the message failed in.
func (p past) queue(d *client.Delivery) string {
	if p.failedIn != nil {
		return p.failedIn.queue
	}
	return d.Queue()
}

// read returns p with its compact form parsed. It is empty if it belongs to another queue.
func (p past) read() past {
	if p.compact != "" && p.parsed == nil {
		t := readCompact(p.compact)
		p.parsed, p.base = &t, int(min(max(t.Base, 0), math.MaxInt32))
		if p.first.IsZero() {
			p.first = millis(t.First)
		}
		if p.named == "" {
			p.named = t.Queue
		}
	}
	if p.in == "" || p.named == "" || p.named == p.in || p.returned() {
		return p
	}
	return past{in: p.in, base: p.others, failedIn: p.failedIn, parsed: &compactHistory{}}
}

// returned reports whether the message came back from a delay for the queue that its record names, by the key that
// RabbitMQ routed it by: then its retries were moved to the queue that it is in now, as operate/migrate does. A message
// that was published to the queue itself has the queue's name as its key, and didn't come back.
func (p past) returned() bool {
	return p.key != p.in && (p.key == p.named || strings.HasSuffix(p.key, "."+p.named))
}

// account is the record of a failure.
type account struct {
	retries     int
	first, last int64 // milliseconds; 0 for none
	queue       string
	worker      string
	text, kind  string // of the error; empty if there is none
	origin      [len(originOf)]origin
	was         past
	attempts    string // "" if there are none before this one
	asked, left int64  // see annotation.History
	message     *client.Message
}

// waits notes that a queue holds the message for some time of its delay.
func (a *account) waits(what decision, held time.Duration) {
	left := max(what.delay-held, 0)
	a.asked, a.left = 0, left.Milliseconds()
	if left > 0 || what.whole > 0 {
		a.asked = max(what.whole, what.delay).Milliseconds()
	}
}

// passesOn notes the rest of the delay that a message had when it came back from a delay queue. One that
// has failed has none.
func (a *account) passesOn(what decision) {
	a.asked, a.left = 0, 0
	if what.whole > 0 {
		a.asked, a.left = what.whole.Milliseconds(), what.delay.Milliseconds()
	}
}

// account makes one. was.count is the count after the failure.
func (pl *plan) account(d *client.Delivery, err error, was past, now time.Time) account {
	was = was.read()
	a := account{retries: was.count, last: now.UnixMilli(), queue: was.queue(d), worker: pl.worker, was: was, message: messageOf(d)}
	a.first = a.last
	if first := since(was.first, now); first.Before(now) {
		a.first = first.UnixMilli()
	}
	if err != nil {
		a.text, a.kind = client.ErrorText(err), errorType(err)
	}
	a.attempts = attemptsBefore(messageOf(d), was.parsed, a.text, err == nil)
	seen := was.published(&pl.names, d)
	for i, o := range originOf {
		from := origin{}
		own, replayed := d.Annotation(o.own).(string)
		switch {
		case !seen && was.parsed != nil && was.parsed.origin(i) != nil:
			from = origin{true, *was.parsed.origin(i)}
		case !seen && replayed:
			from = origin{true, own}
		case was.failedIn != nil:
			from = was.failedIn.routed[i]
		default:
			from.text, from.known = d.Annotation(o.brokers).(string)
		}
		if from.known && utf8.ValidString(from.text) && len(from.text) <= maxOrigin {
			a.origin[i] = from
		}
	}
	return a
}

// published reports whether the broker shows how d was first published. Then only the sender can
// have written an earlier origin. A message that came back from a delay or a replay shows only
// how it came back.
func (p past) published(n *Names, d *client.Delivery) bool {
	queue := p.queue(d)
	if p.failedIn != nil {
		by := &p.failedIn.routed
		return p.failedIn.first && !n.brings(by[0].text) && (by[0].text != "" || by[1].text != queue)
	}
	exchange, ok := d.Annotation(originOf[0].brokers).(string)
	switch {
	case !ok || n.brings(exchange) || d.Annotation(annotation.Deaths) != nil:
		return false
	case exchange != "":
		return true
	}
	key, _ := d.Annotation(originOf[1].brokers).(string)
	return key != queue
}

// annotations returns the annotations for a. delay is annotation.Delay; 0 if the message
// doesn't wait.
func (a *account) annotations(delay time.Duration) map[string]any {
	h := make(map[string]any, 8) // as many as there can be, with those of a strategy
	notified := a.kind != "" || a.message.Annotations[client.AnnotationError] != nil
	h[annotation.Retries] = int64(a.retries)
	h[annotation.Queue], h[annotation.History] = a.queue, a.compact(delay, notified)
	if a.kind != "" {
		h[client.AnnotationError] = a.text
	}
	if a.message.Annotations[annotation.Parked] != nil {
		h[annotation.Parked] = int64(0)
	}
	overwriteOlder(h, a.message)
	return h
}

// history returns the annotations for a failure. was.count is the count after it.
func (pl *plan) history(d *client.Delivery, err error, was past, now time.Time) map[string]any {
	a := pl.account(d, err, was, now)
	return a.annotations(0)
}

// keyValues has the keys of annotations as values of type any, which saves an
// allocation for each copy.
var keyValues = func() map[string]any {
	m := map[string]any{}
	for _, k := range append([]string{
		client.AnnotationReason, client.AnnotationError, annotation.Retries, annotation.Queue, annotation.Exchange, annotation.RoutingKey,
		annotation.Delay, annotation.History,
	}, annotation.OlderKeys...) {
		m[k] = k
	}
	return m
}()

// newHistory returns the history of a message that waits although it hasn't failed.
func (pl *plan) newHistory(d *client.Delivery, was past, now time.Time) account {
	a := pl.account(d, nil, was, now)
	a.last = 0
	if a.was.first.IsZero() {
		a.first = 0
	}
	return a
}

// errorType returns the name of the error's type, without the wrappers of this
// package.
func errorType(err error) string {
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
		case *client.PanicError:
			return "*client.PanicError" // the name that users know
		case *client.Error:
			return "*client.Error"
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
			return name.(string)
		}
		name := t.String()
		name = strings.ToValidUTF8(name[:min(len(name), 255)], "") // the cut may be in a character
		typeNames.Store(t, name)
		return name
	}
}

// typeNames caches the names of error types. A program has a bounded number.
var typeNames sync.Map

// millis reads a time that anybody could have written: milliseconds, or an AMQP timestamp. Any
// other value, and a time after the year 9999, is the zero time.
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
	due = millis(m.Annotations[annotation.DeliveryTime])
	if due.IsZero() || m.Annotations[client.AnnotationReason] == reasonRetry {
		return time.Time{}, 0 // in the latter case it comes from a delay queue, and the time is an older one
	}
	ms, _ := m.Annotations[annotation.Delay].(int64)
	if ms <= 0 || ms > maxDelay.Milliseconds() {
		return time.Time{}, 0 // not set by us
	}
	return due, time.Duration(ms) * time.Millisecond
}

var errEarly = errors.New("delivered before its time: the clocks differ, or the broker ignores x-opt-delivery-time")
