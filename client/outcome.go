package client

import (
	"fmt"
	"reflect"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/outcome"

	"github.com/hopback/hopback/internal/failure"
)

// Outcome decides what becomes of a delivery. A handler returns one as its error. nil
// accepts the delivery. An error without an Outcome in its chain counts as
// Requeue{Failed: true}.
//
//	nil                 accepted: the broker forgets the message
//	Requeue             back to its queue, at once
//	DeadLetter          to the queue's dead-letter exchange, with the reason
//	Modify              as Requeue or DeadLetter, with annotations of your own
//	Forward             a copy goes to an address; accepted once the broker has confirmed the copy
//
// Outcomes are values and may be wrapped like any error. The outermost one counts.
type Outcome interface {
	error
	outcome()
}

// OutcomeOf returns the outcome that err stands for, and nil for nil. A pointer to an
// outcome stands for the outcome. An error whose methods panic, such as a nil pointer,
// counts as Requeue{Failed: true}.
func OutcomeOf(err error) Outcome {
	if err == nil {
		return nil // without what the rest allocates
	}
	return outcomeOf(err, maxEmbedded)
}

// maxEmbedded bounds how many outcomes are looked for one within the other: one may
// embed itself.
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
	case Requeue, DeadLetter, Modify, Forward:
		return o
	}
	return embedded(reflect.ValueOf(o), err, left)
}

// embedded finds the outcome within a type of the user's own that embeds one. It
// panics as outcomeOf may.
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

// Requeue gives the message back to its queue, which delivers it again at once.
//
// If Failed is set, the delivery counts toward the queue's delivery limit. Otherwise
// RabbitMQ 4.3 doesn't count it, and 4.0 does. A message that always fails and never
// counts comes back for ever.
type Requeue struct {
	Failed bool
	Err    error // for logs; may be nil
}

// Reason is a word that says why a message was dead-lettered. The annotation
// AnnotationReason holds it.
type Reason string

// The reasons of this package. Middleware may add others.
const (
	// ReasonUndecodable: the codec couldn't read the body.
	ReasonUndecodable Reason = "undecodable"
	// ReasonPanicked: the handler panicked.
	ReasonPanicked Reason = "panicked"
	// ReasonUnforwardable: a Forward that can never be sent, such as one whose
	// address isn't valid.
	ReasonUnforwardable Reason = "unforwardable"
)

// Annotations of a dead letter, which say why it is dead. They are message
// annotations: the broker merges them into the message when it dead-letters it. The
// body and everything else that the sender set stay the same. An AMQP 0-9-1 consumer
// sees them as headers.
const (
	// AnnotationReason holds the Reason, a string.
	AnnotationReason = "x-opt-hopback-reason"
	// AnnotationError holds the error's text, a string of at most ErrorTextLimit bytes.
	AnnotationError = "x-opt-hopback-error"
)

// AnnotationKnownCount is how many of a message's failed deliveries were reported by a
// consumer of this package, an int64. Every disposition that gives a message back or
// dead-letters it writes it.
const AnnotationKnownCount = "x-opt-hopback-known-count"

// ErrorTextLimit is how many bytes of an error's text are kept in an annotation.
// A settlement must fit in a frame: a larger one would close the connection.
const ErrorTextLimit = 1024

// DeadLetter sends the message to the dead-letter exchange of its queue. The message
// gets Reason and the text of Err as annotations. A queue without a dead-letter
// exchange DROPS the message, so every work queue needs one.
type DeadLetter struct {
	Reason Reason
	Err    error
	// Annotations are merged into the message; see Modify for what they may be.
	Annotations map[string]any
}

// Modify merges Annotations into the message and gives it back to its queue, or
// dead-letters it if DeadLetter is set. Failed has the meaning that it has in Requeue.
//
// Keys of Annotations must begin with "x-". Values must be string, bool, int, int64, or
// []any or map[string]any of these. Others are refused before anything is sent, and the
// message is requeued as failed: RabbitMQ changes them, and a null or floating-point
// annotation makes each later delivery end its consumer's session.
type Modify struct {
	DeadLetter  bool
	Failed      bool
	Annotations map[string]any
	Err         error
}

// Forward publishes Message to To, and accepts the delivery once the broker has
// accepted the copy. So there may be two copies, and never none. Until then the
// delivery stays unsettled and counts toward Prefetch, but its handler is free.
//
// A copy that isn't accepted is tried again with back-off. After
// ConsumerConfig.ForwardPatience the delivery goes back to its queue as failed, with
// Annotations. So the queue's delivery limit ends a message that can't be forwarded. A
// queue without a dead-letter exchange would drop it. So if the queue isn't known to
// have one, the delivery is kept and its copy tried again until it is accepted. A
// dead-letter exchange that a RabbitMQ policy sets isn't known. In a memory or disk alarm
// copies wait until it is over, however long that takes.
type Forward struct {
	To address.Address
	// Message is the copy; build it with Copy. It must not be changed afterwards.
	Message *Message
	// Annotations are merged into the original where it goes back; see Modify for
	// what they may be. It also gets AnnotationReason and AnnotationError, with the
	// texts of Err and of what kept the copy from being accepted.
	Annotations map[string]any
	// Else is carried out if Message can never be sent: it isn't valid, or larger than
	// the broker takes. nil dead-letters the original as ReasonUnforwardable.
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

// ErrorText is err's text as AnnotationError holds it: valid UTF-8 of at most
// ErrorTextLimit bytes, whatever the error's Error method returns, and even if it
// panics. It is empty for nil.
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
