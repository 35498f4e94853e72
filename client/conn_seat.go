package client

import (
	"context"
	"slices"
)

// A consumer or publisher holds a booking: the right to as many sessions as it may need
// at the same time. It reserves a seat for each of them before it opens the first, and
// keeps them until it ends. So a consumer's forwards get their session at the first
// failure, however many others live on the Conn.

// How many sessions they may need: a consumer one to receive on, and one for its forwards.
const (
	publisherSessions = 1
	consumerSessions  = 2
)

// booking is a consumer's or publisher's right to sessions.
type booking struct {
	conn *Conn
	want int

	// Guarded by the Conn's mu.
	seats    []*seat // none before the first session
	released bool
}

// seat is a place on a line: the right to one session at a time.
type seat struct {
	line *line
	busy bool // from before its session begins until that has ended
}

func (c *Conn) book(sessions int) *booking { return &booking{conn: c, want: sessions} }

// open opens a session, waiting for the connection while that is being rebuilt. A
// session beyond those that are reserved gets a seat for as long as it lives: forwards
// may use an old session for some addresses and a new one for others.
func (b *booking) open(ctx context.Context) (session, error) {
	s, err := b.openWire(ctx)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (b *booking) openWire(ctx context.Context) (*wireSession, error) {
	s, err := b.sit(ctx)
	if err != nil {
		return nil, err
	}
	w, err := b.conn.wireOf(ctx, s)
	if err != nil {
		b.stand(s)
		return nil, err
	}
	return w.session(ctx, b.conn.renewAfter, func() { b.stand(s) })
}

// give ends a session.
func (b *booking) give(s session, _ bool) { closeSession(s) }

// sit returns a seat that is busy from then on.
func (b *booking) sit(ctx context.Context) (*seat, error) {
	c := b.conn
	for {
		c.mu.Lock()
		if b.released {
			c.mu.Unlock()
			return nil, ErrClosed
		}
		for _, s := range b.seats {
			if !s.busy {
				s.busy = true
				c.mu.Unlock()
				return s, nil
			}
		}
		missing := max(b.want-len(b.seats), 1)
		c.mu.Unlock()
		lines, err := c.reserve(ctx, missing)
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		for _, l := range lines {
			if b.released {
				l.give()
				continue
			}
			b.seats = append(b.seats, &seat{line: l})
		}
		c.mu.Unlock()
	}
}

// stand is called when the session on s has ended.
func (b *booking) stand(s *seat) {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	s.busy = false
	if b.released || len(b.seats) > b.want {
		b.leave(s)
	}
}

// leave is called with the Conn's mu held.
func (b *booking) leave(s *seat) {
	b.seats = slices.DeleteFunc(b.seats, func(other *seat) bool { return other == s })
	s.line.give()
}

// release ends the booking. Seats whose sessions are still being closed are free when
// those have ended.
func (b *booking) release() {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	b.released = true
	for _, s := range slices.Clone(b.seats) {
		if !s.busy {
			b.leave(s)
		}
	}
}

// line is where the first of its seats is. It is called with the Conn's mu held.
func (b *booking) line() *line {
	if len(b.seats) > 0 {
		return b.seats[0].line
	}
	return b.conn.lines[0]
}

// tell tells an event of the consumer or publisher.
func (b *booking) tell(e stateEvent) {
	c := b.conn
	if !c.observer.listens() {
		return
	}
	c.mu.Lock()
	l := b.line()
	e.Generation = l.generation
	if l.live != nil {
		e.Node = l.live.broker.Node
	}
	c.mu.Unlock()
	c.observer.notify(e)
}

// outage is why the booking's connection carries no messages now; nil if it does.
func (b *booking) outage() error {
	c := b.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := b.line().outage(); err != nil || len(b.seats) > 0 {
		return err
	}
	return c.refusal
}

// wireOf returns the connection of the seat's line, and waits while that is being
// rebuilt. The seat stays on its line unless the line came back with fewer places than
// are taken, or can't be rebuilt while another is up and has room.
func (c *Conn) wireOf(ctx context.Context, s *seat) (*wire, error) {
	for {
		switch {
		case c.ctx.Err() != nil: // all lines have ended
			return nil, ErrClosed
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
		c.mu.Lock()
		l := s.line
		if l.room() < 0 || l.ctx.Err() != nil {
			l.give() // at once, so that no more leave than must
			c.mu.Unlock()
			lines, err := c.reserve(ctx, 1)
			c.mu.Lock()
			if err == nil {
				l = lines[0]
			} else {
				l.take(1)
			}
			s.line = l
			c.mu.Unlock()
			if err != nil {
				return nil, err
			}
			continue
		}
		if l.live == nil && l.attempts > 0 {
			if to := c.place(1); to != nil && to.live != nil {
				to.take(1)
				l.give()
				s.line = to
				c.mu.Unlock()
				continue
			}
		}
		w, changed := l.live, c.changed
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

// reserve takes n places, on one line where one has so many, and returns their lines.
// If there is no room, it opens a further line.
func (c *Conn) reserve(ctx context.Context, n int) ([]*line, error) {
	for {
		c.mu.Lock()
		if lines := c.places(n); lines != nil {
			for _, l := range lines {
				l.take(1)
			}
			c.mu.Unlock()
			return lines, nil
		}
		changed := c.changed
		var g *growth
		var err error
		if slices.ContainsFunc(c.lines, func(l *line) bool { return l.live != nil }) {
			g, err = c.grow()
		}
		c.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if g != nil {
			changed = g.done
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-c.ctx.Done():
			return nil, ErrClosed
		}
		if g != nil && g.err != nil {
			return nil, g.err
		}
	}
}

// places finds n places, together if possible. It is called with mu held.
func (c *Conn) places(n int) []*line {
	if l := c.place(n); l != nil {
		return slices.Repeat([]*line{l}, n)
	}
	wide := slices.ContainsFunc(c.lines, func(l *line) bool { return l.places() >= n })
	if n == 1 || wide && len(c.lines) < c.cfg.MaxConnections {
		return nil // a further line may hold all of them
	}
	var lines []*line
	for _, l := range c.lines {
		for range max(l.room(), 0) {
			lines = append(lines, l)
		}
	}
	if len(lines) < n {
		return nil
	}
	return lines[:n]
}

// place is the first line with n places, one that is up if there is one. It is called
// with mu held.
func (c *Conn) place(n int) *line {
	var down *line
	for _, l := range c.lines {
		switch {
		case l.room() < n:
		case l.live != nil:
			return l
		case down == nil:
			down = l
		}
	}
	return down
}
