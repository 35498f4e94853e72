// Package proxy is a TCP proxy to put between a client and its broker, whose
// connections can be cut, stalled, slowed down, left half-open and refused.
package proxy

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proxy listens on a port of 127.0.0.1 and passes every connection on to one
// target. Its methods are safe for concurrent use.
type Proxy struct {
	target string
	addr   string

	accepted, toTarget, toClient atomic.Int64

	mu      sync.Mutex
	ln      net.Listener // nil while connections are refused
	pairs   map[*pair]struct{}
	flowing chan struct{} // closed while bytes flow
	stalled bool
	deaf    bool
	slow    pace
	closed  bool
	running sync.WaitGroup
}

// pair is a connection of a client and the one to the target behind it.
type pair struct {
	client, target net.Conn
	gone           chan struct{}
	once           sync.Once
	// lost is set by Drop: nothing gets through any more.
	lost atomic.Bool
}

// pace is what Slow has set.
type pace struct {
	latency time.Duration
	rate    int // bytes per second; 0: any
}

// of is how long n bytes take.
func (p pace) of(n int) time.Duration {
	d := p.latency
	if p.rate > 0 {
		d += time.Duration(n) * time.Second / time.Duration(p.rate)
	}
	return d
}

// New starts a proxy for target, a host:port.
func New(target string) (*Proxy, error) {
	p := &Proxy{target: target, pairs: map[*pair]struct{}{}, flowing: make(chan struct{})}
	close(p.flowing)
	// While connections are refused, nobody listens on its port. So it isn't one of those that systems give to outgoing
	// connections, from 32768 on Linux and 49152 elsewhere: such a connection would keep it.
	var err error
	for range 100 {
		if err = p.listen(fmt.Sprintf("127.0.0.1:%d", 10_000+rand.IntN(10_000))); err == nil {
			return p, nil
		}
	}
	return nil, err
}

// Addr is the host:port to connect to; it stays the same.
func (p *Proxy) Addr() string { return p.addr }

// Accepted is how many connections were accepted so far.
func (p *Proxy) Accepted() int { return int(p.accepted.Load()) }

// Sent is how many bytes were passed on to the target, Received how many came
// back.
func (p *Proxy) Sent() int64 { return p.toTarget.Load() }

// Received is how many bytes the target sent.
func (p *Proxy) Received() int64 { return p.toClient.Load() }

// Open is how many connections are open now.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pairs)
}

// Cut resets all open connections, on both sides, and returns how many there
// were. Data in flight is lost.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.pairs {
		c.reset()
	}
	n := len(p.pairs)
	clear(p.pairs)
	return n
}

// Stall lets no byte through any more, in either direction, though all
// connections stay open and new ones are accepted: the other side looks as if it
// had lost its power.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stalled {
		p.stalled, p.flowing = true, make(chan struct{})
	}
}

// Resume undoes Stall.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stalled {
		p.stalled = false
		close(p.flowing)
	}
}

// Drop makes every connection that is open now half-open, and returns how many
// there were: everything that either side sends is thrown away, including the end of the
// connection, so that each side finds out by itself, or never. Connections that are
// opened later work.
func (p *Proxy) Drop() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.pairs {
		c.lost.Store(true)
	}
	return len(p.pairs)
}

// Deafen throws away everything that clients send from now on, also on connections that are
// opened later. What the target sends still arrives: a black hole in one direction.
func (p *Proxy) Deafen() { p.setDeaf(true) }

// Hear undoes Deafen. Connections that have lost data are of no use.
func (p *Proxy) Hear() { p.setDeaf(false) }

func (p *Proxy) setDeaf(deaf bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaf = deaf
}

// Slow holds what is passed on, in each direction, for latency and for as long as
// it takes at rate bytes per second (0: no time). One piece, of at most 32 KiB, is
// in flight at a time. Slow(0, 0) undoes it.
func (p *Proxy) Slow(latency time.Duration, rate int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slow = pace{max(latency, 0), max(rate, 0)}
}

// Refuse lets no new connection in: connecting fails with "connection refused".
// Open ones stay.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil {
		_ = p.ln.Close()
		p.ln = nil
	}
}

// Admit undoes Refuse.
func (p *Proxy) Admit() error {
	p.mu.Lock()
	open := p.ln != nil
	p.mu.Unlock()
	if open {
		return nil
	}
	return p.listen(p.addr)
}

// Close resets all connections, lets no more in, and waits until nothing of the
// proxy runs.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Refuse()
	p.Cut()
	p.running.Wait()
}

func (p *Proxy) listen(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.ln != nil {
		_ = ln.Close()
		if p.closed {
			return errors.New("proxy: closed")
		}
		return nil
	}
	p.ln = ln
	if p.addr == "" { // or Addr would race with Admit
		p.addr = ln.Addr().String()
	}
	p.running.Go(func() { p.accept(ln) })
	return nil
}

func (p *Proxy) accept(ln net.Listener) {
	for {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		p.accepted.Add(1)
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	target, err := net.DialTimeout("tcp", p.target, 10*time.Second)
	if err != nil {
		_ = client.Close()
		return
	}
	c := &pair{client: client, target: target, gone: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		c.reset()
		return
	}
	p.pairs[c] = struct{}{}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.pass(c, target, client, &p.toTarget) })
	both.Go(func() { p.pass(c, client, target, &p.toClient) })
	both.Wait()
	c.end()
	p.mu.Lock()
	delete(p.pairs, c)
	p.mu.Unlock()
}

// pass copies from one side to the other until either ends.
func (p *Proxy) pass(c *pair, to, from net.Conn, count *atomic.Int64) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		flowing, slow, deaf := p.flowing, p.slow, p.deaf && to == c.target
		p.mu.Unlock()
		select {
		case <-flowing:
		case <-c.gone:
			return
		}
		if d := slow.of(n); d > 0 {
			t := time.NewTimer(d)
			select {
			case <-t.C:
			case <-c.gone:
				t.Stop()
				return
			}
		}
		if deaf || c.lost.Load() {
			if err != nil {
				_ = from.Close() // this side has closed; the other must not notice
				return
			}
			continue
		}
		if n > 0 {
			count.Add(int64(n))
			if _, err := to.Write(buf[:n]); err != nil {
				c.end()
				return
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			// One side has said all; the other may still have something to say.
			if t, ok := to.(*net.TCPConn); ok {
				_ = t.CloseWrite()
			}
			return
		case err != nil:
			c.end()
			return
		}
	}
}

func (c *pair) end() {
	c.once.Do(func() {
		close(c.gone)
		_ = c.client.Close()
		_ = c.target.Close()
	})
}

// reset ends both sides with RST rather than FIN.
func (c *pair) reset() {
	for _, side := range []net.Conn{c.client, c.target} {
		if t, ok := side.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
	}
	c.end()
}
