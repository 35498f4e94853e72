package stream

import (
	"context"
	"errors"
	"fmt"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
)

// peek checks that it is a stream: other queues claim to apply its filters, and would lose what a
// consumer of settled messages doesn't handle. During an alarm the broker doesn't answer this
// question, but the stream's messages do. If it has none, there is nothing to handle either.
func (k *consumer) peek(ctx context.Context) error {
	failed := make(chan error, 1)
	_, pending, err := startcheck.Check[struct{}]{
		Run: func(ctx context.Context) (struct{}, error) { return struct{}{}, k.inspect(ctx) }, Alarms: k.owner, Log: k.log,
		Stop: func(err error) {
			failed <- err
			refusal.Stop(ctx, err)
		},
	}.Start(ctx, func(struct{}) {})
	if err != nil {
		return err
	}
	if pending != nil {
		if err := k.peekDuringAlarm(ctx, pending, failed); err != nil {
			return err
		}
	}
	k.broker = k.conn.Broker()
	return client.Prepare(ctx, k.handler, client.Start{Queue: k.stream, Broker: k.broker, Management: k.conn.Management(), Log: k.cfg.Logger, Handlers: oneHandler})
}

// inspect asks the broker for the type of the queue.
func (k *consumer) inspect(ctx context.Context) error {
	info, err := declare.Inspect(ctx, k.conn.Management(), k.stream)
	if errors.Is(err, declare.ErrNotFound) {
		return &client.Error{Op: "consume", Target: k.stream, Kind: client.ErrNotFound, Err: err}
	}
	if err == nil && info.Type != "stream" {
		return argument.At(argument.Root("stream"), argument.CodeUnsupported, k.stream, fmt.Sprintf("is a %s queue", info.Type), "consume from it with Conn.Consume, or declare a stream with declare.Stream")
	}
	return err
}

// peekDuringAlarm returns nil when the messages show that it is a stream, or when the broker has
// answered that it is one.
func (k *consumer) peekDuringAlarm(ctx context.Context, pending *startcheck.Pending[struct{}], failed <-chan error) error {
	for try := range backoff.Tries(ctx, k.owner.Pause) {
		found, err := k.isStream(ctx, try.Attempt()-1)
		if found {
			k.log.Warn("hopback: the broker answers no requests during its memory or disk alarm. The stream consumer starts without the check of the stream, and runs it after the alarm")
			return nil
		}
		if err == nil {
			break
		}
		select {
		case <-pending.Done():
			return nil
		case err := <-failed:
			return err
		default:
			k.log.Warn("hopback: a stream consumer can't read the stream yet; trying again", "error", err)
		}
	}
	select {
	case <-pending.Done():
		return nil
	case err := <-failed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// isStream reports whether the messages show that it is a stream. Another kind of queue ignores from
// which offset it is read, and its messages have no offset, unless their publisher wrote one.
func (k *consumer) isStream(ctx context.Context, behind int) (bool, error) {
	patient := impatient(ctx)
	defer patient.stop()
	raw, err := dedicated.OpenFor(patient, k.owner, "stream", behind)
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = raw.Close(ctx)
	}()
	for _, from := range []Offset{At(maxOffset), {}} {
		_, found, err := k.firstOf(patient, raw, from)
		patient.answered()
		if beyond := from.kind == offsetNumber; errors.Is(err, errNoOffset) || err == nil && found == beyond {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}
