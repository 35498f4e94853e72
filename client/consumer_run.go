package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/outcome"
)

// run keeps a link session open, until ctx ends.
func (k *consumer) run(ctx context.Context) error {
	defer close(k.gone)
	defer k.forwarder.Close()
	k.timeouts.know(k.cfg.ConsumerTimeout)
	defer k.timeouts.end()
	defer k.follow.follow(k)()
	// Handlers outlive the end of ctx, with its values; cancelHandlers ends their ctx.
	handlerCtx, cancelHandlers := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancelHandlers(context.Canceled)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(k.closed, func() { stop(failure.ErrClosed) })()
	k.draining = ctx.Done()
	ended := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { ended <- time.Now() })
	err := k.checkForwards(ctx)
	if err == nil {
		err = k.linkSessions(ctx, handlerCtx, cancelHandlers)
	}
	stop(nil)
	k.awaitHandlers(<-ended, cancelHandlers)
	return err
}

// checkForwards opens links to the addresses that the handler forwards to, and closes them. The error is
// that the user may not publish there. What else is in the way may pass, or is the business of a check.
func (k *consumer) checkForwards(ctx context.Context) error {
	for _, to := range k.forwards {
		target, err := to.Build()
		if err != nil {
			return err
		}
		if err := k.forwarder.Check(ctx, target); errors.Is(err, failure.ErrUnauthorized) {
			return fmt.Errorf("hopback: consume %q: failed messages couldn't be retried, because the user may not publish retry copies: %w", k.queue, err)
		}
	}
	return nil
}

// linkSessions runs one link session after the other until ctx ends.
func (k *consumer) linkSessions(ctx, handlerCtx context.Context, cancelHandlers context.CancelCauseFunc) error {
	try := &backoff.Try{}
	notify := func(e Event) {
		e.Attempt = try.Attempt()
		k.event(e)
	}
	defer func() { notify(Event{Kind: EventEnded}) }()
	defer k.active.ended()
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	attached := false
	var outage loglines.Outage
	for try = range backoff.Tries(ctx, k.deps.Backoff.Pause) {
		s, err := k.open(ctx)
		if ctx.Err() != nil {
			if err == nil {
				k.deps.Sessions.Give(s.sess, true)
			}
			break
		}
		if err != nil {
			if !attached && (failure.Final(err) || errors.Is(err, failure.ErrSessionLimit)) || errors.Is(err, failure.ErrClosed) {
				return err
			}
			if !errors.Is(err, failure.ErrConnectionLost) {
				notify(Event{Kind: EventRefused, Err: err})
			}
			renewed = false
			level := slog.LevelDebug
			if !errors.Is(err, failure.ErrConnectionLost) { // which has a line for all
				level = outage.Level(time.Now())
			}
			k.log.Log(ctx, level, "hopback: consuming failed; trying again", "error", err)
			continue
		}
		if k.gated() && !attached {
			k.gate.Handler.Attached()
		}
		attached = true
		try.Up()
		outage = loglines.Outage{}
		if !renewed {
			notify(Event{Kind: EventUp, Down: time.Since(lost)})
		}
		end := s.run(ctx, handlerCtx, cancelHandlers)
		s.endTurn(ctx)
		if end == sessionDrained {
			break
		}
		if end == sessionStepped {
			try.Worked()
			renewed = true
			continue
		}
		lost, renewed = time.Now(), end == sessionRenewed
		if renewed {
			try.Worked()
			continue
		}
		k.active.ended()
		k.starvation.reset()
		notify(Event{Kind: EventLost, Err: failure.NewError("consume", k.queue, failure.ErrConnectionLost, s.deliveries.why), Unsettled: s.unsettled})
	}
	if errors.Is(context.Cause(ctx), failure.ErrClosed) {
		return &failure.Error{Op: "consume", Target: k.queue, Kind: failure.ErrClosed}
	}
	return nil
}

// awaitHandlers waits, within the grace time that began at ended, for handlers
// that still run: those whose link was lost hold no delivery that a drain waits for.
func (k *consumer) awaitHandlers(ended time.Time, cancelHandlers context.CancelCauseFunc) {
	grace.Await(k.slots, k.expedite, ended, k.cfg.Grace, cancelHandlers)
}

func (k *consumer) open(ctx context.Context) (*linkSession, error) {
	if k.missing && k.cfg.OnGone != nil {
		slow := time.AfterFunc(onGoneSlow, func() {
			k.log.Warn("hopback: ConsumerConfig.OnGone hasn't returned; the consumer waits for it. During a memory or disk alarm, the broker answers no requests")
		})
		err := onGone(ctx, k.cfg.OnGone)
		slow.Stop()
		if err != nil {
			return nil, failure.NewError("consume", k.queue, failure.ErrNotFound, err)
		}
	}
	sess, err := k.deps.Sessions.Open(ctx)
	if err != nil {
		kind := failure.ErrConnectionLost
		if errors.Is(err, failure.ErrSessionLimit) {
			kind = failure.ErrSessionLimit
		}
		return nil, failure.NewError("consume", k.queue, kind, err)
	}
	s := newLinkSession(k, sess)
	ds := s.deliveries
	switch {
	case k.gated():
		ds.gate.begin(ds)
	case k.active != nil:
		k.active.follow(s)
	}
	began := time.Now()
	receiver, err := sess.Receiver(ctx, k.source, link.ReceiverOptions{Events: s, Properties: k.cfg.linkProperties(), MaxBytes: int64(k.cfg.PrefetchBytes)})
	if err != nil {
		k.deps.Sessions.Give(sess, true)
		err := failure.NewError("consume", k.queue, link.AttachKind(err), err)
		k.missing = k.attached && errors.Is(err, failure.ErrNotFound)
		return nil, err
	}
	k.attached, k.missing = true, false
	k.estimate.attached(time.Since(began))
	ds.link = receiver
	return s, nil
}

// onGoneSlow is how long an OnGone may take before that is logged.
const onGoneSlow = 5 * time.Second

// onGone calls the user's onGone.
func onGone(ctx context.Context, call func(context.Context) error) (err error) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		err = &failure.PanicError{Value: value, Stack: stack}
	})
	err = call(ctx)
	returned = true
	return err
}

// activity notifies ConsumerConfig.OnActive whether the consumer is the active one of its
// queue. A nil *activity does nothing.
type activity struct {
	notify func(bool)

	mu        sync.Mutex
	link      *linkSession // whose link states count
	notified  bool
	waiting   []bool
	notifying bool // a goroutine calls notify
}

func newActivity(notify func(bool)) *activity {
	if notify == nil {
		return nil
	}
	return &activity{notify: notify}
}

// follow makes the link of s, the consumer's next, the one whose states count.
func (a *activity) follow(s *linkSession) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.link = s
}

// heard reports a state of the link of s.
func (a *activity) heard(s *linkSession, active bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.link == s {
		a.change(active)
	}
}

// ended reports that the link is gone, or that the consumer has stopped.
func (a *activity) ended() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.link = nil
	a.change(false)
}

// change is called with mu held. It doesn't wait for the user's function.
func (a *activity) change(active bool) {
	if active == a.notified {
		return
	}
	a.notified = active
	a.waiting = append(a.waiting, active)
	if a.notifying {
		return
	}
	a.notifying = true
	go func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		for len(a.waiting) > 0 {
			active := a.waiting[0]
			a.waiting = a.waiting[1:]
			a.mu.Unlock()
			a.notify(active)
			a.mu.Lock()
		}
		a.notifying = false
	}()
}
