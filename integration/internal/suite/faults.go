package suite

import (
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/proxy"
)

// frameCutter is a proxy that understands so much of AMQP as to end a connection
// behind a certain frame. What it has passed on arrives before the end does.
type frameCutter struct {
	t      *testing.T
	ln     net.Listener
	target string

	mu     sync.Mutex
	behind int  // 0: never
	armed  bool // count
	began  bool // the first transfer to the client has come
	seen   int
	cut    bool
	// deliveries are the transfers to the client up to the cut.
	deliveries int
	open       map[net.Conn]net.Conn
	wg         sync.WaitGroup
}

func NewFrameCutter(t *testing.T, target string) *frameCutter {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &frameCutter{t: t, ln: ln, target: target, open: map[net.Conn]net.Conn{}}
	c.wg.Go(func() {
		for {
			from, err := ln.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", target)
			if err != nil {
				_ = from.Close()
				continue
			}
			c.mu.Lock()
			c.open[from] = to
			c.mu.Unlock()
			c.wg.Go(func() { c.pump(from, to, from, false) })
			c.wg.Go(func() { c.pump(to, from, from, true) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		c.mu.Lock()
		for from, to := range c.open {
			_, _ = from.Close(), to.Close()
		}
		c.mu.Unlock()
		c.wg.Wait()
	})
	return c
}

func (c *frameCutter) Addr() string { return c.ln.Addr().String() }

// pump passes frames on, one by one.
func (c *frameCutter) pump(from, to net.Conn, key net.Conn, fromBroker bool) {
	defer c.end(key)
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(from, head); err != nil {
			return
		}
		frame := head
		if string(head[:4]) != "AMQP" { // else a protocol header
			size := binary.BigEndian.Uint32(head)
			if size < 8 || size > 1<<24 {
				return
			}
			frame = make([]byte, size)
			copy(frame, head)
			if _, err := io.ReadFull(from, frame[8:]); err != nil {
				return
			}
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
		if c.counts(frame, fromBroker) {
			return
		}
	}
}

// counts says whether the connection is to end behind this frame.
func (c *frameCutter) counts(frame []byte, fromBroker bool) bool {
	const transfer = 0x14
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.armed || c.cut || len(frame) <= 11 { // a heartbeat is 8 bytes
		return false
	}
	if !c.began && !(fromBroker && frame[4] == 2 && frame[10] == transfer) {
		return false
	}
	c.began = true
	if fromBroker && frame[4] == 2 && frame[10] == transfer {
		c.deliveries++
	}
	c.seen++
	c.cut = c.seen == c.behind
	return c.cut
}

// end closes both sides; what was written before arrives.
func (c *frameCutter) end(key net.Conn) {
	c.mu.Lock()
	to := c.open[key]
	delete(c.open, key)
	c.mu.Unlock()
	_ = key.Close()
	if to != nil {
		_ = to.Close()
	}
}

func (c *frameCutter) Arm(behind int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed, c.began, c.cut, c.seen, c.deliveries, c.behind = true, false, false, 0, 0, behind
}

func (c *frameCutter) Disarm() (frames, deliveries int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = false
	return c.seen, c.deliveries
}

// Through starts a proxy to the broker, and returns the URL that leads through it.
func (s *Site) Through(t *testing.T) (*proxy.Proxy, string) {
	t.Helper()
	p, err := proxy.New(s.Host())
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p, s.AMQPURLWith(func(u *url.URL) { u.Host = p.Addr() })
}

func Soon(c *client.Config) {
	c.Reconnect = client.ReconnectBackoff{Min: 10 * time.Millisecond, Max: 200 * time.Millisecond}
}

// LogWhereMessagesAre logs what each queue holds, by the HTTP API.
func (s *Site) LogWhereMessagesAre(t *testing.T) {
	t.Helper()
	var queues []map[string]any
	s.HTTP(t, http.MethodGet, "/queues/"+s.VHost, nil, &queues)
	for _, q := range queues {
		t.Logf("REPORT %s: %v holds messages %v, ready %v, unacked %v, dlx %v", t.Name(), q["name"], q["messages"], q["messages_ready"], q["messages_unacknowledged"], q["messages_dlx"])
	}
}

// TallyByID counts how often each message was seen.
type TallyByID struct {
	mu sync.Mutex
	n  map[int]int
}

func (c *TallyByID) Add(id int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[int]int{}
	}
	c.n[id]++
}

func (c *TallyByID) Of(id int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[id]
}

func (c *TallyByID) IDs() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.n)
}

func (c *TallyByID) Total() (sum int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.n {
		sum += n
	}
	return sum
}
