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
	"slices"
	"sync"
	"time"
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
	cfg       Config
	endpoints []endpoint
	log       *slog.Logger
	observer  *observer
	hooks     *hooks // nil: no Instrument
	unhook    func() // tells it of Close; set by Connect
	// connect is dial, and idle is lineIdle, but in tests.
	connect func(context.Context, endpoint, dialConfig) (*wire, error)
	idle    time.Duration
	// renewAfter is sessionDeliveries, but in tests.
	renewAfter uint64
	// starving is after how long without a delivery a consumer looks at its queue.
	starving time.Duration

	// ctx ends when Close is done with all that uses the connections.
	ctx    context.Context
	cancel context.CancelFunc
	// hurry ends when Close has no time left.
	hurry  context.Context
	cutOff context.CancelFunc
	// closing is closed when Close begins: no new work from then on.
	closing    chan struct{}
	closeOnce  sync.Once
	closeErr   error
	closed     chan struct{}  // closed when Close is done
	background sync.WaitGroup // lines that are being opened, or closed as nobody needs them
	clock      brokerClock
	preparing  preparations

	mu         sync.Mutex
	nodes      []string      // that each endpoint led to last
	lines      []*line       // the first is always there; replaced, never changed in place
	changed    chan struct{} // closed and renewed whenever a line is up, down, new or gone
	generation uint64        // connections made
	connected  bool          // all lines were up, when that was last looked at
	since      time.Time     // since when connected is so
	users      map[closer]struct{}
	mgmt       *Management
	growing    *growth   // nil: no line is being opened
	refusal    error     // why the last one was not opened; holds for Reconnect.Min
	refusedAt  time.Time // when
	past       past
}

// past is what a Conn counts; guarded by its mu.
type past struct {
	lost, rebuilt uint64        // connections
	blocked       time.Duration // of connections that have ended
}

// closer is what lives on a Conn and must end before it: consumers, publishers.
type closer interface {
	shut(ctx context.Context) error
}

// Broker describes the broker, as it introduced itself when the connection was last
// made. With several connections it is the broker of the first one that is up. It is
// the zero Broker while none is up.
func (c *Conn) Broker() Broker {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.up(); w != nil {
		return Broker(w.broker)
	}
	return Broker{}
}

// up is the connection of the first line that has one; nil if none has. It is called
// with mu held.
func (c *Conn) up() *wire {
	for _, l := range c.lines {
		if l.live != nil {
			return l.live
		}
	}
	return nil
}

// Management returns the broker's management node, for package declare.
func (c *Conn) Management() *Management { return c.mgmt }

// awaitUp returns a connection that is up and isn't lost, and waits while there is none.
func (c *Conn) awaitUp(ctx context.Context, lost *wire) (*wire, error) {
	for {
		c.mu.Lock()
		w, changed := c.up(), c.changed
		c.mu.Unlock()
		if w != nil && w != lost {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-c.closing:
			return nil, ErrClosed
		}
	}
}

// hasLost says whether the connection w has ended.
func (c *Conn) hasLost(w *wire) bool {
	if isClosed(w.amqp.Done()) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.up() != w
}

// outage is why the first connection carries no messages now; nil if it does.
func (c *Conn) outage() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lines[0].outage()
}

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

// State returns whether the connections are up, and if not, why. Config.Observe is
// called for each change.
func (c *Conn) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := State{
		Connected: true, Closed: c.isClosing(), Since: c.since,
		Generation: c.generation, Endpoint: c.lines[0].endpoint,
	}
	for _, l := range c.lines {
		if l.live == nil {
			s.Connected = false
			s.Attempts = max(s.Attempts, l.attempts)
			if s.Err == nil {
				s.Err = l.why
			}
			continue
		}
		s.Connections++
		if since := l.live.blockage.blockedSince(); s.BlockedSince.IsZero() || !since.IsZero() && since.Before(s.BlockedSince) {
			s.BlockedSince = since
		}
	}
	if w := c.up(); w != nil {
		s.Broker = Broker(w.broker)
	}
	return s
}

// noteState is called with mu held whenever a line is up, down, new or gone.
func (c *Conn) noteState() {
	connected := !slices.ContainsFunc(c.lines, func(l *line) bool { return l.live == nil })
	if connected != c.connected {
		c.connected, c.since = connected, time.Now()
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

// tell fills in what an event of the connection has.
func (c *Conn) tell(w *wire, e stateEvent) {
	e.Op, e.Target, e.Generation, e.Node = "connection", w.endpoint.shown, w.generation, w.broker.Node
	c.observer.notify(e)
}

// wire returns the connection of the first line that has one, and waits for one while
// all are being rebuilt.
func (c *Conn) wire(ctx context.Context) (*wire, error) {
	for {
		c.mu.Lock()
		w, changed := c.up(), c.changed
		c.mu.Unlock()
		if w != nil {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-c.ctx.Done():
			return nil, ErrClosed
		}
	}
}

// openSession opens a session for the machinery.
func (c *Conn) openSession(ctx context.Context) (*wireSession, error) {
	w, err := c.wire(ctx)
	if err != nil {
		return nil, err
	}
	return w.openSession(ctx, c.renewAfter)
}

func (c *Conn) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// join registers what must end before the connection does.
func (c *Conn) join(u closer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosing() {
		return ErrClosed
	}
	c.users[u] = struct{}{}
	return nil
}

func (c *Conn) leave(u closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.users, u)
}
