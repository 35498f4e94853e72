package link

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/event"
	"github.com/hopback/hopback/internal/failure"
)

// pooledIdle is how long a further connection may be without a taken slot before the pool closes
// it. It is longer than the pauses of a program that keeps opening and closing publishers, which
// would otherwise make a connection for each.
const pooledIdle = time.Minute

// pooledConn is one connection of a pool. It outlives the wires that carry it, one after the
// other. Each has its supervisor, its backoff over all endpoints, its watch for alarms and its
// renewal of tokens.
type pooledConn struct {
	pool   *Pool
	number int        // 1 is the first
	Cfg    DialConfig // with the connection's name

	// ctx ends when the connection is closed.
	ctx     context.Context
	cancel  context.CancelFunc
	Done    chan struct{}  // the supervisor has ended
	keepers sync.WaitGroup // of tokens

	// The rest is guarded by the pool's mu.

	Live       *Wire // nil while there is no connection
	Why        error // why there is none
	since      time.Time
	generation uint64 // of the wire made last
	endpoint   string // where it was to
	at         int    // the index of that endpoint
	attempts   int    // to rebuild it that have failed

	limit int         // sessions that the wire made last can carry
	Taken int         // slots that are reserved or in use
	idle  *time.Timer // runs while no slot is taken
}

// newConn makes a connection that isn't open yet. It is called with mu held.
func (p *Pool) newConn(number int) *pooledConn {
	c := &pooledConn{pool: p, number: number, Cfg: p.cfg.Dial, Done: make(chan struct{}), limit: MaxSessions}
	c.Cfg.Name = connName(c.Cfg.Name, number)
	c.ctx, c.cancel = context.WithCancel(p.Ctx)
	return c
}

// connName is the name that the broker shows for the connection.
func connName(name string, number int) string {
	if number == 1 {
		return name
	}
	suffix := "-" + strconv.Itoa(number)
	return failure.Clip(name, MaxName-len(suffix)) + suffix
}

// Run makes w the connection and keeps one from then on.
func (c *pooledConn) Run(w *Wire, at int) {
	c.begin(w, at, 1)
	go c.supervise(w, at)
}

// begin makes w the live connection.
func (c *pooledConn) begin(w *Wire, at, attempts int) {
	p := c.pool
	p.Mu.Lock()
	defer p.Mu.Unlock()
	e := event.StateEvent{Kind: event.EventUp, Attempt: attempts}
	if c.generation > 0 {
		p.past.Rebuilt++
		e.Down = time.Since(c.since)
	}
	p.generation++
	w.generation = p.generation
	c.since, c.generation, c.attempts = time.Now(), w.generation, 0
	c.endpoint, c.at, c.limit = w.endpoint.Shown, at, w.Limit
	p.cfg.OnConnected(w.endpoint.address)
	p.notify(w, e) // before its users can report their links
	w.Blockage.Start(w.Broker.Node, func(e event.StateEvent) { p.notify(w, e) })
	c.Change(w, nil)
	c.keepers.Go(func() { p.keepToken(w) })
}

// end notes that the wire w has ended.
func (c *pooledConn) end(w *Wire, why error) {
	p := c.pool
	p.Mu.Lock()
	defer p.Mu.Unlock()
	c.since = time.Now()
	p.past.Lost++
	p.past.Blocked += w.Blockage.total()
	p.notify(w, event.StateEvent{Kind: event.EventLost, Err: why})
	c.Change(nil, why)
}

// Change is called with mu held.
func (c *pooledConn) Change(w *Wire, why error) {
	c.Live, c.Why = w, why
	c.pool.noteState()
}

// outage is why the connection carries no messages now; nil if it does. It is called with mu
// held.
func (c *pooledConn) outage() error {
	switch {
	case c.Live == nil:
		return c.Why
	case !c.Live.Blockage.blockedSince().IsZero():
		return failure.ErrBlocked
	}
	return nil
}

