package wire

import (
	"fmt"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// kind is what a link is for.
type kind uint8

const (
	kindPublishing kind = iota // the client sends messages
	kindConsuming              // the client receives messages
	kindRequesting             // the client sends requests to /management
	kindReplying               // the client receives the replies
)

// linkCredit is what a client that sends gets at a time; there is more at half of it.
const linkCredit = 170

// link is a link of a session. Its handle is the client's.
type link struct {
	s      *session
	kind   kind
	name   string
	handle uint32
	size   int // of the attach frame
	gone   bool

	// What credit the sender has, and its delivery-count.
	credit, count uint32

	// publishing
	pub        *engine.Publisher
	senderMode uint8  // 0 unsettled, 1 settled, 2 mixed
	anonymous  bool   // each message has a separate address
	tag        []byte // of the latest message to such an address, if it is settled
	partial    *partial

	// consuming
	con        *engine.Consumer
	settled    bool   // deliveries are sent so
	maxSize    uint64 // of a message that the client takes; 0: any
	asked      uint32 // credit that the engine was given, and hasn't used
	askedCount uint32 // the engine's delivery-count
	waiting    int    // deliveries in s.pending
	draining   bool
	stashed    *frames.Flow // the latest that came while draining
	tokens     []string     // of the flow that is next
}

// partial is a message whose last frame hasn't come.
type partial struct {
	payload []byte
	id      uint32
	settled bool
}

// forget releases what the link holds. The engine knows of its end.
func (l *link) forget() {
	if !l.gone {
		l.s.c.holdAttached(-l.size - cap(l.tag))
	}
	l.gone = true
	l.dropPartial()
}

func (l *link) dropPartial() {
	if l.partial != nil {
		l.s.c.holdPartial(-cap(l.partial.payload))
		l.partial = nil
	}
}

// holdPartial and holdAttached count bytes that the connection holds, and say whether that
// is more than it may.
func (c *Conn) holdPartial(n int) (over bool) {
	c.partial += n
	return c.hold(n) || c.partial > c.server.cfg.MaxPartial
}

func (c *Conn) holdAttached(n int) (over bool) {
	c.attached += n
	return c.hold(n) || c.attached > c.server.cfg.MaxAttached
}

func (c *Conn) hold(n int) (over bool) {
	return c.server.held.Add(int64(n)) > int64(c.server.cfg.MaxHeld) && n > 0
}

// release lets go of all that the connection holds, at its end.
func (c *Conn) release() {
	c.hold(-c.partial - c.attached)
	c.partial, c.attached = 0, 0
}

// tooMuch closes a connection that would hold more than it may.
func tooMuch(of string) *engine.Fault {
	return &engine.Fault{Ends: engine.ScopeConnection, Err: &frames.Error{Condition: "amqp:resource-limit-exceeded", Description: "too many bytes in " + of}}
}

// linkFault is an error that ends the link.
func linkFault(condition frames.Symbol, format string, args ...any) *engine.Fault {
	return &engine.Fault{Ends: engine.ScopeLink, Err: &frames.Error{Condition: condition, Description: fmt.Sprintf(format, args...)}}
}

// misuse is what a transfer that contradicts its link, or the transfers before it, comes
// to. RabbitMQ 4.0 ends the session over it.
func (s *session) misuse(format string, args ...any) *engine.Fault {
	if s.c.server.old {
		return sessionFault("amqp:connection:framing-error", format, args...)
	}
	return linkFault("amqp:invalid-field", format, args...)
}

// refusal is what refuses an attach: RabbitMQ 4.0 ends the session over it.
func (s *session) refusal(condition frames.Symbol, format string, args ...any) *engine.Fault {
	f := linkFault(condition, format, args...)
	if s.c.server.old {
		f.Ends = engine.ScopeSession
	}
	return f
}

// attach attaches a link, or refuses it.
func (s *session) attach(a *frames.Attach) *engine.Fault {
	if a.Handle > s.maxHandle {
		return sessionFault("amqp:connection:framing-error", "link handle value (%d) exceeds maximum link handle value (%d)", a.Handle, s.maxHandle)
	}
	if l := s.links[a.Handle]; l != nil && s.c.server.old && l.kind <= kindConsuming {
		// RabbitMQ 4.0 doesn't look, and forgets the link that it had.
		l.shut()
		s.drop(l)
	} else if l != nil {
		return sessionFault("amqp:session:handle-in-use", "handle %d is already associated with a link", a.Handle)
	}
	size := s.c.size
	if s.c.holdAttached(size) {
		s.c.holdAttached(-size)
		return tooMuch("the attach frames of links")
	}
	fault := s.validate(a)
	if fault == nil {
		fault = s.open(a)
	}
	if fault == nil {
		s.links[a.Handle].size = size
		return nil
	}
	s.c.holdAttached(-size)
	if fault.Ends != engine.ScopeLink {
		return fault
	}
	s.c.server.log(s.c, fmt.Sprintf("refusing link '%s': %v", a.Name, fault))
	reply := frames.Attach{
		Name: a.Name, Handle: a.Handle, Role: !a.Role,
		SenderSettleMode: a.SenderSettleMode, ReceiverSettleMode: a.ReceiverSettleMode,
	}
	if a.Role == frames.RoleSender {
		reply.Source = a.Source
	} else {
		reply.Target = a.Target
		reply.InitialDeliveryCount = frames.Some(s.initialCount())
	}
	s.c.send(s.channel, &reply)
	s.c.send(s.channel, &frames.Detach{Handle: a.Handle, Closed: true, Error: fault.Err})
	return nil
}

// initialCount is the delivery-count of a link on which the server sends.
func (s *session) initialCount() uint32 {
	if s.c.server.old {
		return unlimited - 4
	}
	return 0
}

// validate refuses what no link of RabbitMQ can do.
func (s *session) validate(a *frames.Attach) *engine.Fault {
	if d, ok := a.Target.(frames.Described); ok {
		if d.Descriptor == uint64(0x30) || d.Descriptor == frames.Symbol("amqp:coordinator:list") {
			return s.refusal("amqp:not-implemented", "Transactions not supported")
		}
		return sessionFault("amqp:internal-error", "a target of type %v", d.Descriptor)
	}
	switch {
	case len(a.Unsettled) > 0 || a.IncompleteUnsettled:
		return s.refusal("amqp:not-implemented", "Link recovery not supported")
	case a.ReceiverSettleMode.Value == 1 && a.SenderSettleMode.Or(2) != 1:
		return s.refusal("amqp:not-implemented", "rcv-settle-mode second not supported")
	case a.SenderSettleMode.Value > 2 || a.ReceiverSettleMode.Value > 1:
		return sessionFault("amqp:internal-error", "a settle mode out of its range")
	case a.Role == frames.RoleSender && !a.InitialDeliveryCount.Set:
		return sessionFault("amqp:internal-error", "a sender without an initial-delivery-count")
	}
	return nil
}

// open opens a valid link.
func (s *session) open(a *frames.Attach) *engine.Fault {
	l := &link{s: s, name: a.Name, handle: a.Handle, senderMode: a.SenderSettleMode.Or(2), maxSize: a.MaxMessageSize.Value}
	if a.Role == frames.RoleSender {
		if t, ok := a.Target.(*frames.Target); ok && t.Address == managementNode && l.senderMode == 1 {
			return s.openRequests(l, a)
		}
		return s.openPublisher(l, a)
	}
	if a.Source != nil && a.Source.Address == managementNode {
		return s.openReplies(l, a)
	}
	return s.openConsumer(l, a)
}

func (s *session) openPublisher(l *link, a *frames.Attach) *engine.Fault {
	pub, fault := s.e.OpenPublisher(a)
	if fault != nil {
		return fault
	}
	l.kind, l.pub = kindPublishing, pub
	if t, ok := a.Target.(*frames.Target); ok {
		l.anonymous = t.Address == nil && !t.Dynamic
	}
	pub.Tag = l
	l.credit, l.count = linkCredit, a.InitialDeliveryCount.Value
	s.links[l.handle] = l
	reply := *pub.Attach()
	reply.Name, reply.Handle, reply.Role = a.Name, a.Handle, frames.RoleReceiver
	s.c.send(s.channel, &reply)
	l.sendCredit(linkCredit)
	return nil
}

func (s *session) openConsumer(l *link, a *frames.Attach) *engine.Fault {
	con, fault := s.e.OpenConsumer(a)
	if fault != nil {
		return fault
	}
	l.kind, l.con = kindConsuming, con
	con.Tag = l
	l.settled = a.SenderSettleMode.Or(2) == 1
	s.links[l.handle] = l
	reply := *con.Attach()
	reply.Name, reply.Handle, reply.Role = a.Name, a.Handle, frames.RoleSender
	reply.Target = nil // RabbitMQ leaves it out
	l.askedCount = reply.InitialDeliveryCount.Value
	l.count = s.initialCount()
	reply.InitialDeliveryCount = frames.Some(l.count)
	s.c.send(s.channel, &reply)
	return nil
}

// sendCredit sends the client its credit.
func (l *link) sendCredit(n uint32) {
	l.credit = n
	l.s.sendFlow(frames.Flow{Handle: frames.Some(l.handle), DeliveryCount: frames.Some(l.count), LinkCredit: frames.Some(n)})
}

// detach is the client's end of a link, or its answer to ours.
func (s *session) detach(d *frames.Detach) {
	l := s.links[d.Handle]
	if l == nil {
		return
	}
	s.settleUp()
	if l.gone {
		return
	}
	l.shut()
	s.drop(l)
	s.c.send(s.channel, &frames.Detach{Handle: d.Handle, Closed: d.Closed})
}

// shut ends the link in the engine.
func (l *link) shut() {
	switch l.kind {
	case kindPublishing:
		l.pub.Close()
	case kindConsuming:
		l.con.Close()
	default:
		l.s.unpair(l)
	}
}

// drop forgets a link and its deliveries.
func (s *session) drop(l *link) {
	l.forget()
	delete(s.links, l.handle)
	s.pending.remove(l)
	if l.kind == kindConsuming {
		for id, d := range s.unsettled {
			if d.Consumer == l.con {
				delete(s.unsettled, id)
			}
		}
	}
}

// detached is the broker's end of a link.
func (l *link) detached(why *frames.Error) {
	s := l.s
	s.c.server.log(s.c, fmt.Sprintf("detaching link '%s': %v", l.name, why))
	s.notifyConfirmed()
	s.drop(l)
	s.c.send(s.channel, &frames.Detach{Handle: l.handle, Closed: true, Error: why})
}
