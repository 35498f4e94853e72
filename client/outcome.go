package client

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/outcome"
)

// Outcome decides what happens to a delivery. A handler returns one as its error:
//
//   - nil: the delivery is acknowledged, and the broker deletes the message.
//   - [Requeue]: the message returns to its queue at once.
//   - [DeadLetter]: the message goes to the queue's dead-letter exchange, with a reason.
//   - [Modify]: like Requeue or DeadLetter, with annotations of your choice.
//   - [Forward]: a copy goes to an address. The delivery is acknowledged once the broker has
//     confirmed the copy.
//   - [Park]: the message waits in its queue until a time, or until it is claimed by a token.
//     It needs RabbitMQ 4.4.
//
// An error without an Outcome in its chain counts as Requeue{Failed: true}; middleware such as
// retry.With turns it into a retry. Outcomes are values and can be wrapped like any error. The
// outermost one counts.
type Outcome interface {
	error
	outcome()
}

// OutcomeOf returns the outcome that err stands for, and nil for nil. A pointer to an outcome
// stands for that outcome. An error whose methods panic, such as a nil pointer, counts as
// Requeue{Failed: true}.
func OutcomeOf(err error) Outcome {
	if err == nil {
		return nil // without what the rest allocates
	}
	return outcomeOf(err, maxEmbedded)
}

// maxEmbedded limits the depth of the search for an outcome within another: one may embed
// itself.
const maxEmbedded = 100

func outcomeOf(err error, left int) (o Outcome) {
	defer func() {
		if recover() != nil {
			o = Requeue{Failed: true, Err: fmt.Errorf("an error of type %T whose methods panic", err)}
		}
	}()
	o, ok := err.(Outcome)
	if !ok {
		if o, ok = outcome.Find[Outcome](err); !ok {
			return Requeue{Failed: true, Err: err}
		}
	}
	switch p := o.(type) {
	case *Requeue:
		return *p
	case *DeadLetter:
		return *p
	case *Modify:
		return *p
	case *Forward:
		return *p
	case *Park:
		return *p
	case Requeue, DeadLetter, Modify, Forward, Park:
		return o
	}
	return embedded(reflect.ValueOf(o), err, left)
}

// embedded finds the outcome in a user's type that embeds one. It panics as outcomeOf may.
func embedded(v reflect.Value, err error, left int) Outcome {
	v = reflect.Indirect(v)
	if v.Kind() == reflect.Struct && left > 0 {
		for i := range v.NumField() {
			field := v.Type().Field(i)
			if !field.Anonymous || !field.Type.Implements(reflect.TypeFor[Outcome]()) || !v.Field(i).CanInterface() {
				continue
			}
			return outcomeOf(v.Field(i).Interface().(Outcome), left-1)
		}
	}
	return Requeue{Failed: true, Err: err}
}

// Requeue returns the message to its queue, which delivers it again at once. For a retry with a
// delay, use retry.With.
//
// A message that always fails and never counts is redelivered without end. So set Failed if the
// attempt failed.
type Requeue struct {
	// Failed makes the delivery count toward the queue's delivery limit. Without it, RabbitMQ
	// 4.3 doesn't count the delivery; RabbitMQ 4.0 does.
	Failed bool
	Err    error // for logs; may be nil
}

// Reason is a word that says why a message was dead-lettered. The message carries it as
// [AnnotationReason]. Package retry has all reasons, with a table: see retry.ReasonExhausted.
type Reason string

// The reasons of this package and of packages on top of it. Package retry has them, too, and its own.
const (
	// ReasonUndecodable: the codec couldn't decode the body.
	ReasonUndecodable Reason = "undecodable"
	// ReasonTooLarge: the message is larger than [Config.MaxMessageSize].
	ReasonTooLarge Reason = "too-large"
	// ReasonPanicked: the handler panicked.
	ReasonPanicked Reason = "panicked"
	// ReasonUnforwardable: a [Forward] that can never be sent, for instance because its address
	// is invalid.
	ReasonUnforwardable Reason = "unforwardable"
	// ReasonUnparkable: the message can't be parked, because the broker is older than RabbitMQ 4.4,
	// the queue isn't a quorum queue, or the handler doesn't run in [Conn.Consume] or a [Claimer].
	ReasonUnparkable Reason = "unparkable"
	// ReasonUnknownType: the message's type has no handler in middleware/typemux.
	ReasonUnknownType Reason = "unknown-type"
	// ReasonUnsendable: the reply of a request of package rpc can't be encoded, or is larger than the
	// broker accepts. The handler has run.
	ReasonUnsendable Reason = "unsendable-reply"
	// ReasonUndeliverable: the broker didn't accept a message of package schedule when it was due.
	// [AnnotationError] is the broker's error.
	ReasonUndeliverable Reason = "undeliverable"
	// ReasonFailureLimit: the message failed more often than Config.FailureLimit of
	// adapter/officialclient allows.
	ReasonFailureLimit Reason = "failure-limit"
)

