// Package rawlink is a small AMQP 1.0 client that receives and sends messages as the
// bytes that they are. go-amqp decodes every message, and doesn't keep all of AMQP's
// types: symbols become strings, and it can't read decimals at all.
//
// A [Conn] has one session, and is used for one task: to walk a queue with one
// [Receiver], or to send. It isn't rebuilt when it is lost. Its memory is bounded: what
// was received and not taken yet is at most 16 MiB, and one message.
package rawlink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// Dialed is a network connection on which nothing was sent yet, and how to log in.
type Dialed struct {
	Net         net.Conn
	Host        string // of the open: "vhost:" and the virtual host
	Name        string // the container-id
	Shown       string // the endpoint for people, without a password
	Mechanism   string // of SASL
	Response    []byte // its initial response
	IdleTimeout time.Duration
}

// Dial connects to where conn, a *client.Conn, is connected to, or to the endpoint that is
// so many behind it. Package client sets it.
var Dial func(ctx context.Context, conn any, behind int) (Dialed, error)

// Owner is what else a *client.Conn is configured with.
type Owner struct {
	Closed <-chan struct{}                  // closed when it is closed
	Pause  func(failures int) time.Duration // before another attempt to connect
}

// OwnerOf returns what conn, a *client.Conn that isn't nil, is. Package client sets it.
var OwnerOf func(conn any) Owner

const (
	// maxFrame and window bound what is received and not taken: the broker sends so many
	// frames of that size ahead.
	maxFrame = 64 << 10
	window   = 256
	// maxUnwritten is how many bytes wait for the network before writers wait.
	maxUnwritten = 1 << 20
	writeLimit   = 30 * time.Second
	// maxLinks bounds the links of a session, among them those that are being detached.
	maxLinks = 256
	channel  = 0
)

// ErrClosed is the error of a Conn that was closed by its user.
var ErrClosed = errors.New("closed")

// Conn is a connection with one session.
type Conn struct {
	net   net.Conn
	shown string
	r     *frames.Reader
	idle  time.Duration

	peerFrame uint32 // the largest frame that the broker takes
	peerIdle  time.Duration
	props     frames.Map

	wake    chan struct{} // something is to be written
	done    chan struct{} // closed when the connection has ended
	running sync.WaitGroup

	mu        sync.Mutex
	err       error         // why it has ended
	changed   chan struct{} // closed, and made anew, when something changes that somebody may wait for
	unwritten []byte
	joint     joint
	closing   bool

	subscribed atomic.Bool // transfers are a Subscription's

	// The session.
	nextOut    uint32 // of the next transfer
	peerWindow uint32 // transfers that the broker still takes
	nextIn     uint32
	untaken    uint32 // transfers that were received and not taken
	granted    uint32 // transfers that the broker may still send
	window     uint32 // how many it may be
	nextHandle uint32
	nextID     uint32 // of the next delivery that is sent
	ended      bool   // the broker has answered the end

	links       map[uint32]*link // by our handles
	peers       map[uint32]*link // by the broker's
	senders     map[string]*link
	unconfirmed map[uint32]unconfirmed
}

// joint is the disposition at the end of what is to be written.
type joint struct {
	open        bool // another one can be joined to it
	accepts     bool
	at          int
	first, last uint32
}

type unconfirmed struct {
	link *link
	tell func(error)
}

// link is one end of a link.
type link struct {
	name     string
	handle   uint32
	attached bool
	gone     error // why it isn't there any more
	detached bool  // the broker has detached it

	deliveryCount uint32 // of a receiver, as it was when it was attached

	// A sender's.
	sender bool
	target string
	credit uint32
	used   time.Time
	open   int // unconfirmed

	// The receiver's.
	in      chan event
	partial *Delivery

	// A subscription's.
	sub    *Subscription
	filter frames.Map // that the broker applies
}

// event is what a receiver gets: a delivery, or the end of a drain.
type event struct {
	delivery Delivery
	drained  bool
	count    uint32 // the delivery-count behind the drain
}

// Delivery is a message as it was received.
type Delivery struct {
	ID uint32
	// Payload is the encoded message.
	Payload []byte

	frames uint32
}

