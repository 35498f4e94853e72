package amqp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// Config is how a connection is opened.
type Config struct {
	ContainerID string
	// Hostname is the host in the open and in SASL. RabbitMQ takes "vhost:" and a virtual host.
	Hostname string
	// Mechanism is SASL's, such as "PLAIN". Response is its initial response; nil sends none.
	Mechanism string
	Response  []byte
	// IdleTimeout is after how long a silent peer is considered lost. Default 60 s, at least 2 s.
	// The peer is asked for a frame twice in that time.
	IdleTimeout time.Duration
	// MaxFrameSize is the largest frame that the peer may send. Default 64 KiB, at least 512.
	MaxFrameSize uint32
	// MaxSessions is how many sessions the connection may have at once. Default 64, which is
	// RabbitMQ's limit. The peer's limit counts if it is lower.
	MaxSessions int
	// Settlements, if not nil, hears of what is settled.
	Settlements Settlements
	Properties  frames.Map
}

// Settlements hears of settlements.
type Settlements interface {
	// SettledRange is called for each disposition that settles deliveries, just before it is
	// written, with how many they are. It is called on the goroutine that writes: while it blocks,
	// nothing is written.
	SettledRange(n int)
}

// Peer is what the other end says of itself in its open.
type Peer struct {
	ContainerID  string
	MaxFrameSize uint32        // at least 512
	IdleTimeout  time.Duration // how often it wants to hear something; 0: never
	Sessions     int           // how many it allows
	Capabilities []frames.Symbol
	Properties   frames.Map
}

const (
	// readSize is how much is read at once.
	readSize = 64 << 10
	// handshakeLimit is the timeout of the handshake, in addition to ctx; writeLimit that of one
	// later write.
	handshakeLimit = 30 * time.Second
	writeLimit     = 30 * time.Second
	// maxChallenges bounds SASL's dialog.
	maxChallenges = 8
	// minFrame is the size of frames that each peer has to accept, by AMQP 1.0, part 2.7.1.
	minFrame = 512
	// maxPeerFrame is the maximum size of sent frames, even if the peer allows more.
	maxPeerFrame = 1 << 20
)

// Conn is a connection. Its methods are safe for concurrent use.
type Conn struct {
	net  net.Conn
	in   *frames.Reader
	idle time.Duration
	// maxFrame is the maximum size of the peer's frames.
	maxFrame int64
	peer     Peer
	answers  atomic.Uint64 // frames by which the peer answers one of this end's
	writes   atomic.Uint64 // begins and ends of writes to the network
	done     chan struct{} // closed when the connection has ended
	running  sync.WaitGroup
	settled  Settlements // Config.Settlements

	mu      sync.Mutex
	err     *Error // why it has ended
	closing bool   // this end's close was put
	rest    time.Duration
	out     output
	enc     frames.Codec

	sessions []*Session          // by this end's channel; nil: free
	freed    []time.Time         // when the channel became free
	byPeer   map[uint16]*Session // by the peer's channel

	// The reader's.
	dec         frames.Codec
	transfer    frames.Transfer
	disposition frames.Disposition
	flow        frames.Flow
	deliveries  []Delivery
	events      []event
	ids         []uint32
}

// Open opens a connection on nc, on which nothing was sent yet. ctx bounds the handshake alone.
// Open closes nc if it fails; the error is a [HandshakeError], or ctx's.
func Open(ctx context.Context, nc net.Conn, cfg Config) (*Conn, error) {
	if cfg.IdleTimeout == 0 {
		cfg.IdleTimeout = time.Minute
	}
	cfg.IdleTimeout = max(cfg.IdleTimeout, 2*time.Second)
	if cfg.MaxFrameSize == 0 {
		cfg.MaxFrameSize = 64 << 10
	}
	cfg.MaxFrameSize = min(max(cfg.MaxFrameSize, 512), maxPeerFrame)
	if cfg.MaxSessions <= 0 {
		cfg.MaxSessions = 64
	}
	cfg.MaxSessions = min(cfg.MaxSessions, 1<<16)
	c := &Conn{
		net: nc, in: frames.NewReader(nc, readSize, int(cfg.MaxFrameSize)), idle: cfg.IdleTimeout, maxFrame: int64(cfg.MaxFrameSize), settled: cfg.Settlements,
		done: make(chan struct{}), byPeer: map[uint16]*Session{},
	}
	c.out.wake, c.out.flushed = make(chan struct{}, 1), make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	err := c.handshake(cfg)
	if !stop() && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	if socket, ok := nc.(*net.TCPConn); ok {
		c.out.try = tryWriter(socket)
	}
	n := min(cfg.MaxSessions, c.peer.Sessions)
	c.sessions, c.freed = make([]*Session, n), make([]time.Time, n)
	c.peer.Sessions = n
	c.running.Go(c.write)
	c.running.Go(c.read)
	return c, nil
}

