package client

import (
	"sync"
	"sync/atomic"
)

// backlog is a channel whose sender never blocks: what the channel has no room for waits
// in a slice. So the channel can be small where there is mostly little in it. Who
// receives from c calls refill afterwards.
type backlog[T any] struct {
	c chan T
	// waiting is the length of rest. It is set before c is found full, so that whoever
	// makes room in c afterwards sees it.
	waiting atomic.Int64
	mu      sync.Mutex
	rest    []T
}

func newBacklog[T any](room int) backlog[T] { return backlog[T]{c: make(chan T, room)} }

// put appends v. What one goroutine puts comes out in its order.
func (b *backlog[T]) put(v T) {
	if b.waiting.Load() == 0 {
		select {
		case b.c <- v:
			return
		default:
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rest = append(b.rest, v)
	b.waiting.Store(int64(len(b.rest)))
	b.move()
}

// refill moves what waits into c once that is half empty, so that it seldom has to.
func (b *backlog[T]) refill() {
	if b.waiting.Load() == 0 || len(b.c) > cap(b.c)/2 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.move()
}

// move is called with mu held.
func (b *backlog[T]) move() {
	n := 0
	for n < len(b.rest) {
		select {
		case b.c <- b.rest[n]:
			n++
			continue
		default:
		}
		break
	}
	clear(b.rest[:n])
	b.rest = b.rest[n:]
	if len(b.rest) == 0 {
		b.rest = nil
	}
	b.waiting.Store(int64(len(b.rest)))
}
