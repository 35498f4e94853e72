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
			c.catchUp()
			c.size = len(b)
			c.general(f)
		} else if foreign(b) {
			err = nil
			if s := c.sessions[channel16(b)]; s != nil {
				s.fail(sessionFault("amqp:internal-error", "Unexpected frame"))
			}
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
// been in flight when the session ended.
func (c *Conn) onSession(channel uint16, p frames.Performative, payload []byte) {
	if s := c.sessions[channel]; s != nil {
		if fault := s.handle(p, payload); fault != nil {
			s.fail(fault)
		}
	}
}

// foreign says whether a frame's body is described, and isn't a performative: something
// that RabbitMQ can read, and has no use for.
func foreign(b []byte) bool {
	v, _, err := frames.ReadValue(b[4*int(b[4]):])
	d, ok := v.(frames.Described)
	if err != nil || !ok {
		return false
	}
	code, ok := d.Descriptor.(uint64)
	return ok && (code < 0x10 || code > 0x18)
}

func channel16(b []byte) uint16 { return uint16(b[6])<<8 | uint16(b[7]) }
