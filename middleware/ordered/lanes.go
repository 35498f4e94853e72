package ordered

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/hopback/hopback/client"
)

// laneKey is a key of one queue.
type laneKey struct{ queue, key string }

// lanes lets one delivery of each key through at a time. A key is in the map while
// one of its deliveries is being handled, and then its value are those that wait.
type lanes struct {
	mu      sync.Mutex
	waiting map[laneKey][]*turn // in the order in which they were received
}

// turn is a delivery that waits.
type turn struct {
	delivery *client.Delivery
	come     chan struct{} // closed when it may go
}

func newLanes() *lanes { return &lanes{waiting: map[laneKey][]*turn{}} }

// enter waits until it is d's turn. After nil, leave must be called.
func (l *lanes) enter(ctx context.Context, k laneKey, d *client.Delivery) error {
	l.mu.Lock()
	queue, busy := l.waiting[k]
	if !busy {
		l.waiting[k] = nil
		l.mu.Unlock()
		return nil
	}
	t := &turn{delivery: d, come: make(chan struct{})}
	// Most come in their order: so look from the end.
	at := len(queue)
	for at > 0 && compare(d, queue[at-1].delivery) < 0 {
		at--
	}
	l.waiting[k] = slices.Insert(queue, at, t)
	l.mu.Unlock()

	select {
	case <-t.come:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	queue = l.waiting[k]
	if i := slices.Index(queue, t); i >= 0 {
		l.waiting[k] = slices.Delete(queue, i, i+1)
		l.mu.Unlock()
		return context.Cause(ctx)
	}
	l.mu.Unlock()
	l.leave(k) // its turn has come all the same: pass it on
	return context.Cause(ctx)
}

// leave ends a turn; the next one begins.
func (l *lanes) leave(k laneKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	queue := l.waiting[k]
	if len(queue) == 0 {
		delete(l.waiting, k)
		return
	}
	close(queue[0].come)
	queue[0] = nil // for the collector: the slice goes on
	l.waiting[k] = queue[1:]
}

// compare orders deliveries as they were received. In one tick of the clock the
// delivery-tags tell, which RabbitMQ counts up for each link.
func compare(a, b *client.Delivery) int {
	return cmp.Or(a.Received().Compare(b.Received()), bytes.Compare(a.Message().DeliveryTag, b.Message().DeliveryTag))
}
