package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/adapter"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/retry"
)

// take handles one message, and continues with the next.
func (k *consumer) take(ctx, handlerCtx context.Context, got dedicated.Message) error {
	payload, reason := got.Payload, client.ReasonUndecodable
	m, unreadable := decode(payload)
	if got.Cut() {
		m, unreadable = &client.Message{}, &client.Error{Op: "consume", Target: k.stream, Kind: client.ErrTooLarge, Text: fmt.Sprintf("the message has %d bytes, and Config.MaxMessageSize allows fewer", got.Size)}
		reason = client.ReasonTooLarge
	}
	offset, ok := offsetIn(m)
	if unreadable != nil {
		offset, ok = offsetOfEncoded(payload)
	}
	if !ok {
		return errNoOffset
	}
	if k.at.kind == offsetNumber {
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
		v := verdict{do: doGiveUp, reason: reason, text: client.ErrorText(unreadable)}
		err = k.giveUp(ctx, handlerCtx, v, failure{message: m, offset: offset, err: unreadable, cut: got.Cut()})
	case k.cfg.Filter.matches(m):
		err = k.process(ctx, handlerCtx, failure{message: m, offset: offset, attempts: 1})
	}
	if err != nil {
		return err
	}
	if !got.Cut() {
		k.mark = markOf(offset, payload)
	}
	k.handled(ctx, offset)
	return nil
}

// handled advances the position.
func (k *consumer) handled(ctx context.Context, offset uint64) {
	k.at, k.saved = At(offset+1), true
	k.saver.handled(ctx, offset+1, k.mark)
}

// workOn works until ctx is done or an error is final. A handler can terminate the goroutine with
// runtime.Goexit, and with it the connection: then another goroutine carries out the outcome of
// its message, and continues from there.
func (k *consumer) workOn(ctx, handlerCtx context.Context) error {
	for {
		// Of a function of the user's that isn't the handler.
		var err error = &HandlerError{Stream: k.stream, Reason: client.ReasonPanicked, Err: &client.PanicError{}}
		done := make(chan struct{})
		f := k.exited
		k.exited = nil
		go func() {
			defer close(done)
			if f != nil {
				if unfinished := k.process(ctx, handlerCtx, *f); unfinished != nil {
					err = unfinished
					return
				}
				k.handled(ctx, f.offset)
			}
			err = k.work(ctx, handlerCtx)
		}()
		<-done
		if k.exited == nil && errors.Is(err, errDrained) {
			return nil
		}
		if k.exited == nil {
			return err
		}
		k.counts.attached(false, k.exited.err)
	}
}

func (f Filter) selectsAll() bool {
	return len(f.Values)+len(f.Properties)+len(f.ApplicationProperties)+len(f.SQL) == 0
}

// decode returns a message. If go-amqp can't decode the bytes, or would panic, it returns a
// message with the bytes as its body, and an error.
func decode(payload []byte) (*client.Message, error) {
	var m message.Decoded
	if m.Decode(payload) == nil {
		return &m.Message, nil
	}
	return client.NewMessage(append([]byte(nil), payload...)), errUnreadable
}

var errUnreadable = errors.New("go-amqp can't decode the message; the body of the copy contains its encoded bytes")

// process calls the handler until f's message is finished. If f has an error, the handler was
// called already.
func (k *consumer) process(ctx, handlerCtx context.Context, f failure) error {
	d := client.NewDelivery(k.stream, f.message)
	for {
		if f.err == nil {
			f.err = k.call(handlerCtx, d, f)
		}
		if f.err == nil {
			return nil
		}
		if handlerCtx.Err() != nil {
			return errDrained // with any result: it was interrupted
		}
		v := k.judge(&f)
		for v.do == doForward {
			err := k.publish(ctx, handlerCtx, address.Address{}, v.forward.Message, f, client.PublishTo(v.forward.To))
			if !hopeless(err) {
				return err
			}
			v = k.resolved(v.forward.Unsendable(err), &f)
		}
		switch v.do {
		case doNothing:
			return nil
		case doGiveUp:
			return k.giveUp(ctx, handlerCtx, v, f)
		}
		if ctx.Err() != nil {
			return errDrained
		}
		if v.counts {
			k.log.Debug("hopback: a message from a stream failed; its handler is called again", "offset", f.offset, "attempt", f.attempts, "pause", v.pause, "error", client.ErrorText(f.err))
			f.attempts++
		}
		f.err = nil
		if !backoff.Sleep(ctx, v.pause) {
			return errDrained
		}
	}
}

// call calls the handler for f's message.
func (k *consumer) call(ctx context.Context, d *client.Delivery, f failure) (err error) {
	ctx, handled := k.owner.Handle(client.WithDelivery(ctx, d), d)
	k.counts.handling.Store(time.Now().UnixNano())
	adapter.Call(ctx, k.handler, d, func(result error, exits bool) {
		k.counts.handling.Store(0)
		handled(result)
		if err = result; exits {
			f.err = result
			k.exited = &f
		}
	})
	return err
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
	forward client.Forward
	// doGiveUp: the reason of a dead letter.
	reason      client.Reason
	text        string
	annotations map[string]any
}

// minPause keeps a handler that asks for no pause from looping without one.
const minPause = 10 * time.Millisecond

