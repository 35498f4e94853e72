package frames

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// died is a message as RabbitMQ 4.0 writes one that has died once in each of queues, the
// last death first. 4.3 writes the annotations the other way round.
func died(t testing.TB, queues ...string) []byte {
	return diedWith(t, nil, queues...)
}

func diedWith(t testing.TB, own Map, queues ...string) []byte {
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
		Annotations: append(slices.Clone(own), Map{
			{Key: Symbol("x-exchange"), Value: "errors"},
			{Key: Symbol("x-routing-key"), Value: "order.placed"},
			{Key: Symbol("x-opt-deaths"), Value: history},
			{Key: Symbol("x-first-death-exchange"), Value: "shop"},
			{Key: Symbol("x-first-death-queue"), Value: queues[len(queues)-1]},
			{Key: Symbol("x-first-death-reason"), Value: "rejected"},
			{Key: Symbol("x-last-death-exchange"), Value: "shop"},
			{Key: Symbol("x-last-death-queue"), Value: queues[0]},
			{Key: Symbol("x-last-death-reason"), Value: "rejected"},
		}...),
		Body: section(0x75, 0xa0, 1, 'b'),
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	return b
}

// decoded is what go-amqp makes of a message.
func decoded(t testing.TB, b []byte) *amqp.Message {
	t.Helper()
	var m amqp.Message
	require.NoError(t, m.UnmarshalBinary(b))
	return &m
}

// foldedIn is what a message's annotations were folded into; "" if they weren't.
func foldedIn(m *amqp.Message) string {
	s, _ := m.Annotations[FoldedDeaths].(string)
	return s
}

// unfolded adds to a message's annotations what was folded.
func unfolded(t testing.TB, m *amqp.Message) amqp.Annotations {
	all := decoded(t, Unfolded(foldedIn(m))).Annotations
	for k, v := range m.Annotations {
		if k != FoldedDeaths {
			all[k] = v
		}
	}
	return all
}

func TestADeathHistoryIsFolded(t *testing.T) {
	long := strings.Repeat("q", 255)
	whole := died(t, "orders", "delay", long)
	got := slices.Clone(whole)
	Fold(got)

	m := decoded(t, got)
	folded := foldedIn(m)
	assert.Len(t, m.Annotations, 1)
	want := []Death{{"orders", "rejected", "shop", "order.placed"}, {"delay", "rejected", "shop", "order.placed"}, {long, "rejected", "shop", "order.placed"}}
	assert.Equal(t, want, Deaths(nil, folded))
	key, ok := FoldedText(folded, "x-routing-key")
	assert.True(t, ok)
	assert.Equal(t, "order.placed", key)
	for _, none := range []string{"x-opt-deaths", "x-other", ""} {
		_, ok = FoldedText(folded, none)
		assert.False(t, ok)
	}
	assert.Equal(t, "b", string(m.GetData()))
	assert.Equal(t, uint64(1), m.DeliveryAnnotations["x-opt-deaths"])
	assert.Equal(t, decoded(t, whole).Annotations, unfolded(t, m))
}

// What is folded can be unfolded, whatever is around it, and in any order.
func TestFoldingLosesNothing(t *testing.T) {
	own := Map{{Key: Symbol("x-reason"), Value: "fatal"}, {Key: Symbol("x-opt-n"), Value: int64(-7)}, {Key: Symbol("x-list"), Value: List{"x-exchange", "y"}}}
	for name, b := range map[string][]byte{
		"as 4.0 writes it":   died(t, "orders", "delay"),
		"short":              died(t, "q"),
		"one":                died(t, "orders"),
		"others before":      diedWith(t, own, "orders"),
		"others in between":  shuffled(t, diedWith(t, own, "orders", "delay"), 5),
		"in another order":   shuffled(t, diedWith(t, own, strings.Repeat("q", 250)), 7),
		"in a third order":   shuffled(t, diedWith(t, own, "orders"), 11),
		"no deaths":          without(t, diedWith(t, own, "orders"), "deaths", "x-first-", "x-last-"),
		"no short forms":     without(t, died(t, "orders"), "x-first-", "x-last-"),
		"a list for a death": diedWith(t, Map{{Key: Symbol("x-other"), Value: "1"}}, "orders"),
	} {
		t.Run(name, func(t *testing.T) {
			before := decoded(t, b)
			got := slices.Clone(b)
			Fold(got)
			require.NoError(t, Decodable(got))
			m := decoded(t, got)
			require.NotEmpty(t, foldedIn(m))
			for k := range before.Annotations {
				_, there := m.Annotations[k]
				assert.NotEqual(t, Folds(k.(string)), there, k)
			}
			assert.Equal(t, before.Annotations, unfolded(t, m))
			m.Annotations = before.Annotations
			assert.Equal(t, before, m)
		})
	}
}

