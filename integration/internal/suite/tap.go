package suite

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
)

// Tapped passes connections on to a broker and shows the performatives that come
// back: their descriptor's code, and their fields, encoded.
func Tapped(t *testing.T, target string, see func(code byte, fields []byte)) string {
	t.Helper()
	return Between(t, target, nil, func(code byte, fields []byte) bool {
		see(code, fields)
		return true
	})
}

// Dropping passes connections on to a broker, except for the performatives of the client
// for which drop returns true.
func Dropping(t *testing.T, target string, drop func(code byte) bool) string {
	t.Helper()
	return Between(t, target, func(code byte, _ []byte) bool { return !drop(code) }, nil)
}

// Between passes connections on to a broker. fromClient and fromBroker say which
// performatives pass; all do where they are nil.
func Between(t *testing.T, target string, fromClient, fromBroker func(code byte, fields []byte) bool) string {
	t.Helper()
	return Listen(t, func(c net.Conn) {
		up, err := net.Dial("tcp", target)
		if err != nil {
			return
		}
		defer func() { _ = up.Close() }()
		go func() {
			passFrames(up, c, fromClient)
			_ = up.Close()
		}()
		passFrames(c, up, fromBroker)
	})
}

// passFrames copies frames until an end fails.
func passFrames(to io.Writer, from io.Reader, passes func(code byte, fields []byte) bool) {
	if passes == nil {
		_, _ = io.Copy(to, from)
		return
	}
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(from, head); err != nil {
			return
		}
		frame := head
		if size := binary.BigEndian.Uint32(head); string(head[:4]) != "AMQP" && size > 8 && size < 64<<20 {
			frame = append(frame, make([]byte, size-8)...)
			if _, err := io.ReadFull(from, frame[8:]); err != nil {
				return
			}
			if code, fields, ok := performative(frame); ok && !passes(code, fields) {
				continue
			}
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
	}
}

// performative reads the head of an AMQP frame: 00 53 code, and a list.
func performative(frame []byte) (code byte, fields []byte, ok bool) {
	if len(frame) < 14 || frame[5] != 0 || frame[8] != 0 || frame[9] != 0x53 {
		return 0, nil, false
	}
	switch body := frame[11:]; body[0] {
	case 0xc0:
		return frame[10], body[3:], true
	case 0xd0:
		return frame[10], body[9:], true
	}
	return 0, nil, false
}
