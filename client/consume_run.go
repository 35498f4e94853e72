package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/outcome"
)

// run keeps a link session open, until ctx ends.
func (k *consumer) run(ctx context.Context) error {
	defer close(k.gone)
	defer k.forwards.close()
	k.timeouts.know(k.cfg.consumerTimeout)
	defer k.timeouts.end()
	defer k.deps.follow(k.limited)()
	// Handlers outlive the end of ctx, with its values; hard ends their ctx.
	handlerCtx, hard := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hard(context.Canceled)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(k.closed, func() { stop(ErrClosed) })()
	k.draining = ctx.Done()
	ended := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { ended <- time.Now() })
	err := k.checkForwards(ctx)
	if err == nil {
		err = k.linkSessions(ctx, handlerCtx, hard)
	}
	stop(nil)
	k.awaitHandlers(<-ended, hard)
	return err
}

// checkForwards opens links to the addresses that the handler forwards to, and closes them. The error is
// that the user may not publish there. What else is in the way may pass, or is the business of a check.
func (k *consumer) checkForwards(ctx context.Context) error {
	for _, to := range k.cfg.forwards {
		target, err := to.Build()
		if err != nil {
			return err
		}
		if err := k.forwards.check(ctx, target); errors.Is(err, ErrUnauthorized) {
			return fmt.Errorf("hopback: consume %q: what fails couldn't be retried, because the user may not publish retry copies; give the user the write permission (rabbitmqctl set_permissions): %w", k.queue, err)
		}
	}
	return nil
}

// linkSessions runs one link session after the other until ctx ends.
func (k *consumer) linkSessions(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) error {
	try := &link.Try{}
	notify := func(e stateEvent) {
		e.Attempt = try.Attempt()
		k.event(e)
	}
	defer func() { notify(stateEvent{Kind: eventEnded}) }()
	defer k.active.ended()
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	attached := false
	for try = range link.Tries(ctx, k.deps.backoff.Pause) {
		s, err := k.open(ctx)
		if ctx.Err() != nil {
			if err == nil {
				k.deps.sessions.give(s.sess, true)
			}
			break
		}
		if err != nil {
			if !attached && (final(err) || errors.Is(err, ErrSessionLimit)) || errors.Is(err, ErrClosed) {
				return err
			}
			if !errors.Is(err, ErrConnectionLost) {
				notify(stateEvent{Kind: eventRefused, Err: err})
			}
			renewed = false
			k.log.Warn("hopback: consuming failed; trying again", "error", err)
			continue
		}
		attached = true
		try.Up()
		if !renewed {
			notify(stateEvent{Kind: eventUp, Down: time.Since(lost)})
		}
		end := s.run(ctx, handlerCtx, hard)
		if end == sessionDrained {
			break
		}
		lost, renewed = time.Now(), end == sessionRenewed
		if renewed {
			try.Worked()
			continue
		}
		k.active.ended()
		k.hunger.reset()
		notify(stateEvent{Kind: eventLost, Err: newError("consume", k.queue, ErrConnectionLost, s.why), Unsettled: s.unsettled})
	}
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return &Error{Op: "consume", Target: k.queue, Kind: ErrClosed}
	}
	return nil
}

// awaitHandlers waits, within the grace time that began at ended, for handlers
// that still run: those whose link was lost hold no delivery that a drain waits for.
func (k *consumer) awaitHandlers(ended time.Time, hard context.CancelCauseFunc) {
	grace.Await(k.slots, k.hurry, ended, k.cfg.grace, hard)
}

func (k *consumer) open(ctx context.Context) (*linkSession, error) {
	if k.missing && k.cfg.onGone != nil {
		if err := onGone(ctx, k.cfg.onGone); err != nil {
			return nil, newError("consume", k.queue, ErrNotFound, err)
		}
	}
	sess, err := k.deps.sessions.open(ctx)
	if err != nil {
		kind := ErrConnectionLost
		if errors.Is(err, ErrSessionLimit) {
			kind = ErrSessionLimit
		}
		return nil, newError("consume", k.queue, kind, err)
	}
	s := &linkSession{
		consumer: k, sess: sess, old: sess.quirks(),
		settler: settler{next: make(chan settlement, 1), exited: make(chan struct{})},
		dead:    make(chan struct{}), idle: make(chan struct{}, 1), closing: make(chan struct{}),
		worn:   make(chan struct{}, 1),
		window: window{workers: k.cfg.concurrency}, isolation: isolation{off: k.cfg.noQuarantine},
	}
	s.workers = newWorkers(s, k.cfg.concurrency, k.slots, &k.workers)
	o := receiverOptions{properties: k.cfg.properties}
	if !s.old.LacksConsumerTimeout {
		s.leases = leases{}
		o.takenBack = s.leaseEnded
	}
	if k.active != nil {
		o.state = k.active.state(sess)
	}
	began := time.Now()
	receiver, err := sess.receiver(ctx, k.cfg.source, o)
	if err != nil {
		k.deps.sessions.give(sess, true)
		err := newError("consume", k.queue, attachKind(err), err)
		k.missing = k.attached && errors.Is(err, ErrNotFound)
		return nil, err
	}
	k.attached, k.missing = true, false
	if k.estimate != nil {
		k.estimate.attached(time.Since(began))
	}
	s.link = receiver
	return s, nil
}

// onGone calls the user's onGone.
func onGone(ctx context.Context, call func(context.Context) error) (err error) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		err = &PanicError{Value: value, Stack: stack}
	})
	err = call(ctx)
	returned = true
	return err
}
