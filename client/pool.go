package client

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// pool holds the AMQP connections of a Conn, one or several, and rebuilds each whenever it is
// lost. Users reserve session slots on them: see pool_slot.go. The first connection stays until
// the pool is closed. The pool opens a further one when no connection has a free slot, and
// closes it once all its slots have been free for a while.
type pool struct {
	cfg       poolConfig
	endpoints []endpoint
	// connect is dial, idleAfter is pooledIdle, and renewAfter is sessionDeliveries, but in tests.
	connect    func(context.Context, endpoint, dialConfig) (*wire, error)
	idleAfter  time.Duration
	renewAfter uint64

	// ctx ends when all users of the connections have stopped.
	ctx    context.Context
	cancel context.CancelFunc
	// hurry ends when a Close has no time left.
	hurry  context.Context
	cutOff context.CancelFunc
	// closing is closed by beginClose: the pool opens and closes no further connections then.
	closing    chan struct{}
	background sync.WaitGroup // see inBackground; added to with mu held, before closing is closed

	mu         sync.Mutex
	nodes      []string      // the node that each endpoint led to last
	conns      []*pooledConn // the first is always there; replaced, never changed in place
	changed    chan struct{} // closed and renewed whenever a connection is up, down, new or gone
	generation uint64        // connections made
	connected  bool          // all connections were up at the last change
	since      time.Time     // when connected last changed
	growing    *growth       // nil: no further connection is being opened
	refusal    error         // why the last one wasn't opened; holds for backoff.Min
	refusedAt  time.Time
	past       poolStats // what the connections that have ended counted
}

// poolConfig configures a pool.
type poolConfig struct {
	dial           dialConfig // further connections get a number behind the name
	maxConnections int
	backoff        link.Backoff // between attempts to rebuild a connection
	observer       *observer
	// onConnected is called with the host:port of each new connection. It must not block.
	onConnected func(address string)
	// leader, if not nil, returns the node to prefer among several endpoints. It returns "" if
	// any node will do.
	leader func(ctx context.Context, w *wire) string
	// sendToken gives the broker a new token for the connection w.
	sendToken func(ctx context.Context, w *wire, token string) error
}

// newPool makes a pool whose first connection isn't open yet.
func newPool(cfg poolConfig, eps []endpoint) *pool {
	p := &pool{
		cfg: cfg, endpoints: eps, nodes: make([]string, len(eps)), connect: dial, idleAfter: pooledIdle, renewAfter: sessionDeliveries,
		closing: make(chan struct{}), changed: make(chan struct{}),
	}
	for i := range eps {
		eps[i].raw = eps[i].user(cfg.dial.impersonator)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.hurry, p.cutOff = context.WithCancel(context.Background())
	p.conns = []*pooledConn{p.newConn(1)}
	return p
}

// beginClose lets no new work begin.
func (p *pool) beginClose() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.closing)
}

// abort ends all connections at once, so that nothing waits for their broker.
func (p *pool) abort() {
	p.cutOff()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if c.live != nil {
			c.live.fail()
		}
	}
}

// close closes all connections in order, within ctx. It follows beginClose, once all users have
// stopped.
func (p *pool) close(ctx context.Context) {
	defer p.cutOff()
	p.cancel()
	p.background.Wait()
	p.mu.Lock()
	conns := p.conns
	p.mu.Unlock()
	var wg sync.WaitGroup
	for _, c := range conns {
		wg.Go(func() { c.close(ctx) })
	}
	wg.Wait()
}

// inBackground runs f on a goroutine that close waits for. It returns false if the pool is
// being closed.
func (p *pool) inBackground(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.closing) {
		return false
	}
	p.background.Go(f)
	return true
}

// up returns the first connection that is up; nil if none is.
func (p *pool) up() *wire {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.first()
}

// first is up with mu held.
func (p *pool) first() *wire {
	for _, c := range p.conns {
		if c.live != nil {
			return c.live
		}
	}
	return nil
}

// awaitUp waits for a connection that is up and isn't lost. It fails with ErrClosed once stop is
// closed.
func (p *pool) awaitUp(ctx context.Context, lost *wire, stop <-chan struct{}) (*wire, error) {
	for {
		p.mu.Lock()
		w, changed := p.first(), p.changed
		p.mu.Unlock()
		if w != nil && w != lost {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-stop:
			return nil, ErrClosed
		}
	}
}

// wire returns the first connection that is up, and waits while all are being rebuilt.
func (p *pool) wire(ctx context.Context) (*wire, error) { return p.awaitUp(ctx, nil, p.ctx.Done()) }

// openSession opens a session for the machinery, which needs no slot.
func (p *pool) openSession(ctx context.Context) (*wireSession, error) {
	w, err := p.wire(ctx)
	if err != nil {
		return nil, err
	}
	return w.openSession(ctx, p.renewAfter)
}

// hasLost reports whether the connection w has ended.
func (p *pool) hasLost(w *wire) bool { return isClosed(w.amqp.Done()) || p.up() != w }

// outage is why the first connection carries no messages now; nil if it does.
func (p *pool) outage() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conns[0].outage()
}

// poolState is the state of a pool at one moment. State documents the fields.
type poolState struct {
	connected    bool
	connections  int
	since        time.Time
	generation   uint64
	endpoint     string
	broker       brokerInfo
	blockedSince time.Time
	attempts     int
	err          error
}

func (p *pool) state() poolState {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := poolState{connected: true, since: p.since, generation: p.generation, endpoint: p.conns[0].endpoint}
	for _, c := range p.conns {
		if c.live == nil {
			s.connected = false
			s.attempts = max(s.attempts, c.attempts)
			if s.err == nil {
				s.err = c.why
			}
			continue
		}
		s.connections++
		if since := c.live.blockage.blockedSince(); s.blockedSince.IsZero() || !since.IsZero() && since.Before(s.blockedSince) {
			s.blockedSince = since
		}
	}
	if w := p.first(); w != nil {
		s.broker = w.broker
	}
	return s
}

// poolStats are numbers of a pool's connections.
type poolStats struct {
	lost, rebuilt                     uint64
	connections, sessions, blockedNow int
	blocked                           time.Duration
}

func (p *pool) stats() poolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.past
	for _, c := range p.conns {
		if c.live == nil {
			continue
		}
		s.connections++
		s.sessions += int(c.live.sessions.Load())
		s.blocked += c.live.blockage.total()
		if !c.live.blockage.blockedSince().IsZero() {
			s.blockedNow++
		}
	}
	return s
}

// noteState is called with mu held whenever a connection is up, down, new or gone.
func (p *pool) noteState() {
	connected := !slices.ContainsFunc(p.conns, func(c *pooledConn) bool { return c.live == nil })
	if connected != p.connected {
		p.connected, p.since = connected, time.Now()
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// notify reports an event of the connection w.
func (p *pool) notify(w *wire, e stateEvent) {
	e.Op, e.Target, e.Generation, e.Node = "connection", w.endpoint.shown, w.generation, w.broker.Node
	p.cfg.observer.notify(e)
}

// notifyUp reports an event of the first connection that is up, if there is one.
func (p *pool) notifyUp(e stateEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.first(); w != nil {
		p.notify(w, e)
	}
}
