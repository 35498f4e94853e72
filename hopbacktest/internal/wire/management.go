package wire

import (
	"bytes"
	"reflect"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

const (
	managementNode = "/management"
	// requestCredit is how many requests a client may send at a time.
	requestCredit = 8
	// maxReplies is how many replies may wait for the session's window.
	maxReplies = 1024
)

// pair is the two links of a client to the management: one for requests, one for replies.
// They have the same name, and the client's end the same address.
type pair struct {
	address           any
	requests, replies *link
}

// join makes a link one of a pair.
func (s *session) join(l *link, a *frames.Attach, address any) *engine.Fault {
	if paired, _ := a.Properties.Get("paired"); paired != true {
		return s.refusal("amqp:invalid-field", "Link property 'paired' is not set to boolean value 'true'")
	}
	p := s.pairs[l.name]
	if p == nil {
		p = &pair{address: address}
	} else if half := p.half(l.kind); *half != nil || !reflect.DeepEqual(p.address, address) {
		return s.refusal("amqp:precondition-failed", "received invalid attach for management link pair %q", l.name)
	}
	*p.half(l.kind) = l
	if s.pairs == nil {
		s.pairs = map[string]*pair{}
	}
	s.pairs[l.name] = p
	s.links[l.handle] = l
	return nil
}

func (p *pair) half(k kind) **link {
	if k == kindRequesting {
		return &p.requests
	}
	return &p.replies
}

// unpair takes a link from its pair.
func (s *session) unpair(l *link) {
	p := s.pairs[l.name]
	*p.half(l.kind) = nil
	if p.requests == nil && p.replies == nil {
		delete(s.pairs, l.name)
	}
}

func (s *session) openRequests(l *link, a *frames.Attach) *engine.Fault {
	var address any
	if a.Source != nil {
		address = a.Source.Address
	}
	l.kind = kindRequesting
	if fault := s.join(l, a, address); fault != nil {
		return fault
	}
	l.count = a.InitialDeliveryCount.Value
	s.c.send(s.channel, &frames.Attach{
		Name: a.Name, Handle: a.Handle, Role: frames.RoleReceiver,
		SenderSettleMode: frames.Some[uint8](1), ReceiverSettleMode: frames.Some[uint8](0),
		Source: a.Source, Target: a.Target,
		MaxMessageSize: frames.Some(uint64(s.c.server.cfg.MaxMessageSize)), Properties: a.Properties,
	})
	l.sendCredit(requestCredit)
	return nil
}

func (s *session) openReplies(l *link, a *frames.Attach) *engine.Fault {
	var address any
	if t, ok := a.Target.(*frames.Target); ok && t != nil {
		address = t.Address
	}
	l.kind = kindReplying
	if fault := s.join(l, a, address); fault != nil {
		return fault
	}
	l.count = s.initialCount()
	s.c.send(s.channel, &frames.Attach{
		Name: a.Name, Handle: a.Handle, Role: frames.RoleSender,
		SenderSettleMode: frames.Some[uint8](1), ReceiverSettleMode: a.ReceiverSettleMode,
		Source: a.Source, Target: a.Target,
		InitialDeliveryCount: frames.Some(l.count), MaxMessageSize: a.MaxMessageSize, Properties: a.Properties,
	})
	return nil
}

// repliesCredited takes the credit for replies.
func (l *link) repliesCredited(f *frames.Flow) {
	count := f.DeliveryCount.Or(l.s.initialCount())
	l.credit = 0
	if left := int64(f.LinkCredit.Value) - int64(int32(l.count-count)); left > 0 {
		l.credit = uint32(min(left, unlimited))
	}
	if f.Drain {
		l.count += l.credit
		l.credit = 0
	}
	if f.Echo || f.Drain {
		l.s.push(waiting{link: l, flow: &frames.Flow{
			Handle: frames.Some(l.handle), DeliveryCount: frames.Some(l.count), LinkCredit: frames.Some(l.credit),
			Available: frames.Some[uint32](0), Drain: f.Drain,
		}})
	}
}

// request carries out a request to the management.
func (l *link) request(t *frames.Transfer, payload []byte) *engine.Fault {
	s := l.s
	if !t.Settled.Value || t.More {
		return sessionFault("amqp:internal-error", "a request to the management isn't settled, or isn't in one frame")
	}
	if l.credit == 0 {
		return sessionFault("amqp:link:transfer-limit-exceeded", "insufficient credit (0) for management link from client to RabbitMQ")
	}
	replies := s.pairs[l.name].replies
	if replies == nil {
		return sessionFault("amqp:precondition-failed", "received transfer on half open management link pair")
	}
	if replies.credit == 0 {
		return sessionFault("amqp:precondition-failed", "insufficient credit (0) for management link from RabbitMQ to client")
	}
	if s.pendingReplies >= maxReplies {
		return sessionFault("amqp:resource-limit-exceeded", "%d replies wait for the session's window", s.pendingReplies)
	}
	request, err := frames.DecodeMessage(bytes.Clone(payload))
	if err != nil {
		return sessionFault("amqp:internal-error", "a request that can't be read: %v", err)
	}
	reply, fault := s.e.Request(request)
	if fault != nil || reply == nil { // nil: the session is over, and the client is about to get that
		return fault
	}
	b, err := reply.Append(nil)
	if err != nil {
		return sessionFault("amqp:internal-error", "a reply that can't be written: %v", err)
	}
	if replies.maxSize > 0 && uint64(len(b)) > replies.maxSize {
		return sessionFault("amqp:link:message-size-exceeded", "message size (%d bytes) > maximum message size (%d bytes)", len(b), replies.maxSize)
	}
	replies.count++
	replies.credit--
	s.pendingReplies++
	r := &managementReply{link: replies, payload: b}
	if !s.c.postpone(answer{reply: r}) {
		r.send()
	}
	l.count++
	if l.credit--; l.credit <= requestCredit/2 {
		l.sendCredit(requestCredit)
	}
	return nil
}

// managementReply is the reply to a request.
type managementReply struct {
	link    *link
	payload []byte
}

func (r *managementReply) send() {
	if !r.link.gone {
		r.link.s.push(waiting{link: r.link, payload: r.payload})
	}
}
