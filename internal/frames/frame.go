// Package frames knows the bytes of AMQP 1.0. It has two halves:
//
//   - a codec for frames, performatives, values and messages, on which a client's and a
//     server's end can stand;
//   - [Conn], which stands between go-amqp and the network: it joins writes and
//     settlements, follows the sessions, and keeps from go-amqp what would hurt it.
//     It looks at a few bytes of each frame and decodes none on the way.
//
// What is read may come from anywhere: nothing here panics, loops or takes more memory
// than a multiple of what it is given.
package frames

import (
	"bufio"
	"encoding/binary"
	"io"
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
	d := decoder{b: body, roomless: maxRoomless}
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

// Reader reads frames from a stream.
type Reader struct {
	r   *bufio.Reader
	max uint32
}

// NewReader returns a reader of frames of up to max bytes.
func NewReader(r io.Reader, max uint32) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, readAhead), max: max}
}

// readAhead is how much a reader reads at once.
const readAhead = 64 << 10

// NewReaderSize returns a reader that reads up to size bytes at once, at least 16.
func NewReaderSize(r io.Reader, size int) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, size), max: math.MaxUint32}
}

// Start returns the first eight bytes of what comes next, and leaves them to be read
// again: a frame's or a protocol's header. They are valid until the next read.
func (r *Reader) Start() ([]byte, error) {
	b, err := r.r.Peek(HeaderSize)
	if err != nil {
		return nil, whole(err, len(b))
	}
	return b, nil
}

// Discard skips n bytes.
func (r *Reader) Discard(n int) error {
	_, err := r.r.Discard(n)
	return err
}

// Next returns the next size bytes: a whole frame, whose header the caller has looked at.
// They are valid until the next read.
func (r *Reader) Next(size int) ([]byte, error) {
	if size > r.r.Size() {
		b := make([]byte, size)
		if n, err := io.ReadFull(r.r, b); err != nil {
			return nil, whole(err, n)
		}
		return b, nil
	}
	b, err := r.r.Peek(size)
	if err != nil {
		return nil, whole(err, len(b))
	}
	_, _ = r.r.Discard(size)
	return b, nil
}

// Whole says whether the next frame has come as a whole, so that reading it doesn't wait.
func (r *Reader) Whole() bool {
	n := r.r.Buffered()
	if n < HeaderSize {
		return false
	}
	b, _ := r.r.Peek(HeaderSize)
	return uint64(binary.BigEndian.Uint32(b)) <= uint64(n)
}

// Protocol reads a protocol header.
func (r *Reader) Protocol() (Protocol, error) {
	b, err := r.r.Peek(HeaderSize)
	if err != nil {
		return 0, whole(err, len(b))
	}
	p, ok := ReadProtocol(b)
	if !ok {
		return 0, malformed("a protocol header of %x", b)
	}
	_, _ = r.r.Discard(HeaderSize)
	return p, nil
}

// Raw reads a whole frame, and doesn't decode it. The bytes are the caller's. An error
// is io.EOF only at the end of a frame.
func (r *Reader) Raw() ([]byte, error) {
	b, err := r.r.Peek(HeaderSize)
	if err != nil {
		return nil, whole(err, len(b))
	}
	h, ok := ReadHeader(b)
	switch {
	case !ok:
		return nil, malformed("a frame header of %x", b)
	case h.Size > r.max:
		return nil, malformed("a frame of %d bytes, above the limit of %d", h.Size, r.max)
	}
	frame := make([]byte, h.Size)
	if n, err := io.ReadFull(r.r, frame); err != nil {
		return nil, whole(err, n)
	}
	return frame, nil
}

// Frame reads a frame. What is in it remains valid.
func (r *Reader) Frame() (Frame, error) {
	b, err := r.Raw()
	if err != nil {
		return Frame{}, err
	}
	return Decode(b)
}

// whole makes an end amid something an unexpected one.
func whole(err error, n int) error {
	if err == io.EOF && n > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
