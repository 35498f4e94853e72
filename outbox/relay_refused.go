package outbox

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// addresses are those that the broker takes nothing for: the user may not write to their
// exchange. RabbitMQ ends the session of such a message, with all that is under way on it,
// and the client needs a second to find out which message it was. So one message at a time
// tries such an address, on a link of its own, and the others for it wait.
type addresses struct {
	first time.Duration // the pause before the first try
	log   *slog.Logger

	mu sync.Mutex
	of map[string]*refusal
}

type refusal struct {
	err    error
	due    time.Time
	pause  time.Duration
	trying bool
}

// waiting returns the addresses that aren't to be tried now.
func (a *addresses) waiting() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := []string{}
	for to, f := range a.of {
		if f.trying || time.Now().Before(f.due) {
			all = append(all, to)
		}
	}
	return all
}

// ask returns why an address is refused, or nil. The caller should try it if try is true,
// and then call tried.
func (a *addresses) ask(to string) (refused error, try bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.of[to]
	if f == nil {
		return nil, false
	}
	if f.trying || time.Now().Before(f.due) {
		return f.err, false
	}
	f.trying = true
	return f.err, true
}

// tried is called after a try.
func (a *addresses) tried(to string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.of[to]
	if f == nil {
		return
	}
	if err == nil {
		delete(a.of, to)
		a.log.Info("outbox: the broker takes messages for an address again", "address", to)
		return
	}
	f.trying = false
	a.longer(to, f, err)
}

// refuse notes that the broker takes nothing for an address.
func (a *addresses) refuse(to string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of[to] == nil {
		a.of[to] = &refusal{}
		a.longer(to, a.of[to], err)
	}
}

func (a *addresses) longer(to string, f *refusal, err error) {
	f.pause = min(max(2*f.pause, a.first), max(maxRetry, a.first))
	f.err, f.due = err, time.Now().Add(f.pause)
	a.log.Warn("outbox: the broker takes nothing for an address; its messages wait", "address", to, "tried again in", f.pause, "error", err)
}

// learn notes the addresses that are refused in an outcome.
func (r *Relay) learn(o *outcome) {
	seen := map[string]bool{}
	for _, f := range o.failed {
		if f.refused != "" && !seen[f.refused] {
			seen[f.refused] = true
			r.addresses.refuse(f.refused, f.err)
		}
	}
}

// try publishes a message to a refused address, on a link of its own.
func (r *Relay) try(ctx context.Context, rec *record) (err error) {
	defer func() { r.addresses.tried(rec.address, err) }()
	p, err := client.NewPublisher[*client.Message](ctx, r.conn, address.Address{}, client.PublisherConfig{Pending: 1})
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = p.Close(closing)
	}()
	return p.Publish(ctx, rec.decoded)
}
