package main

import (
	"io"
	"net"
	"net/url"
	"slices"
	"sync"
	"time"
)

// cutter is a TCP proxy in front of the broker that can cut all connections, or put the
// broker far away.
type cutter struct {
	url    string
	listen net.Listener
	to     string
	// distance is how long each byte is under way, in each direction.
	distance time.Duration

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]bool
}

func newCutter(broker string) (*cutter, error) { return farAway(broker, 0) }

// farAway is a cutter whose broker is a distance away.
func farAway(broker string, distance time.Duration) (*cutter, error) {
	u, err := url.Parse(broker)
	if err != nil {
		return nil, err
	}
	to := u.Host
	if u.Port() == "" {
		to = net.JoinHostPort(u.Hostname(), "5672")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u.Host = l.Addr().String()
	c := &cutter{url: u.String(), listen: l, to: to, distance: distance, conns: map[net.Conn]bool{}}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go c.serve(in)
		}
	}()
	return c, nil
}

func (c *cutter) serve(in net.Conn) {
	out, err := net.Dial("tcp", c.to)
	if err != nil {
		_ = in.Close()
		return
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		_, _ = in.Close(), out.Close()
		return
	}
	c.conns[in], c.conns[out] = true, true
	c.mu.Unlock()
	var wg sync.WaitGroup
	pipe := func(a, b net.Conn) {
		if c.distance > 0 {
			late(a, b, c.distance)
		} else {
			_, _ = io.Copy(a, b)
		}
		_, _ = a.Close(), b.Close()
	}
	wg.Go(func() { pipe(in, out) })
	pipe(out, in)
	wg.Wait()
	c.mu.Lock()
	delete(c.conns, in)
	delete(c.conns, out)
	c.mu.Unlock()
}

// late copies from b to a, and holds each byte for a while. Any number of bytes may be under
// way, as on a long line, so this bounds no throughput by itself.
func late(a, b net.Conn, by time.Duration) {
	type piece struct {
		bytes []byte
		due   time.Time
	}
	line := make(chan piece, 1<<14)
	go func() {
		defer close(line)
		all := make([]byte, 64<<10)
		for {
			n, err := b.Read(all)
			if n > 0 {
				line <- piece{slices.Clone(all[:n]), time.Now().Add(by)}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range line {
		time.Sleep(time.Until(p.due))
		if _, err := a.Write(p.bytes); err != nil {
			_ = b.Close() // which ends the reader; what it has read is drained
		}
	}
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		if t, ok := conn.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = conn.Close()
	}
}

func (c *cutter) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	_ = c.listen.Close()
	c.cut()
}
