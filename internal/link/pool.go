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

// Pool has the AMQP connections of a client.Conn, and rebuilds each that is lost. Users reserve session slots on
// them: see pool_slot.go. The first connection stays until the pool is closed. The pool opens another one when no
// connection has a free slot, and closes it once all its slots have been free for a while.
type Pool struct {
	cfg       PoolConfig
	endpoints []Endpoint
	// Connect is Dial, IdleAfter is pooledIdle, and RenewAfter is sessionDeliveries. Only tests set others,
	// before they use the Pool.
	Connect    func(context.Context, Endpoint, DialConfig) (*Wire, error)
	IdleAfter  time.Duration
	RenewAfter uint64

	// Ctx ends when all users of the connections have stopped, before the connections are closed.
	Ctx    context.Context
	cancel context.CancelFunc
	// expedite ends when Close has no time left.
	expedite context.Context
	cutOff   context.CancelFunc
	// Closing is closed by BeginClose. From then on the pool neither opens connections nor closes idle ones.
	Closing    chan struct{}
	Background sync.WaitGroup // see InBackground; Add is called with Mu held, before Closing is closed

	// Mu guards the fields below, and those of the connections and reservations that say so.
	Mu         sync.Mutex
	nodes      []string      // the node that each endpoint led to last
	Conns      []*pooledConn // the first is always there; replaced, never changed in place
	changed    chan struct{} // closed and replaced whenever a connection is up, lost, new, or removed
	generation uint64        // how many connections were opened
	connected  bool          // all connections were up at the last change
	since      time.Time     // when connected last changed
	growing    *growth       // nil: no additional connection is being opened
	Refusal    error         // why the last one couldn't be opened; returned to callers until Backoff.Min is over
	refusedAt  time.Time     // when that was
	// The sums of connections that have ended.
	lost, rebuilt uint64
	blocked       time.Duration
}

// PoolConfig configures a pool.
type PoolConfig struct {
	Dial           DialConfig // additional connections get a number behind the name
	MaxConnections int
	Backoff        backoff.Exponential // between attempts to rebuild a connection
	Observer       Observer
	Requests       Requests
}

// Requests makes the pool's management requests.
type Requests interface {
	// Leader returns the node to prefer among several endpoints. It returns "" if any node will do.
	Leader(ctx context.Context, w *Wire) string
	// SendToken gives the broker a new token for the connection w.
	SendToken(ctx context.Context, w *Wire, token string) error
}

// NewPool returns a Pool whose first connection isn't open yet.
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

// BeginClose makes InBackground and grow refuse new work.
func (p *Pool) BeginClose() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	close(p.Closing)
}

// Abort closes all connections at once, so that nothing waits for the broker.
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

// Close closes all connections within ctx. Call it after BeginClose, once all users have stopped.
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

// InBackground runs f on a goroutine that Close waits for. It returns false if the pool is being closed.
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

// first is Up with Mu held.
func (p *Pool) first() *Wire {
	for _, c := range p.Conns {
		if c.Live != nil {
			return c.Live
		}
	}
	return nil
}

// AwaitUp waits for a connection that is up, other than lost, which may be nil. It returns failure.ErrClosed once
// stop is closed.
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

// OpenSession opens a session for the client itself, which needs no slot.
func (p *Pool) OpenSession(ctx context.Context) (*WireSession, error) {
	w, err := p.Wire(ctx)
	if err != nil {
		return nil, err
	}
	return w.OpenSession(ctx, p.RenewAfter)
}

// HasLost reports whether the connection w has ended.
func (p *Pool) HasLost(w *Wire) bool { return failure.IsClosed(w.AMQP.Done()) || p.Up() != w }

// Outage returns why the first connection carries no messages now; nil if it does.
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

// State calls f with the state of each connection, beginning with the first. changed is when
// connections last became all live, or no longer all live. opened is how many were opened so far, and endpoint is
// that of the first. f must not call the pool.
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

// noteState is called with Mu held whenever a connection is up, lost, new, or removed.
func (p *Pool) noteState() {
	connected := !slices.ContainsFunc(p.Conns, func(c *pooledConn) bool { return c.Live == nil })
	if connected != p.connected {
		p.connected, p.since = connected, time.Now()
	}
	close(p.changed)
	p.changed = make(chan struct{})
}
