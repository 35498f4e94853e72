package link

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
)

// Pool holds the AMQP connections of a Conn, one or several, and rebuilds each whenever it is
// lost. Users reserve session slots on them: see pool_slot.go. The first connection stays until
// the pool is closed. The pool opens a further one when no connection has a free slot, and
// closes it once all its slots have been free for a while.
type Pool struct {
	cfg       PoolConfig
	endpoints []Endpoint
	// Connect is dial, idleAfter is pooledIdle, and renewAfter is sessionDeliveries, but in tests.
	Connect    func(context.Context, Endpoint, DialConfig) (*Wire, error)
	IdleAfter  time.Duration
	RenewAfter uint64

	// Ctx ends when all users of the connections have stopped.
	Ctx    context.Context
	cancel context.CancelFunc
	// expedite ends when a Close has no time left.
	expedite context.Context
	cutOff   context.CancelFunc
	// Closing is closed by beginClose: the pool opens and closes no further connections then.
	Closing    chan struct{}
	Background sync.WaitGroup // see inBackground; added to with mu held, before closing is closed

	Mu         sync.Mutex
	nodes      []string      // the node that each endpoint led to last
	Conns      []*pooledConn // the first is always there; replaced, never changed in place
	changed    chan struct{} // closed and renewed whenever a connection is up, down, new or gone
	generation uint64        // connections made
	connected  bool          // all connections were up at the last change
	since      time.Time     // when connected last changed
	growing    *growth       // nil: no further connection is being opened
	Refusal    error         // why the last one wasn't opened; holds for backoff.Min
	refusedAt  time.Time
	// What the connections that have ended counted.
	lost, rebuilt uint64
	blocked       time.Duration
}

// PoolConfig configures a pool.
type PoolConfig struct {
	Dial           DialConfig // further connections get a number behind the name
	MaxConnections int
	Backoff        backoff.Exponential // between attempts to rebuild a connection
	Observer       Observer
	Requests       Requests
}

// Requests is what a pool asks the broker by management requests.
type Requests interface {
	// Leader returns the node to prefer among several endpoints. It returns "" if any node will do.
	Leader(ctx context.Context, w *Wire) string
	// SendToken gives the broker a new token for the connection w.
	SendToken(ctx context.Context, w *Wire, token string) error
}

// NewPool makes a pool whose first connection isn't open yet.
func NewPool(cfg PoolConfig, eps []Endpoint) *Pool {
	p := &Pool{
		cfg: cfg, endpoints: eps, nodes: make([]string, len(eps)), Connect: Dial, IdleAfter: pooledIdle, RenewAfter: sessionDeliveries,
		Closing: make(chan struct{}), changed: make(chan struct{}),
	}
	p.cfg.Dial.addresses = &addresses{}
	for i := range eps {
		eps[i].raw, eps[i].worked = eps[i].user(cfg.Dial.Impersonator), &atomic.Bool{}
	}
	p.Ctx, p.cancel = context.WithCancel(context.Background())
	p.expedite, p.cutOff = context.WithCancel(context.Background())
	p.Conns = []*pooledConn{p.newConn(1)}
	return p
}

// BeginClose lets no new work begin.
func (p *Pool) BeginClose() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	close(p.Closing)
}

// Abort ends all connections at once, so that nothing waits for their broker.
func (p *Pool) Abort() {
	p.cutOff()
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, c := range p.Conns {
		if c.Live != nil {
			c.Live.fail()
		}
	}
}

// Cancel ends Ctx.
func (p *Pool) Cancel() { p.cancel() }

// Close closes all connections in order, within ctx. It follows beginClose, once all users have
// stopped.
func (p *Pool) Close(ctx context.Context) {
	defer p.cutOff()
	p.Cancel()
	p.Background.Wait()
	p.Mu.Lock()
	conns := p.Conns
	p.Mu.Unlock()
	var wg sync.WaitGroup
	for _, c := range conns {
		wg.Go(func() { c.close(ctx) })
	}
	wg.Wait()
}

// InBackground runs f on a goroutine that close waits for. It returns false if the pool is
// being closed.
func (p *Pool) InBackground(f func()) bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if failure.IsClosed(p.Closing) {
		return false
	}
	p.Background.Go(f)
	return true
}

// Up returns the first connection that is up; nil if none is.
func (p *Pool) Up() *Wire {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.first()
}

// first is up with mu held.
func (p *Pool) first() *Wire {
	for _, c := range p.Conns {
		if c.Live != nil {
			return c.Live
		}
	}
	return nil
}

// AwaitUp waits for a connection that is up and isn't lost. It fails with ErrClosed once stop is
// closed.
func (p *Pool) AwaitUp(ctx context.Context, lost *Wire, stop <-chan struct{}) (*Wire, error) {
	for {
		p.Mu.Lock()
		w, changed := p.first(), p.changed
		p.Mu.Unlock()
		if w != nil && w != lost {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-stop:
			return nil, failure.ErrClosed
		}
	}
}

// Wire returns the first connection that is up, and waits while all are being rebuilt.
func (p *Pool) Wire(ctx context.Context) (*Wire, error) { return p.AwaitUp(ctx, nil, p.Ctx.Done()) }

// OpenSession opens a session for the machinery, which needs no slot.
func (p *Pool) OpenSession(ctx context.Context) (*WireSession, error) {
	w, err := p.Wire(ctx)
	if err != nil {
		return nil, err
	}
	return w.OpenSession(ctx, p.RenewAfter)
}

// HasLost reports whether the connection w has ended.
func (p *Pool) HasLost(w *Wire) bool { return failure.IsClosed(w.AMQP.Done()) || p.Up() != w }

// Outage is why the first connection carries no messages now; nil if it does.
func (p *Pool) Outage() error {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.Conns[0].outage()
}

// ConnState is the state of one connection of a pool.
type ConnState struct {
	Live         *Wire     // nil while it is being rebuilt
	BlockedSince time.Time // zero: it isn't blocked
	Attempts     int       // to rebuild it that have failed
	Why          error     // why it isn't live
}

// State calls f with the state of each connection, beginning with the first. changed is when it was last true
// for the first time, or false, that all are live. opened counts the connections so far, and endpoint is where
// the first is to. f must not call the pool.
func (p *Pool) State(f func(ConnState)) (changed time.Time, opened uint64, endpoint string) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, c := range p.Conns {
		s := ConnState{Live: c.Live}
		if c.Live == nil {
			s.Attempts, s.Why = c.attempts, c.Why
		} else {
			s.BlockedSince = c.Live.Blockage.blockedSince()
		}
		f(s)
	}
	return p.since, p.generation, p.Conns[0].endpoint
}

// Count adds the pool's connections to s.
func (p *Pool) Count(s *instrument.Stats) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	s.Lost += p.lost
	s.Rebuilt += p.rebuilt
	s.Blocked += p.blocked
	for _, c := range p.Conns {
		if c.Live == nil {
			continue
		}
		s.Connections++
		s.Sessions += int(c.Live.sessions.Load())
		s.Blocked += c.Live.Blockage.total()
		if !c.Live.Blockage.blockedSince().IsZero() {
			s.BlockedNow++
		}
	}
}

// noteState is called with mu held whenever a connection is up, down, new or gone.
func (p *Pool) noteState() {
	connected := !slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.Live == nil })
	if connected != p.connected {
		p.connected, p.since = connected, time.Now()
	}
	close(p.changed)
	p.changed = make(chan struct{})
}
