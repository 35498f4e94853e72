package inside

import (
	"context"
	"strings"
)

// Locks are names that one connection of the virtual host can have: they are exclusive queues, which RabbitMQ
// refuses to other connections, and deletes when the connection ends, however it ends. Two Locks of one Conn
// exclude each other, too. During an alarm, the methods wait.
type Locks interface {
	// Lock reports whether the name belongs to these Locks now. After a client.ErrOutcomeUnknown it may; call Unlock.
	Lock(ctx context.Context, name string) (ok bool, err error)
	// Unlock does nothing for a name that belongs to others.
	Unlock(ctx context.Context, name string) error
	// Locked reports whether the name belongs to anybody.
	Locked(ctx context.Context, name string) (bool, error)
	// Lost returns a channel that is closed when the connection has ended. Then all names are free.
	Lost() <-chan struct{}
	// Close ends the requests. Call Unlock before.
	Close()
}

// LocksOf returns what opens Locks on a connection of the Conn whose Prepare ctx belongs to; nil: there is none. Opening
// waits for a connection.
func LocksOf(ctx context.Context) func(context.Context) (Locks, error) {
	a, _ := AlarmsOf(ctx).(interface {
		OpenLocks(ctx context.Context) (Locks, error)
	})
	if a == nil {
		return nil
	}
	return a.OpenLocks
}

// LockQueue is what a management request declares for a lock.
func LockQueue() map[string]any {
	return map[string]any{"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"}}
}

// LockRefused reports whether the text of the reply to it says that another connection has the lock.
func LockRefused(text string) bool { return strings.Contains(text, "exclusive access to locked queue") }
