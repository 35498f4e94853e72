package frames

import "encoding/binary"

// Fields of the common types are read and written without a detour through an any, which
// would allocate. What isn't handled here goes that way.

// readDirect reads the next field into p, a pointer, if it is of a type and an encoding
// that is known here. An absent field is the zero value, and not set.
func (f *fields) readDirect(p any) (set, ok bool) {
	d := f.d
	if f.left == 0 || d.err != nil {
		return false, false
	}
	b := d.b
	if len(b) == 0 {
		return false, false
	}
	code, size := b[0], 1
	if code == CodeNull {
		switch p := p.(type) {
		case *uint32:
			*p = 0
		case *bool:
			*p = false
		case *uint8:
			*p = 0
		case *[]byte:
			*p = nil
		case *string:
			*p = ""
		case *Symbol:
			*p = ""
		default:
			return false, false
		}
		f.left--
		d.b = b[1:]
		return false, true
	}
	switch p := p.(type) {
	case *uint32:
		switch {
		case code == CodeUint0:
			*p = 0
		case code == CodeSmallUint && len(b) > 1:
			*p, size = uint32(b[1]), 2
		case code == CodeUint && len(b) > 4:
			*p, size = binary.BigEndian.Uint32(b[1:]), 5
		default:
			return false, false
		}
	case *bool:
		if code != CodeTrue && code != CodeFalse {
			return false, false
		}
		*p = code == CodeTrue
	case *uint8:
		if code != CodeUbyte || len(b) < 2 {
			return false, false
		}
		*p, size = b[1], 2
	case *[]byte:
		v, n := shortText(b, CodeBinary8)
		if n == 0 {
			return false, false
		}
		*p, size = v[:n-2:n-2], n
	case *string:
		v, n := shortText(b, CodeString8)
		if n == 0 {
			return false, false
		}
		*p, size = string(v), n
	case *Symbol:
		v, n := shortText(b, CodeSymbol8)
		if n == 0 {
			return false, false
		}
		*p, size = Symbol(v), n
	default:
		return false, false
	}
	f.left--
	d.b = b[size:]
	return true, true
}

// shortText reads a binary or text of the short form, which code begins. n is 0 if it
// isn't one.
func shortText(b []byte, code byte) (v []byte, n int) {
	if b[0] != code || len(b) < 2 || len(b) < 2+int(b[1]) {
		return v, 0
	}
	n = 2 + int(b[1])
	return b[2:n], n
}

// writeDirect writes the field at p, a pointer, if its type is known here.
func (f *fields) writeDirect(p any) bool {
	e := f.e
	switch p := p.(type) {
	case *uint32:
		switch v := *p; {
		case v == 0:
			e.b = append(e.b, CodeUint0)
		case v < 256:
			e.b = append(e.b, CodeSmallUint, byte(v))
		default:
			e.b = binary.BigEndian.AppendUint32(append(e.b, CodeUint), v)
		}
	case *bool:
		if *p {
			e.b = append(e.b, CodeTrue)
		} else {
			e.b = append(e.b, CodeFalse)
		}
	case *uint8:
		e.b = append(e.b, CodeUbyte, *p)
	case *[]byte:
		e.sized(CodeBinary8, len(*p))
		e.b = append(e.b, *p...)
	case *string:
		e.sized(CodeString8, len(*p))
		e.b = append(e.b, *p...)
	case *Symbol:
		e.sized(CodeSymbol8, len(*p))
		e.b = append(e.b, *p...)
	default:
		return false
	}
	f.n++
	f.count, f.end = f.n, len(e.b)
	return true
}

// frameHead is what determines a frame's kind: the header, and a descriptor of three bytes.
const frameHead = HeaderSize + 3

// frameKind reads the first bytes of a frame. Of a performative its code is returned,
// and of anything else 0. The descriptor of a performative is a small ulong.
func frameKind(b []byte) (code byte, channel uint16) {
	if len(b) < frameHead || b[4] != 2 || b[5] != TypeAMQP || b[8] != CodeDescribed || b[9] != CodeSmallUlong {
		return 0, 0
	}
	return b[10], uint16(b[6])<<8 | uint16(b[7])
}

// Codec reads and writes frames like Decode and Append, and uses its own parts again: it
// allocates nothing for the frames that each message needs. It isn't safe for concurrent
// use.
type Codec struct {
	d   decoder
	e   encoder
	in  fields
	out fields
}

// Kind is the code of the performative in a frame, and the frame's channel. The code is 0
// for a frame that only Decode reads: it isn't AMQP's, is empty, or is encoded in an
// uncommon way.
func Kind(frame []byte) (code byte, channel uint16) { return frameKind(frame) }

// The codes of the performatives that Kind returns.
const (
	KindFlow        = codeFlow
	KindTransfer    = codeTransfer
	KindDisposition = codeDisposition
)

// Decode decodes a whole frame of p's Kind into p, and overwrites all of p.
// Binary values and the payload are parts of frame.
func (c *Codec) Decode(frame []byte, p Performative) (payload []byte, err error) {
	h, ok := ReadHeader(frame)
	code, _ := p.kind()
	if kind, _ := frameKind(frame); !ok || uint64(h.Size) != uint64(len(frame)) || uint64(kind) != code {
		return nil, malformed("a frame header of %x before %d bytes", frame[:min(frameHead, len(frame))], len(frame))
	}
	c.d = newDecoder(frame[frameHead:])
	c.d.walk(p, &c.in)
	if c.d.err != nil {
		return nil, c.d.err
	}
	if len(c.d.b) > 0 && code != codeTransfer {
		return nil, malformed("%d bytes behind a %T", len(c.d.b), p)
	}
	return c.d.b, nil
}

// Begin writes the head of an AMQP frame and p behind b. A payload may follow. Complete
// then fills in the frame's size.
func (c *Codec) Begin(b []byte, channel uint16, p Performative) ([]byte, error) {
	at := len(b)
	c.e = encoder{b: append(b, 0, 0, 0, 0, 2, TypeAMQP, byte(channel>>8), byte(channel))}
	c.e.walk(p, &c.out)
	b = c.e.b
	c.e.b = nil
	if c.e.err != nil {
		return b[:at], c.e.err
	}
	return b, nil
}

// Complete fills in the size of the frame that begins at b[at] and ends with b.
func Complete(b []byte, at int) { binary.BigEndian.PutUint32(b[at:], uint32(len(b)-at)) }

// Append writes an AMQP frame without a payload behind b.
func (c *Codec) Append(b []byte, channel uint16, p Performative) ([]byte, error) {
	at := len(b)
	b, err := c.Begin(b, channel, p)
	if err == nil {
		Complete(b, at)
	}
	return b, err
}
