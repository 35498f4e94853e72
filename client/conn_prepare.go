package client

import (
	"errors"
	"log/slog"
	"sync"
	"time"
)

// preparations counts the consumers that are starting.
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

// run calls f, which asks the broker before a consumer starts. When many wait, one line is logged for
// all, with the outage that they may wait for.
func (p *preparations) run(log *slog.Logger, queue string, outage func() error, f func() error) error {
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
		log.Warn("hopback: consumers can't start yet; their handlers wait for answers from the broker", "queue", queue, "waiting", waiting, "error", why)
	})
	defer func() {
		slow.Stop()
		p.mu.Lock()
		p.count--
		p.mu.Unlock()
	}()
	return f()
}
