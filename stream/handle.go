package stream

import (
	"context"
	"errors"
	"runtime/debug"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/retry"
)

// take has one message handled, and moves on.
func (k *consumer) take(ctx, handlerCtx context.Context, payload []byte) error {
	m, unreadable := decode(payload)
	offset, ok := offsetIn(m)
	if unreadable != nil {
		offset, ok = offsetOfEncoded(payload)
	}
	if !ok {
		return errNoOffset
	}
	if k.at.kind == number {
		if offset < k.at.n {
			return nil // the beginning of a chunk
		}
		if k.saved && offset > k.at.n && k.cfg.Filter.selectsAll() {
			k.gap(ctx, offset)
		}
	}
	var err error
	switch {
	case unreadable != nil:
		err = k.giveUp(ctx, handlerCtx, failure{m, offset, 0, client.ReasonUndecodable, unreadable})
	case k.cfg.Filter.matches(m):
		err = k.process(ctx, handlerCtx, m, offset)
	}
	if err != nil {
		return err
	}
	k.at, k.saved = At(offset+1), true
	k.saver.handled(ctx, offset+1)
	return nil
}

func (f Filter) selectsAll() bool {
	return len(f.Values)+len(f.Properties)+len(f.ApplicationProperties)+len(f.SQL) == 0
}

// decode returns a message with its bytes as its body, and an error, if go-amqp can't
// decode it or wouldn't survive that.
func decode(payload []byte) (*client.Message, error) {
	var m message.Decoded
	if m.Decode(payload) == nil {
		return &m.Message, nil
	}
	return client.NewMessage(append([]byte(nil), payload...)), errUnreadable
}

var errUnreadable = errors.New("go-amqp can't decode the message; the copy's body is all of it, encoded")

// process calls the handler until it is done with the message.
func (k *consumer) process(ctx, handlerCtx context.Context, m *client.Message, offset uint64) error {
	d := client.NewDelivery(k.stream, m)
	for attempt := 1; ; {
		err := k.call(client.WithDelivery(handlerCtx, d), d)
		if err == nil {
			return nil
		}
		if handlerCtx.Err() != nil {
			return errDrained // whatever it says: it was interrupted
		}
		v := k.judge(err, attempt)
		switch v.do {
		case doNothing:
			return nil
		case doForward:
			return k.forward(ctx, handlerCtx, v.forward, failure{m, offset, attempt, client.ReasonUnforwardable, err})
		case doGiveUp:
			return k.giveUp(ctx, handlerCtx, failure{m, offset, attempt, v.reason, err})
		}
		if ctx.Err() != nil {
			return errDrained
		}
		if v.counts {
			k.log.Debug("hopback: a message of a stream failed; its handler is called again", "offset", offset, "attempt", attempt, "pause", v.pause, "error", client.ErrorText(err))
			attempt++
		}
		if !sleep(ctx, v.pause) {
			return errDrained
		}
	}
}

// call turns a panic into an error.
func (k *consumer) call(ctx context.Context, d *client.Delivery) (err error) {
	ctx, handled := k.owner.Handle(ctx, d)
	k.counts.handling.Store(time.Now().UnixNano())
	defer func() {
		if p := recover(); p != nil {
			err = client.DeadLetter{Reason: client.ReasonPanicked, Err: &client.PanicError{Value: p, Stack: debug.Stack()}}
		}
		k.counts.handling.Store(0)
		handled(err)
	}()
	return k.handler.Handle(ctx, d)
}

type action int8

const (
	doAgain action = iota
	doNothing
	doForward
	doGiveUp
)

type verdict struct {
	do      action
	counts  bool // as an attempt
	pause   time.Duration
	reason  client.Reason
	forward client.Forward
}

// minPause keeps a handler that asks for no pause from spinning.
const minPause = 10 * time.Millisecond