// shuffled writes the annotations in another order.
func shuffled(t testing.TB, b []byte, step int) []byte {
	m, err := DecodeMessage(b)
	require.NoError(t, err)
	var other Map
	for i := range m.Annotations {
		other = append(other, m.Annotations[(i*step+1)%len(m.Annotations)])
	}
	require.Len(t, other, len(m.Annotations))
	m.Annotations = other
	b, err = m.Append(nil)
	require.NoError(t, err)
	return b
}

// without leaves annotations out whose keys contain one of some texts.
func without(t testing.TB, b []byte, texts ...string) []byte {
	m, err := DecodeMessage(b)
	require.NoError(t, err)
	m.Annotations = slices.DeleteFunc(m.Annotations, func(e Entry) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(string(e.Key.(Symbol)), text) })
	})
	b, err = m.Append(nil)
	require.NoError(t, err)
	return b
}

// What isn't as RabbitMQ writes it stays.
func TestWhatIsNotFolded(t *testing.T) {
	twice := diedWith(t, Map{{Key: Symbol("x-last-death-queue"), Value: "forged"}}, "orders")
	long := died(t, slices.Repeat([]string{strings.Repeat("q", 200)}, 40)...)
	cut := died(t, "orders")
	cut = cut[:bytes.Index(cut, []byte("x-last"))]
	miscounted := died(t, "orders")
	at := bytes.Index(miscounted, []byte{0x00, 0x53, sectionAnnotations, codeMap32}) + 8
	binary.BigEndian.PutUint32(miscounted[at:], 16)
	alone := without(t, died(t, "orders"), "x-first", "x-last", "x-ex", "x-ro")
	none := without(t, died(t, "orders"), "x-")
	for name, b := range map[string][]byte{"twice": twice, "too long": long, "not all there": cut, "miscounted": miscounted, "no room": alone, "none": none, "nothing": nil} {
		got := slices.Clone(b)
		Fold(got)
		assert.Equal(t, b, got, name)
	}
}

func TestAPublisherCantMakeADeathHistory(t *testing.T) {
	for _, claimed := range []any{"forged", []byte("forged"), Map{}, uint64(1), List{"forged"}, Array{Elements: []any{"forged"}}} {
		b := diedWith(t, Map{{Key: Symbol("x-opt-deaths"), Value: claimed}, {Key: Symbol("x-opt-deaths-too"), Value: claimed}}, "orders")
		// Only the claim is left.
		m, err := DecodeMessage(b)
		require.NoError(t, err)
		m.Annotations = slices.Delete(m.Annotations, 4, 5)
		b, err = m.Append(nil)
		require.NoError(t, err)
		Fold(b)
		got := decoded(t, b)
		assert.NotEmpty(t, foldedIn(got))
		assert.Contains(t, got.Annotations, "x-opt-deaths", "it stays as it is")
		assert.Empty(t, Deaths(nil, foldedIn(got)))
	}
}

