package link

import (
	"sync/atomic"
	"time"
)

// Intake says whether the broker takes messages on a session. While RabbitMQ has a memory or
// disk alarm it doesn't: it sends an incoming-window of 0, in a flow, or in the begin of a
// session that is opened during that time. Senders stop at once.
type Intake struct {
	state atomic.Pointer[intakeState]
	begun bool // it is counted in intakes
}

// intakeState is the state of an intake at one moment.
type intakeState struct {
	Blocked bool
	Since   time.Time     // when it became blocked
	Changed chan struct{} // closed when another state takes its place
}

// NewIntake returns one that isn't blocked.
func NewIntake() *Intake {
	i := &Intake{}
	i.state.Store(&intakeState{Changed: make(chan struct{})})
	return i
}

// Now is the present state. It is never nil, and doesn't change.
func (i *Intake) Now() *intakeState { return i.state.Load() }

// Set changes the state, and says whether that is a change. It is called by one
// goroutine at a time.
func (i *Intake) Set(blocked bool) bool {
	was := i.Now()
	if was.Blocked == blocked {
		return false
	}
	is := &intakeState{Blocked: blocked, Changed: make(chan struct{})}
	if blocked {
		is.Since = time.Now()
	}
	i.state.Store(is)
	close(was.Changed)
	return true
}

// intakes are those of a connection's sessions. Its methods are called on the goroutine that
// reads from the connection.
type intakes struct {
	// notify is called with true when some session is blocked, and with false when none is and
	// one is open: the end of the last session says nothing of an alarm. It must not block.
	notify func(blocked bool)

	open, blocked int
	notified      bool
}

// set notes whether a session is blocked. The first time, the session has begun.
func (n *intakes) set(i *Intake, blocked bool) {
	if !i.begun {
		i.begun = true
		n.open++
	}
	if i.Set(blocked) {
		if blocked {
			n.blocked++
		} else {
			n.blocked--
		}
	}
	n.report()
}

// remove is called when a session has ended.
func (n *intakes) remove(i *Intake) {
	if !i.begun {
		return
	}
	n.open--
	if i.Now().Blocked {
		n.blocked--
	}
	n.report()
}

func (n *intakes) report() {
	if notified := n.blocked > 0 || n.notified && n.open == 0; notified != n.notified {
		n.notified = notified
		n.notify(notified)
	}
}
