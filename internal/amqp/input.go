package amqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/hopback/hopback/internal/frames"
)

// input is what was read from the network and not looked at yet.
type input struct {
	net  net.Conn
	buf  []byte
	r, w int // what is unread is buf[r:w]
	max  int // bytes of a frame
}

var errProtocol = errors.New("no protocol header of AMQP 1.0")

// readSize is how much is read at once.
const readSize = 64 << 10

func newInput(c net.Conn, maxFrame int) *input {
	return &input{net: c, buf: make([]byte, readSize), max: maxFrame}
}

// frame returns the next frame if all of it is there, and nil if not. It is valid until the
// next fill.
func (in *input) frame() ([]byte, error) {
	b := in.buf[in.r:in.w]
	if len(b) < frames.HeaderSize {
		return nil, nil
	}
	h, ok := frames.ReadHeader(b)
	switch {
	case !ok:
		return nil, fmt.Errorf("a frame header of %x", b[:frames.HeaderSize])
	case uint64(h.Size) > uint64(in.max):
		return nil, fmt.Errorf("a frame of %d bytes, above the maximum of %d", h.Size, in.max)
	case uint64(h.Size) > uint64(len(b)):
		return nil, nil
	}
	in.r += int(h.Size)
	return b[:h.Size:h.Size], nil
}

// protocol returns the next protocol header if it is there.
func (in *input) protocol() (p frames.Protocol, there bool, err error) {
	b := in.buf[in.r:in.w]
	if len(b) < frames.HeaderSize {
		return 0, false, nil
	}
	p, ok := frames.ReadProtocol(b)
	if !ok {
		return 0, false, fmt.Errorf("%w: %x", errProtocol, b[:frames.HeaderSize])
	}
	in.r += frames.HeaderSize
	return p, true, nil
}

// fill reads once. It makes room for the frame that has begun.
func (in *input) fill() error {
	if in.r > 0 {
		in.w = copy(in.buf, in.buf[in.r:in.w])
		in.r = 0
	}
	if in.w >= frames.HeaderSize { // of a frame whose size frame has checked
		size := int(binary.BigEndian.Uint32(in.buf))
		if size > len(in.buf) && size <= in.max {
			grown := make([]byte, size+readSize)
			copy(grown, in.buf[:in.w])
			in.buf = grown
		}
	}
	n, err := in.net.Read(in.buf[in.w:])
	in.w += n
	switch {
	case n > 0:
		return nil // the error comes again
	case err == io.EOF && in.w > 0:
		return io.ErrUnexpectedEOF
	case err == nil:
		return nil
	}
	return err
}
