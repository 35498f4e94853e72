package client

import (
	"context"
	"sync"
	"time"
)

// window grants credit so that what the broker has given and what it may still
// give never exceed a limit that can change at any time. Raising it grants the
// difference; lowering it takes credit back by draining the link.
type window struct {
	link receiverLink
	dead <-chan struct{}

	// workers is how many deliveries are handled at once.
	workers int

	mu sync.Mutex
	// limit is the most deliveries that may be unsettled or on their way.
	limit int
	// granted is the credit that no delivery has used yet; unsettled are the
	// deliveries received and not settled.
	granted, unsettled int
	stopped            bool
	draining           chan struct{} // closed when the drain under way ends; nil if none is
}

func newWindow(link receiverLink, dead <-chan struct{}, workers, limit int) *window {
	return &window{link: link, dead: dead, workers: workers, limit: limit}
}

// setLimit changes the limit, and what is granted with it.
func (w *window) setLimit(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit = n
	w.adjust()
}

// received counts a delivery.
func (w *window) received() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled++
	// A delivery that overtook the end of a drain was counted off with it.
	w.granted = max(w.granted-1, 0)
}

// settled counts a settlement, and grants credit in batches: one flow frame for
// half a window, or as much as leaves no worker without work. It returns how many are left.
func (w *window) settled() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled--
	w.adjust()
	return w.unsettled
}

func (w *window) open() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unsettled
}

// adjust is called with mu held.
func (w *window) adjust() {
	if w.stopped || w.draining != nil {
		return
	}
	room := w.limit - w.granted - w.unsettled
	switch {
	case room < 0 && w.granted > 0:
		done := make(chan struct{})
		w.draining = done
		go func() {
			w.drain(w.dead)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.granted, w.draining = 0, nil
			close(done)
			w.adjust()
		}()
	case room >= max(min(w.limit/2, w.limit-w.workers), 1):
		// An error means that the link is gone, which its receive notices.
		if w.link.issueCredit(uint32(room)) == nil {
			w.granted += room
		}
	}
}

// drain asks the broker to use or give up its credit, and waits for the answer
// until hurry is closed, or for drainTimeout.
func (w *window) drain(hurry <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-hurry:
			cancel()
		case <-done:
		}
	}()
	_ = w.link.drain(ctx)
}

// stop grants no more credit, and takes back what is granted, unless hurry is
// closed.
func (w *window) stop(hurry <-chan struct{}) {
	w.mu.Lock()
	w.stopped = true
	running := w.draining
	granted := w.granted
	w.mu.Unlock()
	if running != nil {
		select {
		case <-running:
		case <-hurry:
		}
		return
	}
	if granted > 0 {
		w.drain(hurry)
	}
}

// resume undoes stop.
func (w *window) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped, w.granted = false, 0
	w.adjust()
}

// drainTimeout bounds the wait for the broker's answer to a drain.
const drainTimeout = 10 * time.Second
