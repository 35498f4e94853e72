// Package vnet is a network in memory. Its connections are buffered pipes that wait by
// channels and timers alone, so they stand in testing/synctest.
package vnet

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// window is how many bytes can be in flight in each direction. A writer waits when there
// are more, as with TCP.
const window = 256 << 10

// Config is what Pipe needs to know.
type Config struct {
	// Client and Server are the addresses of the two ends.
	Client, Server Addr
	// Latency, if not nil, is how long what is written now takes to arrive. Nothing
	// overtakes what was written before it.
	Latency func() time.Duration
}

// Addr is an address of the network, such as "127.0.0.1:5672".
type Addr string

// Network is "tcp": a client shouldn't tell the difference.
func (Addr) Network() string { return "tcp" }

func (a Addr) String() string { return string(a) }

// Conn is one end of a pipe.
type Conn struct {
	local, remote Addr
	in, out       *half
	read, write   deadline
}

// Pipe returns the two ends of a connection.
func Pipe(cfg Config) (client, server *Conn) {
	there, back := newHalf(cfg.Latency), newHalf(cfg.Latency)
	client = &Conn{local: cfg.Client, remote: cfg.Server, in: back, out: there}
	server = &Conn{local: cfg.Server, remote: cfg.Client, in: there, out: back}
	return client, server
}

// Read waits for data within the read deadline. It returns io.EOF behind the last byte
// of an end that was closed.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.in.read(b, &c.read)
	return n, c.wrap("read", err)
}

// Write returns when there is room for b in the pipe, within the write deadline.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.out.write(b, &c.write)
	return n, c.wrap("write", err)
}

// Close lets what was written arrive. The other end's writes fail.
func (c *Conn) Close() error {
	c.out.finish()
	c.in.abandon()
	return nil
}

// Reset ends the connection at once, and drops data in flight.
func (c *Conn) Reset() {
	c.out.reset()
	c.in.reset()
}

// Open reports whether neither this end has been closed nor the connection reset.
func (c *Conn) Open() bool {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	return !c.out.closed && !c.out.cut
}

// LocalAddr is the address of this end.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the address of the other end.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// SetReadDeadline holds for a Read that waits, too.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.read.set(t, c.in.readable)
	return nil
}

// SetWriteDeadline holds for a Write that waits, too.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.write.set(t, c.out.writable)
	return nil
}

func (c *Conn) wrap(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
}

// half is one direction of a pipe.
type half struct {
	latency func() time.Duration

	mu     sync.Mutex
	data   []byte // from at on it is in flight
	at     int
	parts  []part // that data consists of, where there is latency
	due    time.Time
	closed bool // by the writer: behind data there is io.EOF
	gone   bool // by the reader: nobody reads any more
	cut    bool // reset, or closed by the end whose call this is
	// readable and writable have a token when something has changed.
	readable, writable chan struct{}
}

// part is a number of bytes that arrive together.
type part struct {
	n   int
	due time.Time
}

func newHalf(latency func() time.Duration) *half {
	return &half{latency: latency, readable: make(chan struct{}, 1), writable: make(chan struct{}, 1)}
}

// poke leaves a token for one who waits.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (h *half) read(b []byte, limit *deadline) (int, error) {
	for {
		n, wait, err := h.take(b, limit)
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
		limit.wait(h.readable, wait)
	}
}

// take reads what has arrived. If something is still in flight, wait is how long that
// takes.
func (h *half) take(b []byte, limit *deadline) (n int, wait time.Duration, err error) {
	if limit.over() {
		return 0, 0, os.ErrDeadlineExceeded
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.cut:
		poke(h.readable)
		return 0, 0, syscall.ECONNRESET
	case h.gone:
		poke(h.readable)
		return 0, 0, net.ErrClosed
	}
	arrived := len(h.data) - h.at
	if h.latency != nil {
		arrived, wait = h.arrived()
	}
	n = copy(b, h.data[h.at:h.at+arrived])
	h.at += n
	for left := n; h.latency != nil && left > 0; {
		k := min(left, h.parts[0].n)
		h.parts[0].n -= k
		left -= k
		if h.parts[0].n == 0 {
			h.parts = h.parts[1:]
		}
	}
	if h.at == len(h.data) {
		h.data, h.at = h.data[:0], 0
	}
	if n > 0 {
		poke(h.writable)
		return n, 0, nil
	}
	if h.closed && len(h.data) == 0 {
		if h.latency == nil {
			poke(h.readable)
			return 0, 0, io.EOF
		}
		if wait = time.Until(h.due); wait <= 0 {
			poke(h.readable)
			return 0, 0, io.EOF
		}
	}
	return 0, wait, nil
}

