package link

import (
	"context"
	"errors"
	"slices"

	"github.com/hopback/hopback/internal/failure"
)

// Before a consumer or publisher opens its first session, it reserves a slot for each session that it may need at
// the same time. It keeps the slots until it stops. So a consumer can always open the session for its retry copies,
// however many others use the pool.

// Reservation is a consumer's or publisher's right to sessions.
type Reservation struct {
	pool *Pool
	want int

	// Guarded by Pool.Mu.
	slots    []*slot // none before the first session
	released bool
}

// slot is the right to one session at a time on a connection. Pool.Mu guards its fields.
type slot struct {
	on   *pooledConn
	busy bool // from before its session is opened until that has ended
}

// Reserve returns a reservation of so many slots. The slots are reserved when the first session is opened.
func (p *Pool) Reserve(sessions int) *Reservation { return &Reservation{pool: p, want: sessions} }

// Open opens a session. While the connection is being rebuilt, it waits. If all reserved slots are in use, the
// session gets another one until it ends: retry copies may use an old session for some addresses and a new one
// for others.
func (r *Reservation) Open(ctx context.Context) (Session, error) {
	s, err := r.OpenWire(ctx)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (r *Reservation) OpenWire(ctx context.Context) (*WireSession, error) {
	s, err := r.acquire(ctx)
	if err != nil {
		return nil, err
	}
	w, err := r.pool.wireOf(ctx, s)
	if err != nil {
		r.vacate(s)
		return nil, err
	}
	return w.Session(ctx, r.pool.RenewAfter, func() { r.vacate(s) })
}

// Give closes a session.
func (r *Reservation) Give(s Session, _ bool) { CloseSession(s) }

// acquire returns a slot, and marks it as busy.
func (r *Reservation) acquire(ctx context.Context) (*slot, error) {
	p := r.pool
	for {
		p.Mu.Lock()
		if r.released {
			p.Mu.Unlock()
			return nil, failure.ErrClosed
		}
		for _, s := range r.slots {
			if !s.busy {
				s.busy = true
				p.Mu.Unlock()
				return s, nil
			}
		}
		missing := max(r.want-len(r.slots), 1)
		p.Mu.Unlock()
		conns, err := p.takeSlots(ctx, missing)
		if err != nil {
			return nil, err
		}
		p.Mu.Lock()
		for _, c := range conns {
			if r.released {
				c.release()
				continue
			}
			r.slots = append(r.slots, &slot{on: c})
		}
		p.Mu.Unlock()
	}
}

// vacate is called when the session on s has ended.
func (r *Reservation) vacate(s *slot) {
	r.pool.Mu.Lock()
	defer r.pool.Mu.Unlock()
	s.busy = false
	if r.released || len(r.slots) > r.want {
		r.leave(s)
	}
}

// leave frees a slot. It is called with Mu held.
func (r *Reservation) leave(s *slot) {
	r.slots = slices.DeleteFunc(r.slots, func(other *slot) bool { return other == s })
	s.on.release()
}

// Release ends the reservation. A slot whose session is still being closed becomes free when the session has
// ended.
func (r *Reservation) Release() {
	r.pool.Mu.Lock()
	defer r.pool.Mu.Unlock()
	r.released = true
	for _, s := range slices.Clone(r.slots) {
		if !s.busy {
			r.leave(s)
		}
	}
}

// conn returns the connection of the first slot. It is called with Mu held.
func (r *Reservation) conn() *pooledConn {
	if len(r.slots) > 0 {
		return r.slots[0].on
	}
	return r.pool.Conns[0]
}

// Place returns the Place of the consumer's or publisher's connection.
func (r *Reservation) Place() Place {
	p := r.pool
	p.Mu.Lock()
	defer p.Mu.Unlock()
	c := r.conn()
	at := Place{Endpoint: c.endpoint, Generation: c.generation}
	if c.Live != nil {
		at.Node = c.Live.Node
	}
	return at
}

// Outage returns why the reservation's connection carries no messages now; nil if it does.
func (r *Reservation) Outage() error {
	p := r.pool
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if err := r.conn().outage(); err != nil || len(r.slots) > 0 {
		return err
	}
	return p.Refusal
}

// ErrNoRoom is returned by OpenExtra.
var ErrNoRoom = errors.New("no connection that is up has half of its session slots free")

// OpenExtra opens a session that its caller can do without. It leaves half of a connection's slots to others. If
// that isn't possible, it returns ErrNoRoom: it neither opens a connection nor waits for one.
func (p *Pool) OpenExtra(ctx context.Context) (*WireSession, error) {
	p.Mu.Lock()
	i := slices.IndexFunc(p.Conns, func(c *pooledConn) bool { return c.Live != nil && 2*c.free() > c.slots() })
	if i < 0 {
		p.Mu.Unlock()
		return nil, ErrNoRoom
	}
	c := p.Conns[i]
	w := c.Live
	c.take(1)
	p.Mu.Unlock()
	return w.Session(ctx, p.RenewAfter, func() {
		p.Mu.Lock()
		defer p.Mu.Unlock()
		c.release()
	})
}

// wireOf returns the Wire of the slot's connection. While that is being rebuilt, it waits. It moves the slot to
// another connection if the slot's was rebuilt with fewer slots than are reserved, or was closed, or if an
// attempt to rebuild it failed while another connection is up and has a free slot.
func (p *Pool) wireOf(ctx context.Context, s *slot) (*Wire, error) {
	for {
		switch {
		case p.Ctx.Err() != nil: // all connections have ended
			return nil, failure.ErrClosed
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
		p.Mu.Lock()
		c := s.on
		if c.free() < 0 || c.ctx.Err() != nil {
			c.release() // at once, so that no more slots move than must
			p.Mu.Unlock()
			conns, err := p.takeSlots(ctx, 1)
			p.Mu.Lock()
			if err == nil {
				c = conns[0]
			} else {
				c.take(1)
			}
			s.on = c
			p.Mu.Unlock()
			if err != nil {
				return nil, err
			}
			continue
		}
		if c.Live == nil && c.attempts > 0 {
			if to := p.withFree(1); to != nil && to.Live != nil {
				to.take(1)
				c.release()
				s.on = to
				p.Mu.Unlock()
				continue
			}
		}
		w, changed := c.Live, p.changed
		p.Mu.Unlock()
		if w != nil {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-p.Ctx.Done():
			return nil, failure.ErrClosed
		}
	}
}

// takeSlots reserves n slots, on one connection if possible, and returns the connection of each. If too few are
// free, it opens another connection.
func (p *Pool) takeSlots(ctx context.Context, n int) ([]*pooledConn, error) {
	for {
		p.Mu.Lock()
		if conns := p.find(n); conns != nil {
			for _, c := range conns {
				c.take(1)
			}
			p.Mu.Unlock()
			return conns, nil
		}
		changed := p.changed
		var g *growth
		var err error
		if slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.Live != nil }) {
			g, err = p.grow()
		}
		p.Mu.Unlock()
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
		case <-p.Ctx.Done():
			return nil, failure.ErrClosed
		}
		if g != nil && g.err != nil {
			return nil, g.err
		}
	}
}

// find returns the connections of n free slots, all on one connection if possible; nil if there are too few. It is
// called with Mu held.
func (p *Pool) find(n int) []*pooledConn {
	if c := p.withFree(n); c != nil {
		return slices.Repeat([]*pooledConn{c}, n)
	}
	wide := slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.slots() >= n })
	if n == 1 || wide && len(p.Conns) < p.cfg.MaxConnections {
		return nil // another connection may have room for all of them
	}
	var conns []*pooledConn
	for _, c := range p.Conns {
		for range max(c.free(), 0) {
			conns = append(conns, c)
		}
	}
	if len(conns) < n {
		return nil
	}
	return conns[:n]
}

// withFree returns the first connection with n free slots, preferably one that is up. It is called with Mu held.
func (p *Pool) withFree(n int) *pooledConn {
	var down *pooledConn
	for _, c := range p.Conns {
		switch {
		case c.free() < n:
		case c.Live != nil:
			return c
		case down == nil:
			down = c
		}
	}
	return down
}