// Open opens a connection to where conn, a *client.Conn, is connected to, and begins a
// session. ctx bounds the opening alone.
func Open(ctx context.Context, conn any) (*Conn, error) { return OpenFor(ctx, conn, "desk", 0) }

// OpenFor is Open, to the endpoint that is so many behind the one that conn is connected
// to. The purpose is the end of the connection's name.
func OpenFor(ctx context.Context, conn any, purpose string, behind int) (*Conn, error) {
	d, err := Dial(ctx, conn, behind)
	if err != nil {
		return nil, err
	}
	d.Name += "-" + purpose
	c := &Conn{
		net: d.Net, shown: d.Shown, idle: max(d.IdleTimeout, 2*time.Second), r: frames.NewReader(d.Net, maxFrame),
		window: window,
		wake:   make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{}),
		links: map[uint32]*link{}, peers: map[uint32]*link{}, senders: map[string]*link{}, unconfirmed: map[uint32]unconfirmed{},
	}
	stop := context.AfterFunc(ctx, func() { _ = d.Net.Close() })
	err = c.handshake(d)
	if !stop() && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = d.Net.Close()
		return nil, fmt.Errorf("%s: %w", d.Shown, err)
	}
	c.running.Go(c.read)
	c.running.Go(c.write)
	return c, nil
}

// handshake logs in, opens the connection and begins the session.
func (c *Conn) handshake(d Dialed) error {
	_ = c.net.SetDeadline(time.Now().Add(writeLimit))
	put := func(b []byte, fs ...frames.Frame) error {
		var err error
		for _, f := range fs {
			if b, err = frames.Append(b, f); err != nil {
				return err
			}
		}
		_, err = c.net.Write(b)
		return err
	}
	get := func() (frames.Performative, error) {
		for {
			f, err := c.r.Frame()
			if err != nil || f.Body != nil {
				if b, ok := f.Body.(*frames.Close); ok {
					return nil, ended("the broker closed the connection", b.Error)
				}
				return f.Body, err
			}
		}
	}
	if err := put(frames.ProtocolSASL.Header()); err != nil {
		return err
	}
	if p, err := c.r.Protocol(); err != nil || p != frames.ProtocolSASL {
		return errors.Join(errors.New("the broker doesn't offer SASL"), err)
	}
	if _, err := get(); err != nil { // its mechanisms: it refuses one that it hasn't
		return err
	}
	if err := put(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: frames.Symbol(d.Mechanism), InitialResponse: d.Response, Hostname: d.Host}}); err != nil {
		return err
	}
	for {
		b, err := get()
		if err != nil {
			return err
		}
		if o, ok := b.(*frames.Outcome); ok {
			if o.Code != 0 {
				return &RefusedError{Condition: "amqp:unauthorized-access", Text: "the broker refused the login"}
			}
			break
		}
		if err := put(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Response{Response: []byte{}}}); err != nil {
			return err
		}
	}
	idle := uint32(min(c.idle, time.Hour).Milliseconds())
	err := put(frames.ProtocolAMQP.Header(), frames.Frame{Body: &frames.Open{
		ContainerID: d.Name, Hostname: d.Host, MaxFrameSize: frames.Some(uint32(maxFrame)), ChannelMax: frames.Some(uint16(0)),
		IdleTimeout: frames.Some(idle / 2),
		Properties: frames.Map{
			{Key: frames.Symbol("connection_name"), Value: d.Name}, {Key: frames.Symbol("product"), Value: "hopback"},
		},
	}}, frames.Frame{Channel: channel, Body: &frames.Begin{IncomingWindow: window, OutgoingWindow: 1 << 30, HandleMax: frames.Some(uint32(maxLinks - 1))}})
	if err != nil {
		return err
	}
	if p, err := c.r.Protocol(); err != nil || p != frames.ProtocolAMQP {
		return errors.Join(errors.New("the broker doesn't offer AMQP 1.0"), err)
	}
	c.granted = window
	for opened := false; ; {
		b, err := get()
		switch b := b.(type) {
		case *frames.Open:
			opened = true
			c.peerFrame = max(min(b.MaxFrameSize.Or(1<<20), 1<<20), 512)
			c.peerIdle = time.Duration(b.IdleTimeout.Or(0)) * time.Millisecond
			c.props = b.Properties
			continue
		case *frames.Begin:
			if !opened {
				return errors.New("the broker begins a session before it opens the connection")
			}
			c.nextIn, c.peerWindow = b.NextOutgoingID, b.IncomingWindow
			_ = c.net.SetDeadline(time.Time{})
			return nil
		case *frames.End:
			return ended("the broker ended the session", b.Error)
		}
		switch {
		case err != nil && !opened:
			return errors.Join(errors.New("the broker closed the connection when asked for the virtual host"), err)
		case err != nil:
			return err
		default:
			return fmt.Errorf("a %T in the handshake", b)
		}
	}
}

