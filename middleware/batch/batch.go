// Package batch handles messages together, for instance as the rows of one INSERT, and gives
// each message a separate outcome.
//
//	handler := batch.JSON(batch.Config{Size: 100, Wait: 50 * time.Millisecond},
//		func(ctx context.Context, orders []*batch.Item[Order]) error {
//			for _, order := range orders {
//				if err := add(ctx, order.Value); err != nil {
//					order.Fail(err) // this one is retried, the others aren't
//				}
//			}
//			return nil
//		})
//	err := conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{})
//
// # How it works
//
// The result is a [client.Handler] like any other. The consumer calls it once for each message,
// and these calls wait for each other. A batch starts when it has [Config.Size] messages, or
// [Config.Wait] after its first message was received. Then each call returns its message's error.
// So every middleware sees single messages and works as usual: retry.With retries
// the message that failed, with any strategy, and acknowledges the others.
//
// Each message of a batch needs a handler. The batch raises client.ConsumerConfig.Concurrency to
// Size times Parallel, so the zero ConsumerConfig works.
//
//   - A ConsumerConfig.Prefetch below that is an *argument.Error.
//   - A batch of several messages on a stream is an *argument.Error, because stream.Consume
//     handles one message at a time.
//   - Another client's consumer must run that many handlers itself; otherwise all batches are
//     small and late.
//   - The bodies of a batch are decoded one after the other when it starts. If that takes long,
//     raise [Config.Parallel], so that several batches decode at once.
//
// # Outcomes
//
//   - [Item.Fail] was called with err: the message's result is err, which may be any error or
//     client.Outcome.
//   - The function returns nil: all other messages are acknowledged.
//   - The function returns err: all other messages fail with err.
//   - The function panics: all other messages fail with a *client.PanicError. Because any
//     message of the batch may be the cause, this is an ordinary error that retry.With retries.
//     [Config.Split] finds the message at fault.
//   - A body can't be decoded: its message is dead-lettered with client.ReasonUndecodable, and
//     isn't part of the batch.
//
// If the process crashes, each message that it held counts as a failed delivery. After two of
// them, the consumer isolates these messages and delivers them one at a time, in batches of one.
//
// # When a batch ends early
//
// When Consume's ctx ends, a batch that isn't full starts at once. RabbitMQ below 4.3 counts
// returned messages as delivered, so with it the prefetched messages form a few last batches.
//
// RabbitMQ 4.3 revokes a message that was held for longer than its consumer timeout, by default
// 30 minutes. If that happens before the batch starts, the message isn't part of it. If it
// happens later, [Item.Revoked] returns true, and the message's result is ignored. The batch's
// ctx continues for the other messages.
//
// # With other middleware
//
//   - Middleware around the batch sees single messages.
//   - With ordered.With around it, a batch never contains two messages of one key. So messages
//     of few keys form small batches that each wait for Config.Wait.
//   - A client.Timeout around it includes the time that a message waits for its batch. The
//     batch's ctx ends when those of all its messages have ended.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package batch

