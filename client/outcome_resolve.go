package client

import (
	"errors"
	"maps"
	"time"

	"github.com/hopback/hopback/internal/failure"
)

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
