package frames

import (
	"bytes"
	"net"
	"sync/atomic"
	"time"
)

// Conn is the connection that go-amqp is given. It passes on what comes and goes, and
//
//   - gathers writes into fewer and larger ones (coalescer);
//   - joins the settlements of neighbouring deliveries (joiner);
//   - follows the sessions: whether the broker takes messages on them, and when one may
//     begin (sessions);
//   - keeps messages from go-amqp that it can't decode (reader).
type Conn struct {
	net.Conn // for what isn't below
	out      *coalescer
	in       *reader
	sessions sessions
	opening  atomic.Bool
}

// Config is what a Conn needs to know from the beginning.
type Config struct {
	// Blocked, if not nil, is called with true when the broker stops taking messages on
	// some session, and with false when it takes them on all sessions again. The end of
	// a session or of the connection says nothing of that. It is called with a lock
	// held, on the goroutine that reads: it must not block, and must not call the Conn.
	Blocked func(blocked bool)
	// Settled, if not nil, is called for each disposition that settles deliveries, just
	// before it is written, with how many they are. It is called without a lock, on the
	// goroutine that writes.
	Settled func(n int)
}

// Wrap makes a Conn of c, which has just been opened. Close ends both.
func Wrap(c net.Conn, cfg Config) *Conn {
	w := &Conn{Conn: c, out: coalesce(c)}
	w.out.settled = cfg.Settled
	w.out.joiner.counts = cfg.Settled != nil
	w.sessions.tell = cfg.Blocked
	if w.sessions.tell == nil {
		w.sessions.tell = func(bool) {}
	}
	w.in = newReader(c, &w.sessions)
	return w
}

// frameHead is what tells a frame's kind: the header, and a descriptor of three bytes.
const frameHead = HeaderSize + 3

// frameKind reads the first bytes of a frame. Of a performative its code is returned,
// and of anything else 0. The descriptor of a performative is a small ulong.
func frameKind(b []byte) (code byte, channel uint16) {
	if len(b) < frameHead || b[4] != 2 || b[5] != TypeAMQP || b[8] != codeDescribed || b[9] != codeSmallUlong {
		return 0, 0
	}
	return b[10], uint16(b[6])<<8 | uint16(b[7])
}

var amqpHeader = ProtocolAMQP.Header()

// Write is given whole frames, one at a time. It returns when they are in the buffer.
func (c *Conn) Write(b []byte) (int, error) {
	switch code, channel := frameKind(b); {
	case code == codeBegin:
		wait, held := c.sessions.begin(channel, b)
		if held {
			return len(b), nil
		}
		if wait > 0 {
			c.writeIn(wait, bytes.Clone(b))
			return len(b), nil
		}
	case code == codeEnd:
		n, err := c.out.Write(b)
		if begin, wait := c.sessions.left(channel); begin != nil && err == nil {
			c.writeIn(wait, begin)
		}
		return n, err
	case code == 0 && !c.opening.Load() && bytes.Equal(b, amqpHeader):
		c.opening.Store(true)
	}
	return c.out.Write(b)
}

// writeIn writes a begin that was held back. An error comes again with the next Write.
func (c *Conn) writeIn(wait time.Duration, begin []byte) {
	if wait <= 0 {
		_, _ = c.out.Write(begin)
		return
	}
	time.AfterFunc(wait, func() { _, _ = c.out.Write(begin) })
}

// Read passes on what has come, in whole frames.
func (c *Conn) Read(b []byte) (int, error) { return c.in.Read(b) }

// SetWriteDeadline holds for the writes that follow.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }

// SetDeadline holds for reads and for the writes that follow.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.out.SetWriteDeadline(t); err != nil {
		return err
	}
	return c.Conn.SetReadDeadline(t)
}

// Close lets what was written leave, but not for longer than a second, and closes the
// connection.
func (c *Conn) Close() error {
	c.sessions.close()
	return c.out.Close()
}

// RestChannels makes each session wait whose channel was in use a moment ago. It is
// called before the first session begins.
func (c *Conn) RestChannels() { c.sessions.rests.Store(true) }

// Intake is that of the session that began last.
func (c *Conn) Intake() *Intake { return c.sessions.last() }

// Answers is how many frames have come that answer one of ours. Each shows that the
// broker still receives. What it sends by itself, such as deliveries and credit, isn't
// counted.
func (c *Conn) Answers() uint64 { return c.in.answers.Load() }

// Opening says whether the handshake has got as far as to open the connection: SASL, if
// there was any, is through.
func (c *Conn) Opening() bool { return c.opening.Load() }

// Sessions is how many sessions the broker allows on the connection, by the channel-max
// of its open frame.
func (c *Conn) Sessions() int {
	if n := c.in.sessionMax.Load(); n > 0 {
		return int(n)
	}
	return 1 << 16
}

// Refusal is the error with which the broker has closed the connection; nil if it gave
// none.
func (c *Conn) Refusal() *Error { return c.in.refusal.Load() }
