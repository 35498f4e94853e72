package outbox

import (
	"log/slog"
	"sync"
	"time"
)

// gates delay the messages to addresses that the broker accepts none for.
//
// RabbitMQ closes the session of a forbidden message, with everything in flight on it, and the
// client needs a second to find out which message it was. The reason may be the message itself,
// or its address, to which the user may not write. So the next other message to the address is
// tried alone, on a separate link, while the rest waits. If the broker accepts it, the first
// message alone was to blame. If not, the address is: from then on, one message at a time tries
// it, with pauses.
//
// An address whose messages have no queue costs no session. But many such messages would take up
// the relay's time. So an address that accepted none of several messages in a batch is isolated:
// its messages get no more than a share of each batch until it accepts one.
type gates struct {
	first time.Duration // the pause before the first try
	log   *slog.Logger
	waits *waits

	mu      sync.Mutex
	of      map[string]*gate
	poisons map[string]bool
}

type gate struct {
	err      error
	culprits map[int64]bool // the messages that were refused
	due      time.Time
	pause    time.Duration
	trying   bool
}

// toBlame reports whether more than one message to the address was refused.
func (g *gate) toBlame() bool { return len(g.culprits) > 1 }

// closed returns the addresses that no message should be tried for now.
func (a *gates) closed() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := []string{}
	for to, g := range a.of {
		if g.trying || time.Now().Before(g.due) {
			list = append(list, to)
		}
	}
	return list
}

// isolated returns the addresses that get a share of each batch.
func (a *gates) isolated() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := []string{}
	for to := range a.poisons {
		list = append(list, to)
	}
	return list
}

// gateState is the state of an address that the broker accepts nothing for.
type gateState int

const (
	gateShut gateState = iota // no message is tried now
	gateAjar                  // one may try
)

// states returns the addresses with a gate.
func (a *gates) states() map[string]gateState {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := map[string]gateState{}
	for to, g := range a.of {
		all[to] = gateAjar
		if g.trying || time.Now().Before(g.due) {
			all[to] = gateShut
		}
	}
	return all
}

// blames reports whether an address is to blame for refused messages.
func (a *gates) blames(to string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of[to]
	return g != nil && g.toBlame()
}

// ask reports whether a message to an address waits, or tries it, after which tried is called.
func (a *gates) ask(to string) (waits, tries bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of[to]
	switch {
	case g == nil:
		return false, false
	case g.trying, time.Now().Before(g.due):
		return true, false
	}
	g.trying = true
	return false, true
}

// tried is called with the result of a message that has tried an address.
func (a *gates) tried(to string, id int64, is verdict, err error) {
	a.mu.Lock()
	g := a.of[to]
	if g == nil {
		a.mu.Unlock()
		return
	}
	g.trying = false
	switch {
	case is == verdictForbidden:
		a.blame(to, g, id, err)
		a.mu.Unlock()
	case is == verdictUnknown, is == verdictMissigned:
		g.due = time.Now().Add(max(g.pause, a.first))
		a.mu.Unlock()
	default: // the broker has read it, and kept the session
		delete(a.of, to)
		if g.toBlame() {
			a.log.Info("outbox: the broker accepts messages for an address again", "address", to)
		}
		a.mu.Unlock()
		a.waits.release(to)
	}
}

// refuse notes that the broker has closed the session because of a message, whose own fault it
// may be.
func (a *gates) refuse(to string, id int64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of[to]
	if g == nil {
		g = &gate{culprits: map[int64]bool{}, due: time.Now()}
		a.of[to] = g
	}
	if !g.culprits[id] { // otherwise tried has just been called
		a.blame(to, g, id, err)
	}
}

// blame is called with mu held.
func (a *gates) blame(to string, g *gate, id int64, err error) {
	g.err, g.culprits[id] = err, true
	if !g.toBlame() {
		return // the next message to it shows
	}
	if len(g.culprits) == 2 {
		a.waits.gated(to)
	}
	g.pause = min(max(2*g.pause, a.first), max(maxRetry, a.first))
	g.due = time.Now().Add(g.pause)
	a.log.Warn("outbox: the broker accepts nothing for an address; its messages wait", "address", to, "tried again in", g.pause, "error", err)
}

// learn isolates addresses that accepted none of several messages of a batch, and releases those
// that accepted one.
func (a *gates) learn(o *outcome) {
	failed := map[string]int{}
	for _, f := range o.failed {
		if f.is == verdictUntaken {
			failed[f.rec.address]++
		}
	}
	a.mu.Lock()
	opened := []string{}
	for _, rec := range o.accepted {
		if a.poisons[rec.address] {
			delete(a.poisons, rec.address)
			opened = append(opened, rec.address)
		}
		delete(failed, rec.address)
	}
	for to, n := range failed {
		if n > 1 && a.of[to] == nil {
			a.poisons[to] = true
		}
	}
	a.mu.Unlock()
	for _, to := range opened {
		a.waits.release(to)
	}
}

// signers are the users in the messages' user-ids. RabbitMQ closes the link or the session of a
// message whose user-id isn't the relay's user, unless that has the tag impersonator. The client
// then fails that message alone, with ErrUserID, but it sends again what was in flight at the
// same time, and RabbitMQ may have stored some of that. So the first message with a user-id is
// tried on a separate link, and one at a time while the broker refuses it.
type signers struct {
	first time.Duration
	log   *slog.Logger

	mu sync.Mutex
	of map[string]*signer
}

type signer struct {
	err    error // why the broker refuses it; nil: it doesn't
	known  bool
	due    time.Time
	pause  time.Duration
	trying bool
}

// ask reports whether a message with a user-id waits, or tries it, after which tried is called.
// refused is why the broker refuses it.
func (a *signers) ask(user string) (waits, tries bool, refused error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.of[user]
	if s == nil {
		s = &signer{}
		a.of[user] = s
	}
	switch {
	case s.known && s.err == nil:
		return false, false, nil
	case s.known && (s.trying || time.Now().Before(s.due)):
		return false, false, s.err
	case s.trying:
		return true, false, nil
	}
	s.trying = true
	return false, true, nil
}

// ok reports whether the broker accepts a user-id, as far as is known.
func (a *signers) ok(user string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.of[user]
	return s != nil && s.known && s.err == nil
}

// tried is called with the result of a message with a user-id.
func (a *signers) tried(user string, is verdict, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.of[user]
	if s == nil {
		return
	}
	s.trying = false
	switch {
	case is == verdictMissigned:
		s.known, s.err = true, err
		s.pause = min(max(2*s.pause, a.first), max(maxRetry, a.first))
		s.due = time.Now().Add(s.pause)
		a.log.Warn("outbox: the broker refuses messages with this user-id from the relay's user; they wait", "user-id", user, "tried again in", s.pause, "error", err)
	case is == verdictAccepted, is == verdictUntaken:
		*s = signer{known: true}
	}
}
