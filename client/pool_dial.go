package client

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/internal/dedicated"
)

// leaderTimeout bounds the question which node leads a queue.
const leaderTimeout = 5 * time.Second

// open opens the first connection. It tries each endpoint once.
func (p *pool) open(ctx context.Context) error {
	var errs []error
	first := p.conns[0]
	for i := range p.endpoints {
		w, at, err := p.dial(ctx, i, first.cfg)
		if err == nil {
			first.run(w, at)
			return nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	p.cancel()
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// dial connects to endpoint i, or to another that leads to the preferred node. It returns the
// connection with the index of its endpoint.
func (p *pool) dial(ctx context.Context, i int, cfg dialConfig) (*wire, int, error) {
	w, err := p.connect(ctx, p.endpoints[i], cfg)
	if err != nil {
		return nil, i, err
	}
	p.noteNode(i, w.broker.Node)
	if p.cfg.leader == nil || len(p.endpoints) == 1 {
		return w, i, nil
	}
	limited, cancel := context.WithTimeout(ctx, leaderTimeout)
	leader := p.cfg.leader(limited, w)
	cancel()
	if leader == "" || leader == w.broker.Node {
		return w, i, nil
	}
	for _, j := range p.othersFor(i, leader) {
		other, err := p.connect(ctx, p.endpoints[j], cfg)
		if err != nil {
			continue // the one that we have does
		}
		p.noteNode(j, other.broker.Node)
		if other.broker.Node == leader {
			closeWire(w)
			return other, j, nil
		}
		closeWire(other)
	}
	return w, i, nil
}

// othersFor returns the endpoints other than i. Those that led to the node earlier come first.
func (p *pool) othersFor(i int, node string) []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var first, rest []int
	for j := range p.endpoints {
		switch {
		case j == i:
		case p.nodes[j] == node:
			first = append(first, j)
		default:
			rest = append(rest, j)
		}
	}
	return append(first, rest...)
}

// noteNode notes which node an endpoint led to.
func (p *pool) noteNode(i int, node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nodes[i] = node
}

// dialRaw makes a network connection for package dedicated, to the endpoint that is so many
// behind the first connection's, or to the next that can be reached.
func (p *pool) dialRaw(ctx context.Context, behind int) (dedicated.Dialed, error) {
	p.mu.Lock()
	at, cfg := p.conns[0].at, p.conns[0].cfg
	p.mu.Unlock()
	if p.ctx.Err() != nil {
		return dedicated.Dialed{}, &Error{Op: "connect", Kind: ErrClosed}
	}
	var errs []error
	for i := range p.endpoints {
		d, err := dialRaw(ctx, p.endpoints[(at+behind+i)%len(p.endpoints)], cfg)
		if err == nil {
			return d, nil
		}
		errs = append(errs, err)
	}
	return dedicated.Dialed{}, errors.Join(errs...)
}

func dialRaw(ctx context.Context, ep endpoint, cfg dialConfig) (dedicated.Dialed, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.connectTimeout)
	defer cancel()
	sasl, _, err := ep.sasl.login(ctx)
	if err != nil {
		return dedicated.Dialed{}, &Error{Op: "connect", Target: ep.shown, Kind: ErrAuthentication, Err: err}
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return dedicated.Dialed{}, err
	}
	return dedicated.Dialed{
		Net: raw, Host: "vhost:" + ep.vhost, Name: clip(cfg.name, maxName-8), Shown: ep.shown,
		Mechanism: sasl.mechanism, Response: sasl.response(), IdleTimeout: cfg.idleTimeout, Login: ep.raw,
	}, nil
}