// handshake logs in and opens the connection.
func (c *Conn) handshake(cfg Config) error {
	_ = c.net.SetDeadline(time.Now().Add(handshakeLimit)) // reader and writer set their own
	if err := c.login(cfg); err != nil {
		return err
	}
	begun := time.Now()
	fail := func(err error) error {
		e := &HandshakeError{Phase: PhaseOpen, Err: err, Waited: time.Since(begun)}
		if remote, ok := errors.AsType[*frames.Error](err); ok {
			e.Remote = remote
		}
		return e
	}
	err := c.send(frames.ProtocolAMQP.Header(), frames.Frame{Body: &frames.Open{
		ContainerID: cfg.ContainerID, Hostname: cfg.Hostname,
		MaxFrameSize: frames.Some(cfg.MaxFrameSize), ChannelMax: frames.Some(uint16(cfg.MaxSessions - 1)),
		IdleTimeout: frames.Some(uint32(min(c.idle/2, time.Hour).Milliseconds())), Properties: cfg.Properties,
	}})
	if err != nil {
		return fail(err)
	}
	if p, err := c.in.AwaitProtocol(); err != nil || p != frames.ProtocolAMQP {
		return fail(errors.Join(errors.New("the peer doesn't speak AMQP 1.0"), err))
	}
	body, err := c.awaitBody()
	if err != nil {
		return fail(err)
	}
	switch b := body.(type) {
	case *frames.Open:
		if most := b.MaxFrameSize.Or(maxPeerFrame); most < minFrame {
			return fail(FrameLimitError(most))
		}
		c.peer = Peer{
			ContainerID:  b.ContainerID,
			MaxFrameSize: min(b.MaxFrameSize.Or(maxPeerFrame), maxPeerFrame),
			IdleTimeout:  time.Duration(b.IdleTimeout.Or(0)) * time.Millisecond,
			Sessions:     int(b.ChannelMax.Or(1<<16-1)) + 1,
			Capabilities: b.OfferedCapabilities, Properties: b.Properties,
		}
		return nil
	case *frames.Close:
		if b.Error != nil {
			return fail(b.Error)
		}
		return fail(ErrNoReason)
	default:
		return fail(fmt.Errorf("a %T in place of an open", b))
	}
}

// login is SASL's part of the handshake.
func (c *Conn) login(cfg Config) error {
	fail := func(refused bool, err error) error {
		return &HandshakeError{Phase: PhaseSASL, Refused: refused, Err: err}
	}
	if err := c.send(frames.ProtocolSASL.Header()); err != nil {
		return fail(false, err)
	}
	switch p, err := c.in.AwaitProtocol(); {
	case errors.Is(err, frames.ErrProtocol), err == nil && p != frames.ProtocolSASL:
		return fail(false, errors.Join(errors.New("the peer doesn't offer SASL"), err))
	case err != nil:
		return fail(false, err)
	}
	body, err := c.awaitBody()
	if err != nil {
		return fail(false, err)
	}
	offered, ok := body.(*frames.Mechanisms)
	if !ok {
		return fail(false, fmt.Errorf("a %T in place of SASL's mechanisms", body))
	}
	if !slices.Contains(offered.Mechanisms, frames.Symbol(cfg.Mechanism)) {
		e := &HandshakeError{Phase: PhaseSASL, Refused: true, Err: fmt.Errorf("the peer offers %v, and not %s", offered.Mechanisms, cfg.Mechanism)}
		for _, m := range offered.Mechanisms {
			e.Offered = append(e.Offered, string(m))
		}
		return e
	}
	err = c.send(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: frames.Symbol(cfg.Mechanism), InitialResponse: cfg.Response, Hostname: cfg.Hostname}})
	for range maxChallenges {
		if err != nil {
			return fail(false, err)
		}
		if body, err = c.awaitBody(); err != nil {
			return fail(false, err)
		}
		switch b := body.(type) {
		case *frames.Outcome:
			if b.Code != 0 {
				return fail(b.Code == 1, fmt.Errorf("the peer refused the login with SASL code %d", b.Code))
			}
			return nil
		case *frames.Challenge:
			err = c.send(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Response{Response: []byte{}}})
		default:
			return fail(false, fmt.Errorf("a %T in SASL's dialog", b))
		}
	}
	return fail(false, errors.New("the peer's SASL dialog doesn't end"))
}

