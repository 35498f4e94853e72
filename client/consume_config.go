package client

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/link"
)

// ConsumerConfig configures a consumer. The zero value handles one message at a time.
type ConsumerConfig struct {
	// Concurrency is how many handlers run at once, up to 100,000. A handler of package batch
	// raises it. Default: 1.
	Concurrency int
	// Prefetch limits how many unsettled deliveries the consumer holds, up to 100,000: those
	// that wait for a handler, those in a handler, and those whose retry copy isn't confirmed
	// yet. If the process crashes, each of them counts as a failed delivery.
	//
	// Default: adaptive, from Concurrency up to max(64, 2×Concurrency), or up to max(1024,
	// 2×Concurrency) on slow networks. It is enough to keep the handlers busy for 200 ms, or for
	// two and a half round trips to the broker if that is longer. With [Start.Order] it is
	// max(64, 2×Concurrency). Set Prefetch to pin the value. On a queue with a single active
	// consumer, all workers need the same value to keep the order when workers are lost.
	//
	// Deliveries that wait because their retry queue accepts nothing aren't counted, up to 4,096
	// deliveries with 64 MiB of copies. With RabbitMQ 4.3, the consumer returns the deliveries
	// beyond that to the queue, which delivers them again after 30 s. With earlier versions,
	// those count like all others.
	Prefetch int
	// PrefetchBytes limits the encoded bytes of the unsettled deliveries that the consumer holds.
	// When it is reached, the broker waits with further messages, even if Prefetch allows more,
	// and handlers can be idle. A message that is larger is received alone. Deliveries that
	// don't count toward Prefetch don't count here either. Default: 64 MiB.
	//
	// In the worst case, a consumer needs about four times as much memory: for the encoded
	// bytes, the decoded message, a retry copy, and what the garbage collector hasn't freed yet.
	PrefetchBytes int
	// Grace is how long handlers may continue after Consume's ctx has ended. Then their own ctx
	// ends. If a handler ignores that, Consume abandons it 5 s later and returns, and the broker
	// delivers the message again. On Kubernetes, set terminationGracePeriodSeconds higher than
	// Grace + 5 s. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long the consumer tries to publish the copy of a [Forward] that the
	// broker doesn't accept. Then it returns the message to the queue as a failed delivery. The
	// time doubles with each failed delivery of the message, up to an hour. Time during a memory
	// or disk alarm doesn't count. Default: 30 s.
	ForwardPatience time.Duration
	// Priority is the consumer's priority on its queue. Consumers of lower priority receive
	// nothing while consumers of higher priority have credit. See also [EventStarved]. On a queue
	// with a single active consumer, leave it 0: on RabbitMQ 4.3, different priorities can block
	// the queue (see docs/guarantees.md#order). Default: 0.
	Priority int32
	// ConsumerTimeout is how long the consumer may hold a delivery before the broker revokes it:
	// see [ErrConsumerTimeout]. A handler's ctx ends shortly before: see
	// [ErrConsumerTimeoutNear]. It must be at least 1 ms and below 2³² ms (49 days). Default:
	// the queue's timeout. Below RabbitMQ 4.3, Consume returns an [*argument.Error] if it is
	// set.
	ConsumerTimeout time.Duration
	// OnActive, if not nil, is called with true when the broker makes this the active consumer
	// of a queue with a single active consumer. It is called with false when that ends: another
	// consumer is active, the link is lost, or Consume returns. Handlers may still be running
	// then.
	//
	//   - On other queues, the consumer is active as long as it has a link.
	//   - Calls come in order, and only for changes. The last one may come after Consume has
	//     returned.
	//   - Below RabbitMQ 4.3, brokers don't report the active consumer, so Consume returns an
	//     [*argument.Error] if OnActive is set.
	OnActive func(active bool)
	// OnGone, if not nil, is called when the queue no longer exists. Use it to declare the queue
	// again. By default, the consumer waits until somebody else declares it.
	//
	//   - The consumer waits for OnGone, and then tries to open its link again. If OnGone
	//     returns an error or panics, or the queue is still missing, the consumer calls it
	//     again, with the pauses of [Config.Reconnect].
	//   - Messages that were in the queue are lost, and so are messages published while it was
	//     missing. So OnGone is the place to refill a cache.
	//   - ctx ends with Consume's ctx.
	OnGone func(ctx context.Context) error
	// Control, if not nil, pauses the consumer or slows it down while it runs.
	Control *Control
	// NoIsolation disables the isolation of poison messages. By default, a message that was
	// redelivered twice without a reported failure may be crashing its worker, so the consumer
	// handles it alone: it holds no other message during that time. So another crash can't raise
	// the delivery counts of other messages.
	NoIsolation bool

	// near is 0 if the user set Prefetch. Otherwise Prefetch is the limit on slow networks, and
	// near the limit on fast ones.
	near int
}

