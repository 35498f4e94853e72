package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/refusal"
)

// atOnce limits how many calls run at once, of all messages or of each key. Without Config.Shared, each line has room for
// Config.AtOnce calls, otherwise for as many as it has slots: see slots.go.
type atOnce struct {
	cfg Config

	mu    sync.Mutex
	lines map[string]*line // those in use, by key; without Config.Key that of ""

	// With Config.Shared.
	prefix   string // of the names of the queues, while there are members
	members  map[*refusal.Consumer]*member
	slots    *slots             // nil: there is no connection
	returnAt time.Time          // when the last message that was returned for later is delivered again, by the broker's clock
	stop     context.CancelFunc // ends run; nil: it doesn't run
	done     chan struct{}      // closed when the last run has ended; nil: there was none
	more     chan struct{}      // a line without a key could use more slots
}

// line is the calls of a key, or of all messages, and those that wait to start.
type line struct {
	key     string
	running int
	peak    int             // the most that ran since the last round
	waiting []chan struct{} // each is closed when its call has started
	held    []int           // numbers of slots
	asked   chan struct{}   // closed when ask is over; nil: it isn't running
	refused time.Time       // when others had the slots that were asked for
}

func newAtOnce(c Config) *atOnce {
	return &atOnce{
		cfg: c, lines: map[string]*line{}, members: map[*refusal.Consumer]*member{}, more: make(chan struct{}, 1),
	}
}

var (
	errFull     = errors.New("as many calls as the limit allows are running")
	errDraining = errors.New("the consumer stops")
)

// enter waits until a call may start, after which leave must be called. An error is what becomes of the message.
func (a *atOnce) enter(ctx context.Context, key string) (*line, error) {
	if ctx.Err() != nil {
		return nil, returned(context.Cause(ctx))
	}
	a.mu.Lock()
	l := a.line(key)
	if len(l.waiting) == 0 && l.running < a.room(l) {
		a.start(l)
		a.mu.Unlock()
		return l, nil
	}
	turn := make(chan struct{})
	l.waiting = append(l.waiting, turn)
	m := a.members[refusal.Of(ctx)]
	a.mu.Unlock()

	err := a.await(ctx, l, m, turn)
	if err == nil {
		return l, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(l.waiting, turn); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		a.forget(l)
		return nil, err
	}
	if ctx.Err() == nil {
		return l, nil // its turn came after all
	}
	a.end(l)
	return nil, err
}

// await waits for the turn of a call.
func (a *atOnce) await(ctx context.Context, l *line, m *member, turn chan struct{}) error {
	var again, enough <-chan time.Time
	var asked <-chan struct{}
	if m != nil && m.uncounted {
		timer := time.NewTimer(inHandFor)
		defer timer.Stop()
		enough = timer.C
	}
	if m != nil && a.cfg.Key != nil {
		ticker := time.NewTicker(keyEvery)
		defer ticker.Stop()
		again = ticker.C
		asked = a.ask(l)
	}
	for {
		select {
		case <-turn:
			return nil
		case <-ctx.Done():
			return returned(context.Cause(ctx))
		case <-client.Draining(ctx):
			return returned(errDraining)
		case <-enough:
			return a.later(ctx, m)
		case <-asked:
			asked = nil
			if m.delays && a.behind(l, turn) {
				return a.later(ctx, m)
			}
		case <-again:
			a.ask(l)
		}
	}
}

// behind reports whether more calls wait before this one than the line has slots.
func (a *atOnce) behind(l *line, turn chan struct{}) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Index(l.waiting, turn) >= len(l.held)
}

func returned(err error) error {
	return client.Requeue{Err: fmt.Errorf("waiting for a call to end: %w", err)}
}

func (a *atOnce) leave(l *line) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.end(l)
}

// The others are called with mu held.

func (a *atOnce) line(key string) *line {
	l := a.lines[key]
	if l == nil {
		l = &line{key: key}
		a.lines[key] = l
	}
	return l
}

// room is how many calls may run at once.
func (a *atOnce) room(l *line) int {
	switch {
	case len(a.members) == 0: // the limit isn't shared, or this is a test without a broker
		return a.cfg.AtOnce
	case a.slots == nil || failure.IsClosed(a.slots.locks.Lost()):
		return 0
	}
	return len(l.held)
}

// start starts a call.
func (a *atOnce) start(l *line) {
	l.running++
	l.peak = max(l.peak, l.running)
	if l.running >= len(l.held) {
		select {
		case a.more <- struct{}{}:
		default:
		}
	}
}

func (a *atOnce) end(l *line) {
	l.running--
	a.grant(l)
	a.forget(l)
}

// grant starts calls that wait, in their order.
func (a *atOnce) grant(l *line) {
	for len(l.waiting) > 0 && l.running < a.room(l) {
		close(l.waiting[0])
		l.waiting = l.waiting[1:]
		a.start(l)
	}
}

// forget removes the line of a key that isn't in use.
func (a *atOnce) forget(l *line) {
	if a.cfg.Key != nil && l.running == 0 && len(l.waiting) == 0 && len(l.held) == 0 && l.asked == nil && time.Since(l.refused) >= every && a.lines[l.key] == l {
		delete(a.lines, l.key)
	}
}
