package wire

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

const (
	// readBuffer is how much is read at once.
	readBuffer = 64 << 10
	// maxOut is how much may wait to be written. Behind it no frame of the client is
	// read, and no event of the engine is carried out.
	maxOut = 256 << 10
	// closingTimeout is how long a client may take to close a connection that the server has
	// closed.
	closingTimeout = 30 * time.Second
	// minFrameSize is the least that AMQP lets a client ask for.
	minFrameSize = 512
	// firstFrameSize is the largest frame before the open frame.
	firstFrameSize = 8192
)

// Conn is one connection of a client.
type Conn struct {
	server *Server
	net    net.Conn
	id     uint64
	in     *frames.Reader
	begun  time.Time

	// wake tells the writer that there is something to do, room tells the reader that
	// something has been written. done is closed when the connection has ended.
	wake, room chan struct{}
	done       chan struct{}
	end        sync.Once
	written    chan struct{} // closed when the writer has ended
	faults     faults

	// The reader's own.
	decode frames.Codec
	frame  performatives

	mu sync.Mutex
	// The rest is guarded by mu.
	open       bool
	info       Info
	engine     *engine.Connection
	maxFrame   int // the largest that the client takes; 0: any
	channelMax uint16
	beat       time.Duration // how often the client wants a sign of life; 0: never
	received   uint64        // bytes
	sent       uint64
	out, spare []byte
	encode     frames.Codec
	write      performatives
	sessions   map[uint16]*session
	events     []engine.Event // of the engine
	notified   int            // of events
	notifying  bool           // notify is being called
	dirty      []*session     // with confirmations to send
	stalled    []*session     // with deliveries that wait
	partial    int            // bytes of messages that have begun
	attached   int            // bytes of the attach frames of the links
	size       int            // of the frame that is carried out, if it is one of the rarer ones
	blocked    bool           // by an alarm
	closeSent  bool           // nothing else may be sent
	closer     *time.Timer
	later      []answer
}

// performatives are used again for each frame.
type performatives struct {
	transfer    frames.Transfer
	flow        frames.Flow
	disposition frames.Disposition
}

// Info describes a connection.
type Info struct {
	ID        uint64
	User      string // empty before the login
	VHost     string // empty before the open frame
	Container string // the client's container-id
	Client    string // its network address
	Since     time.Time
	Sessions  int
}

func sortConns(all []*Conn) {
	slices.SortFunc(all, func(a, b *Conn) int { return cmp.Compare(a.id, b.id) })
}

func newConn(s *Server, nc net.Conn, id uint64) *Conn {
	c := &Conn{
		server: s, net: nc, id: id, in: frames.NewReader(nc, readBuffer, max(s.cfg.MaxFrameSize, firstFrameSize)), begun: time.Now(),
		wake: make(chan struct{}, 1), room: make(chan struct{}, 1), done: make(chan struct{}), written: make(chan struct{}),
		sessions: map[uint16]*session{},
	}
	c.info = Info{ID: id, Since: c.begun}
	if a := nc.RemoteAddr(); a != nil {
		c.info.Client = a.String()
	}
	return c
}

// ID is the connection's number, from 1.
func (c *Conn) ID() uint64 { return c.id }

// Info describes the connection's current state.
func (c *Conn) Info() Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	info := c.info
	info.Sessions = len(c.sessions)
	return info
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (c *Conn) poke() { poke(c.wake) }

// Cut ends the connection at once. The client finds it reset.
func (c *Conn) Cut() {
	switch nc := c.net.(type) {
	case interface{ Reset() }:
		nc.Reset()
	case *net.TCPConn:
		_ = nc.SetLinger(0)
	}
	_ = c.net.Close()
	c.stop()
}

// stop ends the connection. While nothing of ours reaches the client, it learns nothing
// of that.
func (c *Conn) stop() {
	c.end.Do(func() {
		close(c.done)
		if !c.faults.silent(DirectionToClient) {
			_ = c.net.Close()
		}
	})
}

// Shut closes the connection with an error, in order.
func (c *Conn) Shut(why *frames.Error) {
	c.mu.Lock()
	open := c.open
	if open {
		c.close(why)
	}
	c.mu.Unlock()
	if !open {
		c.Cut()
	}
	c.poke()
}

// errOver ends the reader: the connection is at its end.
var errOver = errors.New("wire: the connection has ended")

// run serves the connection until its end.
func (c *Conn) run() {
	err := c.handshake()
	if err == nil {
		go c.writer()
		err = c.reader()
		c.stop()
		<-c.written
	}
	c.stop()
	c.mu.Lock()
	e, closer := c.engine, c.closer
	c.release()
	c.mu.Unlock()
	if e != nil {
		e.Close()
	}
	if closer != nil {
		closer.Stop()
	}
	if c.faults.silent(DirectionToClient) {
		c.discard() // the client still sends, and must not notice
		_ = c.net.Close()
	}
	if err != nil && !errors.Is(err, errOver) {
		c.server.log(c, err.Error())
	}
}