// Limits of ConsumerConfig.
const (
	maxConcurrency = 100_000
	maxPrefetch    = 100_000
	// farPrefetch is what the default Prefetch grows to where the broker is far away.
	farPrefetch = 1024
)

func (c ConsumerConfig) withDefaults() (ConsumerConfig, error) {
	for _, f := range []struct {
		name string
		n    int
		max  int
	}{{"Concurrency", c.Concurrency, maxConcurrency}, {"Prefetch", c.Prefetch, maxPrefetch}} {
		if f.n < 0 || f.n > f.max {
			return c, argument.New("ConsumerConfig."+f.name, f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", f.max))
		}
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"Grace", c.Grace}, {"ForwardPatience", c.ForwardPatience}} {
		if f.d < 0 {
			return c, argument.New("ConsumerConfig."+f.name, f.d, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	if c.PrefetchBytes < 0 {
		return c, argument.New("ConsumerConfig.PrefetchBytes", c.PrefetchBytes, "is negative", "use a number of bytes, or 0 for the default of 64 MiB")
	}
	if t := c.ConsumerTimeout; t != 0 && (t < time.Millisecond || t > math.MaxUint32*time.Millisecond) {
		return c, argument.New("ConsumerConfig.ConsumerTimeout", t, "is out of range", "use 1 ms to 49 days, or 0 for the queue's")
	}
	if c.Concurrency == 0 {
		c.Concurrency = 1
	}
	if c.Prefetch == 0 {
		c.near = max(2*c.Concurrency, 64)
		c.Prefetch = max(c.near, farPrefetch)
	}
	if c.PrefetchBytes == 0 {
		c.PrefetchBytes = link.PrefetchBytes
	}
	if c.Grace == 0 {
		c.Grace = 30 * time.Second
	}
	if c.ForwardPatience == 0 {
		c.ForwardPatience = 30 * time.Second
	}
	return c, nil
}

// raised returns c with at least n handlers. given is c before withDefaults.
func (c ConsumerConfig) raised(given ConsumerConfig, n int) (ConsumerConfig, error) {
	switch {
	case n < 1 || n > maxConcurrency:
		return c, argument.New("handlers", n, "is out of range", fmt.Sprintf("call Start.Handlers with 1 to %d", maxConcurrency))
	case n <= c.Concurrency:
		return c, nil
	case given.Prefetch > 0 && given.Prefetch < n:
		return c, argument.New("ConsumerConfig.Prefetch", given.Prefetch, fmt.Sprintf("is less than the %d deliveries that the handler needs at once", n), fmt.Sprintf("use at least %d, or 0 for the default", n))
	}
	given.Concurrency = n
	return given.withDefaults()
}

// linkProperties returns the properties of the attach frame; nil if there are none.
func (c ConsumerConfig) linkProperties() map[string]any {
	var p map[string]any
	set := func(key string, v any) {
		if p == nil {
			p = map[string]any{}
		}
		p[key] = v
	}
	if c.Priority != 0 {
		set("rabbitmq:priority", c.Priority)
	}
	if c.ConsumerTimeout != 0 {
		set("rabbitmq:consumer-timeout", uint32(c.ConsumerTimeout.Milliseconds()))
	}
	return p
}
