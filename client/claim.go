package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/claim"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/outcome"
)

// Claimer gets waiting messages out of one queue by their tokens: to handle, cancel, or reschedule
// them, or to have them delivered now. Messages get their tokens from [Park], from retry.Policy's
// field Claimable, and from schedule.PublisherConfig's. It needs RabbitMQ 4.4 or later and a quorum
// queue without a single active consumer.
//
// Open it with [NewClaimer] once and share it: it is safe for concurrent use, claims for many
// callers at once, and survives the loss of its connection.
//
// # Answers
//
// Each method returns how many messages it has changed. It waits until the broker has stored that,
// so the answer is final: a message that [Claimer.Cancel] has counted is never delivered again. If
// no error is returned, there is no waiting message under the token any more, except one that was
// parked since. 0 means that none was waiting: it may be due or in a handler, handled, not parked
// yet, or it may never have existed.
//
// With an error, the number counts the messages that were certainly changed. The errors:
//
//   - [*argument.Error]: an argument is invalid. Nothing was changed.
//   - [ErrNotSent]: ctx ended first. Nothing more was changed.
//   - [ErrConnectionLost]: the connection was lost while the token was claimed, or before a message
//     was settled. If a message was waiting, it is ready in its queue: the next consumer gets it
//     before its time.
//   - [ErrOutcomeUnknown]: the connection was lost, or ctx ended, before the broker confirmed that
//     it settled a message. It was changed, or it is ready in its queue.
//   - [ErrNotFound], [ErrUnauthorized], [ErrRefused]: the broker refuses the link, or the queue
//     gives out no messages by token.
//   - [ErrClosed]: the Claimer or its Conn was closed.
//
// # Limits
//
//   - Due messages aren't claimed, and neither are those that are due within a second: the
//     queue's consumers get them, at their time.
//   - A claim can make the queue deliver one of its ready messages to the Claimer, or two if nothing is
//     parked under the token. The Claimer returns them to their place at once. They aren't counted as
//     failed.
//   - A program that crashes, or loses its connection, while it has a message claimed makes that
//     message ready. RabbitMQ counts a failed delivery.
type Claimer struct {
	conn   *Conn
	queue  string
	claims *claim.Claims
	// reserved is for the session.
	reserved *link.Reservation
	user     *claimUser
}

// claimUser is what the Conn closes.
type claimUser struct{ c *Claimer }

func (u *claimUser) Shut(ctx context.Context) error { return u.c.Close(ctx) }

// NewClaimer opens a [Claimer] for a queue, and waits until the broker has accepted its link.
// While the connection is being rebuilt, it waits until ctx ends. The errors are those of Claimer.
// On a broker before RabbitMQ 4.4, the error is an *argument.Error that names its version.
func NewClaimer(ctx context.Context, conn *Conn, queue string) (*Claimer, error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	source, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	w, err := conn.pool.AwaitUp(ctx, nil, conn.pool.Closing)
	switch {
	case errors.Is(err, failure.ErrClosed):
		return nil, &failure.Error{Op: "claim", Target: queue, Kind: failure.ErrClosed}
	case err != nil:
		return nil, failure.Ended("claim", queue, failure.ErrNotSent, ctx)
	}
	if b := brokerOf(w); oldbroker.Of(b.AtLeast).LacksTokens {
		return nil, noTokens(b)
	}
	// Without an answer, forged annotations are harder to tell: see package claim.
	_, _ = conn.brokerTime(ctx)
	c := &Claimer{conn: conn, queue: queue, reserved: conn.pool.Reserve(publisherSessions)}
	c.claims = claim.New(claim.Settings{
		Queue: queue, Source: source, Sessions: c.reserved, Backoff: conn.cfg.Reconnect,
		Observer: claimObserver{conn, queue, conn.events.of(c.reserved)}, Log: conn.log,
	})
	c.user = &claimUser{c}
	if err := conn.join(c.user); err != nil {
		_ = c.Close(ctx)
		return nil, &failure.Error{Op: "claim", Target: queue, Kind: failure.ErrClosed}
	}
	if err := c.claims.Await(ctx); err != nil {
		_ = c.Close(ctx)
		if errors.Is(err, claim.ErrNoTokens) {
			return nil, noTokens(conn.Broker())
		}
		return nil, err
	}
	return c, nil
}

// certainNow returns the broker's time, if the broker has told it.
func (c *Conn) certainNow() (time.Time, bool) {
	w := c.pool.Up()
	if w == nil {
		return time.Time{}, false
	}
	known, r, err := c.clock.now(w)
	if !known {
		c.learnTime()
	}
	return r.Broker, known && err == nil
}

// Close waits until all claimed messages are settled, or until ctx ends, and closes the link.
// What isn't settled then returns to its queue.
func (c *Claimer) Close(ctx context.Context) error {
	err := c.claims.Close(ctx)
	c.reserved.Release()
	c.conn.leave(c.user)
	return err
}

