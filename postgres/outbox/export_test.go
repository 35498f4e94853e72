package outbox

import (
	"log/slog"
	"time"
)

const (
	// InsertOne is the statement that writes one message.
	InsertOne = insertOne
	// LockSleep is the advisory lock that a sleeping relay holds.
	LockSleep = lockSleep
)

// Statements that a test has PostgreSQL explain.
const (
	MoveDue = moveDue
	NextDue = nextDue
)

// SetLimits makes a relay's waits for the database short.
func (r *Relay) SetLimits(statement, lease time.Duration) {
	r.limits.statement, r.limits.grace, r.limits.settle, r.limits.lease = statement, statement/4, statement, lease
}

// Continues returns how many messages of a key are tried whose results are errs.
func Continues(errs ...error) (n int) {
	var o outcome
	for _, err := range errs {
		n++
		if !o.note(&record{}, err).continues() {
			break
		}
	}
	return n
}

// Gates are the addresses that the broker accepts nothing for.
type Gates struct{ g *gates }

func NewGates() Gates {
	return Gates{&gates{first: time.Minute, log: slog.New(slog.DiscardHandler), waits: &waits{of: map[int64]*wait{}}, of: map[string]*gate{}, poisons: map[string]bool{}}}
}

func (g Gates) Refuse(to string, id int64, err error) { g.g.refuse(to, id, err) }
func (g Gates) Tried(to string, id int64, err error)  { g.g.tried(to, id, judge(err), err) }
func (g Gates) Isolated() []string                    { return g.g.isolated() }
func (g Gates) Blames(to string) bool                 { return g.g.blames(to) }

// Learn learns from a batch of messages to an address whose results are errs. It returns how
// many of them count as failed attempts.
func (g Gates) Learn(to string, errs ...error) int {
	var o outcome
	for _, err := range errs {
		o.note(&record{address: to}, err)
	}
	g.g.learn(&o)
	return len(o.failed)
}

func (g Gates) Ask(to string) string {
	switch waits, tries := g.g.ask(to); {
	case waits:
		return "waits"
	case tries:
		return "tries"
	}
	return "free"
}
