package client

import (
	"log/slog"
	"sync"
	"time"
)

// blockage reports whether the broker takes messages on a connection. A blockage that
// lasts is logged, too. It is there before the connection's first session, and reports
// nothing until start.
type blockage struct {
	log            *slog.Logger
	endpoint, node string

	mu     sync.Mutex
	event  func(stateEvent) // nil before start, and after end
	since  time.Time        // zero: the broker takes messages
	spent  time.Duration    // in blockages that are over
	timer  *time.Timer      // to notice; nil unless it is blocked
	logged bool
}

// noticeAfter is how long a blockage must last to be logged.
const noticeAfter = 3 * time.Second

// tell is called on the goroutine that reads from the broker.
func (b *blockage) tell(blocked bool) {
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
		if b.event == nil {
			return
		}
		b.timer.Stop()
		b.timer = nil
		after := time.Since(since)
		b.event(stateEvent{Kind: eventUnblocked, Down: after})
		if b.logged {
			b.logged = false
			go b.log.Info("hopback: the broker accepts messages again", "endpoint", b.endpoint, "node", b.node, "after", after.Round(time.Millisecond))
		}
	}
}

// start is called when the connection is the live one: what was seen before is
// reported now.
func (b *blockage) start(node string, event func(stateEvent)) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.node, b.event = node, event
	if !b.since.IsZero() {
		b.announce()
	}
}

// announce is called with mu held.
func (b *blockage) announce() {
	if b.event == nil {
		return
	}
	b.event(stateEvent{Kind: eventBlocked})
	b.timer = time.AfterFunc(noticeAfter, b.notice)
}

// end is called when the connection has ended.
func (b *blockage) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.event = nil
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
}

func (b *blockage) blockedSince() time.Time {
	if b == nil {
		return time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.since
}

// total is for how long the broker has taken no messages on the connection.
func (b *blockage) total() time.Duration {
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

func (b *blockage) notice() {
	b.mu.Lock()
	over, since := b.timer == nil, b.since
	b.logged = !over
	b.mu.Unlock()
	if over {
		return
	}
	b.log.Warn("hopback: the broker accepts no messages, probably because of a memory or disk alarm; publishing waits", "endpoint", b.endpoint, "node", b.node, "since", since)
}
