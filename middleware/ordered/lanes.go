package ordered

import (
	"bytes"
	"cmp"
	"context"
	"sync"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/lanes"
)

// laneKey is a key of one queue.
type laneKey struct{ queue, key string }

// turns lets one delivery of each key through at a time.
type turns struct {
	mu    sync.Mutex
	lanes lanes.Lanes[laneKey, *turn] // in the order in which they were received
}

// turn is a delivery that waits.
type turn struct {
	delivery *client.Delivery
	come     chan struct{} // closed when it may go
}

// enter waits until it is d's turn. After nil, leave must be called.
func (l *turns) enter(ctx context.Context, k laneKey, d *client.Delivery) error {
	l.mu.Lock()
	if l.lanes.Claim(k) {
		l.mu.Unlock()
		return nil
	}
	t := &turn{delivery: d, come: make(chan struct{})}
	l.lanes.Wait(k, t, received)
	l.mu.Unlock()
	select {
	case <-t.come:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	waited := l.lanes.Remove(k, t)
	l.mu.Unlock()
	if !waited {
		l.leave(k) // its turn has come all the same: pass it on
	}
	return context.Cause(ctx)
}

// leave ends a turn; the next one begins.
func (l *turns) leave(k laneKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if next, ok := l.lanes.Leave(k); ok {
		close(next.come)
	}
}

// received reports whether a was received before b. In one tick of the clock the delivery-tags
// tell, which RabbitMQ counts up for each link.
func received(a, b *turn) bool {
	return cmp.Or(a.delivery.Received().Compare(b.delivery.Received()), bytes.Compare(a.delivery.Message().DeliveryTag, b.delivery.Message().DeliveryTag)) < 0
}
