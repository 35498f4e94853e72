package wire

import (
	"bytes"
	"slices"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// transfer takes a message of the client, or a part of one.
func (s *session) transfer(t *frames.Transfer, payload []byte) *engine.Fault {
	s.nextIncoming++
	if s.window--; s.window < -s.margin {
		return sessionFault("amqp:session:window-violation", "incoming window violation (tolerated excess tranfers: %d)", s.margin)
	}
	opened := false
	if s.window <= maxWindow/2 && !s.c.blocked {
		s.window, opened = maxWindow, true
	}
	l := s.links[t.Handle]
	var fault *engine.Fault
	switch {
	case l == nil, l.kind == kindConsuming, l.kind == kindReplying:
		return sessionFault("amqp:session:unattached-handle", "Unknown link handle: %d", t.Handle)
	case l.kind == kindRequesting:
		fault = l.request(t, payload)
	default:
		fault = l.message(t, payload)
	}
	if fault != nil {
		if fault.Ends != engine.ScopeLink {
			return fault
		}
		s.settleUp() // a released message of this link, say
		if !l.gone {
			l.pub.Close()
			l.detached(fault.Err)
		}
	}
	if opened {
		s.sendFlow(frames.Flow{})
	}
	return nil
}

// message passes a message to the engine.
func (l *link) message(t *frames.Transfer, payload []byte) *engine.Fault {
	s := l.s
	settled, id := t.Settled.Value, t.DeliveryID.Value
	if l.anonymous && settled && l.partial == nil {
		tag := bytes.Clone(t.DeliveryTag)
		over := s.c.holdAttached(cap(tag) - cap(l.tag))
		l.tag = tag
		if over {
			return tooMuch("the delivery tags of links")
		}
	}
	if p := l.partial; p != nil {
		switch {
		case t.DeliveryID.Set && t.DeliveryID.Value != p.id:
			return s.misuse("delivery-id of continuation transfer ({uint,%d}) differs from delivery-id on first transfer (%d)", t.DeliveryID.Value, p.id)
		case t.Settled.Set && t.Settled.Value != p.settled:
			return s.misuse("field 'settled' of continuation transfer (%t) differs from (interpreted) field 'settled' on first transfer (%t)", t.Settled.Value, p.settled)
		}
		settled, id = p.settled, p.id
	} else if !t.DeliveryID.Set {
		return sessionFault("amqp:internal-error", "a transfer without a delivery-id")
	}
	// RabbitMQ doesn't know aborted transfers: it treats them as the last one.
	if t.More {
		return l.more(id, settled, payload)
	}
	if l.credit == 0 {
		return &engine.Fault{Ends: engine.ScopeLink, Err: &frames.Error{Condition: "amqp:link:transfer-limit-exceeded"}}
	}
	parts := l.partial != nil
	if parts {
		s.c.holdPartial(-cap(l.partial.payload))
		payload = append(l.partial.payload, payload...)
		l.partial = nil
	} else {
		payload = bytes.Clone(payload)
	}
	switch {
	case l.senderMode == 0 && settled:
		return s.misuse("sender settle mode is 'unsettled' but transfer settled flag is interpreted as being 'true'")
	case l.senderMode == 1 && !settled:
		return s.misuse("sender settle mode is 'settled' but transfer settled flag is interpreted as being 'false'")
	case t.ReceiverSettleMode.Value == 1 && !settled:
		return s.refusal("amqp:not-implemented", "rcv-settle-mode second not supported")
	}
	if fault := s.tooLarge(len(payload)); fault != nil {
		return fault
	}
	if fault := l.pub.Publish(id, settled, payload); fault != nil {
		if l.anonymous && settled && fault.Ends == engine.ScopeLink && fault.Err.Condition != "amqp:decode-error" && fault.Err.Condition != "amqp:unauthorized-access" {
			if parts { // RabbitMQ looks for the tag in the last frame, and crashes
				return &engine.Fault{Ends: engine.ScopeConnection, Err: &frames.Error{Condition: "amqp:internal-error", Description: "Session error: function_clause"}}
			}
			// No disposition can tell which one it was.
			err := *fault.Err
			err.Info = frames.Map{{Key: frames.Symbol("delivery-tag"), Value: l.tag}}
			return &engine.Fault{Ends: engine.ScopeLink, Err: &err}
		}
		return fault
	}
	l.count++
	l.credit--
	l.grant()
	return nil
}

// more takes a part of a message that isn't its last.
func (l *link) more(id uint32, settled bool, payload []byte) *engine.Fault {
	c := l.s.c
	if l.partial == nil {
		l.partial = &partial{id: id, settled: settled}
	}
	before := cap(l.partial.payload)
	l.partial.payload = append(l.partial.payload, payload...)
	over := c.holdPartial(cap(l.partial.payload) - before)
	if fault := l.s.tooLarge(len(l.partial.payload)); fault != nil {
		return fault
	}
	if over {
		return tooMuch("messages that haven't come whole")
	}
	return nil
}

func (s *session) tooLarge(size int) *engine.Fault {
	if limit := s.c.server.cfg.MaxMessageSize; size > limit {
		return sessionFault("amqp:link:message-size-exceeded", "message size (%d bytes) > maximum message size (%d bytes)", size, limit)
	}
	return nil
}

// grant gives the client more credit when half of it is used, unless too much is
// unconfirmed.
func (l *link) grant() {
	if l.credit <= linkCredit/2 && l.pub.Unconfirmed() < linkCredit {
		l.sendCredit(linkCredit)
	}
}

// confirmed is the engine's answer to a message. The client gets it together with others.
func (c *Conn) confirmed(e *engine.Event) {
	l := linkOf(e.Publisher.Tag)
	if l == nil {
		return
	}
	s := l.s
	switch e.State.(type) {
	case nil: // the client has settled it itself
	case *frames.Accepted:
		s.accepted = append(s.accepted, e.ID)
	default:
		s.notifyConfirmed()
		s.notify(e.ID, e.ID, e.State)
	}
	if l.credit <= linkCredit/2 && !slices.Contains(s.granted, l) {
		s.granted = append(s.granted, l)
	}
	if !s.dirty {
		s.dirty = true
		c.dirty = append(c.dirty, s)
	}
}

// notify sends an outcome of the client's messages.
func (s *session) notify(first, last uint32, state any) {
	d := &s.c.write.disposition
	*d = frames.Disposition{Role: frames.RoleReceiver, First: first, Settled: frames.Some(true), State: state}
	if last != first {
		d.Last = frames.Some(last)
	}
	s.c.send(s.channel, d)
}

var accepted = &frames.Accepted{}

// notifyConfirmed sends what has gathered, in as few ranges as possible.
func (s *session) notifyConfirmed() {
	s.dirty = false
	if ids := s.accepted; len(ids) > 0 {
		before := func(a, b uint32) int { return int(int32(a - b)) }
		if !slices.IsSortedFunc(ids, before) {
			slices.SortFunc(ids, before)
		}
		first := ids[0]
		for i, id := range ids {
			if i+1 == len(ids) || ids[i+1] != id+1 {
				s.notify(first, id, accepted)
				if i+1 < len(ids) {
					first = ids[i+1]
				}
			}
		}
		s.accepted = ids[:0]
	}
	for _, l := range s.granted {
		if !l.gone {
			l.grant()
		}
	}
	clear(s.granted)
	s.granted = s.granted[:0]
}
