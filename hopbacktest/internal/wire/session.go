package wire

import (
	"fmt"
	"math"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

const (
	// maxWindow is how many transfer frames a client may send until the window is opened
	// again, which is at half of it.
	maxWindow = 400
	// unlimited is the outgoing window, which RabbitMQ doesn't use.
	unlimited = 1<<32 - 1
)

// session is a session of a connection. All of it is guarded by the connection's mu.
type session struct {
	c       *Conn
	channel uint16
	e       *engine.Session
	gone    bool

	nextIncoming   uint32
	window         int // how many transfers may come
	margin         int // how many more are put up with, since an alarm has closed the window
	nextOutgoing   uint32
	remoteWindow   uint32 // how many transfers the client takes
	nextDelivery   uint32
	firstOutgoing  uint32
	links          map[uint32]*link
	maxHandle      uint32
	pairs          map[string]*pair
	unsettled      map[uint32]*engine.Delivery
	settling       []*engine.Delivery // used again for each disposition
	pending        queue
	stalled        bool // in c.stalled
	dirty          bool // in c.dirty
	accepted       []uint32
	granted        []*link // that are to get credit, with the confirmations
	pendingReplies int
	pendingFlows   int
}

// begin begins a session. c.mu is held.
func (c *Conn) begin(channel uint16, p *frames.Begin) {
	if p.RemoteChannel.Set {
		_ = c.refuse(&frames.Error{Condition: "amqp:internal-error", Description: "Session error: a begin frame with a remote-channel"})
		return
	}
	s := &session{
		c: c, channel: channel, e: c.engine.Begin(),
		nextIncoming: p.NextOutgoingID, remoteWindow: p.IncomingWindow, window: maxWindow,
		links: map[uint32]*link{}, unsettled: map[uint32]*engine.Delivery{},
		maxHandle: min(p.HandleMax.Or(unlimited), uint32(c.server.cfg.MaxLinks-1)),
	}
	s.e.Tag = s
	if c.server.old {
		// RabbitMQ 4.0 begins just before the end of the numbers, so that clients that
		// can't reckon around it are found out.
		s.firstOutgoing = unlimited - 3
	}
	s.nextOutgoing = s.firstOutgoing
	if c.blocked {
		s.window = 0
	}
	c.sessions[channel] = s
	c.send(channel, &frames.Begin{
		RemoteChannel:  frames.Some(channel),
		NextOutgoingID: s.nextOutgoing,
		IncomingWindow: uint32(s.window),
		OutgoingWindow: unlimited,
		HandleMax:      frames.Some(s.maxHandle),
	})
}

// sessionFault is an error that ends the session.
func sessionFault(condition frames.Symbol, format string, args ...any) *engine.Fault {
	return &engine.Fault{Ends: engine.ScopeSession, Err: &frames.Error{Condition: condition, Description: fmt.Sprintf(format, args...)}}
}

// handle carries out a frame. A fault ends what it says.
func (s *session) handle(p frames.Performative, payload []byte) *engine.Fault {
	switch p := p.(type) {
	case *frames.Transfer:
		return s.transfer(p, payload)
	case *frames.Flow:
		return s.flow(p)
	case *frames.Disposition:
		return s.disposition(p)
	case *frames.Attach:
		return s.attach(p)
	case *frames.Detach:
		s.detach(p)
		return nil
	case *frames.End:
		s.settleUp()
		if s.gone {
			return nil
		}
		s.e.End()
		s.leave()
		s.c.send(s.channel, &frames.End{})
		return nil
	}
	return sessionFault("amqp:internal-error", "Unexpected frame %T", p)
}

// fail ends what a fault says. Where the fault is the engine's, the engine has ended it.
func (s *session) fail(f *engine.Fault) {
	if f.Ends == engine.ScopeConnection {
		_ = s.c.refuse(f.Err)
		return
	}
	if s.gone {
		return
	}
	s.c.server.log(s.c, "ending the session: "+f.Error())
	s.settleUp()
	if s.gone {
		return
	}
	s.e.End()
	s.leave()
	s.c.send(s.channel, &frames.End{Error: f.Err})
}

// settleUp sends the client all outcomes that there are, before an end.
func (s *session) settleUp() {
	s.c.notify(math.MaxInt)
	if !s.gone {
		s.notifyConfirmed()
	}
}

// leave forgets the session. What still comes on its channel is ignored.
func (s *session) leave() {
	s.gone = true
	for _, l := range s.links {
		l.forget()
	}
	clear(s.links)
	s.pending = queue{}
	s.unsettled = nil
	if s.c.sessions[s.channel] == s {
		delete(s.c.sessions, s.channel)
	}
}

// sendFlow sends a flow frame with the session's fields filled in.
func (s *session) sendFlow(f frames.Flow) {
	f.NextIncomingID = frames.Some(s.nextIncoming)
	f.IncomingWindow = uint32(max(s.window, 0))
	f.NextOutgoingID = s.nextOutgoing
	f.OutgoingWindow = unlimited
	w := &s.c.write.flow
	*w = f
	s.c.send(s.channel, w)
}

// flow takes the session's windows, and what the client says of a link.
func (s *session) flow(f *frames.Flow) *engine.Fault {
	seen := f.NextIncomingID.Or(s.firstOutgoing)
	if f.NextIncomingID.Set && int32(seen-s.nextOutgoing) > 0 {
		return sessionFault("amqp:session:window-violation", "next-incoming-id from FLOW (%d) leads next-outgoing-id (%d)", seen, s.nextOutgoing)
	}
	s.nextIncoming = f.NextOutgoingID
	s.remoteWindow = 0
	if left := int64(f.IncomingWindow) - int64(s.nextOutgoing-seen); left > 0 {
		s.remoteWindow = uint32(left)
	}
	if s.remoteWindow > 0 && s.pending.len() > 0 {
		s.stall()
	}
	if !f.Handle.Set {
		return nil
	}
	l := s.links[f.Handle.Value]
	if l == nil {
		return sessionFault("amqp:session:unattached-handle", "Unattached link handle: %d", f.Handle.Value)
	}
	switch l.kind {
	case kindConsuming:
		return l.credited(f)
	case kindReplying:
		l.repliesCredited(f)
	}
	return nil
}

// stall has the writer go on with the deliveries that wait.
func (s *session) stall() {
	if !s.stalled {
		s.stalled = true
		s.c.stalled = append(s.c.stalled, s)
	}
}

// block is called when an alarm starts or ends.
func (s *session) block(on bool) {
	if on {
		// What the client has sent before it knows is taken.
		s.window, s.margin = 0, maxWindow
	} else {
		s.window, s.margin = maxWindow, 0
	}
	s.sendFlow(frames.Flow{})
}

// event handles an event of the engine. c.mu is held.
func (c *Conn) event(e *engine.Event) {
	switch e.Kind {
	case engine.EventDelivered:
		if l := linkOf(e.Consumer.Tag); l != nil {
			l.deliver(e.Delivery)
		}
	case engine.EventConfirmed:
		if !c.postpone(answer{event: *e}) {
			c.confirmed(e)
		}
	case engine.EventFlowed:
		if l := linkOf(e.Consumer.Tag); l != nil {
			l.flowed(e.Flow)
		}
	case engine.EventRevoked:
		if l := linkOf(e.Consumer.Tag); l != nil {
			l.revoked(e.Delivery)
		}
	case engine.EventDetached:
		var l *link
		if e.Consumer != nil {
			l = linkOf(e.Consumer.Tag)
		} else if e.Publisher != nil {
			l = linkOf(e.Publisher.Tag)
		}
		if l != nil {
			l.detached(e.Err)
		}
	case engine.EventEnded:
		if s, _ := e.Session.Tag.(*session); s != nil && !s.gone {
			s.fail(&engine.Fault{Ends: engine.ScopeSession, Err: e.Err})
		}
	case engine.EventClosed:
		switch {
		case c.closeSent: // the client has been notified, and must close it now
		case e.Err != nil:
			c.close(e.Err)
		default:
			c.closeSent = true
			c.out = c.out[:0]
			c.Cut()
		}
	case engine.EventBlocked, engine.EventUnblocked:
		c.blocked = e.Kind == engine.EventBlocked
		for _, s := range c.sessions {
			s.block(c.blocked)
		}
	}
}

// linkOf is the link that a tag of ours names, nil if it has ended.
func linkOf(tag any) *link {
	l, _ := tag.(*link)
	if l == nil || l.gone {
		return nil
	}
	return l
}
