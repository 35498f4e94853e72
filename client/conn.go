// Package client connects to RabbitMQ over AMQP 1.0, publishes, and consumes:
//
//	delivery → decode → handler → outcome → settle
//
// It is mechanism only. What should become of a message is decided by the
// handler and the middleware around it; this package carries that out, survives
// the loss of connections, and never accepts a message before its successor is
// confirmed. DESIGN.md holds the invariants.
package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/renewal"
)

// Conn is a connection to a broker that rebuilds itself whenever it is lost, with
// unlimited back-off. It is safe for concurrent use.
//
// A connection carries up to 64 AMQP sessions; each publisher takes one, each
// consumer one, and two once it has forwarded something.
type Conn struct {
	cfg       Config
	endpoints []endpoint
	log       *slog.Logger
	observer  *observer
	// renewAfter is after how many deliveries a session is replaced by another.
	renewAfter uint64

	// ctx ends when Close is done with all that uses the connection.
	ctx    context.Context
	cancel context.CancelFunc
	// closing is closed when Close begins: no new work from then on.
	closing   chan struct{}
	closeOnce sync.Once
	closeErr  error
	done      chan struct{}  // the supervisor has ended
	keepers   sync.WaitGroup // of tokens

	mu      sync.Mutex
	live    *wire         // nil while there is no connection
	changed chan struct{} // closed and renewed whenever live changes
	why     error         // why there is no connection
	state   State         // its Broker and Connected are those of live
	users   map[closer]struct{}
	mgmt    *Management
}

// closer is what lives on a Conn and must end before it: consumers, publishers.
type closer interface {
	shut(ctx context.Context) error
}

// Connect opens a connection. It tries each endpoint once, the URL's and then
// those of Config.Endpoints, and returns every endpoint's error if none takes it:
// ErrUnreachable, ErrTLS, ErrAuthentication, ErrVirtualHost, or an
// *argument.Error for a bad URL or Config, which may hold a password and is never
// repeated whole.
//
// The URL has the form amqp://user:password@host:5672/vhost, or amqps:// for
// TLS. The virtual host is "/" where it names none; the user guest.
func Connect(ctx context.Context, url string, cfg Config) (*Conn, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	eps, err := cfg.endpoints(url)
	if err != nil {
		return nil, err
	}
	c := &Conn{
		cfg: cfg, endpoints: eps, log: cfg.Logger, renewAfter: renewal.From(ctx),
		closing: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}), users: map[closer]struct{}{},
		observer: &observer{call: cfg.Observe, log: cfg.Logger},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.mgmt = newManagement(c)

	var errs []error
	for i := range eps {
		w, at, err := c.dial(ctx, i)
		if err == nil {
			c.begin(w, 1)
			go c.supervise(w, at)
			return c, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	c.cancel()
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, errors.Join(errs...)
}

// Broker is what the broker said of itself when the connection was last made:
// its version, and the node that the connection is to.
func (c *Conn) Broker() Broker {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live == nil {
		return Broker{}
	}
	return c.live.broker
}

// Management is the broker's management node, reached over this connection.
func (c *Conn) Management() *Management { return c.mgmt }

// State is the state of a connection at one moment.
type State struct {
	// Connected says whether there is a connection. If neither Connected nor Closed
	// is set, it is being rebuilt.
	Connected bool
	// Closed says that Close has begun.
	Closed bool
	// Since is when that became so.
	Since time.Time
	// Generation counts the connections that were made: 1 for the first.
	Generation uint64
	// Endpoint is where the connection is to, or was, without a password.
	Endpoint string
	// Broker is what the broker said of itself; empty while there is no connection.
	Broker Broker
	// BlockedSince is since when the broker takes no messages on the connection, as it
	// does while it has a memory or disk alarm. Zero: it takes them.
	BlockedSince time.Time
	// Attempts is how many attempts to rebuild the connection have failed so far.
	Attempts int
	// Err is why there is no connection: how it was lost, and then how the last
	// attempt failed.
	Err error
}

// State tells whether there is a connection, and why not. Config.Observe is told
// of each change.
func (c *Conn) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Closed = c.isClosing()
	s.Connected = c.live != nil
	if c.live != nil {
		s.Broker = c.live.broker
		s.BlockedSince = c.live.channels.intakes.blockedSince()
	}
	s.Err = c.why
	return s
}

// begin makes w the live connection.
func (c *Conn) begin(w *wire, attempts int) {
	w.generation = c.state.Generation + 1
	w.channels.intakes.tell = (&blockage{conn: c, wire: w}).tell // before a session begins
	c.mu.Lock()
	defer c.mu.Unlock()
	e := Event{Kind: Up, Attempt: attempts}
	if w.generation > 1 {
		e.Down = time.Since(c.state.Since)
	}
	c.state = State{Since: time.Now(), Generation: w.generation, Endpoint: w.endpoint.shown}
	c.tell(w, e) // before those who wait for it can tell of their links
	c.change(w, nil)
	c.keepers.Go(func() { c.keepToken(w) })
}

// end says that there is no connection any more.
func (c *Conn) end(w *wire, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Since = time.Now()
	c.tell(w, Event{Kind: Lost, Err: why})
	c.change(nil, why)
}

