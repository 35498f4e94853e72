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

// A Conn has one line or several. A line is an AMQP connection that is made anew
// whenever it is lost: it outlives the wires that carry it, one after the other. Each
// line has a supervisor, its own back-off over all endpoints, its own watch for alarms
// and its own renewal of tokens. The first line is opened by Connect and stays until
// Close. Each further one is opened when a session is wanted and no line has a place
// for it, and is closed once it has been empty for lineIdle: see conn_seat.go.

// lineIdle is how long a further line may be empty before it is closed. It is longer
// than the pauses of a program that opens and closes publishers all the time, which
// would otherwise make a connection for each.
const lineIdle = time.Minute

type line struct {
	conn   *Conn
	number int        // 1 is the first
	cfg    dialConfig // with the line's own name

	// ctx ends when the line is closed.
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{}  // the supervisor has ended
	keepers sync.WaitGroup // of tokens

	// The rest is guarded by the Conn's mu.

	live       *wire // nil while there is no connection
	why        error // why there is none
	since      time.Time
	generation uint64 // of the connection made last
	endpoint   string // where it was to
	at         int    // the index of that endpoint
	attempts   int    // to rebuild it that have failed

	limit int         // sessions that the connection made last can carry
	taken int         // places that are reserved or in use
	idle  *time.Timer // runs while no place is taken
}

// newLine makes a line without a connection. It is called with mu held.
func (c *Conn) newLine(number int) *line {
	l := &line{conn: c, number: number, cfg: c.cfg.dialing(c.hooks.settledRange()), done: make(chan struct{}), limit: maxSessions}
	l.cfg.name = lineName(c.cfg.Name, number)
	l.ctx, l.cancel = context.WithCancel(c.ctx)
	return l
}

// lineName is what the broker shows beside the connection.
func lineName(name string, number int) string {
	if number == 1 {
		return name
	}
	suffix := "-" + strconv.Itoa(number)
	return clip(name, maxName-len(suffix)) + suffix
}

// run makes w the connection and keeps one from then on.
func (l *line) run(w *wire, at int) {
	l.begin(w, at, 1)
	go l.supervise(w, at)
}

// begin makes w the live connection.
func (l *line) begin(w *wire, at, attempts int) {
	c := l.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	e := stateEvent{Kind: eventUp, Attempt: attempts}
	if l.generation > 0 {
		c.past.rebuilt++
		e.Down = time.Since(l.since)
	}
	c.generation++
	w.generation = c.generation
	l.since, l.generation, l.attempts = time.Now(), w.generation, 0
	l.endpoint, l.at, l.limit = w.endpoint.shown, at, w.limit
	c.hooks.connected(w.endpoint.address)
	c.tell(w, e) // before those who wait for it can tell of their links
	w.blockage.start(w.broker.Node, func(e stateEvent) { c.tell(w, e) })
	l.change(w, nil)
	l.keepers.Go(func() { c.keepToken(w) })
}

// end says that there is no connection any more.
func (l *line) end(w *wire, why error) {
	c := l.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	l.since = time.Now()
	c.past.lost++
	c.past.blocked += w.blockage.total()
	c.tell(w, stateEvent{Kind: eventLost, Err: why})
	l.change(nil, why)
}

// change is called with mu held.
func (l *line) change(w *wire, why error) {
	l.live, l.why = w, why
	l.conn.noteState()
}

// outage is why the line carries no messages now; nil if it does. It is called with mu
// held.
func (l *line) outage() error {
	switch {
	case l.live == nil:
		return l.why
	case !l.live.blockage.blockedSince().IsZero():
		return errBlocked
	}
	return nil
}

// supervise replaces the connection whenever it ends.
func (l *line) supervise(w *wire, at int) {
	defer close(l.done)
	c := l.conn
	for try := range link.Tries(l.ctx, l.pause) {
		if w == nil {
			if w, at = l.rebuild(at); w == nil {
				continue
			}
		}
		try.Up()
		select {
		case <-w.amqp.Done():
		case <-l.ctx.Done():
			return
		}
		lost := w.lost()
		w.fail()
		w.cancel()
		l.end(w, lost)
		c.log.Warn("hopback: connection lost; reconnecting", "endpoint", w.endpoint.shown, "node", w.broker.Node, "error", lost)
		if w.givenUp.Load() != nil {
			at = (at + 1) % len(c.endpoints)
		}
		w = nil
	}
}

// pause is how long to wait before the next endpoint is tried. The first round over the
// endpoints needs no pause: what broke may be one node of several. A single endpoint is
// asked at once, too.
func (l *line) pause(failures int) time.Duration {
	round := (failures + 1) / len(l.conn.endpoints)
	if round == 0 {
		return 0
	}
	return l.conn.cfg.Reconnect.pause(round - 1)
}

// rebuild tries the endpoint at. It returns the connection, or nil, and the endpoint that
// it is to or that is to be tried next.
func (l *line) rebuild(at int) (*wire, int) {
	c, attempt := l.conn, l.attempts+1 // since the connection was lost
	w, i, err := c.dial(l.ctx, at, l.cfg)
	if err == nil {
		l.begin(w, i, attempt)
		c.log.Info("hopback: reconnected", "endpoint", w.endpoint.shown, "node", w.broker.Node, "version", w.broker.Version, "attempts", attempt)
		return w, i
	}
	if l.ctx.Err() == nil {
		c.mu.Lock()
		l.attempts = attempt
		generation := l.generation
		l.change(nil, err)
		c.mu.Unlock()
		c.observer.notify(stateEvent{Kind: eventRefused, Op: "connection", Target: c.endpoints[i].shown, Generation: generation, Attempt: attempt, Err: err})
		c.log.Warn("hopback: reconnecting failed; trying again", "endpoint", c.endpoints[i].shown, "attempt", attempt, "error", err)
	}
	return nil, (i + 1) % len(c.endpoints)
}

