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

// pooledIdle is how long an additional connection may have no slot in use before the pool closes it. It is longer
// than the pauses of a program that keeps opening and closing publishers. Otherwise each publisher would open a
// connection.
const pooledIdle = time.Minute

// pooledConn is one connection of a pool: one Wire after the other. Each pooledConn has a supervisor, which tries
// all endpoints with a backoff.
type pooledConn struct {
	pool   *Pool
	number int        // 1 is the first
	Cfg    DialConfig // with the connection's name

	// ctx ends when the connection is closed.
	ctx     context.Context
	cancel  context.CancelFunc
	Done    chan struct{}   // closed when the supervisor has returned
	keepers sync.WaitGroup  // goroutines that renew tokens
	down    loglines.Outage // for the supervisor

	// The rest is guarded by Pool.Mu.

	Live       *Wire     // nil while there is no connection
	Why        error     // why there is none
	since      time.Time // when Live was set, or lost
	generation uint64    // of the last Wire
	endpoint   string    // of the last Wire, for people
	at         int       // the index of that endpoint
	attempts   int       // to rebuild it that have failed; only the supervisor changes it

	limit int         // sessions that the last Wire can carry
	Taken int         // slots that are reserved or in use
	idle  *time.Timer // runs while no slot of an additional connection is in use
}

// newConn returns a connection that isn't open yet. It is called with Mu held, except by NewPool.
func (p *Pool) newConn(number int) *pooledConn {
	c := &pooledConn{pool: p, number: number, Cfg: p.cfg.Dial, Done: make(chan struct{}), limit: MaxSessions}
	c.Cfg.Name = connName(c.Cfg.Name, number)
	c.ctx, c.cancel = context.WithCancel(p.Ctx)
	return c
}

// connName returns the name that the broker shows for the connection.
func connName(name string, number int) string {
	if number == 1 {
		return name
	}
	suffix := "-" + strconv.Itoa(number)
	return failure.Clip(name, MaxName-len(suffix)) + suffix
}

// Run makes w the live connection, and starts the supervisor.
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

// end notes that w, which was live, has ended.
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

// Change sets Live and Why. It is called with Mu held.
func (c *pooledConn) Change(w *Wire, why error) {
	c.Live, c.Why = w, why
	c.pool.noteState()
}

// outage returns why the connection carries no messages now; nil if it does. It is called with Mu held.
func (c *pooledConn) outage() error {
	switch {
	case c.Live == nil:
		return c.Why
	case !c.Live.Blockage.blockedSince().IsZero():
		return failure.ErrBlocked
	}
	return nil
}

// supervise opens another connection whenever one ends, until c is closed.
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
		c.down.Due(time.Now()) // the line below is the first of this outage
		p.cfg.Dial.Log.Warn("hopback: connection lost; reconnecting", "endpoint", w.endpoint.Shown, "node", w.Node, "error", lost)
		if w.GivenUp.Load() != nil {
			at = (at + 1) % len(p.endpoints)
			c.Cfg.fail(w.Net)
		}
		w = nil
	}
}

// pause returns how long to wait before the next endpoint is tried. The first round over all endpoints has no
// pauses, because only one of several nodes may have failed. A single endpoint is tried again at once, too.
func (c *pooledConn) pause(failures int) time.Duration {
	round := (failures + 1) / len(c.pool.endpoints)
	if round == 0 {
		return 0
	}
	return c.pool.cfg.Backoff.Pause(round - 1)
}

// rebuild tries the endpoint with index at. It returns the connection and the index of its endpoint, or nil and
// the index to try next.
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

// close stops the supervisor, and closes the connection within ctx.
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

// slots returns how many sessions the connection has for consumers and publishers.
func (c *pooledConn) slots() int { return c.limit - spareSessions(c.limit) }

// free returns how many slots aren't reserved. It is negative if the connection was rebuilt with fewer slots than
// are reserved. It is called with Mu held.
func (c *pooledConn) free() int { return c.slots() - c.Taken }

// take reserves n slots. It is called with Mu held.
func (c *pooledConn) take(n int) {
	c.Taken += n
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
}

// release frees a slot. It is called with Mu held.
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

// growth is an additional connection that is being opened.
type growth struct {
	done chan struct{}
	err  error // set before done is closed
}

// grow starts to open an additional connection, or returns the one that is being opened. It is one at a time, so
// that many consumers that start at once don't open a connection each. It is called with Mu held.
func (p *Pool) grow() (*growth, error) {
	switch {
	case failure.IsClosed(p.Closing):
		return nil, failure.ErrClosed
	case p.growing != nil:
		return p.growing, nil
	case len(p.Conns) >= p.cfg.MaxConnections, p.Conns[0].slots() == 0: // another connection would have none either
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
			c.take(1) // this pair starts the idle timer: the caller may not want the slot any more
			c.release()
		}
		p.growing, p.Refusal, p.refusedAt = nil, err, time.Now()
		p.noteState()
		g.err = err
		close(g.done)
	})
	return g, nil
}

// dialAny tries each endpoint once, beginning with at. It doesn't stop when the caller of grow stops waiting,
// because others may wait for the same connection.
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

// freeNumber returns the lowest number that no connection has. It is called with Mu held.
func (p *Pool) freeNumber() int {
	number := 2
	for slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.number == number }) {
		number++
	}
	return number
}

// full returns the error for a session that no connection has room for. It is called with Mu held.
func (p *Pool) full() error {
	if first := p.Conns[0]; first.slots() == 0 {
		// Another connection would have none either.
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

// noticing is how much later than that of another connection the loss of the first one may be noticed, if their
// broker has ended both.
const noticing = 100 * time.Millisecond

// furtherTries is how often an additional connection is tried before the callers get an error: a single failure
// may be the network's. furtherRefusals is how many of these tries the broker may refuse, which takes RabbitMQ 3 s
// each.
const (
	furtherTries    = 3
	furtherRefusals = 2
)

// openFurther opens an additional connection. first is the generation of the first connection. If that one is lost
// too, the broker has stopped, so openFurther returns failure.ErrConnectionLost, and callers try again.
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

// limited returns the error of an additional connection that the broker refuses. RabbitMQ closes the socket without
// a reason, as it does for a missing virtual host. But the other connections use the same one, so this is a limit.
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