// judge returns what a handler's error asks for. The policy decides about errors that aren't
// outcomes, as with retry.With. A panic of a rule's condition dead-letters the message there,
// too.
func (k *consumer) judge(f *failure) (v verdict) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		v = verdict{do: doGiveUp, reason: client.ReasonPanicked, text: client.ErrorText(&client.PanicError{Value: value, Stack: stack})}
	})
	says := outcome.Read[client.Outcome](f.err)
	if says.Kind == outcome.IsDecided {
		o := client.OutcomeOf(says.Decided)
		v = k.resolved(client.Resolve(o), f)
		if m, ok := o.(client.Modify); ok && v.do == doGiveUp {
			v.text = client.ErrorText(m.Err)
			if own, ok := m.Annotations[client.AnnotationReason].(string); ok {
				v.reason = client.Reason(own)
			}
		}
	} else {
		v = k.decided(f, f.err, says)
	}
	returned = true
	return v
}

// decided is what the policy decides.
func (k *consumer) decided(f *failure, err error, says outcome.Verdict) verdict {
	now := time.Now()
	what := k.cfg.policy.Decide(inside.Attempt{Err: err, Says: says, Retries: f.attempts - 1, First: f.first, Now: now})
	if f.first.IsZero() && !(says.Kind == outcome.IsAfter && says.After.Snooze) {
		f.first = now
	}
	switch {
	case what.Discard:
		return verdict{do: doNothing}
	case what.Reason != "":
		return verdict{do: doGiveUp, reason: client.Reason(what.Reason), text: client.ErrorText(what.Err)}
	case what.Asked:
		what.Delay = max(what.Delay, minPause)
	}
	return verdict{counts: what.Counted, pause: what.Delay}
}

// resolved reads an outcome. A message that would be requeued is handled again.
func (k *consumer) resolved(r client.Resolution, f *failure) verdict {
	if r.Refused != nil {
		k.log.Error("hopback: an outcome can't be carried out; another one replaces it", "offset", f.offset, "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	switch {
	case r.Kind == client.ResolutionAccept:
		return verdict{do: doNothing}
	case r.Kind == client.ResolutionForward:
		return verdict{do: doForward, forward: r.Forward}
	case r.DeadLetter:
		return verdict{do: doGiveUp, reason: cmp.Or(r.Reason, retry.ReasonRejected), text: r.Error, annotations: r.Annotations}
	case r.Failed:
		return k.decided(f, errors.New(r.Error), outcome.Verdict{})
	}
	return verdict{pause: max(k.cfg.Backoff(1), minPause)}
}

// failure is a message with the result of its handler.
type failure struct {
	message  *client.Message
	offset   uint64
	attempts int       // this one included
	first    time.Time // when the handler first failed; zero: it hasn't
	err      error     // nil: it is still running
	cut      bool      // the message isn't whole, so there can be no copy
}

func (k *consumer) handlerError(f failure, reason client.Reason) error {
	if outcome.Read[client.Outcome](f.err).Unreadable || !outcome.Answers(f.err) {
		f.err = errors.New(client.ErrorText(f.err)) // the caller will ask what it is
	}
	return &HandlerError{Stream: k.stream, Offset: f.offset, Attempts: f.attempts, Reason: reason, Err: f.err}
}

// giveUp carries out Config.Failed.
func (k *consumer) giveUp(ctx, handlerCtx context.Context, v verdict, f failure) error {
	switch failed := k.cfg.Failed; {
	case failed == FailedSkip:
		k.log.Error("hopback: a message from a stream failed and is skipped, because Config.Failed is FailedSkip", "offset", f.offset, "attempts", f.attempts, "reason", v.reason, "error", client.ErrorText(f.err))
		return nil
	case failed == FailedForward && !f.cut:
		c := client.Copy(f.message)
		if c.Annotations == nil {
			c.Annotations = amqp.Annotations{}
		}
		for key, value := range v.annotations {
			c.Annotations[key] = value
		}
		c.Annotations[annotation.Stream] = k.stream
		c.Annotations[annotation.Offset] = int64(f.offset)
		c.Annotations[client.AnnotationReason] = string(v.reason)
		c.Annotations[client.AnnotationError] = v.text
		err := k.publish(ctx, handlerCtx, address.Queue(k.cfg.FailedQueue), c, f)
		if hopeless(err) {
			f.err = errors.Join(f.err, err)
			return k.handlerError(f, v.reason)
		}
		return err
	}
	return k.handlerError(f, v.reason)
}

// hopeless reports whether the message itself is why it can't be sent.
func hopeless(err error) bool {
	_, bad := errors.AsType[*argument.Error](err)
	return bad || errors.Is(err, client.ErrTooLarge)
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

// publish publishes a copy, and returns nil when the broker has confirmed it. It retries for as
// long as that takes, unless the message itself makes it impossible.
func (k *consumer) publish(ctx, handlerCtx context.Context, to address.Address, m *client.Message, f failure, edit ...func(*client.Message)) error {
	for range backoff.Tries(ctx, k.owner.Pause) {
		p, err := k.publisherTo(handlerCtx, to)
		if err == nil {
			err = p.Publish(handlerCtx, m, edit...)
		}
		if err == nil || hopeless(err) {
			return err
		}
		if ctx.Err() != nil || handlerCtx.Err() != nil || errors.Is(err, client.ErrClosed) {
			return errDrained
		}
		k.log.Warn("hopback: the broker didn't confirm the copy of a message from a stream; trying again", "offset", f.offset, "error", err)
	}
	return errDrained
}