// Annotations of a dead letter that say why it was dead-lettered. The broker merges these
// message annotations into the message; the body and everything else that the sender set stay
// the same. An AMQP 0-9-1 consumer sees them as headers.
const (
	// AnnotationReason holds the [Reason], a string.
	AnnotationReason = "x-opt-hopback-reason"
	// AnnotationError holds the error's text, a string of at most [ErrorTextLimit] bytes.
	AnnotationError = "x-opt-hopback-error"
)

// AnnotationKnownCount is how many of a message's failed deliveries a hopback consumer reported,
// an int64. Each settlement that requeues or dead-letters a message writes it. The rest of the
// delivery count are deliveries that failed without a report, for instance because the worker
// crashed.
const AnnotationKnownCount = "x-opt-hopback-known-count"

// ErrorTextLimit is how many bytes of an error's text an annotation keeps. A settlement must fit
// in one frame; a larger one would close the connection.
const ErrorTextLimit = 1024

// DeadLetter sends the message to its queue's dead-letter exchange, with Reason and the text of
// Err as annotations. A queue without a dead-letter exchange drops the message, so give every
// work queue one.
type DeadLetter struct {
	Reason Reason
	Err    error
	// Annotations are merged into the message; see [Modify] for the allowed types.
	Annotations map[string]any
}

// Modify merges Annotations into the message, and requeues it, or dead-letters it if DeadLetter
// is set. Failed means the same as in [Requeue].
//
// Keys of Annotations must begin with "x-". Values must be string, bool, int, int64, or []any or
// map[string]any of these. With any other value, nothing is sent, and the message is requeued as
// failed: RabbitMQ would change the value, and an annotation that is null or a floating-point
// number would make each later delivery end its consumer's session.
type Modify struct {
	DeadLetter  bool
	Failed      bool
	Annotations map[string]any
	Err         error
}

// Forward publishes Message to the address To, and acknowledges the delivery once the broker has
// confirmed the copy. A crash in between leaves both messages; none is lost. Until then, the
// delivery stays unsettled and counts toward Prefetch, but its handler is free.
//
//   - If the broker doesn't accept the copy, the consumer tries again with backoff. After
//     [ConsumerConfig.ForwardPatience], it returns the delivery to its queue as failed, with
//     Annotations. So the queue's delivery limit ends the retries of a message that can't be
//     forwarded.
//   - If the consumer doesn't know that the queue has a dead-letter exchange, it keeps the
//     delivery and keeps trying, because the delivery limit would drop the message. It can't see
//     a dead-letter exchange that a RabbitMQ policy sets.
//   - During a memory or disk alarm, copies wait until it is over.
type Forward struct {
	To address.Address
	// Message is the copy to send; create it with [Copy]. Don't change it afterwards.
	Message *Message
	// Annotations are merged into the original if it returns to its queue; see [Modify] for the
	// allowed types. The original also gets [AnnotationReason] and [AnnotationError], with the
	// texts of Err and of the reason why the copy wasn't accepted.
	Annotations map[string]any
	// Else is used if Message can never be sent, because it is invalid or larger than the broker
	// accepts. Default: dead-letter the original with [ReasonUnforwardable].
	Else Outcome
	Err  error
}

func (Requeue) outcome()    {}
func (DeadLetter) outcome() {}
func (Modify) outcome()     {}
func (Forward) outcome()    {}

func (o Requeue) Error() string {
	if o.Failed {
		return describe("requeue as failed", o.Err)
	}
	return describe("requeue", o.Err)
}
func (o DeadLetter) Error() string { return describe("dead-letter ("+string(o.Reason)+")", o.Err) }
func (o Modify) Error() string     { return describe("modify", o.Err) }
func (o Forward) Error() string    { return describe("forward to "+o.To.String(), o.Err) }

// Unwrap returns Err.
func (o Requeue) Unwrap() error { return o.Err }

// Unwrap returns Err.
func (o DeadLetter) Unwrap() error { return o.Err }

// Unwrap returns Err.
func (o Modify) Unwrap() error { return o.Err }

// Unwrap returns Err.
func (o Forward) Unwrap() error { return o.Err }

func describe(what string, err error) string {
	if err == nil {
		return what
	}
	return fmt.Sprintf("%s: %s", what, ErrorText(err))
}

// ErrorText returns the text of err as [AnnotationError] holds it: valid UTF-8 of at most
// [ErrorTextLimit] bytes, even if the Error method of err panics. It is empty for nil.
func ErrorText(err error) (text string) {
	if err == nil {
		return ""
	}
	defer func() {
		if r := recover(); r != nil {
			text = fmt.Sprintf("%T (its Error method panicked)", err)
		}
	}()
	return failure.Clip(err.Error(), ErrorTextLimit)
}

