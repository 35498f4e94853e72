package client

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// listFrame is a performative with a list of fields, each encoded already.
func listFrame(channel uint16, code byte, payload []byte, fields ...[]byte) []byte {
	var list []byte
	for _, f := range fields {
		list = append(list, f...)
	}
	b := append(performative(code, channel, 0), 0xd0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(list)+4))
	b = binary.BigEndian.AppendUint32(b, uint32(len(fields)))
	b = append(append(b, list...), payload...)
	binary.BigEndian.PutUint32(b, uint32(len(b)))
	return b
}

// smallBroker answers on one connection what a client needs to have a session with
// one receiver on it, delivers n messages, and hands on each later frame.
func smallBroker(c net.Conn, n int, frames chan<- []byte) error {
	uintOf := func(n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{0x70}, n) }
	null := []byte{0x40}
	header := make([]byte, 8)
	if _, err := io.ReadFull(c, header); err != nil {
		return err
	}
	if _, err := c.Write(header); err != nil {
		return err
	}
	for {
		size := make([]byte, 4)
		if _, err := io.ReadFull(c, size); err != nil {
			return nil // the client is gone
		}
		f := append(size, make([]byte, binary.BigEndian.Uint32(size)-4)...)
		if _, err := io.ReadFull(c, f[4:]); err != nil {
			return err
		}
		code, channel := frameKind(f)
		var answer []byte
		switch code {
		case 0x10: // open
			answer = listFrame(0, code, nil, []byte{0xa1, 1, 'b'})
		case frameBegin:
			answer = listFrame(0, code, nil, []byte{0x60, byte(channel >> 8), byte(channel)}, uintOf(0), uintOf(5000), uintOf(5000))
		case 0x12: // attach: a list, its first field the link's name
			name := f[frameHead+9:]
			if name[0] != 0xa1 {
				return errors.New("the name isn't a short string")
			}
			name = name[:2+int(name[1])]
			source := []byte{0, 0x53, 0x28, 0x45}
			target := []byte{0, 0x53, 0x29, 0x45}
			answer = listFrame(0, code, nil, name, uintOf(0), []byte{0x42}, []byte{0x50, 0}, []byte{0x50, 0}, source, target, null, null, uintOf(0))
		case 0x13: // flow
			for id := range uint32(n) {
				answer = append(answer, listFrame(0, 0x14, []byte{0, 0x53, 0x75, 0xa0, 1, 'm'}, uintOf(0), uintOf(id), []byte{0xa0, 1, byte(id)}, uintOf(0))...)
			}
		default:
			frames <- f
			continue
		}
		if _, err := c.Write(answer); err != nil {
			return err
		}
	}
}

// What go-amqp writes for a settlement is what settled can read: with another version
// of it this could silently change, and nothing would be joined any more.
func TestSettlementsOfGoAMQPAreRead(t *testing.T) {
	ours, theirs := net.Pipe()
	frames := make(chan []byte, 100)
	ended := make(chan error, 1)
	const n = 4
	go func() { ended <- smallBroker(theirs, n, frames) }()
	conn, err := amqp.NewConn(t.Context(), ours, nil)
	require.NoError(t, err)
	s, err := conn.NewSession(t.Context(), nil)
	require.NoError(t, err)
	sess := &amqpSession{w: &wire{amqp: conn, turn: make(chan struct{}, 1)}, s: s}
	sess.w.ctx, sess.w.cancel = t.Context(), func() {}
	link, err := sess.receiver(t.Context(), "/queues/q", nil)
	require.NoError(t, err)
	require.NoError(t, link.issueCredit(n))
	var joined settled
	for i, d := range []disposition{
		{kind: accepted}, {kind: released}, {kind: modified, dead: true, annotations: amqp.Annotations{"x-opt-a": "first", "x-opt-b": int64(2)}}, {kind: modified, failed: true},
	} {
		m, err := link.receive(t.Context())
		require.NoError(t, err)
		require.NoError(t, link.settle(m, d))
		f := <-frames
		got, ok := readDisposition(f)
		require.True(t, ok, "%x", f)
		assert.Equal(t, uint32(i), got.id)
		next := dispositionOf(got.channel, got.id+1, got.state)
		before := len(joined.put(nil, f))
		joined.left()
		buffer := joined.put(joined.put(nil, f), next)
		assert.Len(t, buffer, before, "two neighbours take as much as one")
		joined.left()
	}
	_ = conn.Close()
	_ = theirs.Close()
	require.NoError(t, <-ended)
}
