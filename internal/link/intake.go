package link

import (
	"sync/atomic"
	"time"
)

// Intake reports whether the broker accepts messages on a session. During a memory or disk alarm RabbitMQ doesn't:
// it sends an incoming-window of 0 in a flow, or in the begin of a new session. Senders stop at once.
type Intake struct {
	state atomic.Pointer[intakeState]
	begun bool // it is counted in intakes; for the goroutine that reads from the connection
}

// intakeState is the state of an Intake until it changes. It is immutable.
type intakeState struct {
	Blocked bool
	Since   time.Time     // when it became blocked
	Changed chan struct{} // closed when the state has changed
}

// NewIntake returns an Intake that isn't blocked.
func NewIntake() *Intake {
	i := &Intake{}
	i.state.Store(&intakeState{Changed: make(chan struct{})})
	return i
}

// Now returns the current state. It is never nil.
func (i *Intake) Now() *intakeState { return i.state.Load() }

// Set sets the state, and reports whether it changed. Only one goroutine at a time may call it.
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

// intakes sums up the Intakes of a connection's sessions. Only the goroutine that reads from the connection uses
// it.
type intakes struct {
	// notify is called with true when the first session is blocked, and with false when none is blocked
	// and one is open: the end of the last session doesn't mean that an alarm is over. It must not block.
	notify func(blocked bool)

	open, blocked int  // sessions
	notified      bool // what notify was called with last
}

// set notes whether a session is blocked. Its first call for a session counts it as open.
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

// remove removes a session that has ended.
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
