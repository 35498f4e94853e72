package integration

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
)

// tapped passes connections on to a broker and shows the performatives that come
// back: their descriptor's code, and their fields, encoded.
func tapped(t *testing.T, target string, see func(code byte, fields []byte)) string {
	t.Helper()
	return listen(t, func(c net.Conn) {
		up, err := net.Dial("tcp", target)
		if err != nil {
			return
		}
		defer func() { _ = up.Close() }()
		go func() { _, _ = io.Copy(up, c); _ = up.Close() }()
		for {
			head := make([]byte, 8)
			if _, err := io.ReadFull(up, head); err != nil {
				return
			}
			frame := head
			if size := binary.BigEndian.Uint32(head); string(head[:4]) != "AMQP" && size > 8 && size < 64<<20 {
				frame = append(frame, make([]byte, size-8)...)
				if _, err := io.ReadFull(up, frame[8:]); err != nil {
					return
				}
				if code, fields, ok := performative(frame); ok {
					see(code, fields)
				}
			}
			if _, err := c.Write(frame); err != nil {
				return
			}
		}
	})
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