// RefusedError is the broker's no, to a link, a session or a message.
type RefusedError struct {
	Condition string // such as "amqp:not-found"; may be empty
	Text      string
}

func (e *RefusedError) Error() string {
	if e.Condition == "" {
		return e.Text
	}
	return e.Condition + ": " + e.Text
}

// Outcomes of messages that were sent and aren't stored.
var (
	ErrReleased = errors.New("no queue is bound for the routing key")
	ErrModified = errors.New("modified by the broker")
)

func ended(what string, e *frames.Error) error {
	if e == nil {
		return errors.New(what)
	}
	return fmt.Errorf("%s: %w", what, &RefusedError{string(e.Condition), e.Description})
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err is why the connection has ended; nil while it lasts.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// fail ends the connection.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	lost := c.unconfirmed
	c.unconfirmed = map[uint32]unconfirmed{}
	for _, l := range c.links {
		l.open = 0
	}
	c.tellAll()
	close(c.done)
	c.mu.Unlock()
	_ = c.net.Close()
	for _, u := range lost {
		u.tell(&LostError{err})
	}
}

// LostError is the end of a connection before the answer to a message: it may be stored.
type LostError struct{ Err error }

func (e *LostError) Error() string { return "the connection ended before the answer: " + e.Err.Error() }

// Unwrap returns Err.
func (e *LostError) Unwrap() error { return e.Err }

