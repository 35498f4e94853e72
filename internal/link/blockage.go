package link

import (
	"log/slog"
	"sync"
	"time"
)

// Blockage tracks whether the broker accepts messages on a connection. Between Start and end it reports changes to
// an Observer, and logs a blockage that lasts. A nil *Blockage is never blocked.
type Blockage struct {
	Log *slog.Logger

	// mu guards the fields below.
	mu       sync.Mutex
	at       Place
	observer Observer      // nil before Start, and after end
	since    time.Time     // when the blockage began; zero: the broker accepts messages
	spent    time.Duration // the sum of the blockages that are over
	timer    *time.Timer   // logs the blockage; nil if there is none, or no observer
	logged   bool          // the blockage was logged, so its end will be, too
}

// noticeAfter is how long a blockage must last to be logged.
const noticeAfter = 3 * time.Second

// Notify is called on the goroutine that reads from the connection.
func (b *Blockage) Notify(blocked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	since := b.since
	switch {
	case blocked && since.IsZero():
		b.since = time.Now()
		b.announce()
	case !blocked && !since.IsZero():
		b.since = time.Time{}
		b.spent += time.Since(since)
		if b.observer == nil {
			return
		}
		b.timer.Stop()
		b.timer = nil
		after := time.Since(since)
		b.observer.Unblocked(b.at, after)
		if b.logged {
			b.logged = false
			go b.Log.Info("hopback: the broker accepts messages again", "endpoint", b.at.Endpoint, "node", b.at.Node, "after", after.Round(time.Millisecond))
		}
	}
}

// Start is called when the connection has become live. It reports a blockage that began before.
func (b *Blockage) Start(at Place, o Observer) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at, b.observer = at, o
	if !b.since.IsZero() {
		b.announce()
	}
}

// announce is called with mu held.
func (b *Blockage) announce() {
	if b.observer == nil {
		return
	}
	b.observer.Blocked(b.at)
	b.timer = time.AfterFunc(noticeAfter, b.notice)
}

// end is called when the connection has ended.
func (b *Blockage) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.observer = nil
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
}

func (b *Blockage) blockedSince() time.Time {
	if b == nil {
		return time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.since
}

// total returns for how long the broker has accepted no messages on the connection.
func (b *Blockage) total() time.Duration {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.since.IsZero() {
		return b.spent
	}
	return b.spent + time.Since(b.since)
}

func (b *Blockage) notice() {
	b.mu.Lock()
	over, since := b.timer == nil, b.since
	b.logged = !over
	b.mu.Unlock()
	if over {
		return
	}
	b.Log.Warn("hopback: the broker accepts no messages, probably because of a memory or disk alarm; publishing waits", "endpoint", b.at.Endpoint, "node", b.at.Node, "since", since)
}
