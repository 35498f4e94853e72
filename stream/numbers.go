package stream

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client/instrument"
)

// numbers are a consumer's part of client.Conn.Stats.
type numbers struct {
	stream   string
	prefetch int
	// In Unix nanoseconds: since when the handler runs, and when the last message came. 0 is
	// not at all.
	handling, delivered atomic.Int64
	ready               atomic.Int64 // messages that wait for the handler

	mu    sync.Mutex
	up    bool
	since time.Time
	err   error
}

// attached notes whether the consumer has a link, and why it has none.
func (n *numbers) attached(up bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if up != n.up {
		n.up, n.since = up, time.Now()
	}
	n.err = err
	if !up {
		n.ready.Store(0)
		n.delivered.Store(0)
	}
}

// count adds the numbers.
func (n *numbers) count(s *instrument.Stats) {
	n.mu.Lock()
	c := instrument.ConsumerStats{Queue: n.stream, Up: n.up, Since: n.since, Err: n.err, Concurrency: 1, Window: n.prefetch, Ready: int(n.ready.Load())}
	n.mu.Unlock()
	if at := n.handling.Load(); at != 0 {
		c.Handling, c.Oldest = 1, time.Unix(0, at)
		c.Newest = c.Oldest
	}
	if at := n.delivered.Load(); at != 0 {
		c.Delivered = time.Unix(0, at)
	}
	c.Unsettled = c.Handling + c.Ready
	s.Consumers = append(s.Consumers, c)
}