// supervise replaces the connection whenever it ends.
func (c *pooledConn) supervise(w *Wire, at int) {
	defer close(c.Done)
	p := c.pool
	for try := range Tries(c.ctx, c.pause) {
		if w == nil {
			if w, at = c.rebuild(at); w == nil {
				continue
			}
		}
		try.Up()
		select {
		case <-w.AMQP.Done():
		case <-c.ctx.Done():
			return
		}
		lost := w.lost()
		w.fail()
		w.Cancel()
		c.end(w, lost)
		p.cfg.Dial.Log.Warn("hopback: connection lost; reconnecting", "endpoint", w.endpoint.Shown, "node", w.Broker.Node, "error", lost)
		if w.GivenUp.Load() != nil {
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
	return c.pool.cfg.Backoff.Pause(round - 1)
}

// rebuild tries the endpoint at. It returns the connection, or nil, and the endpoint that
// it is to or that is to be tried next.
func (c *pooledConn) rebuild(at int) (*Wire, int) {
	p, attempt := c.pool, c.attempts+1 // since the connection was lost
	w, i, err := p.Dial(c.ctx, at, c.Cfg)
	if err == nil {
		c.begin(w, i, attempt)
		p.cfg.Dial.Log.Info("hopback: reconnected", "endpoint", w.endpoint.Shown, "node", w.Broker.Node, "version", w.Broker.Version, "attempts", attempt)
		return w, i
	}
	if c.ctx.Err() == nil {
		p.Mu.Lock()
		c.attempts = attempt
		generation := c.generation
		c.Change(nil, err)
		p.Mu.Unlock()
		p.cfg.Observer.Notify(event.StateEvent{Kind: event.EventRefused, Op: "connection", Target: p.endpoints[i].Shown, Generation: generation, Attempt: attempt, Err: err})
		p.cfg.Dial.Log.Warn("hopback: reconnecting failed; trying again", "endpoint", p.endpoints[i].Shown, "attempt", attempt, "error", err)
	}
	return nil, (i + 1) % len(p.endpoints)
}

// close ends the connection in order, within ctx.
func (c *pooledConn) close(ctx context.Context) {
	p := c.pool
	c.cancel()
	<-c.Done
	p.Mu.Lock()
	w := c.Live
	if w != nil {
		p.past.Blocked += w.Blockage.total()
	}
	c.Change(nil, failure.ErrClosed)
	if c.idle != nil {
		c.idle.Stop()
	}
	generation, endpoint := c.generation, c.endpoint
	p.Mu.Unlock()
	if w != nil {
		w.close(ctx)
	}
	c.keepers.Wait()
	p.cfg.Observer.Notify(event.StateEvent{Kind: event.EventEnded, Op: "connection", Target: endpoint, Generation: generation})
}

// slots is how many sessions the connection has for consumers and publishers.
func (c *pooledConn) slots() int { return c.limit - spareSessions(c.limit) }

// free is how many slots nobody has; negative if the connection came back with fewer than are
// taken. It is called with mu held.
func (c *pooledConn) free() int { return c.slots() - c.Taken }

// take reserves n slots. It is called with mu held.
func (c *pooledConn) take(n int) {
	c.Taken += n
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
}

// release returns a slot. It is called with mu held.
func (c *pooledConn) release() {
	c.Taken--
	p := c.pool
	if c.Taken > 0 || c.number == 1 || failure.IsClosed(p.Closing) {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(p.IdleAfter, func() {
		p.Mu.Lock()
		if c.idle != t || failure.IsClosed(p.Closing) {
			p.Mu.Unlock()
			return
		}
		p.Conns = slices.DeleteFunc(slices.Clone(p.Conns), func(other *pooledConn) bool { return other == c })
		p.noteState()
		p.Background.Go(func() {
			// Close doesn't wait longer for this than for what it closes itself.
			ctx, cancel := context.WithTimeout(p.expedite, CloseTimeout)
			defer cancel()
			c.close(ctx)
		})
		p.Mu.Unlock()
		p.cfg.Dial.Log.Debug("hopback: an additional connection is no longer needed and is closed", "connection", c.Cfg.Name)
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
func (p *Pool) grow() (*growth, error) {
	switch {
	case failure.IsClosed(p.Closing):
		return nil, failure.ErrClosed
	case p.growing != nil:
		return p.growing, nil
	case len(p.Conns) >= p.cfg.MaxConnections, p.Conns[0].slots() == 0: // nor would a further one have any
		return nil, p.full()
	case p.Refusal != nil && time.Since(p.refusedAt) < p.cfg.Backoff.Min:
		return nil, p.Refusal
	}
	c := p.newConn(p.freeNumber())
	at, first := p.Conns[0].at, p.Conns[0].generation
	g := &growth{done: make(chan struct{})}
	p.growing = g
	p.Background.Go(func() {
		w, at, err := p.dialAny(c, at)
		if err == nil {
			c.Run(w, at)
		} else {
			err = p.refused(c.ctx, first, err)
			c.cancel()
		}
		p.Mu.Lock()
		defer p.Mu.Unlock()
		if err == nil {
			p.Conns = append(slices.Clone(p.Conns), c)
			c.take(1) // for a moment: nobody may ever come
			c.release()
		}
		p.growing, p.Refusal, p.refusedAt = nil, err, time.Now()
		p.noteState()
		g.err = err
		close(g.done)
	})
	return g, nil
}

// dialAny tries each endpoint once, beginning with at. A caller that has left doesn't
// end it, since others may wait for the same connection.
func (p *Pool) dialAny(c *pooledConn, at int) (*Wire, int, error) {
	var errs []error
	for n := range p.endpoints {
		w, i, err := p.Dial(c.ctx, (at+n)%len(p.endpoints), c.Cfg)
		if err == nil {
			return w, i, nil
		}
		if c.ctx.Err() != nil {
			return nil, 0, failure.ErrClosed
		}
		p.cfg.Observer.Notify(event.StateEvent{Kind: event.EventRefused, Op: "connection", Target: p.endpoints[i].Shown, Attempt: n + 1, Err: err})
		p.cfg.Dial.Log.Warn("hopback: an additional connection can't be opened", "connection", c.Cfg.Name, "endpoint", p.endpoints[i].Shown, "error", err)
		errs = append(errs, err)
	}
	return nil, 0, errors.Join(errs...)
}

// freeNumber is the lowest number that no connection has. It is called with mu held.
func (p *Pool) freeNumber() int {
	number := 2
	for slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.number == number }) {
		number++
	}
	return number
}

// full is the error when nothing more can be opened. It is called with mu held.
func (p *Pool) full() error {
	taken := 0
	for _, c := range p.Conns {
		taken += c.Taken
	}
	return &failure.Error{Op: "open session", Kind: failure.ErrSessionLimit, Text: fmt.Sprintf(
		"all %d sessions of the %d connections that Config.MaxConnections allows are in use; a consumer needs two sessions, a publisher one; close those that you don't need, or raise MaxConnections",
		taken, len(p.Conns))}
}

// noticing is how long the loss of the first connection may take to be noticed, after that of
// another one to the same broker.
const noticing = 100 * time.Millisecond

// refused is the error when an additional connection can't be opened. The others use the same
// virtual host, so the broker refuses one more connection, not the virtual host: RabbitMQ closes
// the socket without a reason. One that ends does the same, but then the first connection, which
// had the generation first, ends too.
func (p *Pool) refused(ctx context.Context, first uint64, err error) error {
	if !errors.Is(err, failure.ErrVirtualHost) || !Pause(ctx, noticing) {
		return err
	}
	p.Mu.Lock()
	lost := p.Conns[0].Live == nil || p.Conns[0].generation != first
	p.Mu.Unlock()
	if lost {
		return &failure.Error{Op: "connect", Kind: failure.ErrConnectionLost, Text: "the broker has closed all connections"}
	}
	e := &failure.Error{Op: "connect", Kind: failure.ErrSessionLimit, Err: err, Text: "all sessions of the open connections are in use, and the broker refuses another connection; raise its connection limits for the virtual host and the user, or open fewer consumers and publishers"}
	if first, ok := errors.AsType[*failure.Error](err); ok {
		e.Target = first.Target
	}
	return e
}
