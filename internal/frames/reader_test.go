package frames

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// transferOf is a frame with a part of a message.
func transferOf(handle byte, more bool, payload []byte) []byte {
	last := byte(0x42)
	if more {
		last = 0x41
	}
	list := []byte{0x52, handle, 0x52, 7, 0xa0, 2, 0, 7, 0x43, 0x42, last}
	b := append(performative(codeTransfer, 1, 0), 0xc0, byte(len(list)+1), 6)
	b = append(append(b, list...), payload...)
	binary.BigEndian.PutUint32(b, uint32(len(b)))
	return b
}

// passed is what go-amqp gets of a stream that comes in pieces.
func passed(t testing.TB, stream []byte, piece int) []byte {
	t.Helper()
	got, err := io.ReadAll(newReader(&recorder{reads: bytes.NewReader(stream), piece: piece}, &sessions{tell: func(bool) {}}))
	require.NoError(t, err)
	require.Len(t, got, len(stream))
	return got
}

// payloads puts a delivery's parts together again.
func payloads(t testing.TB, stream []byte) (all []byte) {
	t.Helper()
	for len(stream) > 0 {
		size := binary.BigEndian.Uint32(stream)
		f := itemsOf(stream[frameHead:size])
		all = append(all, stream[frameHead+f.size:size]...)
		stream = stream[size:]
	}
	return all
}

// section is one section of a message: 00 53 code, and a value.
func section(code byte, value ...byte) []byte { return append([]byte{0, 0x53, code}, value...) }

// nested is a list in a list in a list...
func nested(depth int) []byte {
	b := []byte{0x40}
	for range depth {
		head := []byte{0xd0}
		head = binary.BigEndian.AppendUint32(head, uint32(len(b)+4))
		b = append(binary.BigEndian.AppendUint32(head, 1), b...)
	}
	return b
}

func TestMessagesThatCanBeDecodedPassUnchanged(t *testing.T) {
	now := time.Now()
	for _, m := range []*amqp.Message{
		amqp.NewMessage([]byte("body")),
		amqp.NewMessage(nil),
		amqp.NewMessage(bytes.Repeat([]byte{0x73}, 100_000)),
		{Value: amqp.Null{}},
		{Value: []any{"a", int64(1), 1.5, float32(2), true, now, amqp.UUID{1}, []byte("b"), uint8(1), int8(1), uint16(2), int16(2), []any{}, map[string]any{"k": []any{[]any{}}}}},
		{Sequence: [][]any{{"a", []string{"b", "c"}, []int32{1, 300}, []bool{true, false}, []uint64{}, [][]byte{{1}, nil}}}},
		{Data: [][]byte{{1}, {}, make([]byte, 300)}, Footer: amqp.Annotations{"x-f": "f", int64(5): []any{map[any]any{int64(1): "a", true: "b"}}}},
		{
			Header: &amqp.MessageHeader{Durable: true, Priority: 4, DeliveryCount: 3, TTL: time.Second}, DeliveryAnnotations: amqp.Annotations{"x-d": 1}, Annotations: amqp.Annotations{"x-a": map[string]any{"m": []any{"l"}}},
			Properties: &amqp.MessageProperties{MessageID: amqp.UUID{2}, CorrelationID: uint64(7), CreationTime: &now}, ApplicationProperties: map[string]any{"k": "v", "n": nil}, Value: "v",
		},
	} {
		payload, err := m.MarshalBinary()
		require.NoError(t, err)
		var s scan
		s.feed(payload)
		assert.False(t, s.bad)
		assert.True(t, s.whole())
		half := len(payload) / 2
		stream := append(append(append([]byte("AMQP\x00\x01\x00\x00"), transferOf(0, false, payload)...), transferOf(1, true, payload[:half])...), transferOf(1, false, payload[half:])...)
		for _, piece := range []int{1, 7, 1 << 20} {
			assert.True(t, bytes.Equal(stream, passed(t, stream, piece)))
		}
	}
}

// As RabbitMQ sends x-opt-deaths: an array of maps.
func TestArraysOfMapsPassUnchanged(t *testing.T) {
	element := []byte{0, 0, 0, 9, 0, 0, 0, 2, 0xa1, 1, 'k', 0x52, 7} // a map's 32 bits of size and count, behind the constructor
	array := []byte{0xf0, 0, 0, 0, byte(5 + 2*len(element)), 0, 0, 0, 2, 0xd1}
	array = append(append(array, element...), element...)
	annotations := append([]byte{0xc1, byte(1 + 5 + len(array)), 2, 0xa3, 3, 'x', '-', 'd'}, array...)
	payload := append(section(0x72, annotations...), section(0x75, 0xa0, 1, 'b')...)
	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(payload))
	stream := transferOf(0, false, payload)
	assert.Equal(t, stream, passed(t, stream, 100))
}

