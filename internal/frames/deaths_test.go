package frames

import (
	"bytes"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// died is a message as RabbitMQ writes one that has died once in each of queues, the last
// death first.
func died(t testing.TB, queues ...string) []byte {
	history := Array{}
	for _, q := range queues {
		history.Elements = append(history.Elements, Map{
			{Key: Symbol("queue"), Value: q},
			{Key: Symbol("reason"), Value: Symbol("rejected")},
			{Key: Symbol("count"), Value: uint64(3)},
			{Key: Symbol("exchange"), Value: "shop"},
			{Key: Symbol("routing-keys"), Value: Array{Elements: []any{"order.placed", "order.seen"}}},
		})
	}
	m := &Message{
		Header:              &MessageHeader{},
		DeliveryAnnotations: Map{{Key: Symbol("x-opt-deaths"), Value: uint64(1)}},
		Annotations: Map{
			{Key: Symbol("x-exchange"), Value: "errors"},
			{Key: Symbol("x-opt-deaths"), Value: history},
			{Key: Symbol("x-routing-key"), Value: "order.placed"},
		},
		Body: section(0x75, 0xa0, 1, 'b'),
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	return b
}

func TestADeathHistoryIsFoldedWhereASessionAsksForIt(t *testing.T) {
	long := strings.Repeat("q", 255)
	whole := died(t, "orders", "delay", long)
	stream := func(channel byte) (frame []byte) {
		b := transferOf(0, false, whole)
		b[7] = channel
		return b
	}
	s := &sessions{tell: func(bool) {}}
	s.begin(1)
	s.latest.FoldDeaths()
	s.begin(2)
	r := newReader(bytes.NewReader(append(stream(1), stream(2)...)), s)
	var got []byte
	for len(got) < 2*len(stream(1)) {
		b := make([]byte, 1<<16)
		n, err := r.Read(b)
		require.NoError(t, err)
		got = append(got, b[:n]...)
	}
	half := len(got) / 2

	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(payloads(t, got[:half])))
	folded, ok := m.Annotations[FoldedDeaths].([]byte)
	require.True(t, ok, "%v", m.Annotations)
	assert.NotContains(t, m.Annotations, "x-opt-deaths")
	want := []Death{{"orders", "rejected", "shop", "order.placed"}, {"delay", "rejected", "shop", "order.placed"}, {long, "rejected", "shop", "order.placed"}}
	assert.Equal(t, want, Deaths(folded))
	assert.Equal(t, want, Deaths(folded), "it is left as it is")
	assert.Equal(t, "order.placed", m.Annotations["x-routing-key"])
	assert.Equal(t, "b", string(m.GetData()))
	assert.Equal(t, uint64(1), m.DeliveryAnnotations["x-opt-deaths"])

	m = amqp.Message{}
	require.NoError(t, m.UnmarshalBinary(payloads(t, got[half:])))
	assert.IsType(t, []map[any]any{}, m.Annotations["x-opt-deaths"], "the other session didn't ask")
}

func TestAPublisherCantMakeADeathHistory(t *testing.T) {
	b := died(t, "orders")
	i := bytes.Index(b, []byte("x-exchange")) // behind the delivery annotations
	i += bytes.Index(b[i:], []byte("x-opt-deaths")) + len("x-opt-deaths")
	require.Equal(t, byte(codeArray8), b[i])
	b[i] = codeBinary8
	foldDeaths(b)
	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(b))
	assert.NotContains(t, m.Annotations, FoldedDeaths)
}

// RabbitMQ writes a short history as a short array.
func TestAShortDeathHistory(t *testing.T) {
	one := Deaths([]byte{1, codeMap8, 12, 2, codeSymbol8, 5, 'q', 'u', 'e', 'u', 'e', codeString8, 1, 'q', 'x'})
	assert.Equal(t, []Death{{Queue: "q"}}, one[:1])
	b := append(section(0x72, codeMap8, 31, 2, codeSymbol8, 12), "x-opt-deaths"...)
	b = append(b, codeArray8, 14, 1, codeMap8, 11, 2, codeSymbol8, 5, 'q', 'u', 'e', 'u', 'e', codeString8, 1, 'q')
	require.True(t, Readable(b))
	foldDeaths(b)
	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(b))
	assert.Equal(t, []Death{{Queue: "q"}}, Deaths(m.Annotations[FoldedDeaths].([]byte)))
	for _, none := range [][]byte{nil, {0}, {1}, {0, 0, 0, 0, codeMap32}, {1, codeUint0}, {2, codeMap8, 200, 1}} {
		assert.Empty(t, Deaths(none), "%x", none)
	}
}

func FuzzDeaths(f *testing.F) {
	f.Add(died(f, "orders", "delay"), false)
	f.Add([]byte{1, codeMap8, 11, 2, codeSymbol8, 5, 'q', 'u', 'e', 'u', 'e', codeString8, 1, 'q'}, true)
	f.Add([]byte{0, 0, 0, 1, codeMap32, 0, 0, 0, 4, 0, 0, 0, 0}, true)
	f.Fuzz(func(t *testing.T, b []byte, history bool) {
		if history {
			for _, d := range Deaths(b) {
				assert.LessOrEqual(t, len(d.Queue)+len(d.Reason)+len(d.Exchange)+len(d.RoutingKey), len(b))
			}
			return
		}
		readable := Readable(b)
		foldDeaths(b)
		if readable && !Readable(b) {
			t.Fatalf("%x can't be read any more", b)
		}
	})
}
