package amqp

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// overTCP returns a sender on a connection over TCP, and the peer, which has given it credit and
// reads nothing from then on by itself. The sockets have small buffers.
func overTCP(t *testing.T, cfg Config) (*Conn, *Sender, *peer) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	near, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	far, err := listener.Accept()
	require.NoError(t, err)
	socket := near.(*net.TCPConn)
	require.NoError(t, socket.SetWriteBuffer(32<<10))
	require.NoError(t, far.(*net.TCPConn).SetReadBuffer(32<<10))
	p := &peer{t: t, net: far, r: frames.NewReader(far, 64<<10, 1<<20), got: make(chan frames.Frame, 10_000)}
	var script sync.WaitGroup
	script.Go(func() {
		p.handshake(&frames.Open{ContainerID: "peer", MaxFrameSize: frames.Some(uint32(64 << 10))})
		_, _ = p.r.AwaitFrame() // begin
		p.send(0, &frames.Begin{RemoteChannel: frames.Some(uint16(0)), IncomingWindow: 1 << 20, OutgoingWindow: 1000})
		f, _ := p.r.AwaitFrame()
		a, ok := f.Body.(*frames.Attach)
		assert.True(t, ok)
		p.send(0, &frames.Attach{Name: a.Name, Role: frames.RoleReceiver, Source: a.Source, Target: a.Target},
			&frames.Flow{
				NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 1 << 20, OutgoingWindow: 1000,
				Handle: frames.Some(uint32(0)), DeliveryCount: frames.Some(uint32(0)), LinkCredit: frames.Some(uint32(1 << 20)),
			})
	})
	c, err := Open(t.Context(), near, cfg)
	require.NoError(t, err)
	s, err := c.Begin(t.Context(), SessionConfig{})
	require.NoError(t, err)
	l, err := s.Sender(t.Context(), SenderConfig{})
	require.NoError(t, err)
	script.Wait()
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return l.credit > 0 && c.out.asleep
	}, time.Minute, time.Millisecond)
	t.Cleanup(func() {
		c.Fail(ErrClosed)
		<-c.Done()
		c.running.Wait()
		_ = far.Close()
	})
	return c, l, p
}

// quiet says whether everything that was put is with the socket, and the writer was left asleep.
func (c *Conn) quiet() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.asleep && c.out.empty() && len(c.out.wake) == 0
}

// accept accepts n messages as they come, in order, and returns their payloads.
func (p *peer) accept(n int) [][]byte {
	var all [][]byte
	for len(all) < n {
		f, err := p.r.AwaitFrame()
		require.NoError(p.t, err)
		if f.Body == nil {
			continue
		}
		tr := f.Body.(*frames.Transfer)
		assert.Equal(p.t, uint32(len(all)), tr.DeliveryID.Value)
		all = append(all, bytes.Clone(f.Payload))
		p.send(0, &frames.Disposition{Role: frames.RoleReceiver, First: tr.DeliveryID.Value, Settled: frames.Some(true), State: &frames.Accepted{}})
	}
	return all
}

// answered gets an answer.
type answered chan Answer

func (c answered) Answered(_ *Sending, a Answer) { c <- a }

// A message with nothing else in flight is written by its sender, without the writer. One that
// comes while another has no answer is left to the writer.
func TestLoneMessageIsWrittenByItsSender(t *testing.T) {
	c, l, p := overTCP(t, Config{})
	if c.out.try == nil {
		t.Skip("only the writer writes on this system")
	}
	go p.accept(101)
	to := make(answered, 2)
	for i := range 100 {
		require.NoError(t, l.Send(&Sending{Payload: fmt.Append(nil, i), To: to}))
		require.True(t, c.quiet())
		a := <-to
		require.Equal(t, Answer{State: &frames.Accepted{}, Sent: true}, a)
	}
	c.mu.Lock() // as if it were busy
	c.out.asleep = false
	assert.False(t, c.direct())
	c.out.asleep = true
	c.mu.Unlock()
	require.NoError(t, l.Send(&Sending{Payload: []byte("last"), To: to}))
	<-to
}