// change is called with mu held.
func (c *Conn) change(w *wire, why error) {
	c.live, c.why = w, why
	close(c.changed)
	c.changed = make(chan struct{})
}

// tell fills in what an event of the connection has.
func (c *Conn) tell(w *wire, e Event) {
	e.Op, e.Target, e.Generation, e.Node = "connection", w.endpoint.shown, w.generation, w.broker.Node
	c.observer.tell(e)
}

// tellUser tells an event of a publisher or consumer.
func (c *Conn) tellUser(e Event) {
	if c.observer == nil || c.observer.call == nil {
		return
	}
	c.mu.Lock()
	e.Generation = c.state.Generation
	if c.live != nil {
		e.Node = c.live.broker.Node
	}
	c.mu.Unlock()
	c.observer.tell(e)
}

// wire returns the live connection, and waits for it while it is being rebuilt.
func (c *Conn) wire(ctx context.Context) (*wire, error) {
	for {
		c.mu.Lock()
		w, changed := c.live, c.changed
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

// supervise replaces the connection whenever it ends.
func (c *Conn) supervise(w *wire, at int) {
	defer close(c.done)
	for {
		select {
		case <-w.amqp.Done():
		case <-c.ctx.Done():
			return
		}
		lost := newError("connection", w.endpoint.shown, ErrConnectionLost, w.amqp.Err())
		w.fail()
		w.cancel()
		c.end(w, lost)
		c.log.Warn("hopback: connection lost, reconnecting", "endpoint", w.endpoint.shown, "node", w.broker.Node, "error", lost)

		next, i, attempts := c.reconnect(at)
		if next == nil {
			return
		}
		w, at = next, i
		c.begin(w, attempts)
		c.log.Info("hopback: connected again", "endpoint", w.endpoint.shown, "node", w.broker.Node, "version", w.broker.Version, "attempts", attempts)
	}
}

// reconnect tries the endpoints in turn, beginning with the one that was lost,
// until one takes the connection or the Conn is closed.
func (c *Conn) reconnect(at int) (*wire, int, int) {
	for n := 0; ; n++ {
		i := (at + n) % len(c.endpoints)
		// The first round over the endpoints needs no pause: what broke may be one
		// node of several. A single endpoint is asked at once, too.
		if round := n / len(c.endpoints); round > 0 {
			if !pause(c.ctx, c.cfg.Reconnect.pause(round-1)) {
				return nil, 0, n
			}
		}
		w, i, err := c.dial(c.ctx, i)
		if err == nil {
			return w, i, n + 1
		}
		if c.ctx.Err() != nil {
			return nil, 0, n
		}
		c.mu.Lock()
		c.why = err
		c.state.Attempts = n + 1
		generation := c.state.Generation
		c.mu.Unlock()
		c.observer.tell(Event{Kind: Refused, Op: "connection", Target: c.endpoints[i].shown, Generation: generation, Attempt: n + 1, Err: err})
		c.log.Warn("hopback: reconnecting failed, trying again", "endpoint", c.endpoints[i].shown, "attempt", n+1, "error", err)
	}
}

// pause is how long to wait after the nth failure in a row: random between
// nothing and Min·2ⁿ, at most Max. The jitter keeps many clients from coming
// back in step.
func (b Backoff) pause(n int) time.Duration {
	d := b.Max
	if n < 32 && b.Min<<n < b.Max && b.Min<<n > 0 {
		d = b.Min << n
	}
	return rand.N(d) + time.Millisecond
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

// Close ends the consumers as if their ctx were cancelled (running handlers may
// finish), waits until the publishers' messages are confirmed, and closes the
// connection. All that within ctx: when it ends, the rest is cut off, and the
// error says so. Close always returns, in whatever state the connection is;
// later calls return what the first did.
func (c *Conn) Close(ctx context.Context) error {
	c.closeOnce.Do(func() {
		// With the connection gone, nothing waits for its broker any longer.
		cutOff := context.AfterFunc(ctx, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.live != nil {
				c.live.fail()
			}
		})
		defer cutOff()
		c.mu.Lock()
		close(c.closing)
		users := make([]closer, 0, len(c.users))
		for u := range c.users {
			users = append(users, u)
		}
		c.mu.Unlock()

		errs := make([]error, len(users))
		var wg sync.WaitGroup
		for i, u := range users {
			wg.Go(func() { errs[i] = u.shut(ctx) })
		}
		wg.Wait()
		c.mgmt.close(ctx)
		c.cancel()
		<-c.done
		c.mu.Lock()
		w := c.live
		c.live = nil
		c.mu.Unlock()
		if w != nil {
			w.close(ctx)
		}
		c.keepers.Wait()
		c.mu.Lock()
		c.state.Since = time.Now()
		generation, endpoint := c.state.Generation, c.state.Endpoint
		c.mu.Unlock()
		c.observer.tell(Event{Kind: Ended, Op: "connection", Target: endpoint, Generation: generation})
		if err := errors.Join(errs...); err != nil {
			c.closeErr = fmt.Errorf("hopback: close: %w", err)
		}
	})
	<-c.done
	return c.closeErr
}
