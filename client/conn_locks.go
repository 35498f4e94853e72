package client

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
)

// lockOwners are the locks of a Conn by name. RabbitMQ doesn't tell two owners on one connection apart.
type lockOwners struct {
	mu sync.Mutex
	of map[string]*locks
}

// locks implements inside.Locks with sessions on one connection. It doesn't use package declare, which repeats a request
// without an answer: here the caller has to know that the broker may have carried it out.
type locks struct {
	*Management
	reserved *link.Reservation
	first    chan *link.WireSession // holds the first session until it is used
	lost     <-chan struct{}        // closed when the connection has ended
	end      context.CancelFunc
	owners   *lockOwners
}

// OpenLocks waits for a connection.
func (in internal) OpenLocks(ctx context.Context) (inside.Locks, error) {
	c := in.conn
	l := &locks{reserved: c.pool.Reserve(consumerSessions), first: make(chan *link.WireSession, 1), owners: &c.locks}
	first, err := l.reserved.OpenWire(ctx)
	if err != nil {
		l.reserved.Release()
		return nil, err
	}
	l.lost = first.Broken()
	l.first <- first
	var life context.Context
	life, l.end = context.WithCancel(c.pool.Ctx)
	l.Management = newManagement(l.session, life, c.pool.Closing)
	return l, nil
}

// session opens a session on the connection that has the queues.
func (l *locks) session(ctx context.Context) (*link.WireSession, error) {
	select {
	case s := <-l.first:
		return s, nil
	default:
	}
	lost := fmt.Errorf("%w: its queues are gone", failure.ErrConnectionLost)
	if failure.IsClosed(l.lost) {
		return nil, lost
	}
	s, err := l.reserved.OpenWire(ctx)
	if err == nil && s.Broken() != l.lost {
		link.CloseSession(s)
		return nil, lost
	}
	return s, err
}

func (l *locks) Lost() <-chan struct{} { return l.lost }

func (l *locks) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), link.CloseTimeout)
	defer cancel()
	l.close(ctx)
	l.end()
	select {
	case s := <-l.first:
		link.CloseSession(s)
	default:
	}
	l.reserved.Release()
	l.owners.mu.Lock()
	defer l.owners.mu.Unlock()
	for name, owner := range l.owners.of {
		if owner == l {
			delete(l.owners.of, name)
		}
	}
}

// claim notes l as the owner, unless the name has another one.
func (l *locks) claim(name string) bool {
	l.owners.mu.Lock()
	defer l.owners.mu.Unlock()
	if owner := l.owners.of[name]; owner != nil && owner != l && !failure.IsClosed(owner.Lost()) {
		return false
	}
	if l.owners.of == nil {
		l.owners.of = map[string]*locks{}
	}
	l.owners.of[name] = l
	return true
}

func (l *locks) disclaim(name string) {
	l.owners.mu.Lock()
	defer l.owners.mu.Unlock()
	if l.owners.of[name] == l {
		delete(l.owners.of, name)
	}
}

func (l *locks) Lock(ctx context.Context, name string) (bool, error) {
	if !l.claim(name) {
		return false, nil
	}
	status, reply, err := l.Request(ctx, "PUT", "/queues/"+address.Escape(name), inside.LockQueue())
	switch text, _ := reply.(string); {
	case err != nil:
		if !errors.Is(err, failure.ErrOutcomeUnknown) {
			l.disclaim(name)
		}
		return false, err
	case status == 200 || status == 201:
		return true, nil
	case inside.LockRefused(text):
		l.disclaim(name)
		return false, nil
	default:
		l.disclaim(name)
		return false, fmt.Errorf("hopback: the broker refuses the queue %q: %d %s", name, status, failure.Clip(text, ErrorTextLimit))
	}
}

func (l *locks) Unlock(ctx context.Context, name string) error {
	if !l.claim(name) {
		return nil
	}
	// The answer may also be that another connection has it, or that there is none: then it isn't ours either.
	_, _, err := l.Request(ctx, "DELETE", "/queues/"+address.Escape(name), nil)
	if err == nil {
		l.disclaim(name)
	}
	return err
}

// Locked asks for a deletion, which RabbitMQ refuses at once if another connection has the queue. A question about the queue
// of a node that is down takes over a minute, and blocks the session (TestSlotsOfANodeThatIsDownStayTaken).
func (l *locks) Locked(ctx context.Context, name string) (bool, error) {
	if l.owns(name) || !l.claim(name) {
		return true, nil
	}
	defer l.disclaim(name)
	_, reply, err := l.Request(ctx, "DELETE", "/queues/"+address.Escape(name), nil)
	text, _ := reply.(string)
	return inside.LockRefused(text), err
}

func (l *locks) owns(name string) bool {
	l.owners.mu.Lock()
	defer l.owners.mu.Unlock()
	return l.owners.of[name] == l
}