// judge reads what a handler's error asks for.
func (k *consumer) judge(err error, attempt int) verdict {
	failed := verdict{counts: true, pause: max(k.cfg.Backoff(attempt), 0)}
	if attempt >= k.cfg.Attempts {
		failed = verdict{do: doGiveUp, reason: retry.ReasonExhausted}
	}
	says := outcome.Read[client.Outcome](err)
	switch says.Kind {
	case outcome.IsDiscard:
		return verdict{do: doNothing}
	case outcome.IsPermanent:
		return verdict{do: doGiveUp, reason: retry.ReasonPermanent}
	case outcome.IsAfter:
		if says.After.Snooze {
			return verdict{pause: max(says.After.Delay, minPause)}
		}
		if failed.do == doAgain {
			failed.pause = max(says.After.Delay, minPause)
		}
	case outcome.IsDecided:
		switch o := client.OutcomeOf(says.Decided).(type) {
		case client.Forward:
			return verdict{do: doForward, forward: o}
		case client.DeadLetter:
			return verdict{do: doGiveUp, reason: o.Reason}
		case client.Modify:
			if o.DeadLetter {
				return verdict{do: doGiveUp, reason: retry.ReasonRejected}
			}
		case client.Requeue:
			if !o.Failed {
				return verdict{pause: max(k.cfg.Backoff(1), minPause)}
			}
		}
	}
	return failed
}

// failure is a message that isn't tried again.
type failure struct {
	message  *client.Message
	offset   uint64
	attempts int
	reason   client.Reason
	err      error
}

func (k *consumer) handlerError(f failure) error {
	return &HandlerError{Stream: k.stream, Offset: f.offset, Attempts: f.attempts, Reason: f.reason, Err: f.err}
}

// giveUp does what Config.Failed says.
func (k *consumer) giveUp(ctx, handlerCtx context.Context, f failure) error {
	switch k.cfg.Failed {
	case FailedSkip:
		k.log.Error("hopback: a message of a stream failed to the end and is skipped", "offset", f.offset, "attempts", f.attempts, "reason", f.reason, "error", client.ErrorText(f.err))
		return nil
	case FailedForward:
		c := client.Copy(f.message)
		if c.Annotations == nil {
			c.Annotations = amqp.Annotations{}
		}
		c.Annotations[annotation.Stream] = k.stream
		c.Annotations[annotation.Offset] = int64(f.offset)
		c.Annotations[client.AnnotationReason] = string(f.reason)
		c.Annotations[client.AnnotationError] = client.ErrorText(f.err)
		return k.publish(ctx, handlerCtx, address.Queue(k.cfg.FailedQueue), c, f)
	}
	return k.handlerError(f)
}

// forward publishes what a handler has returned as a Forward.
func (k *consumer) forward(ctx, handlerCtx context.Context, o client.Forward, f failure) error {
	r := client.Resolve(o)
	if r.Kind != client.ResolutionForward {
		f.err = errors.Join(f.err, r.Refused)
		return k.giveUp(ctx, handlerCtx, f)
	}
	return k.publish(ctx, handlerCtx, address.Address{}, r.Forward.Message, f, client.PublishTo(r.Forward.To))
}

// publisherTo returns the publisher of FailedQueue, or the one of Forwards for the zero
// Address. It opens it if need be.
func (k *consumer) publisherTo(ctx context.Context, to address.Address) (*client.Publisher[*client.Message], error) {
	p := &k.failed
	if to.IsZero() {
		p = &k.forwards
	}
	if *p == nil {
		var err error
		if *p, err = client.NewPublisher[*client.Message](ctx, k.conn, to, client.PublisherConfig{Copies: true}); err != nil {
			return nil, err
		}
	}
	return *p, nil
}

// publish publishes a copy, and returns nil when the broker has confirmed it. It tries for
// as long as it takes.
func (k *consumer) publish(ctx, handlerCtx context.Context, to address.Address, m *client.Message, f failure, edit ...func(*client.Message)) error {
	for failures := 0; ; failures++ {
		p, err := k.publisherTo(handlerCtx, to)
		if err == nil {
			err = p.Publish(handlerCtx, m, edit...)
		}
		if err == nil {
			return nil
		}
		_, bad := errors.AsType[*argument.Error](err)
		if bad || errors.Is(err, client.ErrTooLarge) {
			f.err = errors.Join(f.err, err)
			return k.handlerError(f)
		}
		if ctx.Err() != nil || handlerCtx.Err() != nil || errors.Is(err, client.ErrClosed) {
			return errDrained
		}
		k.log.Warn("hopback: the copy of a stream's message isn't confirmed; trying again", "offset", f.offset, "error", err)
		if !sleep(ctx, k.owner.Pause(failures)) {
			return errDrained
		}
	}
}
