package frames

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSplitMessageFindsWhatDecodeMessageDecodes(t *testing.T) {
	m := &Message{
		Header:                &MessageHeader{Durable: true, Priority: Some[uint8](7), TTL: Some[uint32](100_000)},
		DeliveryAnnotations:   Map{{Symbol("x-d"), true}},
		Annotations:           Map{{Symbol("x-a"), "b"}},
		Properties:            &Properties{MessageID: "id", UserID: []byte("guest"), To: "/queues/q"},
		ApplicationProperties: Map{{"k", int64(1)}},
		Body:                  []byte{0, 0x53, 0x75, 0xa0, 1, 'x'},
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	s, err := SplitMessage(b)
	require.NoError(t, err)
	assert.Equal(t, m.Body, s.Body)
	annotations, err := SectionMap(s.Annotations)
	require.NoError(t, err)
	assert.Equal(t, m.Annotations, annotations)
	properties, err := SectionMap(s.ApplicationProperties)
	require.NoError(t, err)
	assert.Equal(t, m.ApplicationProperties, properties)
	bare, err := DecodeMessage(s.Bare)
	require.NoError(t, err)
	assert.Equal(t, m.Properties, bare.Properties)
	assert.Nil(t, bare.Header)

	field := func(section []byte, n int) any {
		b := Field(section, n)
		if b == nil {
			return nil
		}
		v, rest, err := ReadValue(b)
		require.NoError(t, err)
		assert.Empty(t, rest)
		return v
	}
	assert.Equal(t, true, field(s.Header, 0))
	assert.Equal(t, uint8(7), field(s.Header, 1))
	assert.Equal(t, uint32(100_000), field(s.Header, 2))
	assert.Nil(t, field(s.Header, 3))
	assert.Nil(t, field(s.Header, 9))
	assert.Equal(t, "id", field(s.Properties, 0))
	assert.Equal(t, "/queues/q", field(s.Properties, 2))
	assert.Nil(t, field(s.Properties, 3))

	for n := range b {
		s, err := SplitMessage(b[:n])
		if err == nil {
			assert.LessOrEqual(t, len(s.Bare), n)
		}
	}
}

// What can be decoded can be split, with the same body; and nothing panics.
func FuzzSplitMessage(f *testing.F) {
	b, err := (&Message{Header: &MessageHeader{}, Annotations: Map{{Symbol("x"), nil}}, Properties: &Properties{MessageID: "x"}, Body: []byte{0, 0x53, 0x77, 0x40}}).Append(nil)
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := SplitMessage(b)
		m, whole := DecodeMessage(b)
		if whole == nil && len(m.Body) > 0 && sectionOf(m.Body) != sectionFooter {
			if err != nil || !bytes.Equal(m.Body, s.Body) {
				t.Fatalf("decoded, but not split: %v", err)
			}
		}
		for _, section := range [][]byte{s.Header, s.Properties, s.Annotations} {
			for n := range 14 {
				if v := Field(section, n); v != nil {
					_, _, _ = ReadValue(v)
				}
			}
			_, _ = SectionMap(section)
		}
	})
}