// close ends the line in order, within ctx.
func (l *line) close(ctx context.Context) {
	c := l.conn
	l.cancel()
	<-l.done
	c.mu.Lock()
	w := l.live
	if w != nil {
		c.past.blocked += w.blockage.total()
	}
	l.change(nil, ErrClosed)
	if l.idle != nil {
		l.idle.Stop()
	}
	generation, endpoint := l.generation, l.endpoint
	c.mu.Unlock()
	if w != nil {
		w.close(ctx)
	}
	l.keepers.Wait()
	c.observer.notify(stateEvent{Kind: eventEnded, Op: "connection", Target: endpoint, Generation: generation})
}

// places is how many sessions the line has for consumers and publishers.
func (l *line) places() int { return l.limit - spareSessions(l.limit) }

// room is how many of them nobody has. It is called with mu held.
func (l *line) room() int { return l.places() - l.taken }

// take reserves n places. It is called with mu held.
func (l *line) take(n int) {
	l.taken += n
	if l.idle != nil {
		l.idle.Stop()
		l.idle = nil
	}
}

// give returns a place. It is called with mu held.
func (l *line) give() {
	l.taken--
	c := l.conn
	if l.taken > 0 || l.number == 1 || c.isClosing() {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(c.idle, func() {
		c.mu.Lock()
		if l.idle != t || c.isClosing() {
			c.mu.Unlock()
			return
		}
		c.lines = slices.DeleteFunc(slices.Clone(c.lines), func(other *line) bool { return other == l })
		c.noteState()
		c.background.Go(func() {
			// Close doesn't wait longer for this than for what it closes itself.
			ctx, cancel := context.WithTimeout(c.hurry, closeTimeout)
			defer cancel()
			l.close(ctx)
		})
		c.mu.Unlock()
		c.log.Debug("hopback: an additional connection is no longer needed and is closed", "connection", l.cfg.name)
	})
	l.idle = t
}

// growth is a further line that is being opened.
type growth struct {
	done chan struct{}
	err  error // set before done is closed
}

// grow opens a further line, or returns the one that is being opened: one at a time,
// so that many consumers that start at once don't make a connection each. It is called
// with mu held.
func (c *Conn) grow() (*growth, error) {
	switch {
	case c.isClosing():
		return nil, ErrClosed
	case c.growing != nil:
		return c.growing, nil
	case len(c.lines) >= c.cfg.MaxConnections, c.lines[0].places() == 0: // nor would a further one have any
		return nil, c.full()
	case c.refusal != nil && time.Since(c.refusedAt) < c.cfg.Reconnect.Min:
		return nil, c.refusal
	}
	l := c.newLine(c.freeNumber())
	at := c.lines[0].at
	g := &growth{done: make(chan struct{})}
	c.growing = g
	c.background.Go(func() {
		w, at, err := c.dialAny(l, at)
		if err == nil {
			l.run(w, at)
		} else {
			l.cancel()
			err = c.refused(err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err == nil {
			c.lines = append(slices.Clone(c.lines), l)
			l.take(1) // for a moment: nobody may ever come
			l.give()
		}
		c.growing, c.refusal, c.refusedAt = nil, err, time.Now()
		c.noteState()
		g.err = err
		close(g.done)
	})
	return g, nil
}

// dialAny tries each endpoint once, beginning with at. A caller that has left doesn't
// end it, since others may wait for the same line.
func (c *Conn) dialAny(l *line, at int) (*wire, int, error) {
	var errs []error
	for n := range c.endpoints {
		w, i, err := c.dial(l.ctx, (at+n)%len(c.endpoints), l.cfg)
		if err == nil {
			return w, i, nil
		}
		if l.ctx.Err() != nil {
			return nil, 0, ErrClosed
		}
		c.observer.notify(stateEvent{Kind: eventRefused, Op: "connection", Target: c.endpoints[i].shown, Attempt: n + 1, Err: err})
		c.log.Warn("hopback: an additional connection can't be opened", "connection", l.cfg.name, "endpoint", c.endpoints[i].shown, "error", err)
		errs = append(errs, err)
	}
	return nil, 0, errors.Join(errs...)
}

// freeNumber is the lowest number that no line has. It is called with mu held.
func (c *Conn) freeNumber() int {
	number := 2
	for slices.ContainsFunc(c.lines, func(l *line) bool { return l.number == number }) {
		number++
	}
	return number
}

// full is the error when nothing more can be opened. It is called with mu held.
func (c *Conn) full() error {
	taken := 0
	for _, l := range c.lines {
		taken += l.taken
	}
	return &Error{Op: "open session", Kind: ErrSessionLimit, Text: fmt.Sprintf(
		"%d sessions are taken on %d connections, which is what Config.MaxConnections allows: a consumer takes two, a publisher one; close those that aren't needed, or raise MaxConnections",
		taken, len(c.lines))}
}

// refused is the error when a further connection can't be opened. The others are with
// the same virtual host, so what is refused there is one connection more: RabbitMQ
// closes the socket without telling its reason.
func (c *Conn) refused(err error) error {
	if !errors.Is(err, ErrVirtualHost) {
		return err
	}
	e := &Error{Op: "connect", Kind: ErrSessionLimit, Err: err, Text: "all sessions of the open connections are in use, and the broker refuses another connection; raise its connection limits for the virtual host and the user, or open fewer consumers and publishers"}
	if first, ok := errors.AsType[*Error](err); ok {
		e.Target = first.Target
	}
	return e
}