// Claim claims the messages that are parked under token, and calls h for each, one after the other,
// on the caller's goroutine. The handler's result decides about the message, as in [Conn.Consume]:
// nil acknowledges it, an error returns it to its queue, and an [Outcome] is carried out. So a
// handler can also park it again.
//
// A message is handled at least once: after an error, it may have been handled, and be delivered
// again.
func (c *Claimer) Claim(ctx context.Context, token string, h Handler) (n int, err error) {
	if err := checkHandler(h); err != nil {
		return 0, err
	}
	return c.each(ctx, token, func(d *Delivery) error {
		with, handled := internal{c.conn}.Handle(ctx, d)
		err := safely(WithDelivery(with, d), h, d)
		handled(err)
		return err
	})
}

// safely calls h, and turns a panic into an outcome. A handler that calls runtime.Goexit ends the
// caller, and the message returns to its queue when the Claimer is closed.
func safely(ctx context.Context, h Handler, d *Delivery) (err error) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		err = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
	})
	err = h.Handle(ctx, d)
	returned = true
	return err
}

// Cancel deletes the messages that are parked under token. They are never delivered again.
func (c *Claimer) Cancel(ctx context.Context, token string) (n int, err error) {
	return c.each(ctx, token, func(*Delivery) error { return nil })
}

// RunNow makes the messages that are parked under token ready: the queue delivers them now, to any
// of its consumers. It doesn't count as a failed delivery.
func (c *Claimer) RunNow(ctx context.Context, token string) (n int, err error) {
	return c.each(ctx, token, func(*Delivery) error {
		// A time that is over tells a handler that the message isn't early by accident.
		return Modify{Annotations: map[string]any{annotation.DeliveryTime: int64(0)}}
	})
}

// Reschedule parks the messages that are parked under token until another time, under the same
// token. until is by this host's clock; see [Park].
func (c *Claimer) Reschedule(ctx context.Context, token string, until time.Time) (n int, err error) {
	again := Park{Token: token, Until: until}
	if err := again.check(); err != nil {
		return 0, err
	}
	return c.each(ctx, token, func(*Delivery) error { return again })
}

// each decides about each message that is parked under token.
func (c *Claimer) each(ctx context.Context, token string, decide func(*Delivery) error) (n int, err error) {
	if err := checkToken("token", token); err != nil {
		return 0, err
	}
	for {
		found, more, err := c.claims.Claim(ctx, token)
		if err != nil {
			return n, err
		}
		results := make(chan error, len(found))
		for _, m := range found {
			d := NewDelivery(c.queue, m.Message)
			s := c.disposition(ctx, d, decide(d))
			go func() { results <- m.Settle(ctx, s) }()
		}
		var failed error
		for range found {
			if err := <-results; err == nil {
				n++
			} else if failed == nil || errors.Is(err, failure.ErrOutcomeUnknown) {
				failed = err
			}
		}
		if failed != nil || !more {
			return n, failed
		}
	}
}

// disposition is how to settle d by the result of its handler.
func (c *Claimer) disposition(ctx context.Context, d *Delivery, result error) link.Disposition {
	o := OutcomeOf(result)
	var r Resolution
	if p, ok := o.(Park); ok {
		r = p.resolve(context.WithoutCancel(ctx), true, c.conn.Broker(), c.conn.brokerTime)
	} else if r = resolve(o); r.Kind == ResolutionForward {
		r = c.forward(ctx, r.Forward)
	}
	if r.Refused != nil {
		c.conn.log.ErrorContext(ctx, "hopback: an outcome can't be carried out; another one replaces it", "outcome", ErrorText(o), "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	switch r.Kind {
	case ResolutionAccept:
		return link.Disposition{Kind: link.DispositionAccepted}
	case ResolutionRelease:
		return link.Disposition{Kind: link.DispositionReleased}
	}
	all := amqp.Annotations{}
	for k, v := range r.AllAnnotations() {
		all[k] = v
	}
	if _, timed := all[annotation.DeliveryTime]; r.DeadLetter || r.Failed && !timed { // otherwise the dead-letter queue would hide it until its time
		all[annotation.DeliveryTime] = int64(0)
	}
	if n := int64(d.DeliveryCount()); n > 0 || r.Failed {
		if r.Failed {
			n++
		}
		all[annotation.KnownCount] = n
	}
	return link.Disposition{Kind: link.DispositionModified, Failed: r.Failed, Dead: r.DeadLetter, Annotations: all}
}

// forward publishes the copy of a Forward, and returns what then becomes of the original.
func (c *Claimer) forward(ctx context.Context, o Forward) Resolution {
	p, err := NewPublisher[*Message](ctx, c.conn, o.To, PublisherConfig{Copies: true})
	if err == nil {
		err = p.Publish(ctx, o.Message)
		_ = p.Close(ctx)
	}
	switch {
	case err == nil:
		return Resolution{Kind: ResolutionAccept}
	case errors.Is(err, failure.ErrTooLarge) || errors.As(err, new(*argument.Error)):
		return o.Unsendable(err)
	}
	return o.Unaccepted(fmt.Errorf("forwarding to %v: %w", o.To, err))
}