// What go-amqp can't decode comes as bytes with a mark: none of it ends the link, and
// the stack isn't used up.
func TestMessagesThatCannotBeDecodedAreReplaced(t *testing.T) {
	long := bytes.Repeat([]byte{'p'}, 200)
	head := section(0x75, append([]byte{0xa0, 200}, long...)...)
	for name, payload := range map[string][]byte{
		"char":                     append(head, section(0x77, 0x73, 0, 1, 0xf6, 0)...),
		"decimal32":                append(head, section(0x77, 0x74, 0, 1, 0xf6, 0)...),
		"decimal64 in a list":      append(head, section(0x77, 0xc0, 10, 1, 0x84, 0, 0, 0, 0, 0, 0, 0, 0)...),
		"decimal128":               append(head, section(0x77, append([]byte{0x94}, make([]byte, 16)...)...)...),
		"unknown code":             append(head, section(0x77, 0x3f)...),
		"array of chars":           append(head, section(0x77, 0xe0, 6, 1, 0x73, 0, 0, 0, 1)...),
		"deep lists":               section(0x77, nested(5000)...),
		"deep descriptors":         append(section(0x77), make([]byte, 60_000)...),
		"deep described values":    append(section(0x77, bytes.Repeat([]byte{0, 0x53, 1}, 15_000)...), 0x40),
		"deep arrays of arrays":    section(0x77, append([]byte{0xf0, 0, 0, 255, 0, 0, 0, 0, 1}, bytes.Repeat([]byte{0xf0, 0, 0, 250, 0, 0, 0, 0, 1}, 2000)...)...),
		"a count above its size":   append(head, section(0x77, 0xd0, 0, 0, 0, 8, 0xff, 0xff, 0xff, 0xff, 0x40)...),
		"an odd map":               append(head, section(0x77, 0xc1, 3, 1, 0xa1, 0)...),
		"cut amid a value":         append(head, section(0x77, 0xb0, 0, 1, 0, 0, 'a')...),
		"nothing but a descriptor": append(head, 0, 0x53, 0x77),
		"a binary for a key":       append(head, section(0x78, 0xc1, 7, 2, 0xa0, 1, 'k', 0xa1, 1, 'v')...),
		"a list for a key":         append(head, section(0x78, 0xc1, 5, 2, 0x45, 0xa1, 1, 'v')...),
		"an array for a key":       append(head, section(0x78, 0xc1, 8, 2, 0xe0, 2, 1, 0x56, 0xa1, 1, 'v')...),
		"a map for a key":          append(head, section(0x78, 0xc1, 7, 2, 0xc1, 1, 0, 0xa1, 1, 'v')...),
		"a described key":          append(head, section(0x77, 0xc1, 9, 2, 0, 0xa3, 1, 'd', 0xa0, 0, 0x53, 1)...),
		"a binary key within":      append(head, section(0x77, 0xc0, 11, 1, 0xc1, 8, 2, 0xa0, 1, 'k', 0xa1, 1, 'v', 'x')...),
		"a key of a property":      append(section(0x74, 0xc1, 5, 2, 0x52, 1, 0x52, 2), head...),
		"the same, written long":   append([]byte{0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x74, 0xc1, 5, 2, 0x52, 1, 0x52, 2}, head...),
	} {
		t.Run(name, func(t *testing.T) {
			good, err := amqp.NewMessage([]byte("good")).MarshalBinary()
			require.NoError(t, err)
			for _, piece := range []int{100, 1 << 20} {
				stream := append(transferOf(0, false, payload), transferOf(0, false, good)...)
				got := passed(t, stream, piece)
				n := len(stream) - len(transferOf(0, false, good))
				var m amqp.Message
				require.NoError(t, m.UnmarshalBinary(payloads(t, got[:n])))
				assert.True(t, Undecodable(m.Data))
				assert.Equal(t, stream[n:], got[n:], "the next one is untouched")
			}
			if half := len(payload) / 2; half > 300 && len(payload)-half > 300 {
				// In two parts, with another link's delivery between them.
				stream := append(transferOf(0, true, payload[:half]), transferOf(9, false, good)...)
				between := len(stream) - len(transferOf(9, false, good))
				stream = append(stream, transferOf(0, false, payload[half:])...)
				got := passed(t, stream, 1000)
				assert.Equal(t, transferOf(9, false, good), got[between:between+len(transferOf(9, false, good))])
				var m amqp.Message
				require.NoError(t, m.UnmarshalBinary(payloads(t, append(bytes.Clone(got[:between]), got[between+len(transferOf(9, false, good)):]...))))
				assert.True(t, Undecodable(m.Data))
			}
		})
	}
}

