package client

import (
	"math"
	"sync"
)

// Control limits or pauses running consumers, for instance while a service that the handlers
// need is down. The zero value is ready to use as [ConsumerConfig.Control], and may control
// several consumers. A [Middleware] gets its consumer's Control from [Start.Control] or
// [ControlFrom]. It is safe for concurrent use.
type Control struct {
	mu        sync.Mutex
	limits    map[*int]struct{}
	consumers map[*consumer]struct{}
	resumed   chan struct{} // closed and renewed when the limit rises from 0
}

// Limit limits the consumer to n unsettled deliveries, including those that wait for a handler,
// until release is called. If there are several limits, the lowest applies.
//
// A limit of 0 or less pauses the consumer. Then no handler starts, the broker delivers nothing
// more, and prefetched deliveries return to the queue, as do those that wait in one of hopback's
// middlewares, such as ratelimit. RabbitMQ below 4.3 would count these as delivered, so with it the
// consumer keeps them. Running handlers continue.
func (c *Control) Limit(n int) (release func()) {
	n = max(n, 0)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.limits == nil {
		c.limits = map[*int]struct{}{}
	}
	own := &n
	c.limits[own] = struct{}{}
	c.notify()
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.limits, own)
		c.notify()
	})
}

// Pause pauses the consumer until resume is called. It is [Control.Limit] with 0.
func (c *Control) Pause() (resume func()) { return c.Limit(0) }

// Paused reports whether consumers with this Control are paused.
func (c *Control) Paused() bool {
	_, paused := c.gate()
	return paused
}

// lowest is called with mu held.
func (c *Control) lowest() int {
	low := math.MaxInt // above every Prefetch
	for n := range c.limits {
		low = min(low, *n)
	}
	return low
}

// notify is called with mu held, so that consumers learn of changes in order.
func (c *Control) notify() {
	low := c.lowest()
	if low > 0 && c.resumed != nil {
		close(c.resumed)
		c.resumed = nil
	}
	for k := range c.consumers {
		k.limited(low)
	}
}

// gate returns whether the consumer is paused, and a channel that is closed when it resumes.
func (c *Control) gate() (resumed <-chan struct{}, paused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lowest() > 0 {
		return nil, false
	}
	if c.resumed == nil {
		c.resumed = make(chan struct{})
	}
	return c.resumed, true
}

// follow tells k the limit, and again with each change, until stop is called.
func (c *Control) follow(k *consumer) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.consumers == nil {
		c.consumers = map[*consumer]struct{}{}
	}
	c.consumers[k] = struct{}{}
	k.limited(c.lowest())
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.consumers, k)
	}
}