// tellAll is called with mu held, when something has changed.
func (c *Conn) tellAll() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// put queues a frame. It is called with mu held.
func (c *Conn) put(b frames.Performative, payload []byte) {
	c.joint.open = false
	if c.err != nil {
		return
	}
	out, err := frames.Append(c.unwritten, frames.Frame{Channel: channel, Body: b, Payload: payload})
	if err != nil { // none of ours can't be encoded
		panic(err)
	}
	c.unwritten = out
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// write writes what is queued, and signs of life.
func (c *Conn) write() {
	var beat <-chan time.Time
	if c.peerIdle > 0 {
		t := time.NewTicker(max(c.peerIdle/3, 100*time.Millisecond))
		defer t.Stop()
		beat = t.C
	}
	alive, _ := frames.Append(nil, frames.Frame{})
	var spare []byte
	for {
		select {
		case <-c.done:
			return
		case <-beat:
			_ = c.net.SetWriteDeadline(time.Now().Add(writeLimit))
			if _, err := c.net.Write(alive); err != nil {
				c.fail(err)
				return
			}
			continue
		case <-c.wake:
		}
		c.mu.Lock()
		b := c.unwritten
		c.unwritten = spare[:0]
		c.joint.open = false
		c.tellAll()
		c.mu.Unlock()
		_ = c.net.SetWriteDeadline(time.Now().Add(writeLimit))
		if _, err := c.net.Write(b); err != nil {
			c.fail(err)
			return
		}
		if spare = b; cap(spare) > maxUnwritten {
			spare = nil
		}
	}
}

// awaitLocked waits until yes returns true. It is called, and calls yes, with mu held.
func (c *Conn) awaitLocked(ctx context.Context, yes func() bool) error {
	for !yes() {
		if c.err != nil {
			return c.err
		}
		changed := c.changed
		c.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		c.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// read reads until the connection ends.
func (c *Conn) read() {
	var codec frames.Codec
	var transfer frames.Transfer
	for {
		// The broker sends a sign of life at least twice within idle.
		_ = c.net.SetReadDeadline(time.Now().Add(c.idle + 10*time.Second))
		if c.subscribed.Load() {
			n, err := c.transfers(&codec, &transfer)
			if err != nil {
				c.fail(err)
				return
			}
			if n > 0 {
				continue
			}
		}
		f, err := c.r.Frame()
		if err == nil {
			err = c.take(f)
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

func (c *Conn) take(f frames.Frame) error {
	if t, ok := f.Body.(*frames.Transfer); ok {
		return c.transfer(t, f.Payload)
	}
	if d, ok := f.Body.(*frames.Disposition); ok {
		return c.disposition(d)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.tellAll()
	switch b := f.Body.(type) {
	case nil:
	case *frames.Attach:
		for _, l := range c.links {
			if l.name == b.Name {
				if l.attached || c.peers[b.Handle] != nil {
					return errors.New("the broker attaches a link twice")
				}
				l.attached = true
				if !l.sender {
					l.deliveryCount = b.InitialDeliveryCount.Or(0)
					if b.Source != nil {
						l.filter = b.Source.Filter
					}
				}
				c.peers[b.Handle] = l
			}
		}
	case *frames.Flow:
		if n := b.NextIncomingID; n.Set {
			c.peerWindow = n.Value + b.IncomingWindow - c.nextOut
		} else {
			c.peerWindow = b.IncomingWindow - c.nextOut
		}
		if int32(c.peerWindow) < 0 {
			c.peerWindow = 0
		}
		if !b.Handle.Set {
			if b.Echo {
				c.flow(nil)
			}
			return nil
		}
		l := c.peers[b.Handle.Value]
		switch {
		case l == nil:
		case l.sub != nil:
		case l.sender:
			credit := b.DeliveryCount.Or(0) + b.LinkCredit.Or(0) - l.deliveryCount
			l.credit = max(credit, 0)
			if int32(credit) < 0 {
				l.credit = 0
			}
			if b.Drain {
				l.deliveryCount += l.credit
				l.credit = 0
				c.flow(&frames.Flow{Handle: frames.Some(l.handle), DeliveryCount: frames.Some(l.deliveryCount), LinkCredit: frames.Some(uint32(0)), Drain: true})
			}
		case b.LinkCredit.Or(0) == 0 && b.DeliveryCount.Set:
			select {
			case l.in <- event{drained: true, count: b.DeliveryCount.Value}:
			default:
				return errors.New("the broker answers drains that nobody asked for")
			}
		}
	case *frames.Detach:
		l := c.peers[b.Handle]
		if l == nil {
			return nil
		}
		delete(c.peers, b.Handle)
		delete(c.links, l.handle)
		if l.sender && c.senders[l.target] == l {
			delete(c.senders, l.target)
		}
		asked := l.gone != nil
		if l.gone == nil {
			l.gone = ended("the broker detached the link", b.Error)
		}
		l.detached = true
		if !asked {
			c.put(&frames.Detach{Handle: l.handle, Closed: true}, nil)
		}
		if l.in != nil {
			close(l.in)
		}
		if l.sub != nil {
			l.sub.awaken()
		}
		var tell []func(error)
		for id, u := range c.unconfirmed {
			if u.link == l {
				delete(c.unconfirmed, id)
				tell = append(tell, u.tell)
			}
		}
		if len(tell) > 0 {
			why := l.gone
			c.mu.Unlock()
			for _, t := range tell {
				t(&LostError{why})
			}
			c.mu.Lock()
		}
	case *frames.End:
		if c.closing {
			c.ended = true
			return nil
		}
		return ended("the broker ended the session", b.Error)
	case *frames.Close:
		if c.closing && b.Error == nil {
			return ErrClosed
		}
		return ended("the broker closed the connection", b.Error)
	}
	return nil
}

// flow sends the session's windows, and what f has of a link. It is called with mu held.
func (c *Conn) flow(f *frames.Flow) {
	if f == nil {
		f = &frames.Flow{}
	}
	c.granted = c.window - min(c.untaken, c.window)
	f.NextIncomingID, f.IncomingWindow = frames.Some(c.nextIn), c.granted
	f.NextOutgoingID, f.OutgoingWindow = c.nextOut, 1<<30
	c.put(f, nil)
}

func (c *Conn) transfer(t *frames.Transfer, payload []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.subscribed.Load() {
		return c.transferred(t, payload)
	}
	c.nextIn++
	c.untaken++
	if c.granted == 0 {
		return errors.New("the broker sends more than it may")
	}
	c.granted--
	l := c.peers[t.Handle]
	if l == nil || l.in == nil {
		return fmt.Errorf("a transfer on the unknown handle %d", t.Handle)
	}
	if l.partial == nil {
		if !t.DeliveryID.Set {
			return errors.New("a transfer without a delivery-id")
		}
		l.partial = &Delivery{ID: t.DeliveryID.Value}
		if !t.More {
			l.partial.Payload = payload
		}
	}
	d := l.partial
	d.frames++
	if len(d.Payload) == 0 || len(payload) == 0 || &d.Payload[0] != &payload[0] {
		d.Payload = append(d.Payload, payload...)
	}
	if t.More && !t.Aborted {
		// A message may be larger than the window. What was assembled of it is taken.
		c.untaken -= d.frames
		d.frames = 0
		if c.granted < window/2 {
			c.flow(nil)
		}
		return nil
	}
	l.partial = nil
	if t.Aborted {
		c.untaken -= d.frames
		return nil
	}
	select {
	case l.in <- event{delivery: *d}:
		return nil
	default: // the window bounds them
		return errors.New("more deliveries than the window allows")
	}
}

func (c *Conn) disposition(d *frames.Disposition) error {
	if d.Role != frames.RoleReceiver {
		return nil // the broker has taken back a delivery; it knows
	}
	var err error
	switch s := d.State.(type) {
	case *frames.Accepted:
	case *frames.Released:
		err = ErrReleased
	case *frames.Modified:
		err = ErrModified
	case *frames.Rejected:
		refused := &RefusedError{Text: "rejected"}
		if s.Error != nil {
			refused = &RefusedError{string(s.Error.Condition), s.Error.Description}
		}
		err = refused
	default:
		return nil
	}
	last := d.Last.Or(d.First)
	if last-d.First > 1<<20 {
		return errors.New("a disposition of too many deliveries")
	}
	for id := d.First; ; id++ {
		c.mu.Lock()
		u, ok := c.unconfirmed[id]
		delete(c.unconfirmed, id)
		if ok {
			u.link.open--
		}
		c.tellAll()
		c.mu.Unlock()
		if ok {
			u.tell(err)
		}
		if id == last {
			return nil
		}
	}
}

// attach attaches a link and waits for the broker's answer.
func (c *Conn) attach(ctx context.Context, l *link, a *frames.Attach) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) >= maxLinks {
		return errors.New("the broker doesn't answer the end of links")
	}
	for c.links[c.nextHandle] != nil {
		c.nextHandle = (c.nextHandle + 1) % maxLinks
	}
	l.handle = c.nextHandle
	c.nextHandle = (c.nextHandle + 1) % maxLinks
	l.name = fmt.Sprintf("desk-%d-%d", l.handle, time.Now().UnixNano())
	c.links[l.handle] = l
	a.Name, a.Handle = l.name, l.handle
	c.put(a, nil)
	if err := c.awaitLocked(ctx, func() bool { return l.attached || l.gone != nil }); err != nil {
		return err
	}
	if l.sender {
		// A link that is refused is attached first, and detached behind that. The credit of
		// one that isn't comes behind the attach.
		if err := c.awaitLocked(ctx, func() bool { return l.credit > 0 || l.gone != nil }); err != nil {
			return err
		}
	}
	return l.gone
}

// Close ends the connection in order, within ctx: what was written before is read by the
// broker first. It returns why the connection had ended before, or nil.
func (c *Conn) Close(ctx context.Context) error {
	c.mu.Lock()
	before := c.err
	if before == nil {
		c.closing = true
		// The receiver's link goes first. The end of the session alone would count a failed
		// delivery for each message that is on its way.
		for _, l := range c.links {
			if l.attached && l.gone == nil {
				l.gone = ErrClosed
				c.put(&frames.Detach{Handle: l.handle, Closed: true}, nil)
			}
		}
		before = c.awaitLocked(ctx, func() bool { return len(c.peers) == 0 })
		if before == nil {
			c.put(&frames.End{}, nil)
			before = c.awaitLocked(ctx, func() bool { return c.ended })
		}
		if before == nil {
			c.put(&frames.Close{}, nil)
		}
	}
	c.mu.Unlock()
	if before == nil {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
	}
	c.fail(ErrClosed)
	c.running.Wait()
	return before
}
