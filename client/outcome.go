package client

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
)

// Outcome is what becomes of a delivery. A handler returns one as its error; nil
// accepts, and an error without an Outcome in its chain is Requeue{Failed: true}.
//
//	nil                 accepted: the broker forgets the message
//	Requeue             back to its queue, at once
//	DeadLetter          to the queue's dead-letter exchange, with the reason
//	Modify              as Requeue or DeadLetter, with annotations of your own
//	Forward             a copy goes to an address; accepted once the broker has confirmed the copy
//
// Outcomes are values and may be wrapped like any error; the outermost one
// counts.
type Outcome interface {
	error
	outcome()
}

// OutcomeOf finds the outcome that err stands for: nil for nil. A pointer to an
// outcome stands for the outcome; an error that panics when it is looked into,
// such as a nil pointer, is a failure like any other.
func OutcomeOf(err error) Outcome {
	if err == nil {
		return nil // without what the rest allocates
	}
	return outcomeOf(err)
}

func outcomeOf(err error) (o Outcome) {
	defer func() {
		if recover() != nil {
			o = Requeue{Failed: true, Err: fmt.Errorf("an error of type %T that can't be read", err)}
		}
	}()
	o, ok := err.(Outcome)
	if !ok {
		if o, ok = errors.AsType[Outcome](err); !ok {
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
	return embedded(reflect.ValueOf(o), err)
}

// embedded finds the outcome within a type of the user's own that embeds one. It
// panics as outcomeOf may.
func embedded(v reflect.Value, err error) Outcome {
	v = reflect.Indirect(v)
	if v.Kind() == reflect.Struct {
		for i := range v.NumField() {
			field := v.Type().Field(i)
			if !field.Anonymous || !field.Type.Implements(reflect.TypeFor[Outcome]()) || !v.Field(i).CanInterface() {
				continue
			}
			return outcomeOf(v.Field(i).Interface().(Outcome))
		}
	}
	return Requeue{Failed: true, Err: err}
}

// Requeue gives the message back to its queue, which delivers it again at once.
//
// Failed counts the delivery toward the queue's delivery limit, on every
// RabbitMQ; without it RabbitMQ 4.3 doesn't count the delivery, while 4.0 does
// (see TestReturnedDeliveriesCount). A message that always fails and
// never counts comes back for ever.
type Requeue struct {
	Failed bool
	Err    error
}

// Reason says in a word why a message was dead-lettered. It is stored with the
// message in the annotation AnnotationReason.
type Reason string

// The reasons that this package gives; others may be added by decorators.
const (
	// ReasonUndecodable: the codec couldn't read the body.
	ReasonUndecodable Reason = "undecodable"
	// ReasonPanicked: the handler panicked.
	ReasonPanicked Reason = "panicked"
	// ReasonUnforwardable: a Forward that can never be sent, such as one whose
	// address isn't valid.
	ReasonUnforwardable Reason = "unforwardable"
)

// Annotations that tell, in the dead-letter queue, why a message is there. The
// body and everything else that the sender set are untouched. They are message
// annotations, which the broker merges into the message as it dead-letters it;
// to an AMQP 0-9-1 consumer they show as headers.
const (
	// AnnotationReason holds the Reason, a string.
	AnnotationReason = "x-opt-hopback-reason"
	// AnnotationError holds the error's text, a string of at most ErrorTextLimit bytes.
	AnnotationError = "x-opt-hopback-error"
)

// ErrorTextLimit is how many bytes of an error's text are kept in an annotation.
// A settlement must fit in a frame: a larger one would close the connection.
const ErrorTextLimit = 1024

// DeadLetter sends the message to the dead-letter exchange of its queue, with
// Reason and the text of Err. A queue without a dead-letter exchange DROPS it:
// that is the queue's doing, so give every work queue one.
type DeadLetter struct {
	Reason Reason
	Err    error
	// Annotations are merged into the message; see Modify for what they may be.
	Annotations map[string]any
}

// Modify gives the message back (or dead-letters it, if DeadLetter is set) with
// annotations merged into it. Keys must begin with "x-"; values must be string,
// bool, int, int64, []any or map[string]any of these: RabbitMQ poisons a message
// with a null or floating-point annotation (each later delivery ends the
// consumer's session), and hands others back changed. Anything else is refused
// before it is sent, and the message requeued as failed.
type Modify struct {
	DeadLetter  bool
	Failed      bool
	Annotations map[string]any
	Err         error
}

// Forward publishes Message to To and accepts the delivery once the broker has
// accepted the copy, and not before: at worst there are two of it, never none.
// Until then the delivery stays unsettled and counts as prefetched, but the
// handler's slot is free. A copy that isn't accepted is tried again with
// back-off, and in the end the delivery goes back to its queue as failed.
type Forward struct {
	To address.Address
	// Message is the copy; build it with Copy. It must not be changed afterwards.
	Message *Message
	Err     error
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
	return clip(err.Error(), ErrorTextLimit)
}

// clip cuts s to at most limit bytes without cutting a character, and makes it
// valid UTF-8.
func clip(s string, limit int) string {
	if len(s) > limit {
		n := limit
		for n > 0 && n > limit-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	if utf8.ValidString(s) {
		return s
	}
	// A replacement character is three bytes where one was bad.
	s = strings.ToValidUTF8(s, "?")
	return s
}