// reader reads frames and carries them out.
func (c *Conn) reader() error {
	for {
		more, err := c.frames()
		c.poke()
		if err != nil {
			return err
		}
		if !more {
			if err := c.in.Fill(); err != nil {
				return c.lost(err)
			}
			continue
		}
		for full := true; full; {
			select {
			case <-c.room:
			case <-c.done:
				return errOver
			}
			c.mu.Lock()
			full = len(c.out) >= maxOut
			c.mu.Unlock()
		}
	}
}

// frames carries out the frames that have come. more says that the rest has to wait, since too
// much waits to be written.
func (c *Conn) frames() (more bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for there := true; there && err == nil; {
		if len(c.out) >= maxOut {
			c.catchUp()
			return true, nil
		}
		there, err = c.next()
	}
	if err == nil {
		c.catchUp()
	}
	return false, err
}

// lost is called when the client's end is gone. While what the client sends vanishes,
// the server learns of nothing.
func (c *Conn) lost(err error) error {
	if c.faults.silent(DirectionFromClient) {
		<-c.done
		return errOver
	}
	return err
}

// next carries out the next frame, if it is there. c.mu is held.
func (c *Conn) next() (there bool, err error) {
	start := c.in.Header()
	if start == nil {
		return false, nil
	}
	size := uint32(start[0])<<24 | uint32(start[1])<<16 | uint32(start[2])<<8 | uint32(start[3])
	doff, kind := start[4], start[5]
	channel := uint16(start[6])<<8 | uint16(start[7])
	var wrong string
	switch limit := uint32(c.server.cfg.MaxFrameSize); {
	case size < frames.HeaderSize:
		wrong = fmt.Sprintf("frame size (%d bytes) < minimum frame size (8 bytes)", size)
	case size > limit:
		wrong = fmt.Sprintf("frame size (%d bytes) > maximum frame size (%d bytes)", size, limit)
	case doff < 2:
		wrong = fmt.Sprintf("data offset (%d) < minimum data offset (2)", doff)
	case uint32(doff)*4 > size:
		wrong = fmt.Sprintf("data offset (%d bytes) > frame size (%d bytes)", uint32(doff)*4, size)
	case kind != frames.TypeAMQP:
		wrong = fmt.Sprintf("unexpected frame type %d in amqp mode (expected 0)", kind)
	}
	if wrong != "" {
		return true, c.refuse(&frames.Error{Condition: "amqp:connection:framing-error", Description: wrong})
	}
	b, err := c.in.Next()
	if b == nil {
		return false, err
	}
	if c.faults.silent(DirectionFromClient) {
		return true, nil
	}
	c.received += uint64(size)
	if size == uint32(doff)*4 {
		return true, nil // a sign of life
	}
	if c.faults.before(DirectionFromClient) {
		return true, c.severed()
	}
	if channel > c.channelMax {
		err = c.refuse(&frames.Error{
			Condition:   "amqp:connection:framing-error",
			Description: fmt.Sprintf("channel number (%d) exceeds maximum channel number (%d)", channel, c.channelMax),
		})
	} else {
		err = c.handle(b)
	}
	if c.faults.after(DirectionFromClient) {
		return true, c.severed()
	}
	return true, err
}

// severed ends the connection at a point that a test has chosen. c.mu is held.
func (c *Conn) severed() error {
	c.out = c.out[:0]
	c.closeSent = true
	c.stop()
	return errOver
}

// refuse closes the connection with an error. c.mu is held.
func (c *Conn) refuse(why *frames.Error) error {
	c.server.log(c, "closing the connection: "+why.Error())
	c.close(why)
	if why.Condition != "amqp:connection:framing-error" {
		return nil
	}
	// What comes now can't be read: the frame may have no end.
	c.mu.Unlock()
	defer c.mu.Lock()
	c.poke()
	c.discard()
	return errOver
}

// discard reads what comes until the connection has ended.
func (c *Conn) discard() {
	b := make([]byte, 4096)
	for {
		if _, err := c.net.Read(b); err != nil {
			return
		}
	}
}

// close sends a close frame, the last that is sent. c.mu is held.
func (c *Conn) close(why *frames.Error) {
	if c.closeSent {
		return
	}
	for _, s := range c.sessions {
		s.notifyConfirmed()
		s.e.End()
	}
	c.dirty, c.stalled, c.later = nil, nil, nil
	clear(c.sessions)
	c.send(0, &frames.Close{Error: why})
	c.closeSent = true
	c.closer = time.AfterFunc(closingTimeout, c.stop)
}

// send appends a frame to what is to be written. c.mu is held.
func (c *Conn) send(channel uint16, p frames.Performative) {
	if c.closeSent {
		return
	}
	b, err := c.encode.Append(c.out, channel, p)
	if err != nil {
		// Nothing that the engine or the wire says can't be encoded, but for what a
		// client has sent itself.
		c.close(&frames.Error{Condition: "amqp:internal-error", Description: err.Error()})
		return
	}
	c.out = b
}
