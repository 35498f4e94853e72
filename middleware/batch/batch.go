// Package batch handles messages together, such as the rows of one INSERT, and gives each
// of them an outcome of its own.
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
// The result is a client.Handler like any other. The consumer calls it once for each
// message, and these calls wait for each other. A batch begins when Config.Size of them
// have come together, or Config.Wait after the first message was received. Then each call
// returns the error of its own message. So every middleware works as it does with a
// handler of single messages, and sees single messages: retry.With retries the one that
// failed, by any strategy, and the others are accepted once.
//
// A call for each message of a batch needs that many handlers. The batch raises
// client.ConsumerConfig.Concurrency to Size times Parallel, so the zero ConsumerConfig will
// do. A ConsumerConfig.Prefetch below that is an *argument.Error, and so is a batch of
// several messages on a stream, which stream.Consume handles one at a time. Another client's consumer
// must run as many handlers by itself, or all batches are small and late.
//
// The bodies of a batch are decoded when it begins, one after the other. Where that takes
// long, Config.Parallel lets several batches decode at once.
//
// # Outcomes
//
//	Item.Fail(err) was called    the message's result is err: any error or client.Outcome
//	the function returns nil     all other messages are accepted
//	the function returns err     all other messages fail with err
//	the function panics          all other messages fail with a *client.PanicError
//	a body can't be decoded      it is dead-lettered with client.ReasonUndecodable, and
//	                             the function isn't given it
//
// A panic isn't known to be one message's fault. So it is an ordinary error here, which
// retry.With retries, and not a death. Config.Split finds the message at fault.
//
// If the process dies, each message that it held counts as a failed delivery. After two
// the consumer's quarantine hands them over one at a time: batches of one.
//
// # The end of a batch
//
// When Consume's ctx ends, a batch that isn't full begins at once. RabbitMQ below 4.3
// counts what is given back, so there the messages that were prefetched make up a few last
// batches.
//
// RabbitMQ 4.3 takes a message back that was held for longer than its consumer timeout,
// by default 30 minutes. If that happens before the batch begins, the message isn't in it.
// If it happens later, Item.Revoked tells, and the message's result is ignored. The
// batch's ctx goes on for the others.
//
// # With other middleware
//
// Middleware around the batch sees single messages. With ordered.With around it, no
// batch has two messages of one key, and the next of that key is in a later batch. So
// messages of few keys make small batches, each of which waits for Config.Wait. A
// client.Timeout around it begins when the message's wait does. The batch's ctx ends when
// those of all its messages have ended.
package batch

import (
	"context"
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Config configures a batch handler. The zero value makes one batch at a time, of up to
// 100 messages, and waits at most 100 ms for them.
type Config struct {
	// Size is the most messages in a batch. Default: 100.
	Size int
	// Wait is how long a batch waits to become full, from the time that its first message
	// was received. A batch may begin later, while Parallel others run, and goes on
	// filling meanwhile. Default: 100 ms.
	Wait time.Duration
	// Parallel is how many batches run at once. Default: 1.
	Parallel int
	// Split calls the function once more for each message of a batch for which it has
	// returned an error or panicked, in a batch of one. So one message's fault doesn't
	// fail the others. Messages whose Item.Fail was called are left out. The function
	// must have no effect when it fails, for instance because it rolls back a transaction.
	Split bool
}

const (
	defaultSize = 100
	defaultWait = 100 * time.Millisecond
	// lastWait takes the place of Wait while the consumer drains.
	lastWait = 10 * time.Millisecond
	// shortWait is how long a batch waits at least whose first message was received more
	// than Wait ago: others have, too, and are about to come.
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

// Delivery returns the message's delivery. It must not be used after the function has
// returned.
func (i *Item[T]) Delivery() *client.Delivery { return i.call.delivery }

// Context returns the message's own ctx: that of client.DeliveryFrom and retry.Attempt. It
// ends shortly before the broker takes the message back, with client.ErrConsumerTimeoutNear as its
// cause, or at that moment, with client.ErrConsumerTimeout, if the client doesn't know the timeout.
// It also ends when a client.Timeout around the batch is over.
func (i *Item[T]) Context() context.Context { return i.call.ctx }

// Revoked reports whether the broker delivers the message to another consumer because
// this one has held it for too long. Whatever becomes of it here is ignored.
func (i *Item[T]) Revoked() bool {
	return i.call.delivery.Revoked() || context.Cause(i.call.ctx) == client.ErrConsumerTimeout
}

// Fail sets the message's result: an error, or a client.Outcome. The last call counts. Fail(nil)
// has the message accepted, even if the function then fails. Fail may be called
// concurrently, and has no effect once the function has returned.
func (i *Item[T]) Fail(err error) { i.call.fail(err) }

// JSON returns a client.Handler that decodes bodies as JSON and hands them to handle in
// batches: see Typed.
func JSON[T any](cfg Config, handle func(ctx context.Context, items []*Item[T]) error) client.Handler {
	return Typed(client.JSONCodec{}, cfg, handle)
}

// Typed returns a client.Handler that decodes bodies with codec and hands them to handle in
// batches. The function is given at least one message. Its messages are from one queue, in the order
// in which they were received. handle must not keep items, nor what they hold.
//
// ctx has the values of the first message's ctx, but for its delivery: Item.Context has
// each message's own. ctx ends with the consumer's grace time.
//
// A nil codec, a nil handle, a bad cfg, and a T that the codec can't decode into stop the
// consumer at its start with an *argument.Error.
func Typed[T any](codec client.Codec, cfg Config, handle func(ctx context.Context, items []*Item[T]) error) client.Handler {
	h := &handler{}
	cfg, h.invalid = cfg.withDefaults()
	if handle == nil && h.invalid == nil {
		h.invalid = argument.New("handle", nil, "is nil", "give the batch a function")
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