// A socket that is full delays no caller: the writer writes a lone message, and what comes after it.
func TestFullSocketDelaysNoSender(t *testing.T) {
	c, l, p := overTCP(t, Config{})
	fill(t, c)
	to := make(answered, 20)
	var want [][]byte
	for i := range 20 { // a write that waits does so for writeLimit
		want = append(want, bytes.Repeat(fmt.Appendf(nil, "%03d,", i), 3000))
		began := time.Now()
		require.NoError(t, l.Send(&Sending{Payload: want[i], To: to}))
		require.NoError(t, c.Err()) // nobody has the lock
		assert.Less(t, time.Since(began), writeLimit/2)
		require.False(t, c.quiet())
	}
	assert.Equal(t, want, p.accept(20))
	for range 20 {
		assert.Equal(t, Answer{State: &frames.Accepted{}, Sent: true}, <-to)
	}
	require.Eventually(t, c.quiet, time.Minute, time.Millisecond)
}

// What a socket has no room for, the writer writes.
func TestRestOfALoneMessage(t *testing.T) {
	c, l, p := overTCP(t, Config{})
	try := c.out.try
	if try == nil {
		t.Skip("only the writer writes on this system")
	}
	rooms := []int{0, 1, 7, 8, 50, 1000, 1 << 20}
	to := make(answered, 1)
	var got sync.WaitGroup
	got.Go(func() {
		all := p.accept(len(rooms))
		assert.Equal(t, len(rooms), len(all))
		for i, payload := range all {
			assert.Equal(t, bytes.Repeat([]byte{byte(i)}, 2000), payload)
		}
	})
	for i, room := range rooms {
		require.Eventually(t, c.quiet, time.Minute, time.Millisecond)
		tried := false
		c.mu.Lock()
		c.out.try = func(b []byte) int {
			tried = true
			return try(b[:min(room, len(b))])
		}
		c.mu.Unlock()
		require.NoError(t, l.Send(&Sending{Payload: bytes.Repeat([]byte{byte(i)}, 2000), To: to}))
		assert.True(t, tried)
		require.NoError(t, (<-to).Err)
	}
	got.Wait()
}

// fill writes empty frames until the socket is full, and stays full: at first the kernel moves what was written to
// the peer's buffer, and the peer's acknowledgment, which makes room here, can be delayed by 40 ms.
func fill(t *testing.T, c *Conn) {
	t.Helper()
	if c.out.try == nil {
		t.Skip("only the writer writes on this system")
	}
	empty, err := frames.Append(nil, frames.Frame{})
	require.NoError(t, err)
	// Many at once: the kernel finds more room for many small writes later, by joining them.
	empty = bytes.Repeat(empty, 1000)
	c.mu.Lock()
	defer c.mu.Unlock()
	const still = 20 // tries, 5 ms apart
	rest := empty
	for full := 0; full < still; {
		switch n := c.out.try(rest); {
		case n == 0:
			full++
			time.Sleep(5 * time.Millisecond)
		case n == len(rest):
			rest, full = empty, 0
		default:
			rest, full = rest[n:], 0
		}
	}
	if len(rest) < len(empty) {
		c.out.b = append(c.out.b, rest...)
	}
}

// Messages reach the wire in the order of their delivery-ids, whether senders or the writer write them.
func TestOrderOnTheWire(t *testing.T) {
	_, l, p := overTCP(t, Config{})
	const senders, each = 4, 500
	var all sync.WaitGroup
	for i := range senders {
		all.Go(func() {
			to := make(answered, 1)
			for j := range each {
				assert.NoError(t, l.Send(&Sending{Payload: fmt.Appendf(nil, "%d %d", i, j), To: to}))
				assert.NoError(t, (<-to).Err)
				if i > 0 && j%(10*i) == 0 {
					time.Sleep(time.Millisecond) // so that others are alone
				}
			}
		})
	}
	next := make([]int, senders)
	for _, payload := range p.accept(senders * each) {
		var i, j int
		_, err := fmt.Sscan(string(payload), &i, &j)
		require.NoError(t, err)
		require.Equal(t, next[i], j)
		next[i]++
	}
	all.Wait()
}

// A socket that is gone ends the connection, also when a sender finds it so.
func TestLoneMessageOnALostSocket(t *testing.T) {
	c, l, p := overTCP(t, Config{})
	require.NoError(t, p.net.(*net.TCPConn).SetLinger(0))
	require.NoError(t, p.net.Close())
	to := make(answered, 1)
	if err := l.Send(&Sending{Payload: []byte("x"), To: to}); err == nil {
		assert.Error(t, (<-to).Err)
	}
	<-c.Done()
}
