package frames

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Reader reads frames from a stream. It keeps what has been read and not looked at yet. Frames
// that it returns are valid until the next Fill.
type Reader struct {
	from io.Reader
	size int // how much is read at once
	max  int // bytes of a frame
	buf  []byte
	r, w int // what is unread is buf[r:w]
}

// NewReader returns a reader of frames of up to maxFrame bytes, which reads up to size bytes at
// once, at least 16.
func NewReader(from io.Reader, size, maxFrame int) *Reader {
	size = max(size, 16)
	return &Reader{from: from, size: size, max: maxFrame, buf: make([]byte, size)}
}

// Header returns the first eight bytes of what comes next, and leaves them there: a frame's
// header or a protocol's. It is nil if they haven't come.
func (r *Reader) Header() []byte {
	if r.w-r.r < HeaderSize {
		return nil
	}
	return r.buf[r.r : r.r+HeaderSize]
}

// Next returns the next frame if all of it is there, and nil if not.
func (r *Reader) Next() ([]byte, error) {
	header := r.Header()
	if header == nil {
		return nil, nil
	}
	h, ok := ReadHeader(header)
	switch {
	case !ok:
		return nil, malformed("a frame header of %x", header)
	case uint64(h.Size) > uint64(r.max):
		return nil, malformed("a frame of %d bytes, above the maximum of %d", h.Size, r.max)
	case uint64(h.Size) > uint64(r.w-r.r):
		return nil, nil
	}
	b := r.buf[r.r : r.r+int(h.Size) : r.r+int(h.Size)]
	r.r += int(h.Size)
	return b, nil
}

// Fill reads once. It makes room for the frame that has begun.
func (r *Reader) Fill() error {
	if r.r > 0 {
		r.w = copy(r.buf, r.buf[r.r:r.w])
		r.r = 0
	}
	if r.w >= HeaderSize { // of a frame whose size Next has checked
		size := int(binary.BigEndian.Uint32(r.buf))
		if size > len(r.buf) && size <= r.max {
			grown := make([]byte, size+r.size)
			copy(grown, r.buf[:r.w])
			r.buf = grown
		}
	}
	n, err := r.from.Read(r.buf[r.w:])
	r.w += n
	switch {
	case n > 0:
		return nil // the error comes again
	case err == io.EOF && r.w > 0:
		return io.ErrUnexpectedEOF
	}
	return err
}

// Drop forgets what has been read.
func (r *Reader) Drop() { r.r, r.w = 0, 0 }

// AwaitHeader waits for the first eight bytes of what comes next.
func (r *Reader) AwaitHeader() ([]byte, error) {
	for {
		if b := r.Header(); b != nil {
			return b, nil
		}
		if err := r.Fill(); err != nil {
			return nil, err
		}
	}
}

// AwaitProtocol waits for a protocol header.
func (r *Reader) AwaitProtocol() (Protocol, error) {
	b, err := r.AwaitHeader()
	if err != nil {
		return 0, err
	}
	p, ok := ReadProtocol(b)
	if !ok {
		return 0, &ProtocolError{Got: string(b)}
	}
	r.r += HeaderSize
	return p, nil
}

// ErrProtocol is in the error for something else than a protocol header.
var ErrProtocol = fmt.Errorf("%w: no protocol header of AMQP 1.0", ErrMalformed)

// ProtocolError has the bytes that came in place of a protocol header.
type ProtocolError struct{ Got string }

func (e *ProtocolError) Error() string { return fmt.Sprintf("%v: %x", ErrProtocol, e.Got) }

// Unwrap returns ErrProtocol.
func (e *ProtocolError) Unwrap() error { return ErrProtocol }

// AwaitFrame waits for a frame, and decodes it. What is in it is the caller's.
func (r *Reader) AwaitFrame() (Frame, error) {
	for {
		b, err := r.Next()
		if err != nil {
			return Frame{}, err
		}
		if b != nil {
			return Decode(append([]byte(nil), b...))
		}
		if err := r.Fill(); err != nil {
			return Frame{}, err
		}
	}
}
