package link

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/userid"
)

// leaderTimeout bounds the request for the node that leads a queue.
const leaderTimeout = 5 * time.Second

// Open opens the first connection. It tries each endpoint once, at each address of its host.
func (p *Pool) Open(ctx context.Context) error {
	var errs []error
	first := p.Conns[0]
	for i := range p.endpoints {
		w, at, err := p.dialEach(ctx, i, first.Cfg)
		if err == nil {
			first.Run(w, at)
			return nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	p.Cancel()
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// dialEach calls Dial for each address of the endpoint's host until a broker answers. Its error is that of the
// first address.
func (p *Pool) dialEach(ctx context.Context, i int, cfg DialConfig) (*Wire, int, error) {
	var first error
	for tries := 1; ; tries++ {
		w, at, err := p.Dial(ctx, i, cfg)
		if err == nil {
			return w, at, nil
		}
		if first == nil {
			first = err
		}
		if ctx.Err() != nil || !cfg.addresses.more(ctx, p.endpoints[i], cfg, tries, err) {
			return nil, i, first
		}
		cfg.fresh = true
	}
}

// Dial connects to endpoint i, or to another that leads to the preferred node. It returns the
// connection with the index of its endpoint.
func (p *Pool) Dial(ctx context.Context, i int, cfg DialConfig) (*Wire, int, error) {
	w, err := p.Connect(ctx, p.endpoints[i], cfg)
	if err != nil {
		return nil, i, err
	}
	p.noteNode(i, w.Node)
	if len(p.endpoints) == 1 {
		return w, i, nil
	}
	limited, cancel := context.WithTimeout(ctx, leaderTimeout)
	leader := p.cfg.Requests.Leader(limited, w)
	cancel()
	if leader == "" || leader == w.Node {
		return w, i, nil
	}
	for _, j := range p.othersFor(i, leader) {
		other, err := p.Connect(ctx, p.endpoints[j], cfg)
		if err != nil {
			continue // w is good enough
		}
		p.noteNode(j, other.Node)
		if other.Node == leader {
			closeWire(w)
			return other, j, nil
		}
		closeWire(other)
	}
	return w, i, nil
}

// othersFor returns the endpoints other than i. Those that led to the node earlier come first.
func (p *Pool) othersFor(i int, node string) []int {
	p.Mu.Lock()
	defer p.Mu.Unlock()
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
func (p *Pool) noteNode(i int, node string) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.nodes[i] = node
}

// Dialed is a network connection on which nothing was sent yet, and how to log in.
type Dialed struct {
	Net         net.Conn
	Host        string // of the open: "vhost:" and the virtual host
	Name        string // the container-id
	Shown       string // the endpoint for people, without a password
	Mechanism   string // of SASL
	Response    []byte // its initial response
	IdleTimeout time.Duration
	Login       *userid.Login // of all connections to the endpoint
	// MaxMessageSize is how many bytes of a message a dedicated.Subscription keeps. 0: all.
	MaxMessageSize uint64

	cfg DialConfig
}

// Failed notes that no broker answers on the connection.
func (d Dialed) Failed() { d.cfg.fail(d.Net) }

// DialRaw opens a network connection for package dedicated, to the endpoint that comes behind places after that
// of the first connection, or to the next one that can be reached.
func (p *Pool) DialRaw(ctx context.Context, behind int) (Dialed, error) {
	p.Mu.Lock()
	at, cfg := p.Conns[0].at, p.Conns[0].Cfg
	p.Mu.Unlock()
	if p.Ctx.Err() != nil {
		return Dialed{}, &failure.Error{Op: "connect", Kind: failure.ErrClosed}
	}
	var errs []error
	for i := range p.endpoints {
		d, err := dialRaw(ctx, p.endpoints[(at+behind+i)%len(p.endpoints)], cfg)
		if err == nil {
			return d, nil
		}
		errs = append(errs, err)
	}
	return Dialed{}, errors.Join(errs...)
}

func dialRaw(ctx context.Context, ep Endpoint, cfg DialConfig) (Dialed, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()
	sasl, _, err := ep.sasl.login(ctx)
	if err != nil {
		return Dialed{}, noToken(ep, err)
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return Dialed{}, err
	}
	return Dialed{
		Net: raw, Host: "vhost:" + ep.vhost, Name: failure.Clip(cfg.Name, MaxName-8), Shown: ep.Shown,
		Mechanism: sasl.Mechanism, Response: sasl.response(), IdleTimeout: cfg.IdleTimeout, Login: ep.raw, MaxMessageSize: cfg.MaxMessageSize,
		cfg: cfg,
	}, nil
}
