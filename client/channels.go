package client

import (
	"bytes"
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// channels is a net.Conn that watches what the broker says of sessions: it keeps up
// their intakes, and keeps a channel number out of use for a while after a
// session on it has ended. RabbitMQ 4.0 forgets a session only some time after it has
// sent its end, whichever side asked for it, and what arrives on the number meanwhile
// is lost: a session that begins then is never answered. 4.3 answers. go-amqp uses
// the lowest free number, so mostly the one that has just become free.
//
// Only the frames tell it in time: before go-amqp reports the end of a session,
// another may have begun. So the begin that comes too early is held back here, which
// delays nothing else: a session sends nothing before its begin is answered.
type channels struct {
	// Conn takes writes of several goroutines at once, as a coalescer does.
	net.Conn
	// rests says that the broker needs it. Set before the first session begins.
	rests atomic.Bool

	// intakes of the sessions.
	intakes intakes

	// Of the frame that is being read; only Read uses them.
	head []byte // its first bytes, until its kind is known
	skip int    // bytes to come that don't matter

	mu    sync.Mutex
	ended map[uint16]time.Time // when the last session on a number ended
}

// channelRest is how long a number is kept out of use.
const channelRest = 250 * time.Millisecond

// The performatives that matter, by their descriptor's code (AMQP 1.0, part 2.7).
const (
	frameBegin = 0x11
	frameFlow  = 0x13
	frameEnd   = 0x17
	// frameHead is what tells a frame's kind: 8 bytes of header, 3 of descriptor.
	frameHead = 11
)

// frameKind reads the first bytes of a frame. The descriptor of a performative is
// a small ulong: 00 53 code.
func frameKind(b []byte) (code byte, channel uint16) {
	if len(b) < frameHead || b[4] != 2 || b[5] != 0 || b[8] != 0 || b[9] != 0x53 {
		return 0, 0
	}
	return b[10], binary.BigEndian.Uint16(b[6:8])
}

// Write is given whole frames by go-amqp, one at a time.
func (c *channels) Write(b []byte) (int, error) {
	if code, channel := frameKind(b); code == frameBegin {
		c.intakes.begun(channel)
		if !c.rests.Load() {
			return c.Conn.Write(b)
		}
		c.mu.Lock()
		left := channelRest - time.Since(c.ended[channel])
		delete(c.ended, channel)
		c.mu.Unlock()
		if left > 0 {
			held := bytes.Clone(b)
			time.AfterFunc(left, func() { _, _ = c.Conn.Write(held) })
			return len(b), nil
		}
	}
	return c.Conn.Write(b)
}

func (c *channels) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.watch(b[:n])
	}
	return n, err
}

// Close ends the connection, and with it what was known of its sessions.
func (c *channels) Close() error {
	c.intakes.close()
	return c.Conn.Close()
}

// watch follows the stream of frames, which come cut anywhere.
func (c *channels) watch(b []byte) {
	for len(b) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(b))
			c.skip, b = c.skip-n, b[n:]
			continue
		}
		n := min(c.wanted()-len(c.head), len(b))
		c.head, b = append(c.head, b[:n]...), b[n:]
		if len(c.head) < c.wanted() {
			continue
		}
		if string(c.head[:4]) != "AMQP" { // a protocol header is 8 bytes, too
			switch code, channel := frameKind(c.head); code {
			case frameBegin, frameFlow:
				if n, ok := incomingWindow(c.head); ok {
					c.intakes.window(channel, n)
				}
			case frameEnd:
				c.intakes.ended(channel)
				c.sessionEnded(channel)
			}
			c.skip = max(0, int(binary.BigEndian.Uint32(c.head))-len(c.head))
		}
		c.head = c.head[:0]
	}
}

// wanted is how many bytes the head has.
func (c *channels) wanted() int {
	if len(c.head) < 8 || string(c.head[:4]) == "AMQP" {
		return 8
	}
	want := uint32(frameHead)
	if len(c.head) >= frameHead {
		if code, _ := frameKind(c.head); code == frameBegin || code == frameFlow {
			want = windowHead
		}
	}
	return int(min(want, max(8, binary.BigEndian.Uint32(c.head))))
}

// sessionEnded: RabbitMQ sends on the number that the session began on.
func (c *channels) sessionEnded(channel uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended == nil {
		c.ended = map[uint16]time.Time{}
	}
	c.ended[channel] = time.Now()
}
