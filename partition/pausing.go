package partition

import (
	"sync"
	"sync/atomic"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
)

// pausing keeps a worker's handlers from beginning. The worker keeps its partitions and all that it holds, so nothing
// changes its place: what waits for a retry, and what waits behind it. Shortly before the consumer timeout all of it
// returns to the queue in its order, and comes back, as ever.
type pausing struct {
	mu      sync.Mutex
	pauses  int
	resumed atomic.Pointer[chan struct{}] // nil: it isn't paused
}

// Pause pauses the worker until resume is called.
func (p *pausing) Pause() (resume func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pauses++; p.pauses == 1 {
		resumed := make(chan struct{})
		p.resumed.Store(&resumed)
	}
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.pauses--; p.pauses == 0 {
			close(*p.resumed.Swap(nil))
		}
	})
}

// until returns a channel that is closed when the worker resumes; nil: it isn't paused.
func (p *pausing) until() <-chan struct{} {
	if resumed := p.resumed.Load(); resumed != nil {
		return *resumed
	}
	return nil
}

// Resumed has messages wait while the worker is paused. The markers of Reshard don't wait, so that it finishes
// partitions that are empty.
func (p *part) Resumed(d *client.Delivery) <-chan struct{} {
	until := p.of.pausing.until()
	if until != nil {
		if _, _, marker := markerOf(d); marker {
			return nil
		}
	}
	return until
}

func (p *part) Paused() bool { return p.of.pausing.until() != nil }

// admitted returns nil if the handler may be called, now that it has what it waited for: the worker may have been
// paused since.
func (h handler) admitted(again *inside.Again, was attempts) error {
	if h.of.pausing.until() == nil {
		return nil
	}
	kept := inside.Again{Delay: heldPause, Retries: was.retries, State: was}
	if again != nil {
		kept.Annotations = again.Annotations
	}
	return &kept
}
