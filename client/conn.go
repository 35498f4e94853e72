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

	// ctx ends when Close is done with all that uses the connection.
	ctx    context.Context
	cancel context.CancelFunc
	// closing is closed when Close begins: no new work from then on.
	closing   chan struct{}
	closeOnce sync.Once
	closeErr  error
	done      chan struct{} // the supervisor has ended

	mu      sync.Mutex
	live    *wire         // nil while there is no connection
	changed chan struct{} // closed and renewed whenever live changes
	why     error         // why there is no connection
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
		cfg: cfg, endpoints: eps, log: cfg.Logger,
		closing: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}), users: map[closer]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.mgmt = newManagement(c)

	var errs []error
	for i, ep := range eps {
		w, err := dial(ctx, ep, cfg)
		if err == nil {
			w.generation = 1
			c.set(w, nil)
			go c.supervise(w, i)
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

func (c *Conn) set(w *wire, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live, c.why = w, why
	close(c.changed)
	c.changed = make(chan struct{})
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
		c.set(nil, lost)
		c.log.Warn("hopback: connection lost, reconnecting", "endpoint", w.endpoint.shown, "node", w.broker.Node, "error", lost)

		next, i, attempts := c.reconnect(at)
		if next == nil {
			return
		}
		next.generation = w.generation + 1
		w, at = next, i
		c.set(w, nil)
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
		w, err := dial(c.ctx, c.endpoints[i], c.cfg)
		if err == nil {
			return w, i, n + 1
		}
		if c.ctx.Err() != nil {
			return nil, 0, n
		}
		c.mu.Lock()
		c.why = err
		c.mu.Unlock()
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
		if err := errors.Join(errs...); err != nil {
			c.closeErr = fmt.Errorf("hopback: close: %w", err)
		}
	})
	<-c.done
	return c.closeErr
}
