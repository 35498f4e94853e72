package integration

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// A message fails once and is handled the second time. Between its first delivery
// and the settlement of its last, the consumer's connection ends once behind each
// single frame: the delivery, the transfer of the copy, its confirmation, the
// settlements, and all that lies between. Whatever the strategy, the message is
// handled to its end afterwards. It is handled to its end twice only where docs/guarantees.md
// says so: when the connection ends after that, before the broker has heard of it;
// and, by Republish, when the copy is stored and its original isn't accepted yet.
func TestNoMessageIsLostWhereverTheConnectionEnds(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		for name, edit := range strategies(s) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(50 * time.Millisecond)}
				edit(&policy)
				direct, _ := s.connect(t)
				applyRetry(t, direct, policy, declare.QuorumQueue{Name: "work", DeliveryLimit: declare.Unlimited})
				wire := newFrameCutter(t, s.host())
				conn, _ := connectTo(t, s.urlOf(func(u *url.URL) { u.Host = wire.addr() }), soon)

				var mu sync.Mutex
				succeeded := map[int]int{}
				early := map[int]bool{} // the connection ended before the second delivery had come
				done := make(chan int, 1000)
				// One worker, so that frames come in one order.
				consume(t, conn, "work", retry.With(policy)(client.JSON(func(ctx context.Context, id int) error {
					if retry.Attempt(ctx) == 1 {
						return errors.New("not yet")
					}
					mu.Lock()
					defer mu.Unlock()
					succeeded[id]++
					done <- id
					return nil
				})), client.ConsumerConfig{Prefetch: 1})
				p := publisher[int](t, direct, address.Queue("work"))

				one := func(id, behind int) int {
					wire.arm(behind)
					publish(t, p, id)
					for await(t, done, "the message is handled to its end") != id {
					}
					for _, q := range []string{"work", "work.dead", "parking_queue"} {
						poll(t, q+" is empty", func() bool { return ready(t, direct, q) == 0 })
					}
					frames, deliveries := wire.disarm()
					mu.Lock()
					defer mu.Unlock()
					early[id] = deliveries == 1
					return frames
				}
				frames := one(0, 0) // none is cut: how many are there?
				require.Greater(t, frames, 3)
				duplicates, behind := 0, 1
				for ; behind <= frames; behind++ {
					one(behind, behind)
				}
				mu.Lock()
				defer mu.Unlock()
				for id := 1; id < behind; id++ {
					assert.Positive(t, succeeded[id], "cut behind frame %d: lost", id)
					duplicates += succeeded[id] - 1
					if name != "republish" && name != "ladder" && (name != "auto" || s.newer()) && early[id] {
						assert.Equal(t, 1, succeeded[id], "cut behind frame %d, before the second delivery: no copy, so no duplicate", id)
					}
				}
				t.Logf("REPORT %s: cut behind each of %d frames: lost 0, handled twice %d", t.Name(), frames, duplicates)
			})
		}
	})
}

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

func newFrameCutter(t *testing.T, target string) *frameCutter {
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

func (c *frameCutter) addr() string { return c.ln.Addr().String() }

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

func (c *frameCutter) arm(behind int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed, c.began, c.cut, c.seen, c.deliveries, c.behind = true, false, false, 0, 0, behind
}

func (c *frameCutter) disarm() (frames, deliveries int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = false
	return c.seen, c.deliveries
}
