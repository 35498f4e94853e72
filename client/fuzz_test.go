package client

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"
)

// Frames that are no dispositions of ours leave as they are; those that are keep
// their outcome and name every delivery, and no other.
func FuzzSettled(f *testing.F) {
	f.Add([]byte{1, 2, 3, 5, 5, 0}, stateBytesAccepted, []byte{0xa1, 1, 'a'})
	f.Add([]byte{255, 0, 1}, stateBytesModified(true, "x-a", "1", "x-b", "2"), performative(frameBegin, 0, 20))
	f.Fuzz(func(t *testing.T, ids, state, other []byte) {
		n := valueSize(other)
		require.LessOrEqual(t, n, len(other))
		require.GreaterOrEqual(t, n, 0)
		var s settled
		var buffer []byte
		want := map[uint32]int{}
		for _, id := range ids {
			frame := dispositionOf(uint16(id%2), uint32(id), state)
			if _, ok := readDisposition(frame); !ok {
				require.Equal(t, string(buffer)+string(frame), string(s.put(buffer, frame)))
				return
			}
			buffer = s.put(buffer, frame)
			want[uint32(id)]++
		}
		got := map[uint32]int{}
		for b := buffer; len(b) > 0; {
			size := binary.BigEndian.Uint32(b)
			require.LessOrEqual(t, int(size), len(b))
			first, last := binary.BigEndian.Uint32(b[rangeFirst:]), binary.BigEndian.Uint32(b[rangeLast:])
			require.LessOrEqual(t, first, last)
			for id := first; id <= last; id++ {
				got[id]++
			}
			b = b[size:]
		}
		require.Equal(t, want, got)
		before := bytes.Clone(buffer)
		if _, ok := readDisposition(other); !ok {
			require.Equal(t, string(before)+string(other), string(s.put(buffer, other)))
		}
	})
}

// What a broker says when it refuses a connection is shown as text.
func FuzzRefusal(f *testing.F) {
	f.Add([]byte("\x00S\x18\xc0amqp:not-allowed\xa1\x10no such vhost\x00"))
	f.Fuzz(func(t *testing.T, last []byte) {
		text := (&handshake{last: last}).refusal()
		require.LessOrEqual(t, len(text), 200)
		require.True(t, utf8.ValidString(text))
		require.NotContains(t, text, "\n")
	})
}

func FuzzReadable(f *testing.F) {
	f.Add("failed: {shutdown,\n     delete}")
	f.Add(strings.Repeat("\xff", 600))
	f.Add(strings.Repeat("ä", 300))
	f.Fuzz(func(t *testing.T, s string) {
		text := readable(s)
		require.LessOrEqual(t, len(text), maxText)
		require.True(t, utf8.ValidString(text))
		require.NotContains(t, text, "\n")
		require.Equal(t, strings.TrimSpace(text), text)
	})
}

// A reply of the management's with anything in it answers the one request that it is
// for, once.
func FuzzManagementReply(f *testing.F) {
	f.Add("200", uint64(1), uint(0), "body")
	f.Add("-1", uint64(2), uint(1), "")
	f.Add(strings.Repeat("9", 100), uint64(1), uint(4), "\xff")
	f.Fuzz(func(t *testing.T, subject string, id uint64, kind uint, body string) {
		s := &managementSession{waiting: map[uint64]*waiting{}}
		w := &waiting{reply: make(chan managementReply, 1), release: func() {}}
		require.True(t, s.enter(1, w))
		m := &Message{Properties: &amqp.MessageProperties{Subject: &subject}}
		switch kind % 5 {
		case 0:
			m.Properties.CorrelationID = id
		case 1:
			m.Properties.CorrelationID = body
		case 2:
			m.Properties = nil
		case 3:
			m.Properties.CorrelationID, m.Properties.Subject = id, nil
		case 4:
			m.Properties.CorrelationID, m.Value = id, map[any]any{body: []any{id}}
		}
		s.dispatch(m)
		s.dispatch(m) // nobody waits any more
		select {
		case r := <-w.reply:
			require.EqualValues(t, 1, id)
			require.True(t, r.err != nil || r.status >= 100 && r.status <= 999)
		default:
			require.True(t, id != 1 || kind%5 == 1 || kind%5 == 2)
		}
	})
}
