package engine

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func TestSplitFindsWhatDecodeMessageDecodes(t *testing.T) {
	m := &frames.Message{
		Header:                &frames.MessageHeader{Durable: true, Priority: frames.Some[uint8](7), TTL: frames.Some[uint32](100_000)},
		DeliveryAnnotations:   frames.Map{{Key: frames.Symbol("x-d"), Value: true}},
		Annotations:           frames.Map{{Key: frames.Symbol("x-a"), Value: "b"}},
		Properties:            &frames.Properties{MessageID: "id", UserID: []byte("guest"), To: "/queues/q"},
		ApplicationProperties: frames.Map{{Key: "k", Value: int64(1)}},
		Body:                  []byte{0, 0x53, 0x75, 0xa0, 1, 'x'},
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	s, err := split(b)
	require.NoError(t, err)
	assert.Equal(t, m.Body, s.Body)
	annotations, err := sectionMap(s.Annotations)
	require.NoError(t, err)
	assert.Equal(t, m.Annotations, annotations)
	properties, err := sectionMap(s.ApplicationProperties)
	require.NoError(t, err)
	assert.Equal(t, m.ApplicationProperties, properties)
	bare, err := frames.DecodeMessage(s.Bare)
	require.NoError(t, err)
	assert.Equal(t, m.Properties, bare.Properties)
	assert.Nil(t, bare.Header)

	value := func(section []byte, n int) any {
		b := field(section, n)
		if b == nil {
			return nil
		}
		v, rest, err := frames.ReadValue(b)
		require.NoError(t, err)
		assert.Empty(t, rest)
		return v
	}
	assert.Equal(t, true, value(s.Header, 0))
	assert.Equal(t, uint8(7), value(s.Header, 1))
	assert.Equal(t, uint32(100_000), value(s.Header, 2))
	assert.Nil(t, value(s.Header, 3))
	assert.Nil(t, value(s.Header, 9))
	assert.Equal(t, "id", value(s.Properties, 0))
	assert.Equal(t, "/queues/q", value(s.Properties, 2))
	assert.Nil(t, value(s.Properties, 3))

	for n := range b {
		s, err := split(b[:n])
		if err == nil {
			assert.LessOrEqual(t, len(s.Bare), n)
		}
	}
}

// What can be decoded can be split, with the same body; and nothing panics.
func FuzzSplit(f *testing.F) {
	b, err := (&frames.Message{Header: &frames.MessageHeader{}, Annotations: frames.Map{{Key: frames.Symbol("x"), Value: nil}}, Properties: &frames.Properties{MessageID: "x"}, Body: []byte{0, 0x53, 0x77, 0x40}}).Append(nil)
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := split(b)
		m, whole := frames.DecodeMessage(b)
		if whole == nil && len(m.Body) > 0 && m.Body[2] != frames.SectionFooter {
			if err != nil || !bytes.Equal(m.Body, s.Body) {
				t.Fatalf("decoded, but not split: %v", err)
			}
		}
		for _, section := range [][]byte{s.Header, s.Properties, s.Annotations} {
			for n := range 14 {
				if v := field(section, n); v != nil {
					_, _, _ = frames.ReadValue(v)
				}
			}
			_, _ = sectionMap(section)
		}
	})
}