// What shows up behind the first frame can't be taken back, but goes no deeper.
func TestDeepNestingInALaterFrameIsSpoilt(t *testing.T) {
	good := section(0x75, append([]byte{0xa0, 200}, bytes.Repeat([]byte{'p'}, 200)...)...)
	deep := append(section(0x77), make([]byte, 60_000)...)
	stream := append(transferOf(0, true, good), transferOf(0, true, deep)...)
	stream = append(stream, transferOf(0, false, make([]byte, 60_000))...)
	all := payloads(t, passed(t, stream, 1<<20))
	var m amqp.Message
	began := time.Now()
	require.Error(t, m.UnmarshalBinary(all))
	assert.Less(t, time.Since(began), time.Second)
}

// A disposition of all delivery-ids would keep go-amqp busy for ever.
func TestDispositionWithoutAnEndIsRefused(t *testing.T) {
	long := func(first, last uint32) []byte {
		list := binary.BigEndian.AppendUint32([]byte{0x41, 0x70}, first)
		list = append(binary.BigEndian.AppendUint32(append(list, 0x70), last), 0x41)
		b := append(performative(codeDisposition, 1, 0), 0xc0, byte(len(list)+1), 4)
		b = append(b, list...)
		binary.BigEndian.PutUint32(b, uint32(len(b)))
		return b
	}
	for _, ok := range [][2]uint32{{0, 0}, {5, 400}, {1 << 31, 1<<31 + 100}} {
		assert.Equal(t, long(ok[0], ok[1]), passed(t, long(ok[0], ok[1]), 64))
	}
	for _, bad := range [][2]uint32{{0, 1<<32 - 1}, {0, 1 << 30}, {7, 6}} {
		assert.NotEqual(t, long(bad[0], bad[1]), passed(t, long(bad[0], bad[1]), 64))
	}
}

// FuzzReader: whatever a message holds, what go-amqp is given either is what came,
// and no deeper than MaxDepth, or is marked.
func FuzzReader(f *testing.F) {
	m := amqp.NewMessage([]byte("body"))
	m.ApplicationProperties = map[string]any{"k": []any{"v"}}
	whole, _ := m.MarshalBinary()
	f.Add(whole, 10, 3)
	f.Add(section(0x77, nested(600)...), 1, 100)
	f.Add(append(section(0x77), make([]byte, 2000)...), 500, 64)
	f.Add(section(0x77, 0xe0, 6, 1, 0x73, 0, 0, 0, 1), 5, 7)
	f.Add(section(0x78, 0xc1, 7, 2, 0xa0, 1, 'k', 0xa1, 1, 'v'), 5, 7)
	f.Add(section(0x77, 0xc1, 9, 2, 0, 0xa3, 1, 'd', 0xa0, 0, 0x53, 1), 5, 7)
	f.Fuzz(func(t *testing.T, payload []byte, cut, piece int) {
		piece = 1 + max(piece, -piece, 0)%4096
		stream := transferOf(0, false, payload)
		got := passed(t, stream, piece)
		if !bytes.Equal(stream, got) {
			var m amqp.Message
			if len(payload) < dataHead+markLen {
				require.Error(t, m.UnmarshalBinary(payloads(t, got)))
				return
			}
			require.NoError(t, m.UnmarshalBinary(payloads(t, got)))
			require.True(t, Undecodable(m.Data))
		} else {
			var m amqp.Message
			_ = m.UnmarshalBinary(payload) // mustn't panic, nor take long
		}
		cut = max(cut, -cut, 0) % (len(payload) + 1)
		_ = passed(t, append(transferOf(0, true, payload[:cut]), transferOf(0, false, payload[cut:])...), piece)
		_ = passed(t, payload, piece)
	})
}
