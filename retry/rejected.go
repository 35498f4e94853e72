package retry

import (
	"errors"
	"slices"

	"github.com/hopback/hopback/client"
)

// Rejected is the error that [Central] passes to rules and [Policy.RetryIf]: a worker rejected a
// message, or the broker dead-lettered it. [OnReason] and [OnHeader] return conditions for it.
type Rejected struct {
	// Reason is the worker's, if it gave one: see [CentralConfig.ReasonKey]. Otherwise it is
	// ReasonRejected, ReasonDeliveryLimit, ReasonExpired, or ReasonMaxLength.
	Reason client.Reason
	// Text and ErrorType are the worker's. They are empty if it gave none.
	Text, ErrorType string
	// Queue is the work queue that the message failed in.
	Queue string

	delivery *client.Delivery
	// forgets are the headers about a failure. Central empties them when it moves a message.
	forgets []string
}

// texts are the error texts for messages whose worker gave none.
var texts = map[client.Reason]string{
	ReasonRejected:      "a worker rejected the message without giving a reason",
	ReasonDeliveryLimit: "the message reached the delivery limit of its queue",
	ReasonExpired:       "the message expired in its queue",
	ReasonMaxLength:     "the queue was full",
}

func (e *Rejected) Error() string {
	switch {
	case e.Text != "":
		return e.Text
	case texts[e.Reason] != "":
		return texts[e.Reason]
	}
	return "rejected: " + string(e.Reason)
}

// Header returns the message's application property of that name, or else its annotation, or else
// nil. AMQP 0-9-1 calls both headers: those that start with "x-" are annotations here.
func (e *Rejected) Header(name string) any {
	if e.delivery == nil {
		return nil
	}
	if v, ok := messageOf(e.delivery).ApplicationProperties[name]; ok {
		return v
	}
	v := e.delivery.Annotation(name)
	if v == "" && slices.Contains(e.forgets, name) {
		return nil
	}
	return v
}

// OnReason returns a condition for [ErrorRule.If]: it is true for a [*Rejected] with one of these
// reasons, and false for any other error.
func OnReason(reasons ...client.Reason) func(error) bool {
	reasons = slices.Clone(reasons)
	return func(err error) bool {
		e, ok := errors.AsType[*Rejected](err)
		return ok && e != nil && slices.Contains(reasons, e.Reason)
	}
}

// OnHeader returns a condition for [ErrorRule.If]: it is true for a [*Rejected] whose message has
// a header with one of these values, or with any value if you give none. Numbers of different
// types are equal if their values are. The condition is false for any other error.
func OnHeader(name string, values ...any) func(error) bool {
	values = slices.Clone(values)
	return func(err error) bool {
		e, ok := errors.AsType[*Rejected](err)
		if !ok || e == nil {
			return false
		}
		have := e.Header(name)
		return have != nil && (len(values) == 0 || slices.ContainsFunc(values, func(v any) bool { return sameValue(have, v) }))
	}
}

// sameValue compares texts, bools and numbers.
func sameValue(a, b any) bool {
	switch x := a.(type) {
	case string:
		y, ok := b.(string)
		return ok && x == y
	case bool:
		y, ok := b.(bool)
		return ok && x == y
	}
	x, isNumber := number(a)
	y, too := number(b)
	return isNumber && too && x == y
}
