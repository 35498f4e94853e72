package client

import (
	"context"
	"errors"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
)

// laneKey calls the function of Start.Order. If it panics, the message can't be handled in order.
func (d *delivery) laneKey() (key string, ok bool) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		d.unordered = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
	})
	key, ok = d.consumer.order(&d.Delivery)
	returned = true
	return key, ok
}

// observe has the Instrument follow the delivery, and returns the ctx for its handler.
func (d *delivery) observe(ctx context.Context) context.Context {
	if d.consumer.hooks == nil {
		return ctx
	}
	ctx = d.follow(ctx, d.consumer.hooks)
	d.watched.Store(d.observed)
	return ctx
}

// handle runs the handler and turns a panic or Goexit into an error.
func (d *delivery) handle() {
	if d.unordered != nil {
		d.result = d.unordered
		return
	}
	d.outer = deliveryContext{Context: &d.inner, delivery: &d.Delivery, again: d.again}
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		d.result = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
		if value == nil {
			if d.lastWord != nil {
				d.result = d.lastWord
			}
			d.results.exited(d)
		}
	})
	d.result = d.consumer.handler.Handle(&d.outer, &d.Delivery)
	returned = true
}

// decide resolves the handler's result.
func (d *delivery) decide() Resolution {
	if later, ok := outcome.Find[*inside.Later](d.result); ok {
		if !failure.IsClosed(later.Ready) {
			return Resolution{Kind: resolutionLater, ready: later.Ready}
		}
		d.result = later.Then()
	}
	d.watched.Load().Handled(d.result)
	if d.result == nil {
		return Resolution{Kind: ResolutionAccept}
	}
	if again, ok := d.result.(*inside.Again); ok {
		d.again = again
		return Resolution{Kind: resolutionAgain, delay: again.Delay, Annotations: again.Annotations}
	}
	o := OutcomeOf(d.result)
	d.result = o
	if dead, ok := o.(DeadLetter); ok {
		d.logDeadLetter(dead)
	}
	r := d.resolve(o)
	if r.Refused != nil {
		d.consumer.log.ErrorContext(d.logCtx(), "hopback: an outcome can't be carried out; another one replaces it", "message_id", message.ID(d.message), "outcome", ErrorText(o), "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	return d.decided(r)
}

func (d *delivery) resolve(o Outcome) Resolution {
	p, ok := o.(Park)
	if !ok || d.consumer.conn == nil {
		return resolve(o)
	}
	return p.resolve(context.WithoutCancel(&d.outer), d.results.deliveries.link.Claims(), d.consumer.conn.Broker(), d.consumer.conn.brokerTime)
}

// undecodable dead-letters the message.
func (d *delivery) undecodable(err error) Resolution {
	dead := DeadLetter{Reason: ReasonUndecodable, Err: err}
	if errors.Is(err, ErrTooLarge) {
		dead.Reason = ReasonTooLarge
	}
	d.watched.Load().Handled(dead)
	return dead.resolve()
}

// unsendable is what Forward.Unsendable says.
func (d *delivery) unsendable(why error) Resolution {
	return d.decided(d.forward().Unsendable(why))
}

// unaccepted is what Forward.Unaccepted says.
func (d *delivery) unaccepted(why error) Resolution {
	return d.decided(d.forward().Unaccepted(why))
}

// forward is the outcome that the core is carrying out.
func (d *delivery) forward() Forward {
	f, _ := d.result.(Forward)
	return f
}

// decided notes the Else of a Forward, which may be a Forward as well.
func (d *delivery) decided(r Resolution) Resolution {
	if r.Kind == ResolutionForward && r.Refused != nil {
		d.result = r.Forward
	}
	return r
}

func (d *delivery) logDeadLetter(o DeadLetter) {
	if p, ok := outcome.Find[*failure.PanicError](o.Err); ok && p != nil {
		d.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler panicked; the message is dead-lettered", "message_id", message.ID(d.message), "panic", ErrorText(p), "stack", string(p.Stack))
		return
	}
	d.consumer.log.WarnContext(d.logCtx(), "hopback: a message is dead-lettered", "message_id", message.ID(d.message), "reason", failure.Clip(string(o.Reason), 255), "error", ErrorText(o.Err))
}
