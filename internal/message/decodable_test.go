package message

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/frames"
)

// decodes says whether go-amqp decodes a message that was looked at before.
func decodes(b []byte) bool {
	var m amqp.Message
	return m.UnmarshalBinary(b) == nil
}

// survives decodes what decodable says is safe to, before and after frames has read and
// written it.
func survives(t *testing.T, b []byte) {
	t.Helper()
	var theirs, again amqp.Message
	if decodable(b) != nil || theirs.UnmarshalBinary(b) != nil {
		return
	}
	if m, err := frames.DecodeMessage(b); err == nil {
		written, err := m.Append(nil)
		require.NoError(t, err)
		require.NoError(t, again.UnmarshalBinary(written))
		require.Equal(t, theirs.Data, again.Data)
	}
}

// nestedLists is a list in a list in a list...
func nestedLists(depth int) []byte {
	b := []byte{0x40}
	for range depth {
		head := []byte{0xd0}
		head = binary.BigEndian.AppendUint32(head, uint32(len(b)+4))
		b = append(binary.BigEndian.AppendUint32(head, 1), b...)
	}
	return b
}

func TestWhatGoAMQPWritesIsDecodable(t *testing.T) {
	t.Parallel()
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
		assert.NoError(t, decodable(payload))
	}
}

// As RabbitMQ sends x-opt-deaths: an array of maps.
func TestArraysOfMapsAreDecodable(t *testing.T) {
	t.Parallel()
	element := []byte{0, 0, 0, 9, 0, 0, 0, 2, 0xa1, 1, 'k', 0x52, 7} // a map's 32 bits of size and count, behind the constructor
	array := []byte{0xf0, 0, 0, 0, byte(5 + 2*len(element)), 0, 0, 0, 2, 0xd1}
	array = append(append(array, element...), element...)
	annotations := append([]byte{0xc1, byte(1 + 5 + len(array)), 2, 0xa3, 3, 'x', '-', 'd'}, array...)
	payload := append(section(0x72, annotations...), section(0x75, 0xa0, 1, 'b')...)
	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(payload))
	assert.NoError(t, decodable(payload))
}

func TestWhatIsNotDecodable(t *testing.T) {
	t.Parallel()
	long := bytes.Repeat([]byte{'p'}, 200)
	head := section(0x75, append([]byte{0xa0, 200}, long...)...)
	for name, payload := range map[string][]byte{
		"char":                     append(head, section(0x77, 0x73, 0, 1, 0xf6, 0)...),
		"decimal32":                append(head, section(0x77, 0x74, 0, 1, 0xf6, 0)...),
		"decimal64 in a list":      append(head, section(0x77, 0xc0, 10, 1, 0x84, 0, 0, 0, 0, 0, 0, 0, 0)...),
		"decimal128":               append(head, section(0x77, append([]byte{0x94}, make([]byte, 16)...)...)...),
		"unknown code":             append(head, section(0x77, 0x3f)...),
		"array of chars":           append(head, section(0x77, 0xe0, 6, 1, 0x73, 0, 0, 0, 1)...),
		"deep lists":               section(0x77, nestedLists(5000)...),
		"deep descriptors":         append(section(0x77), make([]byte, 60_000)...),
		"deep described values":    append(section(0x77, bytes.Repeat([]byte{0, 0x53, 1}, 15_000)...), 0x40),
		"deep arrays of arrays":    section(0x77, append([]byte{0xf0, 0, 0, 255, 0, 0, 0, 0, 1}, bytes.Repeat([]byte{0xf0, 0, 0, 250, 0, 0, 0, 0, 1}, 2000)...)...),
		"a count above its size":   append(head, section(0x77, 0xd0, 0, 0, 0, 8, 0xff, 0xff, 0xff, 0xff, 0x40)...),
		"an odd map":               append(head, section(0x77, 0xc1, 3, 1, 0xa1, 0)...),
		"cut inside a value":       append(head, section(0x77, 0xb0, 0, 1, 0, 0, 'a')...),
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
		assert.Error(t, decodable(payload), name)
	}
}