// RabbitMQ writes a short history as a short array.
func TestAShortDeathHistory(t *testing.T) {
	short := string([]byte{1, codeArray8, 15, 1, codeMap8, 12, 2, codeSymbol8, 5, 'q', 'u', 'e', 'u', 'e', codeString8, 2, 'q', 'x'})
	assert.Equal(t, []Death{{Queue: "qx"}}, Deaths(nil, short))
	for _, none := range []string{
		"", "\x00", "\x01", "\x01\xe0", "\x01\xf0\x00\x00\x00\x00", string([]byte{1, codeArray8, 2, 1, codeUint0}), string([]byte{1, codeArray8, 4, 2, codeMap8, 200, 1}),
		string([]byte{2, codeString8, 1, 'x', 1, codeArray8, 200}),
	} {
		assert.Empty(t, Deaths(nil, none), "%x", none)
	}
}

func FuzzDeaths(f *testing.F) {
	f.Add(died(f, "orders", "delay"), false)
	f.Add(diedWith(f, Map{{Key: Symbol("x-reason"), Value: "fatal"}}, "orders"), false)
	f.Add(without(f, died(f, "orders"), "x-first-", "x-last-"), false)
	f.Add([]byte{1, codeArray8, 15, 1, codeMap8, 12, 2, codeSymbol8, 5, 'q', 'u', 'e', 'u', 'e', codeString8, 1, 'q', 3, codeString8, 1, 'k'}, true)
	f.Add([]byte{1, codeArray32, 0, 0, 0, 13, 0, 0, 0, 1, codeMap32, 0, 0, 0, 4, 0, 0, 0, 0}, true)
	f.Fuzz(func(t *testing.T, b []byte, folded bool) {
		if folded {
			for _, d := range Deaths(nil, string(b)) {
				assert.LessOrEqual(t, len(d.Queue)+len(d.Reason)+len(d.Exchange)+len(d.RoutingKey), len(b))
			}
			for _, key := range folds {
				s, _ := FoldedText(string(b), key)
				assert.LessOrEqual(t, len(s), len(b))
			}
			if all := Unfolded(string(b)); len(all) > 0 {
				_, _ = readAsGoAMQP(all)
			}
			return
		}
		before, readable := readAsGoAMQP(b)
		got := slices.Clone(b)
		Fold(got)
		after, ok := readAsGoAMQP(got)
		if !ok || foldedIn(after) == "" {
			return // it is replaced, or go-amqp ends the link
		}
		_ = Deaths(nil, foldedIn(after))
		// Sizes that lie are read in one way by those who go by them, and in another by
		// those who count. Nobody writes such.
		if m, err := DecodeMessage(b); readable && err == nil {
			if same, err := m.Append(nil); err == nil && bytes.Equal(same, b) {
				assert.Equal(t, fmt.Sprintf("%#v", before.Annotations), fmt.Sprintf("%#v", unfolded(t, after)))
			}
		}
	})
}

// readAsGoAMQP decodes a message, if go-amqp can.
func readAsGoAMQP(b []byte) (m *amqp.Message, ok bool) {
	defer func() {
		if recover() != nil { // over a key that isn't hashable
			ok = false
		}
	}()
	m = &amqp.Message{}
	return m, Decodable(b) == nil && m.UnmarshalBinary(b) == nil
}

// BenchmarkDead is what it takes to look through a message and to decode it: one that died
// once, folded and as it is, and one that didn't die.
func BenchmarkDead(b *testing.B) {
	whole := died(b, "orders")
	for _, c := range []struct {
		name    string
		message []byte
		fold    bool
	}{{"folded", whole, true}, {"as it is", whole, false}, {"alive", without(b, whole, "deaths", "x-first-", "x-last-"), false}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			var f Folder
			buffer := make([]byte, len(c.message))
			for b.Loop() {
				copy(buffer, c.message)
				if c.fold {
					f.Fold(buffer)
				}
				var m amqp.Message
				if Decodable(buffer) != nil || m.UnmarshalBinary(buffer) != nil {
					b.Fatal("unreadable")
				}
			}
		})
	}
}
