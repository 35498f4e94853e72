package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// pooledIdle is how long a further connection may be without a taken slot before the pool closes
// it. It is longer than the pauses of a program that keeps opening and closing publishers, which
// would otherwise make a connection for each.
const pooledIdle = time.Minute

// pooledConn is one connection of a pool. It outlives the wires that carry it, one after the
// other. Each has its supervisor, its backoff over all endpoints, its watch for alarms and its
// renewal of tokens.
type pooledConn struct {
	pool   *pool
	number int        // 1 is the first
	cfg    dialConfig // with the connection's name

	// ctx ends when the connection is closed.
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{}  // the supervisor has ended
	keepers sync.WaitGroup // of tokens

	// The rest is guarded by the pool's mu.

	live       *wire // nil while there is no connection
	why        error // why there is none
	since      time.Time
	generation uint64 // of the wire made last
	endpoint   string // where it was to
	at         int    // the index of that endpoint
	attempts   int    // to rebuild it that have failed

	limit int         // sessions that the wire made last can carry
	taken int         // slots that are reserved or in use
	idle  *time.Timer // runs while no slot is taken
}

// newConn makes a connection that isn't open yet. It is called with mu held.
func (p *pool) newConn(number int) *pooledConn {
	c := &pooledConn{pool: p, number: number, cfg: p.cfg.dial, done: make(chan struct{}), limit: maxSessions}
	c.cfg.name = connName(c.cfg.name, number)
	c.ctx, c.cancel = context.WithCancel(p.ctx)
	return c
}

// connName is the name that the broker shows for the connection.
func connName(name string, number int) string {
	if number == 1 {
		return name
	}
	suffix := "-" + strconv.Itoa(number)
	return clip(name, maxName-len(suffix)) + suffix
}

// run makes w the connection and keeps one from then on.
func (c *pooledConn) run(w *wire, at int) {
	c.begin(w, at, 1)
	go c.supervise(w, at)
}

// begin makes w the live connection.
func (c *pooledConn) begin(w *wire, at, attempts int) {
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	e := stateEvent{Kind: eventUp, Attempt: attempts}
	if c.generation > 0 {
		p.past.rebuilt++
		e.Down = time.Since(c.since)
	}
	p.generation++
	w.generation = p.generation
	c.since, c.generation, c.attempts = time.Now(), w.generation, 0
	c.endpoint, c.at, c.limit = w.endpoint.shown, at, w.limit
	p.cfg.onConnected(w.endpoint.address)
	p.notify(w, e) // before its users can report their links
	w.blockage.start(w.broker.Node, func(e stateEvent) { p.notify(w, e) })
	c.change(w, nil)
	c.keepers.Go(func() { p.keepToken(w) })
}

// end notes that the wire w has ended.
func (c *pooledConn) end(w *wire, why error) {
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	c.since = time.Now()
	p.past.lost++
	p.past.blocked += w.blockage.total()
	p.notify(w, stateEvent{Kind: eventLost, Err: why})
	c.change(nil, why)
}

// change is called with mu held.
func (c *pooledConn) change(w *wire, why error) {
	c.live, c.why = w, why
	c.pool.noteState()
}

// outage is why the connection carries no messages now; nil if it does. It is called with mu
// held.
func (c *pooledConn) outage() error {
	switch {
	case c.live == nil:
		return c.why
	case !c.live.blockage.blockedSince().IsZero():
		return errBlocked
	}
	return nil
}

// supervise replaces the connection whenever it ends.
func (c *pooledConn) supervise(w *wire, at int) {
	defer close(c.done)
	p := c.pool
	for try := range link.Tries(c.ctx, c.pause) {
		if w == nil {
			if w, at = c.rebuild(at); w == nil {
				continue
			}
		}
		try.Up()
		select {
		case <-w.amqp.Done():
		case <-c.ctx.Done():
			return
		}
		lost := w.lost()
		w.fail()
		w.cancel()
		c.end(w, lost)
		p.cfg.dial.log.Warn("hopback: connection lost; reconnecting", "endpoint", w.endpoint.shown, "node", w.broker.Node, "error", lost)
		if w.givenUp.Load() != nil {
			at = (at + 1) % len(p.endpoints)
		}
		w = nil
	}
}

// pause is how long to wait before the next endpoint is tried. The first round over the
// endpoints needs no pause: what broke may be one node of several. A single endpoint is
// asked at once, too.
func (c *pooledConn) pause(failures int) time.Duration {
	round := (failures + 1) / len(c.pool.endpoints)
	if round == 0 {
		return 0
	}
	return c.pool.cfg.backoff.Pause(round - 1)
}

// rebuild tries the endpoint at. It returns the connection, or nil, and the endpoint that
// it is to or that is to be tried next.
func (c *pooledConn) rebuild(at int) (*wire, int) {
	p, attempt := c.pool, c.attempts+1 // since the connection was lost
	w, i, err := p.dial(c.ctx, at, c.cfg)
	if err == nil {
		c.begin(w, i, attempt)
		p.cfg.dial.log.Info("hopback: reconnected", "endpoint", w.endpoint.shown, "node", w.broker.Node, "version", w.broker.Version, "attempts", attempt)
		return w, i
	}
	if c.ctx.Err() == nil {
		p.mu.Lock()
		c.attempts = attempt
		generation := c.generation
		c.change(nil, err)
		p.mu.Unlock()
		p.cfg.observer.notify(stateEvent{Kind: eventRefused, Op: "connection", Target: p.endpoints[i].shown, Generation: generation, Attempt: attempt, Err: err})
		p.cfg.dial.log.Warn("hopback: reconnecting failed; trying again", "endpoint", p.endpoints[i].shown, "attempt", attempt, "error", err)
	}
	return nil, (i + 1) % len(p.endpoints)
}

