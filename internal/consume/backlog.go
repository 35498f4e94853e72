package consume

import (
	"sync"
	"sync/atomic"
)

// backlog is a channel whose sender never blocks: what the channel has no room for waits
// in a slice. So the channel can be small where there is mostly little in it. Who
// receives from c calls refill afterwards.
type backlog[T any] struct {
	C chan T
	// waiting is the length of rest. It is set before c is found full, so that whoever
	// makes room in c afterwards sees it.
	waiting atomic.Int64
	mu      sync.Mutex
	Rest    []T
}

func NewBacklog[T any](room int) backlog[T] { return backlog[T]{C: make(chan T, room)} }

// put appends v. What one goroutine puts comes out in its order.
func (b *backlog[T]) Put(v T) {
	if b.waiting.Load() == 0 {
		select {
		case b.C <- v:
			return
		default:
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Rest = append(b.Rest, v)
	b.waiting.Store(int64(len(b.Rest)))
	b.move()
}

// refill moves what waits into c once that is half empty, so that it seldom has to.
func (b *backlog[T]) Refill() {
	if b.waiting.Load() == 0 || len(b.C) > cap(b.C)/2 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.move()
}

// move is called with mu held.
func (b *backlog[T]) move() {
	n := 0
	for n < len(b.Rest) {
		select {
		case b.C <- b.Rest[n]:
			n++
			continue
		default:
		}
		break
	}
	clear(b.Rest[:n])
	b.Rest = b.Rest[n:]
	if len(b.Rest) == 0 {
		b.Rest = nil
	}
	b.waiting.Store(int64(len(b.Rest)))
}
