package link

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/loglines"
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
	generation uint64          // of the wire made last
	endpoint   string          // where it was to
	at         int             // the index of that endpoint
	attempts   int             // to rebuild it that have failed
	down       loglines.Outage // only the supervisor uses it

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
	var down time.Duration
	if c.generation > 0 {
		p.rebuilt++
		down = time.Since(c.since)
	}
	p.generation++
	w.generation = p.generation
	c.since, c.generation, c.attempts = time.Now(), w.generation, 0
	c.endpoint, c.at, c.limit = w.endpoint.Shown, at, w.Limit
	p.cfg.Observer.Up(w.Place(), attempts, down) // before its users can report their links
	w.Blockage.Start(w.Place(), p.cfg.Observer)
	c.Change(w, nil)
	c.keepers.Go(func() { p.keepToken(w) })
}

// end notes that the wire w has ended.
func (c *pooledConn) end(w *Wire, why error) {
	p := c.pool
	p.Mu.Lock()
	defer p.Mu.Unlock()
	c.since = time.Now()
	p.lost++
	p.blocked += w.Blockage.total()
	p.cfg.Observer.Lost(w.Place(), why)
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
	for try := range backoff.Tries(c.ctx, c.pause) {
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
		w.cancel()
		c.end(w, lost)
		c.down = loglines.Outage{}
		c.down.Due(time.Now()) // it is: this line is the first
		p.cfg.Dial.Log.Warn("hopback: connection lost; reconnecting", "endpoint", w.endpoint.Shown, "node", w.Node, "error", lost)
		if w.GivenUp.Load() != nil {
			at = (at + 1) % len(p.endpoints)
			c.Cfg.fail(w.Net)
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
	p.Mu.Lock()
	lost := c.since
	p.Mu.Unlock()
	w, i, err := p.Dial(c.ctx, at, c.Cfg)
	if err == nil {
		c.begin(w, i, attempt)
		p.cfg.Dial.Log.Info("hopback: reconnected", "endpoint", w.endpoint.Shown, "node", w.Node, "version", w.Version, "after", time.Since(lost).Round(time.Millisecond), "attempts", attempt)
		return w, i
	}
	if c.ctx.Err() == nil {
		p.Mu.Lock()
		c.attempts = attempt
		generation := c.generation
		c.Change(nil, err)
		p.Mu.Unlock()
		p.cfg.Observer.Refused(Place{Endpoint: p.endpoints[i].Shown, Generation: generation}, attempt, err)
		now := time.Now()
		p.cfg.Dial.Log.Log(c.ctx, c.down.Level(now), "hopback: reconnecting failed; trying again", "endpoint", p.endpoints[i].Shown, "down", now.Sub(lost).Round(time.Millisecond), "attempts", attempt, "error", err)
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
		p.blocked += w.Blockage.total()
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
	p.cfg.Observer.Ended(Place{Endpoint: endpoint, Generation: generation})
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
		w, at, err := p.openFurther(c, at, first)
		if err == nil {
			c.Run(w, at)
		} else {
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
		w, i, err := p.dialEach(c.ctx, (at+n)%len(p.endpoints), c.Cfg)
		if err == nil {
			return w, i, nil
		}
		if c.ctx.Err() != nil {
			return nil, 0, failure.ErrClosed
		}
		p.cfg.Observer.Refused(Place{Endpoint: p.endpoints[i].Shown}, n+1, err)
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
	if first := p.Conns[0]; first.slots() == 0 {
		// A further connection would have none either.
		return failure.MarkLasting(&failure.Error{Op: "open session", Kind: failure.ErrSessionLimit, Text: fmt.Sprintf(
			"the broker allows %d session on a connection (channel-max %d), which hopback needs for management; raise the broker's settings session_max_per_connection and channel_max to 4 at least",
			first.limit, first.limit-1)})
	}
	taken := 0
	for _, c := range p.Conns {
		taken += c.Taken
	}
	return &failure.Error{Op: "open session", Kind: failure.ErrSessionLimit, Text: fmt.Sprintf(
		"all %d sessions of the %d connections that Config.MaxConnections allows are in use (the broker allows %d on a connection, and hopback keeps %d of them for management); a consumer needs two sessions, a publisher one; close those that you don't need, or raise MaxConnections",
		taken, len(p.Conns), p.Conns[0].limit, spareSessions(p.Conns[0].limit))}
}

// noticing is how long the loss of the first connection may take to be noticed, after that of
// another one to the same broker.
const noticing = 100 * time.Millisecond

// furtherTries is how often an additional connection is tried before its callers get an error, and
// furtherRefusals how many of these tries the broker may refuse. One try that fails may be the
// network's doing. A refusal takes RabbitMQ 3 s.
const (
	furtherTries    = 3
	furtherRefusals = 2
)

// openFurther opens an additional connection. first is the generation of the first connection: if
// that is lost, too, the broker has ended, and callers wait until it is back.
func (p *Pool) openFurther(c *pooledConn, at int, first uint64) (*Wire, int, error) {
	refusals := 0
	for n := range furtherTries {
		w, i, err := p.dialAny(c, at)
		if err == nil {
			return w, i, nil
		}
		if !backoff.Sleep(c.ctx, noticing) {
			return nil, 0, failure.ErrClosed
		}
		if p.hasLostFirst(first) {
			return nil, 0, &failure.Error{Op: "connect", Kind: failure.ErrConnectionLost, Text: "the broker has closed all connections"}
		}
		if errors.Is(err, failure.ErrVirtualHost) {
			if refusals++; refusals == furtherRefusals {
				return nil, 0, limited(err)
			}
		} else if !failure.WorthRetrying(err) || n+1 == furtherTries {
			return nil, 0, err
		}
		if !backoff.Sleep(c.ctx, p.cfg.Backoff.Pause(n)) {
			return nil, 0, failure.ErrClosed
		}
	}
	return nil, 0, failure.ErrClosed
}

// hasLostFirst reports whether the first connection, which had this generation, has ended.
func (p *Pool) hasLostFirst(generation uint64) bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.Conns[0].Live == nil || p.Conns[0].generation != generation
}

// limited is the error of an additional connection that the broker refuses. The others use the same
// virtual host, so the broker refuses one more connection, not the virtual host: RabbitMQ closes the
// socket without a reason.
func limited(err error) error {
	e := &failure.Error{Op: "connect", Kind: failure.ErrSessionLimit, Err: err, Text: "all sessions of the open connections are in use, and the broker refuses another connection"}
	if first, ok := errors.AsType[*failure.Error](err); ok {
		e.Target = first.Target
		if first.Err != nil {
			e.Text += " (" + failure.Clip(failure.Readable(first.Err.Error()), 200) + ")"
		}
	}
	e.Text += "; raise its connection limits for the virtual host and the user, or open fewer consumers and publishers"
	return e
}