import (
	"context"
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Config configures a batch handler. The zero value runs one batch at a time, of up to 100
// messages, and waits at most 100 ms for them.
type Config struct {
	// Size is the maximum number of messages in a batch. Default: 100.
	Size int
	// Wait is how long a batch waits to become full, counted from when its first message was
	// received. While Parallel other batches run, it waits longer and keeps filling. Default:
	// 100 ms.
	Wait time.Duration
	// Parallel is how many batches run at once. Default: 1.
	Parallel int
	// Split calls the function again for each message of a failed batch, in batches of one, so
	// that one bad message doesn't fail the others. It applies when the function returns an
	// error or panics, and skips messages whose [Item.Fail] was called. The function must have
	// no effect when it fails, for instance because it rolls back a transaction. Default: false.
	Split bool
}

const (
	defaultSize = 100
	defaultWait = 100 * time.Millisecond
	// lastWait replaces Wait while the consumer drains.
	lastWait = 10 * time.Millisecond
	// shortWait is the minimum wait of a batch whose first message was received more than Wait
	// ago: other messages were, too, and will arrive at any moment.
	shortWait = time.Millisecond
	// maxHandlers is the limit of client.ConsumerConfig.Concurrency.
	maxHandlers = 100_000
)

func (c Config) withDefaults() (Config, error) {
	at := argument.Root("batch.Config")
	for _, f := range []struct {
		name string
		n    *int
		none int
	}{{"Size", &c.Size, defaultSize}, {"Parallel", &c.Parallel, 1}} {
		if *f.n < 0 || *f.n > maxHandlers {
			return c, argument.At(at.Field(f.name), argument.CodeOutOfRange, *f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxHandlers))
		}
		if *f.n == 0 {
			*f.n = f.none
		}
	}
	if c.Size*c.Parallel > maxHandlers {
		return c, argument.At(at.Field("Parallel"), argument.CodeOutOfRange, c.Parallel, fmt.Sprintf("makes over %d messages with Size", maxHandlers), "make fewer or smaller batches at once").And(at.Field("Size"))
	}
	if c.Wait < 0 {
		return c, argument.At(at.Field("Wait"), argument.CodeOutOfRange, c.Wait, "is negative", "use a positive duration, or 0 for the default")
	}
	if c.Wait == 0 {
		c.Wait = defaultWait
	}
	return c, nil
}

// Item is one message of a batch.
type Item[T any] struct {
	// Value is the decoded body.
	Value T

	call *call
}

// Delivery returns the message's delivery. Don't use it after the function has returned.
func (i *Item[T]) Delivery() *client.Delivery { return i.call.delivery }

// Context returns the message's own ctx, for client.DeliveryFrom and retry.Attempt. It ends
// shortly before the broker revokes the message, with client.ErrConsumerTimeoutNear as its
// cause, or when the broker revokes it, with client.ErrConsumerTimeout, if the client doesn't
// know the timeout. It also ends when a client.Timeout around the batch expires.
func (i *Item[T]) Context() context.Context { return i.call.ctx }

// Revoked reports whether the broker has revoked the message because it was held for too long.
// The broker delivers it again, and its result is ignored.
func (i *Item[T]) Revoked() bool {
	return i.call.delivery.Revoked() || context.Cause(i.call.ctx) == client.ErrConsumerTimeout
}

// Fail sets the message's result: an error, or a client.Outcome. The last call counts. Fail(nil)
// acknowledges the message, even if the function then fails. Fail is safe for concurrent use,
// and has no effect once the function has returned.
func (i *Item[T]) Fail(err error) { i.call.fail(err) }

// JSON returns a [client.Handler] that decodes bodies as JSON and passes them to handle in
// batches: see [Typed].
func JSON[T any](cfg Config, handle func(ctx context.Context, items []*Item[T]) error) client.Handler {
	return Typed(client.JSONCodec{}, cfg, handle)
}

// Typed returns a [client.Handler] that decodes bodies with codec and passes them to handle in
// batches. handle gets at least one message. All messages of a batch are from one queue, in the
// order in which they were received. Don't keep items, or the messages they hold, after handle
// has returned.
//
// ctx has the values of the first message's ctx, except its delivery; use [Item.Context] for
// each message. ctx ends when the consumer's grace time is over.
//
// If codec or handle is nil, cfg is invalid, or the codec can't decode into a T, Consume returns
// an *argument.Error when it starts.
func Typed[T any](codec client.Codec, cfg Config, handle func(ctx context.Context, items []*Item[T]) error) client.Handler {
	h := &handler{}
	cfg, h.invalid = cfg.withDefaults()
	if handle == nil && h.invalid == nil {
		h.invalid = argument.New("handle", nil, "is nil", "pass a function")
	}
	h.cfg = cfg
	h.item = func(calls []*call) {
		all := make([]Item[T], len(calls))
		for i, c := range calls {
			all[i].call, c.item = c, &all[i]
		}
	}
	h.single = client.Typed(codec, func(ctx context.Context, v T) error {
		ctx.Value(callKey{}).(*call).item.(*Item[T]).Value = v
		return nil
	})
	h.handle = func(ctx context.Context, calls []*call) error {
		items := make([]*Item[T], len(calls))
		for i, c := range calls {
			items[i] = c.item.(*Item[T])
		}
		return handle(ctx, items)
	}
	return h
}
