package client

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/argument"
)

// ConsumerConfig configures a consumer. The zero value handles one message at a time.
type ConsumerConfig struct {
	// Concurrency is how many handlers run at once, up to 100,000. A handler of package
	// batch raises it. Default: 1.
	Concurrency int
	// Prefetch is how many unsettled deliveries the consumer may hold, up to 100,000:
	// those that wait for a handler, those in a handler, and those whose forwarded copy
	// isn't confirmed yet. If the process crashes, each counts as a failed delivery.
	//
	// Deliveries whose forward waits because its address accepts nothing come on top,
	// up to 4,096 with 64 MiB of copies. RabbitMQ 4.3 gets further ones back and delivers
	// them again after 30 s. With earlier versions further ones count as all others do.
	//
	// Default: adapted to the handlers' times and the round trip to the broker. It is
	// enough to keep the handlers busy for 200 ms, at most twice Concurrency or 64,
	// whichever is more. If the round trip is long, it is enough for two and a half of
	// them, at most twice Concurrency or 1,024. With Start.Order it is twice Concurrency
	// or 64, whichever is more.
	Prefetch int
	// Grace is how long handlers may go on after Consume's ctx has ended. Then their own
	// ctx ends. A handler that ignores this is abandoned 5 s later: Consume returns, and
	// the broker delivers the message again. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long a Forward is tried again while the broker doesn't
	// accept it. Then its message goes back to the queue as a failed delivery. The time
	// doubles with each failed delivery of the message, up to an hour. The time in which the
	// broker has a memory or disk alarm doesn't count. Default: 30 s.
	ForwardPatience time.Duration
	// Priority is the consumer's priority among those of its queue. While consumers of a
	// higher one have credit, others get nothing. See also EventStarved. Default: 0.
	Priority int32
	// ConsumerTimeout is how long the consumer may hold a delivery before the broker takes it
	// back: see ErrConsumerTimeout. A handler's ctx ends shortly before: see
	// ErrConsumerTimeoutNear. It takes the place of the queue's, and must be at least 1 ms and
	// below 2³² ms. Below RabbitMQ 4.3 Consume refuses it. Default: the queue's.
	ConsumerTimeout time.Duration
	// OnActive, if not nil, is called when the broker makes this the active one of a queue
	// with a single active consumer, and with false when it isn't any more: another one has
	// the queue, the link is lost, or Consume ends. The consumer may still have handlers
	// running then. On other queues the consumer is active as long as it has a link. Calls
	// come in order, and only with changes. The last one may come after Consume has
	// returned. Below RabbitMQ 4.3 Consume refuses it, since the broker doesn't tell.
	OnActive func(active bool)
	// OnGone, if not nil, is called when the queue that was consumed from doesn't exist any
	// more, for instance to declare it again. The consumer waits for it, and then tries again
	// to open its link. After an error, or if the queue is still missing, it calls OnGone
	// again, with the pauses of Config.Reconnect. Messages that were in the queue are lost, and
	// so are those published while it was missing, so this is the place to refill a cache. ctx
	// ends with Consume's. A panic counts as an error. By default the consumer waits until
	// somebody else declares the queue.
	OnGone func(ctx context.Context) error
	// Control, if not nil, pauses the consumer or slows it down while it runs.
	Control *Control
	// NoIsolation turns the quarantine off. By default a message with two failed
	// deliveries that no consumer has reported is handled alone, because it may have
	// crashed a process. While it is handled the consumer holds no other message. So a
	// further crash doesn't raise the delivery counts of others.
	NoIsolation bool

	// near is 0 if Prefetch was given. Otherwise Prefetch is the most, and near the
	// most where the broker is near.
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
	if c.Grace < 0 || c.ForwardPatience < 0 {
		return c, argument.New("ConsumerConfig", nil, "has a negative duration", "use a positive one, or 0 for the default")
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
		return c, argument.New("handlers", n, "is out of range", fmt.Sprintf("have the handler ask for 1 to %d", maxConcurrency))
	case n <= c.Concurrency:
		return c, nil
	case given.Prefetch > 0 && given.Prefetch < n:
		return c, argument.New("ConsumerConfig.Prefetch", given.Prefetch, fmt.Sprintf("is less than the %d deliveries that the handler holds at once", n), fmt.Sprintf("use at least %d, or 0 for the default", n))
	}
	given.Concurrency = n
	return given.withDefaults()
}

// linkProperties are those of the attach; nil if there are none.
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