// arrived is how many bytes are there, and if there are none, how long the next take.
func (h *half) arrived() (n int, wait time.Duration) {
	now := time.Now()
	for _, p := range h.parts {
		if p.due.After(now) {
			if n == 0 {
				return 0, p.due.Sub(now)
			}
			return n, 0
		}
		n += p.n
	}
	return n, 0
}

func (h *half) write(b []byte, limit *deadline) (n int, err error) {
	for {
		k, err := h.put(b[n:], limit)
		n += k
		if err != nil || n == len(b) {
			return n, err
		}
		limit.wait(h.writable, 0)
	}
}

func (h *half) put(b []byte, limit *deadline) (int, error) {
	if limit.over() {
		return 0, os.ErrDeadlineExceeded
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		poke(h.writable)
		return 0, net.ErrClosed
	case h.cut:
		poke(h.writable)
		return 0, syscall.ECONNRESET
	case h.gone:
		poke(h.writable)
		return 0, syscall.EPIPE
	}
	n := min(len(b), window-(len(h.data)-h.at))
	if n <= 0 {
		return 0, nil
	}
	if h.at > 0 && len(h.data)+n > cap(h.data) {
		h.data = append(h.data[:0], h.data[h.at:]...)
		h.at = 0
	}
	h.data = append(h.data, b[:n]...)
	if h.latency != nil {
		h.parts = append(h.parts, part{n, h.arrival()})
	}
	poke(h.readable)
	return n, nil
}

// arrival is when what is written now arrives.
func (h *half) arrival() time.Time {
	if due := time.Now().Add(h.latency()); due.After(h.due) {
		h.due = due
	}
	return h.due
}

// finish is the writer's close.
func (h *half) finish() {
	h.mu.Lock()
	if !h.closed && h.latency != nil {
		h.arrival()
	}
	h.closed = true
	h.mu.Unlock()
	poke(h.readable)
	poke(h.writable)
}

// abandon is the reader's close.
func (h *half) abandon() {
	h.mu.Lock()
	h.gone = true
	h.data, h.at, h.parts = nil, 0, nil
	h.mu.Unlock()
	poke(h.readable)
	poke(h.writable)
}

func (h *half) reset() {
	h.mu.Lock()
	h.cut = true
	h.data, h.at, h.parts = nil, 0, nil
	h.mu.Unlock()
	poke(h.readable)
	poke(h.writable)
}

// deadline is when a Read or a Write gives up. It is set for each frame, so only one that
// waits has a timer.
type deadline struct {
	mu sync.Mutex
	at time.Time
}

// set changes the deadline. Who waits by a later one is woken. Who waits by an earlier one
// wakes then, and looks again.
func (d *deadline) set(t time.Time, wake chan struct{}) {
	d.mu.Lock()
	sooner := !t.IsZero() && (d.at.IsZero() || t.Before(d.at))
	d.at = t
	d.mu.Unlock()
	if sooner {
		poke(wake)
	}
}

// wait waits for a token, until the deadline, and for atMost, if that isn't 0.
func (d *deadline) wait(token <-chan struct{}, atMost time.Duration) {
	d.mu.Lock()
	at := d.at
	d.mu.Unlock()
	if !at.IsZero() {
		left := time.Until(at)
		if left <= 0 {
			return
		}
		if atMost <= 0 || left < atMost {
			atMost = left
		}
	}
	if atMost <= 0 {
		<-token
		return
	}
	t := time.NewTimer(atMost)
	defer t.Stop()
	select {
	case <-token:
	case <-t.C:
	}
}

// over says whether the deadline has passed.
func (d *deadline) over() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.at.IsZero() && !time.Now().Before(d.at)
}
