package wire

import (
	"bytes"

	"github.com/hopback/hopback/internal/frames"
)

// handle carries out a frame of the open connection. c.mu is held.
func (c *Conn) handle(b []byte) error {
	kind, channel := frames.Kind(b)
	var err error
	switch kind {
	case frames.KindTransfer:
		var payload []byte
		if payload, err = c.decode.Decode(b, &c.frame.transfer); err == nil {
			c.onSession(channel, &c.frame.transfer, payload)
		}
	case frames.KindFlow:
		if _, err = c.decode.Decode(b, &c.frame.flow); err == nil {
			c.onSession(channel, &c.frame.flow, nil)
		}
	case frames.KindDisposition:
		if _, err = c.decode.Decode(b, &c.frame.disposition); err == nil {
			// Annotations are kept, and would be parts of the read buffer.
			if m, ok := c.frame.disposition.State.(*frames.Modified); ok && m.Annotations != nil {
				_, err = c.decode.Decode(bytes.Clone(b), &c.frame.disposition)
			}
			if err == nil {
				c.onSession(channel, &c.frame.disposition, nil)
			}
		}
	default:
		var f frames.Frame
		if f, err = frames.Decode(bytes.Clone(b)); err == nil {
			c.general(f)
		}
	}
	if err != nil && !c.closeSent {
		return c.refuse(&frames.Error{Condition: "amqp:internal-error", Description: "Reader error: " + err.Error()})
	}
	return nil
}

// general is handle for the rarer frames.
func (c *Conn) general(f frames.Frame) {
	switch p := f.Body.(type) {
	case nil:
	case *frames.Close:
		c.close(nil)
	case *frames.Open:
		if !c.closeSent {
			_ = c.refuse(&frames.Error{Condition: "amqp:internal-error", Description: "Reader error: a second open frame"})
		}
	case *frames.Begin:
		if c.sessions[f.Channel] != nil {
			c.onSession(f.Channel, p, nil)
		} else if !c.closeSent {
			c.begin(f.Channel, p)
		}
	default:
		c.onSession(f.Channel, p, f.Payload)
	}
}

// onSession hands a frame to its session. What comes for none is ignored: it may have
// been under way when the session ended.
func (c *Conn) onSession(channel uint16, p frames.Performative, payload []byte) {
	if s := c.sessions[channel]; s != nil {
		if fault := s.handle(p, payload); fault != nil {
			s.fail(fault)
		}
	}
}