func FuzzDecodable(f *testing.F) {
	f.Add(died(f, "orders", "delay"))
	f.Add([]byte{0, 0x53, 0x77, 0xc1, 5, 2, 0, 0x40, 0x40, 0x40})
	f.Add([]byte{0, 0x53, 0x74, 0xd1, 0, 0, 0, 8, 0, 0, 0, 2, 0xa1, 1, 'a', 0x40})
	f.Add([]byte{0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x77, 0xf0, 0, 0, 0, 6, 0, 0, 0, 1, 0x52, 1})
	f.Fuzz(survives)
}

func TestWhatIsDecodableDoesNotPanic(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	whole := died(t, "orders", "delay")
	n := 100_000
	if explore.UnderRace { // there is one goroutine
		n = 5_000
	}
	for range n {
		b := slices.Clone(whole)
		for range 1 + r.IntN(3) {
			switch i := r.IntN(len(b)); r.IntN(4) {
			case 0:
				b[i] = byte(r.Uint32())
			case 1:
				b[i] = []byte{0, 0x40, 0x45, 0x53, 0x73, 0x74, 0xa0, 0xa1, 0xc0, 0xc1, 0xd0, 0xd1, 0xe0, 0xf0}[r.IntN(14)]
			case 2:
				b = slices.Delete(b, i, min(len(b), i+1+r.IntN(4)))
			case 3:
				b = slices.Insert(b, i, byte(r.Uint32()))
			}
			if len(b) == 0 {
				break
			}
		}
		survives(t, b)
	}
}

func TestDecodableBoundsDepth(t *testing.T) {
	t.Parallel()
	lists := func(n int) []byte {
		b := []byte{frames.CodeNull}
		for range n {
			b = append(binary.BigEndian.AppendUint32([]byte{frames.CodeList32}, uint32(4+len(b))), append([]byte{0, 0, 0, 1}, b...)...)
		}
		return append([]byte{0, frames.CodeSmallUlong, 0x77}, b...)
	}
	require.NoError(t, decodable(lists(frames.MaxDepth-1)))
	require.True(t, decodes(lists(frames.MaxDepth-1)))
	require.ErrorContains(t, decodable(lists(frames.MaxDepth)), "nested more than")
}

// died is a message as RabbitMQ 4.0 writes one that has died once in each of queues, the
// last death first. 4.3 writes the annotations the other way round.
func died(t testing.TB, queues ...string) []byte {
	return diedWith(t, nil, queues...)
}

func diedWith(t testing.TB, own frames.Map, queues ...string) []byte {
	history := frames.Array{}
	for _, q := range queues {
		history.Elements = append(history.Elements, frames.Map{
			{Key: frames.Symbol("queue"), Value: q},
			{Key: frames.Symbol("reason"), Value: frames.Symbol("rejected")},
			{Key: frames.Symbol("count"), Value: uint64(3)},
			{Key: frames.Symbol("exchange"), Value: "shop"},
			{Key: frames.Symbol("routing-keys"), Value: frames.Array{Elements: []any{"order.placed", "order.seen"}}},
		})
	}
	m := &frames.Message{
		Header:              &frames.MessageHeader{},
		DeliveryAnnotations: frames.Map{{Key: frames.Symbol("x-opt-deaths"), Value: uint64(1)}},
		Annotations: append(slices.Clone(own), frames.Map{
			{Key: frames.Symbol("x-exchange"), Value: "errors"},
			{Key: frames.Symbol("x-routing-key"), Value: "order.placed"},
			{Key: frames.Symbol("x-opt-deaths"), Value: history},
			{Key: frames.Symbol("x-first-death-exchange"), Value: "shop"},
			{Key: frames.Symbol("x-first-death-queue"), Value: queues[len(queues)-1]},
			{Key: frames.Symbol("x-first-death-reason"), Value: "rejected"},
			{Key: frames.Symbol("x-last-death-exchange"), Value: "shop"},
			{Key: frames.Symbol("x-last-death-queue"), Value: queues[0]},
			{Key: frames.Symbol("x-last-death-reason"), Value: "rejected"},
		}...),
		Body: section(0x75, 0xa0, 1, 'b'),
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	return b
}
