package client

import (
	"math"
	"sync"
)

// Control limits or pauses running consumers. The zero value is ready to use in
// ConsumerConfig.Control, and may serve several consumers at once. A Middleware finds
// its consumer's in Start.Control, or with ControlFrom. Control is safe for concurrent
// use.
type Control struct {
	mu        sync.Mutex
	limits    map[*int]struct{}
	consumers map[*follower]struct{}
	resumed   chan struct{} // closed and renewed when the limit rises from 0
}

// Limit lets the consumer hold at most n deliveries, including those that wait for a
// handler, until release is called. The lowest of several limits holds. A limit of 0 or
// less pauses the consumer: no handler begins, the broker delivers nothing more, and
// prefetched deliveries go back to the queue. RabbitMQ below 4.3 would count these as
// delivered, so there the consumer keeps them. Running handlers go on.
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

// Pause pauses the consumer until resume is called. It is Limit(0).
func (c *Control) Pause() (resume func()) { return c.Limit(0) }

// Paused reports whether the consumer is paused.
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

// notify is called with mu held, so that consumers hear of changes in their order.
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

// gate returns whether the consumer is paused, and a channel that is closed when
// it isn't any more.
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

// follower is a consumer that follows the limit.
type follower struct{ limited func(n int) }

// follow calls limited with the limit, and again with each change, until stop is called.
func (c *Control) follow(limited func(n int)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.consumers == nil {
		c.consumers = map[*follower]struct{}{}
	}
	k := &follower{limited}
	c.consumers[k] = struct{}{}
	limited(c.lowest())
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.consumers, k)
	}
}
