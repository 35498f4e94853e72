package client

import (
	"errors"
	"maps"

	"github.com/hopback/hopback/internal/failure"
)

// Resolution is an [Outcome] that was checked: nothing in it can poison the message or
// end the link. It is for programs that carry outcomes out with another AMQP client, as
// package officialclient does. The consumer of this package uses it, too.
type Resolution struct {
	// Kind is what becomes of the delivery.
	Kind ResolutionKind
	// Failed and DeadLetter are the fields delivery-failed and undeliverable-here of
	// "modified".
	Failed, DeadLetter bool
	// Annotations are the handler's own, of "modified". They may be the handler's map,
	// which mustn't be changed or kept. See AllAnnotations.
	Annotations map[string]any
	// Reason and Error are for AnnotationReason and AnnotationError. "" is for none.
	Reason Reason
	Error  string
	// Forward is set for ResolutionForward. Its Message and To are valid.
	Forward Forward
	// Refused is why this isn't what the handler's outcome asks for. The outcome can't be
	// carried out as it is, and this takes its place.
	Refused error
}

// ResolutionKind is what becomes of a delivery.
type ResolutionKind string

// The kinds of resolutions.
const (
	// ResolutionAccept: the broker forgets the message.
	ResolutionAccept ResolutionKind = "accept"
	// ResolutionRelease: the message goes back to its queue, and nothing is changed.
	ResolutionRelease ResolutionKind = "release"
	// ResolutionModify: the message gets annotations and goes back to its queue, or to
	// its dead-letter exchange if DeadLetter is set.
	ResolutionModify ResolutionKind = "modify"
	// ResolutionForward: a copy is published. The delivery is accepted after the broker
	// has accepted the copy.
	ResolutionForward ResolutionKind = "forward"
)

// Resolve returns what to do with a delivery whose handler has returned err.
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

// Unsendable returns what to do with the original if the copy can never be sent, and why:
// Else, or a dead letter with ReasonUnforwardable.
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

// Unaccepted returns what to do with the original if the copy wasn't accepted for too
// long, and why: it goes back to its queue as a failed delivery, with Annotations and the
// errors. Only a queue with a dead-letter exchange keeps a message that goes back too
// often.
func (o Forward) Unaccepted(why error) Resolution {
	r := o.blamed(why)
	r.Failed = true
	return r
}

// blamed tells why there is no copy.
func (o Forward) blamed(why error) Resolution {
	r := DeadLetter{Reason: ReasonUnforwardable, Err: errors.Join(why, o.Err), Annotations: o.Annotations}.resolve()
	r.DeadLetter = false
	return r
}

// AllAnnotations returns Annotations with Reason and Error among them, in a map of its
// own.
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