// Resolution is an [Outcome] after its checks: carrying it out can't poison the message or end
// the link. It is for programs that settle deliveries with another AMQP client, such as package
// adapter/officialclient. This package's consumer uses it, too. Get one from [Resolve].
type Resolution struct {
	// Kind is what to do with the delivery.
	Kind ResolutionKind
	// Failed and DeadLetter are the fields delivery-failed and undeliverable-here of the AMQP
	// outcome "modified".
	Failed, DeadLetter bool
	// Annotations are the handler's annotations for "modified". This may be the handler's own
	// map, so don't change or keep it. See [Resolution.AllAnnotations].
	Annotations map[string]any
	// Reason and Error are for [AnnotationReason] and [AnnotationError]. "" means none.
	Reason Reason
	Error  string
	// Forward is set for ResolutionForward. Its Message and To are valid.
	Forward Forward
	// Refused is why this differs from the handler's outcome: that outcome can't be carried out,
	// and this one replaces it. It is nil if nothing was replaced.
	Refused error

	delay time.Duration   // of resolutionAgain
	ready <-chan struct{} // of resolutionLater
}

// ResolutionKind is what to do with a delivery.
type ResolutionKind string

// The kinds of resolutions.
const (
	// ResolutionAccept: the delivery is acknowledged, and the broker deletes the message.
	ResolutionAccept ResolutionKind = "accept"
	// ResolutionRelease: the message returns to its queue unchanged.
	ResolutionRelease ResolutionKind = "release"
	// ResolutionModify: the message gets annotations and returns to its queue, or goes to its
	// dead-letter exchange if DeadLetter is set.
	ResolutionModify ResolutionKind = "modify"
	// ResolutionForward: a copy is published. The delivery is acknowledged after the broker has
	// confirmed the copy.
	ResolutionForward ResolutionKind = "forward"
	// resolutionAgain keeps the delivery, and has its handler called again after delay. Only a gated
	// consumer carries it out. If it has to return the delivery, it returns it with Annotations.
	resolutionAgain ResolutionKind = "again"
	// resolutionLater keeps the delivery until ready is closed, and asks again.
	resolutionLater ResolutionKind = "later"
)

// Resolve returns what to do with a delivery whose handler returned err. A [Park] becomes a dead
// letter with [ReasonUnparkable]: it needs this package's consumer.
func Resolve(err error) Resolution { return resolve(OutcomeOf(err)) }

func resolve(o Outcome) Resolution {
	switch o := o.(type) {
	case nil:
		return Resolution{Kind: ResolutionAccept}
	case Requeue:
		if o.Failed {
			return failedDelivery
		}
		return Resolution{Kind: ResolutionRelease}
	case DeadLetter:
		return o.resolve()
	case Modify:
		if err := checkModified(o.Annotations); err != nil {
			r := failedDelivery
			r.Refused = err
			return r
		}
		return Resolution{Kind: ResolutionModify, Failed: o.Failed, DeadLetter: o.DeadLetter, Annotations: o.Annotations}
	case Forward:
		err := Validate(o.Message)
		if err == nil {
			err = o.To.Validate()
		}
		if err != nil {
			return o.Unsendable(err)
		}
		return Resolution{Kind: ResolutionForward, Forward: o}
	case Park:
		return o.unparkable(errNoPark)
	}
	return failedDelivery // OutcomeOf knows no other
}

var failedDelivery = Resolution{Kind: ResolutionModify, Failed: true}

// resolve uses modified with undeliverable-here, which RabbitMQ dead-letters like a
// rejected message, and which can carry annotations. delivery-failed stays false, or on
// 4.3 the delivery-count would add up over the dead-letter queue.
func (o DeadLetter) resolve() Resolution {
	// What is added fits: it is bounded, and checkModified leaves room for it.
	r := Resolution{Kind: ResolutionModify, DeadLetter: true, Annotations: o.Annotations, Reason: Reason(failure.Clip(string(o.Reason), 255)), Error: ErrorText(o.Err)}
	if r.Refused = checkModified(o.Annotations); r.Refused != nil {
		r.Annotations = nil
	}
	return r
}

// Unsendable returns what to do with the original if the copy can never be sent: Else, or a dead
// letter with [ReasonUnforwardable]. why is the reason.
func (o Forward) Unsendable(why error) Resolution {
	var r Resolution
	if o.Else != nil {
		r = Resolve(o.Else)
	} else {
		r = o.blamed(why)
		r.DeadLetter = true
	}
	r.Refused = errors.Join(why, r.Refused)
	return r
}

// Unaccepted returns what to do with the original if the broker didn't accept the copy for too
// long: it returns to its queue as a failed delivery, with Annotations and the errors. why is
// the reason. Give the queue a dead-letter exchange; otherwise its delivery limit drops the
// message.
func (o Forward) Unaccepted(why error) Resolution {
	r := o.blamed(why)
	r.Failed = true
	return r
}

// blamed returns a resolution that records why there is no copy.
func (o Forward) blamed(why error) Resolution {
	r := DeadLetter{Reason: ReasonUnforwardable, Err: errors.Join(why, o.Err), Annotations: o.Annotations}.resolve()
	r.DeadLetter = false
	return r
}

// AllAnnotations returns a new map with Annotations, Reason, and Error.
func (r Resolution) AllAnnotations() map[string]any {
	all := make(map[string]any, len(r.Annotations)+2)
	maps.Copy(all, r.Annotations)
	if r.Reason != "" {
		all[AnnotationReason] = string(r.Reason)
	}
	if r.Error != "" {
		all[AnnotationError] = r.Error
	}
	return all
}
