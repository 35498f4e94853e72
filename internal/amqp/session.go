package amqp

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// SessionConfig is how a session begins.
type SessionConfig struct {
	// Window is how many transfers the peer may send ahead. Default 2048.
	Window uint32
	// MaxBytes bounds the bytes of deliveries for which [Receiver.Taken] wasn't called yet: the
	// peer may send no more transfers than there is room for, even if each of them is a full
	// frame. A single delivery above MaxBytes still arrives, once all others are taken; so the
	// bound is MaxBytes, or one delivery and MaxBytes/4, whichever is more. Default: credit
	// alone bounds what is received. See also [Session.Limit].
	MaxBytes int64
	// OnBlocked, if not nil, is called before Begin returns, and whenever the peer stops
	// accepting transfers on the session, as RabbitMQ does in a memory or disk alarm, or accepts
	// them again.
	OnBlocked func(blocked bool)
	// OnEnd, if not nil, is called once, with an *[Error], when the session ends without
	// [Session.End]. The OnEnd of its links is called before.
	OnEnd func(error)
	// OnOver, if not nil, is called once: when the session is over at both ends and its channel
	// is free, or before Begin returns an error without having sent anything.
	OnOver func()
}

const (
	defaultWindow = 2048
	// outgoingWindow is the window that this end announces for itself; it has no bound.
	outgoingWindow = 1 << 30
	// maxLinks is how many links a session may have: RabbitMQ's limit.
	maxLinks = 256
)

// Session is a session. Its methods are safe for concurrent use.
type Session struct {
	c       *Conn
	cfg     SessionConfig
	channel uint16
	begun   chan struct{} // closed when the peer has answered the begin, or the session is over
	over    chan struct{} // closed when the session is over at both ends

	// All of this is guarded by c.mu.
	err         *Error // why it has ended, or ends
	open        bool   // the peer has answered the begin
	ending      bool   // this end's end was put
	abandoned   bool   // nobody waits for the begin
	asked       bool   // this end's user has ended it
	reported    bool   // OnEnd was called, or will be
	closed      bool   // over is closed
	peerChannel uint16
	peerLinks   uint32 // how many links the peer allows

	nextOut    uint32 // of the next transfer
	window     uint32 // transfers that the peer still takes
	blocked    bool
	nextID     uint32 // of the next delivery that is sent
	unanswered map[uint32]*Sending
	stalled    []*Sender // with messages that wait for the window

	nextIn   uint32
	granted  uint32 // transfers that the peer may still send
	maxBytes int64  // SessionConfig.MaxBytes; 0: none
	untaken  int64  // bytes of complete deliveries that weren't taken
	partial  int64  // bytes of deliveries that have begun to arrive

	links map[uint32]*link // by this end's handle
	peers map[uint32]*link // by the peer's

	settled ranges
	marked  bool // it is in output.settling
}

