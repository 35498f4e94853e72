// Package client connects to RabbitMQ over AMQP 1.0, publishes, and consumes:
//
//	delivery → decode → handler → outcome → settle
//
// The package is mechanism only. A handler and the middleware around it decide what
// becomes of a message. The package carries the decision out, survives the loss of
// connections, and never accepts a message before its successor is confirmed.
// DESIGN.md holds the invariants.
package client

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/instrumented"
	"github.com/hopback/hopback/internal/link"
)

// Conn is a connection to a broker that rebuilds itself whenever it is lost, with
// unlimited back-off. It is safe for concurrent use.
//
// A Conn serves any number of consumers and publishers. An AMQP connection carries 64
// sessions, or fewer if the broker says so, of which Conn keeps four for itself. A
// publisher takes one and a consumer two: one to receive on and one for its forwards,
// reserved when it starts. When all sessions are taken, Conn opens a further AMQP
// connection, up to Config.MaxConnections. The loss of one connection doesn't affect
// the others. A further connection is closed after a minute without a session.
type Conn struct {
	cfg    Config
	log    *slog.Logger
	hooks  *instrumented.Hooks // nil: no Instrument
	unhook func()              // reports Close to it; set by Connect
	pool   *link.Pool
	// starving is after how long without a delivery a consumer looks at its queue.
	starving time.Duration

	closeOnce sync.Once
	closeErr  error
	closed    chan struct{} // closed when Close is done
	clock     brokerClock
	preparing preparations
	mgmt      *Management

	mu    sync.Mutex
	users map[closer]struct{}
}

// closer is what lives on a Conn and must end before it: consumers, publishers.
type closer interface {
	Shut(ctx context.Context) error
}

// Broker describes the broker, as it introduced itself when the connection was last
// made. With several connections it is the broker of the first one that is up. It is
// the zero Broker while none is up.
func (c *Conn) Broker() Broker {
	if w := c.pool.Up(); w != nil {
		return Broker(w.Broker)
	}
	return Broker{}
}

// Management returns the broker's management node, for package declare.
func (c *Conn) Management() *Management { return c.mgmt }

// State is the state of a Conn at one moment. With several AMQP connections it is that
// of the worst.
type State struct {
	// Connected reports whether every connection is up. If neither Connected nor Closed
	// is set, at least one is being rebuilt.
	Connected bool
	// Closed reports whether Close has been called.
	Closed bool
	// Connections is how many AMQP connections are up.
	Connections int
	// Since is when Connected last changed.
	Since time.Time
	// Generation counts the AMQP connections made so far, rebuilt and further ones
	// included. The first is 1.
	Generation uint64
	// Endpoint is the URL of the first connection's endpoint, without its password.
	Endpoint string
	// Broker is the broker of the first connection that is up. It is the zero Broker
	// while none is up.
	Broker Broker
	// BlockedSince is since when the broker has accepted no messages on a connection,
	// because of a memory or disk alarm. It is zero if no connection is blocked.
	BlockedSince time.Time
	// Attempts is how many attempts to rebuild a connection have failed in a row: the
	// most, if several are being rebuilt.
	Attempts int
	// Err is why a connection is down: first the error that ended it, then that of the
	// last attempt to rebuild it. It is nil if none is down.
	Err error
}

// State returns whether the connections are up, and if not, why. Config.OnEvent is
// called for each change.
func (c *Conn) State() State {
	s := c.pool.State()
	return State{
		Connected: s.Connected, Closed: c.isClosing(), Connections: s.Connections, Since: s.Since, Generation: s.Generation,
		Endpoint: s.Endpoint, Broker: Broker(s.Broker), BlockedSince: s.BlockedSince, Attempts: s.Attempts, Err: s.Err,
	}
}

func (c *Conn) isClosing() bool { return failure.IsClosed(c.pool.Closing) }

// join registers what must end before the connection does.
func (c *Conn) join(u closer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosing() {
		return failure.ErrClosed
	}
	c.users[u] = struct{}{}
	return nil
}

func (c *Conn) leave(u closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.users, u)
}
