package client

import (
	"context"
	"errors"
	"sync"
	"time"
)

// preparations counts the calls of Prepare in progress.
type preparations struct {
	mu       sync.Mutex
	count    int
	notified time.Time // when a slow one was last logged
}

// prepareSlow is how long a Prepare may take before it is logged, and prepareQuiet
// how long the connection then logs no other.
const (
	prepareSlow  = 5 * time.Second
	prepareQuiet = time.Minute
)

// prepare calls h's Prepare. When many wait, one line is logged for all, with the outage
// that they may wait for.
func (p *preparations) prepare(ctx context.Context, h Handler, s Start, outage func() error) error {
	p.mu.Lock()
	p.count++
	p.mu.Unlock()
	slow := time.AfterFunc(prepareSlow, func() {
		p.mu.Lock()
		waiting := p.count
		quiet := time.Since(p.notified) < prepareQuiet
		if !quiet {
			p.notified = time.Now()
		}
		p.mu.Unlock()
		if quiet {
			return
		}
		// In an alarm the broker answers no management requests.
		why := outage()
		if why == nil {
			why = errors.New("the broker hasn't answered yet")
		}
		s.Log.Warn("hopback: consumers can't start yet; their handlers wait for answers from the broker", "queue", s.Queue, "waiting", waiting, "error", why)
	})
	defer func() {
		slow.Stop()
		p.mu.Lock()
		p.count--
		p.mu.Unlock()
	}()
	return Prepare(ctx, h, s)
}