// send writes in the handshake.
func (c *Conn) send(b []byte, all ...frames.Frame) error {
	var err error
	for _, f := range all {
		if b, err = frames.Append(b, f); err != nil {
			return err
		}
	}
	_, err = c.net.Write(b)
	return err
}

// awaitBody waits for a frame in the handshake, and skips empty ones.
func (c *Conn) awaitBody() (frames.Performative, error) {
	for {
		f, err := c.in.AwaitFrame()
		if err != nil || f.Body != nil {
			return f.Body, err
		}
	}
}

// Peer returns what the other end says of itself. Sessions is what both ends allow.
func (c *Conn) Peer() Peer { return c.peer }

// RestChannels makes a new session wait until the last one on its channel has been over for d.
// RabbitMQ before 4.3 forgets a session some time after it has sent its end, and loses what
// comes on that channel until then.
func (c *Conn) RestChannels(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rest = d
}

// Done is closed when the connection has ended, and all its callbacks have returned.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns why the connection has ended, an *[Error]; nil while it lasts.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		return nil
	}
	return c.err
}

// Answers counts the frames by which the peer has answered one of this end's: begins, attaches,
// dispositions, detaches and ends. While it grows, the peer reads what is sent to it.
func (c *Conn) Answers() uint64 { return c.answers.Load() }

// Writes counts the begins and ends of writes to the network: it is odd during a write.
func (c *Conn) Writes() uint64 { return c.writes.Load() }

// Close closes the connection in order: what was put before is written first. It waits for the
// peer's close within ctx, and closes the network connection in any case. It returns why the
// connection had ended before, or nil. Links should be detached first: RabbitMQ counts a failed
// delivery for each unsettled message of a link that ends with its connection.
func (c *Conn) Close(ctx context.Context) error {
	c.mu.Lock()
	before := c.err
	if before == nil && !c.closing {
		c.flushSettled()
		_ = c.put(0, &frames.Close{})
		c.closing = true
	}
	c.mu.Unlock()
	if before == nil {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
	}
	c.Fail(ErrClosed)
	<-c.done
	c.running.Wait()
	if before != nil {
		return before
	}
	return nil
}

// Fail ends the connection at once, with err as the cause. It doesn't wait.
func (c *Conn) Fail(err error) { c.end(&Error{Scope: ScopeConnection, Err: err}) }

// end ends the connection. The reader does the rest: it runs the callbacks.
func (c *Conn) end(e *Error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = e
		c.out.kick()
		c.out.release()
	}
	c.mu.Unlock()
	_ = c.net.Close()
}

// put encodes a frame into the buffer. It is called with mu held. A frame that can't be encoded
// or is too large for the peer isn't sent.
func (c *Conn) put(channel uint16, p frames.Performative) error {
	if c.err != nil {
		return c.err
	}
	if c.closing {
		return &Error{Scope: ScopeConnection, Err: ErrClosed}
	}
	at := len(c.out.b)
	b, err := c.enc.Append(c.out.b, channel, p)
	if err == nil && len(b)-at > int(c.peer.MaxFrameSize) {
		err = ErrTooLarge
	}
	if err != nil {
		c.out.b = b[:at]
		return err
	}
	c.out.b = b
	c.out.kick()
	return nil
}
