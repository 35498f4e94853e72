package client

import (
	"context"
	"slices"
)

// A consumer or publisher reserves a session slot for each session that it may need at the same
// time, before it opens the first, and keeps the slots until it stops. So a consumer's forwards
// get their session at the first failure, however many others use the pool.

// reservation is a consumer's or publisher's right to sessions.
type reservation struct {
	pool *pool
	want int

	// Guarded by the pool's mu.
	slots    []*slot // none before the first session
	released bool
}

// slot is the right to one session at a time on a connection.
type slot struct {
	on   *pooledConn
	busy bool // from before its session begins until that has ended
}

// reserve returns a reservation of as many slots. It takes them when the first session is wanted.
func (p *pool) reserve(sessions int) *reservation { return &reservation{pool: p, want: sessions} }

// open opens a session, and waits for the connection while that is being rebuilt. A session
// beyond the reserved ones gets a slot for as long as it lives: forwards may use an old session
// for some addresses and a new one for others.
func (r *reservation) open(ctx context.Context) (session, error) {
	s, err := r.openWire(ctx)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (r *reservation) openWire(ctx context.Context) (*wireSession, error) {
	s, err := r.acquire(ctx)
	if err != nil {
		return nil, err
	}
	w, err := r.pool.wireOf(ctx, s)
	if err != nil {
		r.vacate(s)
		return nil, err
	}
	return w.session(ctx, r.pool.renewAfter, func() { r.vacate(s) })
}

// give ends a session.
func (r *reservation) give(s session, _ bool) { closeSession(s) }

// acquire returns a slot, which is busy from then on.
func (r *reservation) acquire(ctx context.Context) (*slot, error) {
	p := r.pool
	for {
		p.mu.Lock()
		if r.released {
			p.mu.Unlock()
			return nil, ErrClosed
		}
		for _, s := range r.slots {
			if !s.busy {
				s.busy = true
				p.mu.Unlock()
				return s, nil
			}
		}
		missing := max(r.want-len(r.slots), 1)
		p.mu.Unlock()
		conns, err := p.takeSlots(ctx, missing)
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		for _, c := range conns {
			if r.released {
				c.release()
				continue
			}
			r.slots = append(r.slots, &slot{on: c})
		}
		p.mu.Unlock()
	}
}

// vacate is called when the session on s has ended.
func (r *reservation) vacate(s *slot) {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	s.busy = false
	if r.released || len(r.slots) > r.want {
		r.leave(s)
	}
}

// leave is called with mu held.
func (r *reservation) leave(s *slot) {
	r.slots = slices.DeleteFunc(r.slots, func(other *slot) bool { return other == s })
	s.on.release()
}

// release ends the reservation. A slot whose session is still being closed is free when that
// has ended.
func (r *reservation) release() {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.released = true
	for _, s := range slices.Clone(r.slots) {
		if !s.busy {
			r.leave(s)
		}
	}
}

// conn is the connection of the first slot. It is called with mu held.
func (r *reservation) conn() *pooledConn {
	if len(r.slots) > 0 {
		return r.slots[0].on
	}
	return r.pool.conns[0]
}

// notify reports an event of the consumer or publisher.
func (r *reservation) notify(e stateEvent) {
	p := r.pool
	if !p.cfg.observer.listens() {
		return
	}
	p.mu.Lock()
	c := r.conn()
	e.Generation = c.generation
	if c.live != nil {
		e.Node = c.live.broker.Node
	}
	p.mu.Unlock()
	p.cfg.observer.notify(e)
}

// outage is why the reservation's connection carries no messages now; nil if it does.
func (r *reservation) outage() error {
	p := r.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := r.conn().outage(); err != nil || len(r.slots) > 0 {
		return err
	}
	return p.refusal
}

// wireOf returns the wire of the slot's connection, and waits while that is being rebuilt. The
// slot stays on its connection unless the connection came back with fewer slots than are taken,
// or can't be rebuilt while another is up and has a free slot.
func (p *pool) wireOf(ctx context.Context, s *slot) (*wire, error) {
	for {
		switch {
		case p.ctx.Err() != nil: // all connections have ended
			return nil, ErrClosed
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
		p.mu.Lock()
		c := s.on
		if c.free() < 0 || c.ctx.Err() != nil {
			c.release() // at once, so that no more leave than must
			p.mu.Unlock()
			conns, err := p.takeSlots(ctx, 1)
			p.mu.Lock()
			if err == nil {
				c = conns[0]
			} else {
				c.take(1)
			}
			s.on = c
			p.mu.Unlock()
			if err != nil {
				return nil, err
			}
			continue
		}
		if c.live == nil && c.attempts > 0 {
			if to := p.withFree(1); to != nil && to.live != nil {
				to.take(1)
				c.release()
				s.on = to
				p.mu.Unlock()
				continue
			}
		}
		w, changed := c.live, p.changed
		p.mu.Unlock()
		if w != nil {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-p.ctx.Done():
			return nil, ErrClosed
		}
	}
}

// takeSlots takes n slots, on one connection if one has so many, and returns their connections.
// If too few are free, it opens a further connection.
func (p *pool) takeSlots(ctx context.Context, n int) ([]*pooledConn, error) {
	for {
		p.mu.Lock()
		if conns := p.find(n); conns != nil {
			for _, c := range conns {
				c.take(1)
			}
			p.mu.Unlock()
			return conns, nil
		}
		changed := p.changed
		var g *growth
		var err error
		if slices.ContainsFunc(p.conns, func(c *pooledConn) bool { return c.live != nil }) {
			g, err = p.grow()
		}
		p.mu.Unlock()
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
		case <-p.ctx.Done():
			return nil, ErrClosed
		}
		if g != nil && g.err != nil {
			return nil, g.err
		}
	}
}

// find finds n free slots, together if possible. It is called with mu held.
func (p *pool) find(n int) []*pooledConn {
	if c := p.withFree(n); c != nil {
		return slices.Repeat([]*pooledConn{c}, n)
	}
	wide := slices.ContainsFunc(p.conns, func(c *pooledConn) bool { return c.slots() >= n })
	if n == 1 || wide && len(p.conns) < p.cfg.maxConnections {
		return nil // a further connection may hold all of them
	}
	var conns []*pooledConn
	for _, c := range p.conns {
		for range max(c.free(), 0) {
			conns = append(conns, c)
		}
	}
	if len(conns) < n {
		return nil
	}
	return conns[:n]
}

// withFree is the first connection with n free slots, one that is up if there is one. It is
// called with mu held.
func (p *pool) withFree(n int) *pooledConn {
	var down *pooledConn
	for _, c := range p.conns {
		switch {
		case c.free() < n:
		case c.live != nil:
			return c
		case down == nil:
			down = c
		}
	}
	return down
}