// Begin begins a session, and waits for the peer's answer within ctx. It returns
// [ErrTooManySessions] if all channels are in use.
func (c *Conn) Begin(ctx context.Context, cfg SessionConfig) (*Session, error) {
	if cfg.Window == 0 {
		cfg.Window = defaultWindow
	}
	s := &Session{
		c: c, cfg: cfg, begun: make(chan struct{}), over: make(chan struct{}),
		unanswered: map[uint32]*Sending{}, links: map[uint32]*link{}, peers: map[uint32]*link{}, maxBytes: cfg.MaxBytes,
	}
	s.granted = s.ahead()
	if err := c.takeChannel(ctx, s); err != nil {
		if cfg.OnOver != nil {
			cfg.OnOver()
		}
		return nil, err
	}
	select {
	case <-s.begun:
	case <-ctx.Done():
		c.mu.Lock()
		if !s.open && s.err == nil {
			s.abandoned = true
			s.err = &Error{Scope: ScopeSession, Err: ErrClosed}
			c.mu.Unlock()
			return nil, context.Cause(ctx)
		}
		c.mu.Unlock()
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	return s, nil
}

// takeChannel begins s on the channel that has been free for longest.
func (c *Conn) takeChannel(ctx context.Context, s *Session) error {
	for {
		c.mu.Lock()
		if c.err != nil || c.closing {
			defer c.mu.Unlock()
			return c.over()
		}
		best := -1
		for i, other := range c.sessions {
			if other == nil && (best < 0 || c.freed[i].Before(c.freed[best])) {
				best = i
			}
		}
		if best < 0 {
			c.mu.Unlock()
			return ErrTooManySessions
		}
		rest := time.Duration(0)
		if !c.freed[best].IsZero() {
			rest = time.Until(c.freed[best].Add(c.rest))
		}
		if c.rest == 0 || rest <= 0 {
			defer c.mu.Unlock()
			s.channel = uint16(best)
			if err := c.put(s.channel, &frames.Begin{IncomingWindow: s.granted, OutgoingWindow: outgoingWindow, HandleMax: frames.Some(uint32(maxLinks - 1))}); err != nil {
				return err
			}
			c.sessions[best] = s
			return nil
		}
		c.mu.Unlock()
		t := time.NewTimer(rest)
		select {
		case <-t.C:
		case <-c.done:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// over is the error for what is asked of a connection that has ended. It is called with mu held.
func (c *Conn) over() error {
	if c.err != nil {
		return c.err
	}
	return &Error{Scope: ScopeConnection, Err: ErrClosed}
}

// Err returns why the session has ended, an *[Error]; nil while it lasts.
func (s *Session) Err() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.gone()
}

// gone is Err with mu held.
func (s *Session) gone() error {
	switch {
	case s.err != nil:
		return s.err
	case s.c.err != nil:
		return s.c.err
	case s.c.closing:
		return &Error{Scope: ScopeConnection, Err: ErrClosed}
	}
	return nil
}

// Conn returns the session's connection.
func (s *Session) Conn() *Conn { return s.c }

// Done is closed when the session is over at both ends, and its channel is free.
func (s *Session) Done() <-chan struct{} { return s.over }

// End ends the session, and waits within ctx until the peer has ended it, too. Links should be
// detached first. Messages that weren't answered get an error; their answers may still come
// until the peer has ended the session.
func (s *Session) End(ctx context.Context) error {
	s.c.mu.Lock()
	s.asked = true
	s.end(&frames.End{}, &Error{Scope: ScopeSession, Err: ErrClosed})
	s.c.mu.Unlock()
	select {
	case <-s.over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// DetachAll detaches all links of the session, and waits for the peer within ctx.
func (s *Session) DetachAll(ctx context.Context) error {
	s.c.mu.Lock()
	var all []*link
	for _, l := range s.links {
		l.ask()
		all = append(all, l)
	}
	s.c.mu.Unlock()
	for _, l := range all {
		select {
		case <-l.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// end puts this end's end. It is called with mu held.
func (s *Session) end(e *frames.End, why *Error) {
	if s.ending || s.closed || s.c.err != nil {
		return
	}
	if !s.open { // it is ended when the peer has begun it
		s.abandoned = true
		if s.err == nil {
			s.err = why
		}
		return
	}
	_ = s.put(e)
	s.ending = true
	if s.err == nil {
		s.err = why
	}
}

// put encodes a frame of the session, behind the settlements that were made before. It is
// called with mu held.
func (s *Session) put(p frames.Performative) error {
	s.writeSettled()
	return s.c.put(s.channel, p)
}

// Limit sets [SessionConfig.MaxBytes]. It is for a session whose links have had no credit yet; the
// peer learns of it with the first credit.
func (s *Session) Limit(maxBytes int64) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.maxBytes = maxBytes
}

// Full reports whether the peer may send no transfer until more deliveries are taken. It can't
// answer a drain either then, if messages wait before the answer.
func (s *Session) Full() bool {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.maxBytes > 0 && s.granted == 0 && s.untaken > 0
}

// grant opens the window again if much of it is used up. It is called with mu held.
func (s *Session) grant() {
	ahead := s.ahead()
	if s.gone() != nil || !s.open || s.granted > 0 && s.granted >= ahead/2 {
		return
	}
	if room := s.room(); room > s.granted+ahead/4 || room > s.granted && s.granted == 0 {
		_ = s.put(s.windows(&frames.Flow{}))
	}
}

// ahead is how many transfers the peer may send ahead while nothing waits to be taken.
func (s *Session) ahead() uint32 {
	if s.maxBytes <= 0 {
		return s.cfg.Window
	}
	return uint32(max(min(int64(s.cfg.Window), s.maxBytes/s.c.maxFrame), 1))
}

// room is how many transfers the peer may send. With nothing left to take, a delivery that has
// begun continues, however large it is: nothing but its end makes room.
func (s *Session) room() uint32 {
	ahead := s.ahead()
	if s.maxBytes <= 0 {
		return ahead
	}
	room := min((s.maxBytes-s.untaken-s.partial)/s.c.maxFrame, int64(ahead))
	if s.untaken == 0 {
		room = max(room, int64(ahead/4), 1)
	}
	return uint32(max(room, 0))
}

// windows fills in the session's part of a flow, which grants the window. It is called with mu
// held.
func (s *Session) windows(f *frames.Flow) *frames.Flow {
	s.granted = s.room()
	f.NextIncomingID, f.IncomingWindow = frames.Some(s.nextIn), s.granted
	f.NextOutgoingID, f.OutgoingWindow = s.nextOut, outgoingWindow
	return f
}

// stall has l wait for the window.
func (s *Session) stall(l *Sender) {
	if !l.stalls {
		l.stalls = true
		s.stalled = append(s.stalled, l)
	}
}

// pump sends what the window held back. It is called with mu held.
func (s *Session) pump() {
	for len(s.stalled) > 0 && s.window > 0 {
		l := s.stalled[0]
		s.stalled[0] = nil
		if s.stalled = s.stalled[1:]; len(s.stalled) == 0 {
			s.stalled = nil
		}
		l.stalls = false
		l.pump()
	}
}

// lose ends what depends on the session: its links, and messages without an answer. It is
// called with mu held.
func (s *Session) lose(why *Error) {
	if s.err == nil {
		s.err = why
	}
	for _, l := range s.links {
		l.lose(why)
	}
	for id, x := range s.unanswered {
		delete(s.unanswered, id)
		s.c.answer(x, Answer{Err: why, Sent: true})
	}
	s.stalled = nil
	if s.open && !s.asked && !s.abandoned && !s.reported && s.cfg.OnEnd != nil {
		s.reported = true
		s.c.events = append(s.c.events, event{kind: eventSessionEnded, s: s})
	}
}

// finish is the end of the session at both ends: its channel is free. It is called with mu held.
func (s *Session) finish(why *Error) {
	if s.closed {
		return
	}
	s.lose(why)
	s.closed = true
	if s.open {
		delete(s.c.byPeer, s.peerChannel)
	}
	s.c.sessions[s.channel], s.c.freed[s.channel] = nil, time.Now()
	if !s.open {
		s.open = true // nobody waits for the begin any more
		close(s.begun)
	}
	s.c.events = append(s.c.events, event{kind: eventSessionOver, s: s})
}

// refuse ends the session over what the peer did. It is called with mu held.
func (s *Session) refuse(v *violation) {
	why := &Error{Scope: ScopeSession, Err: v}
	s.end(&frames.End{Error: &frames.Error{Condition: v.condition, Description: v.text}}, why)
	s.lose(why)
}