// close ends the connection in order, within ctx.
func (c *pooledConn) close(ctx context.Context) {
	p := c.pool
	c.cancel()
	<-c.done
	p.mu.Lock()
	w := c.live
	if w != nil {
		p.past.blocked += w.blockage.total()
	}
	c.change(nil, ErrClosed)
	if c.idle != nil {
		c.idle.Stop()
	}
	generation, endpoint := c.generation, c.endpoint
	p.mu.Unlock()
	if w != nil {
		w.close(ctx)
	}
	c.keepers.Wait()
	p.cfg.observer.notify(stateEvent{Kind: eventEnded, Op: "connection", Target: endpoint, Generation: generation})
}

// slots is how many sessions the connection has for consumers and publishers.
func (c *pooledConn) slots() int { return c.limit - spareSessions(c.limit) }

// free is how many slots nobody has; negative if the connection came back with fewer than are
// taken. It is called with mu held.
func (c *pooledConn) free() int { return c.slots() - c.taken }

// take reserves n slots. It is called with mu held.
func (c *pooledConn) take(n int) {
	c.taken += n
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
}

// release returns a slot. It is called with mu held.
func (c *pooledConn) release() {
	c.taken--
	p := c.pool
	if c.taken > 0 || c.number == 1 || isClosed(p.closing) {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(p.idleAfter, func() {
		p.mu.Lock()
		if c.idle != t || isClosed(p.closing) {
			p.mu.Unlock()
			return
		}
		p.conns = slices.DeleteFunc(slices.Clone(p.conns), func(other *pooledConn) bool { return other == c })
		p.noteState()
		p.background.Go(func() {
			// Close doesn't wait longer for this than for what it closes itself.
			ctx, cancel := context.WithTimeout(p.hurry, closeTimeout)
			defer cancel()
			c.close(ctx)
		})
		p.mu.Unlock()
		p.cfg.dial.log.Debug("hopback: an additional connection is no longer needed and is closed", "connection", c.cfg.name)
	})
	c.idle = t
}

// growth is a further connection that is being opened.
type growth struct {
	done chan struct{}
	err  error // set before done is closed
}

// grow opens a further connection, or returns the one that is being opened: one at a time,
// so that many consumers that start at once don't make a connection each. It is called
// with mu held.
func (p *pool) grow() (*growth, error) {
	switch {
	case isClosed(p.closing):
		return nil, ErrClosed
	case p.growing != nil:
		return p.growing, nil
	case len(p.conns) >= p.cfg.maxConnections, p.conns[0].slots() == 0: // nor would a further one have any
		return nil, p.full()
	case p.refusal != nil && time.Since(p.refusedAt) < p.cfg.backoff.Min:
		return nil, p.refusal
	}
	c := p.newConn(p.freeNumber())
	at := p.conns[0].at
	g := &growth{done: make(chan struct{})}
	p.growing = g
	p.background.Go(func() {
		w, at, err := p.dialAny(c, at)
		if err == nil {
			c.run(w, at)
		} else {
			c.cancel()
			err = p.refused(err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if err == nil {
			p.conns = append(slices.Clone(p.conns), c)
			c.take(1) // for a moment: nobody may ever come
			c.release()
		}
		p.growing, p.refusal, p.refusedAt = nil, err, time.Now()
		p.noteState()
		g.err = err
		close(g.done)
	})
	return g, nil
}

// dialAny tries each endpoint once, beginning with at. A caller that has left doesn't
// end it, since others may wait for the same connection.
func (p *pool) dialAny(c *pooledConn, at int) (*wire, int, error) {
	var errs []error
	for n := range p.endpoints {
		w, i, err := p.dial(c.ctx, (at+n)%len(p.endpoints), c.cfg)
		if err == nil {
			return w, i, nil
		}
		if c.ctx.Err() != nil {
			return nil, 0, ErrClosed
		}
		p.cfg.observer.notify(stateEvent{Kind: eventRefused, Op: "connection", Target: p.endpoints[i].shown, Attempt: n + 1, Err: err})
		p.cfg.dial.log.Warn("hopback: an additional connection can't be opened", "connection", c.cfg.name, "endpoint", p.endpoints[i].shown, "error", err)
		errs = append(errs, err)
	}
	return nil, 0, errors.Join(errs...)
}

// freeNumber is the lowest number that no connection has. It is called with mu held.
func (p *pool) freeNumber() int {
	number := 2
	for slices.ContainsFunc(p.conns, func(c *pooledConn) bool { return c.number == number }) {
		number++
	}
	return number
}

// full is the error when nothing more can be opened. It is called with mu held.
func (p *pool) full() error {
	taken := 0
	for _, c := range p.conns {
		taken += c.taken
	}
	return &Error{Op: "open session", Kind: ErrSessionLimit, Text: fmt.Sprintf(
		"%d sessions are taken on %d connections, which is what Config.MaxConnections allows: a consumer takes two, a publisher one; close those that aren't needed, or raise MaxConnections",
		taken, len(p.conns))}
}

// refused is the error when a further connection can't be opened. The others are with
// the same virtual host, so what is refused there is one connection more: RabbitMQ
// closes the socket without telling its reason.
func (p *pool) refused(err error) error {
	if !errors.Is(err, ErrVirtualHost) {
		return err
	}
	e := &Error{Op: "connect", Kind: ErrSessionLimit, Err: err, Text: "all sessions of the open connections are in use, and the broker refuses another connection; raise its connection limits for the virtual host and the user, or open fewer consumers and publishers"}
	if first, ok := errors.AsType[*Error](err); ok {
		e.Target = first.Target
	}
	return e
}
