// Package frames is the codec of AMQP 1.0: frames, performatives, values and messages. The
// client's engine and the server of hopbacktest stand on it.
//
// What is read may come from anywhere: nothing here panics, loops or takes more memory
// than a multiple of what it is given.
package frames

import (
	"encoding/binary"
	"math"
	"reflect"
)

// The types of frames.
const (
	TypeAMQP uint8 = 0
	TypeSASL uint8 = 1
)

// HeaderSize is the size of a frame's header, and of a protocol header.
const HeaderSize = 8

// Header is the beginning of each frame.
type Header struct {
	Size    uint32 // of the whole frame
	Offset  uint8  // where its body begins, in words of four bytes; at least 2
	Type    uint8
	Channel uint16 // of a session; not used by SASL
}

// ReadHeader reads the header of a frame. It is false where b is too short for one, and
// where the sizes in it can't be.
func ReadHeader(b []byte) (h Header, ok bool) {
	if len(b) < HeaderSize {
		return h, false
	}
	h = Header{binary.BigEndian.Uint32(b), b[4], b[5], binary.BigEndian.Uint16(b[6:])}
	return h, h.Size >= HeaderSize && h.Offset >= 2 && uint32(h.Offset)*4 <= h.Size
}

// Protocol is the layer that a protocol header asks for.
type Protocol uint8

// The protocols.
const (
	ProtocolAMQP Protocol = 0
	ProtocolTLS  Protocol = 2
	ProtocolSASL Protocol = 3
)

// Header is the protocol header: the first bytes that each end sends.
func (p Protocol) Header() []byte { return []byte{'A', 'M', 'Q', 'P', byte(p), 1, 0, 0} }

// ReadProtocol reads a protocol header of AMQP 1.0. A frame can't be taken for one: its
// size would be over a gigabyte.
func ReadProtocol(b []byte) (p Protocol, ok bool) {
	if len(b) < HeaderSize || string(b[:4]) != "AMQP" || string(b[5:8]) != "\x01\x00\x00" {
		return 0, false
	}
	return Protocol(b[4]), true
}

// Performative is the body of a frame: a pointer to one of Open, Begin, Attach, Flow,
// Transfer, Disposition, Detach, End, Close, or of SASL's Mechanisms, Init, Challenge,
// Response, Outcome.
type Performative interface{ composite }

// Frame is a decoded frame.
type Frame struct {
	Type    uint8
	Channel uint16
	Body    Performative // nil in an empty frame, which is a sign of life
	Payload []byte       // behind the performative, in a transfer
}

// Decode decodes one whole frame. Binary values and the payload are parts of b.
func Decode(b []byte) (Frame, error) {
	h, ok := ReadHeader(b)
	if !ok || uint64(h.Size) != uint64(len(b)) {
		return Frame{}, malformed("a frame header of %x before %d bytes", b[:min(HeaderSize, len(b))], len(b))
	}
	f := Frame{Type: h.Type, Channel: h.Channel}
	if f.Type > TypeSASL {
		return Frame{}, malformed("a frame of type %d", f.Type)
	}
	body := b[int(h.Offset)*4:]
	if len(body) == 0 {
		return f, nil
	}
	d := newDecoder(body)
	v := d.described()
	if d.err != nil {
		return Frame{}, d.err
	}
	p, ok := v.(composite)
	if !ok || !isBody(p, f.Type) {
		return Frame{}, malformed("a frame of type %d with a %T", f.Type, v)
	}
	f.Body = p
	if len(d.b) > 0 {
		if _, ok := p.(*Transfer); !ok {
			return Frame{}, malformed("%d bytes behind a %T", len(d.b), p)
		}
		f.Payload = d.b
	}
	return f, nil
}

// isBody says whether a frame of that type can have c as its body.
func isBody(c composite, frameType uint8) bool {
	code, _ := c.kind()
	if frameType == TypeSASL {
		return code >= 0x40 && code <= 0x44
	}
	return code >= codeOpen && code <= codeClose
}

// Append writes f behind b. It fails where f holds a value without an AMQP type, or is
// larger than 4 GiB.
func Append(b []byte, f Frame) ([]byte, error) {
	at := len(b)
	b = append(b, 0, 0, 0, 0, 2, f.Type)
	e := encoder{b: binary.BigEndian.AppendUint16(b, f.Channel)}
	if f.Body != nil {
		if v := reflect.ValueOf(f.Body); v.Kind() == reflect.Pointer && v.IsNil() || !isBody(f.Body, f.Type) {
			e.fail("a frame of type %d can't have a %T", f.Type, f.Body)
			return b[:at], e.err
		}
		e.composite(f.Body)
	}
	e.b = append(e.b, f.Payload...)
	size := uint64(len(e.b) - at)
	if size > math.MaxUint32 {
		e.fail("a frame of %d bytes", size)
	}
	if e.err != nil {
		return e.b[:at], e.err
	}
	binary.BigEndian.PutUint32(e.b[at:], uint32(size))
	return e.b, nil
}
