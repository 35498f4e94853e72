package frames

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// decodes says whether go-amqp decodes a message that was looked at before.
func decodes(b []byte) bool {
	var m amqp.Message
	return m.UnmarshalBinary(b) == nil
}

// Of what go-amqp decodes, Readable and Decodable let the same pass, but for arrays that
// take up memory out of all proportion.
func sameAsReadable(t *testing.T, b []byte) {
	t.Helper()
	err, readable := Decodable(b), Readable(b)
	switch {
	case err == nil:
		require.True(t, readable, "%x", b)
		decodes(b) // and doesn't panic
	case readable && !strings.Contains(err.Error(), "take no room"):
		require.False(t, decodes(b), "%x: %v", b, err)
	}
}

func FuzzDecodable(f *testing.F) {
	f.Add(died(f, "orders", "delay"))
	f.Add([]byte{0, 0x53, 0x77, 0xc1, 5, 2, 0, 0x40, 0x40, 0x40})
	f.Add([]byte{0, 0x53, 0x74, 0xd1, 0, 0, 0, 8, 0, 0, 0, 2, 0xa1, 1, 'a', 0x40})
	f.Add([]byte{0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x77, 0xf0, 0, 0, 0, 6, 0, 0, 0, 1, 0x52, 1})
	f.Fuzz(sameAsReadable)
}

func TestDecodableIsAsReadable(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	whole := died(t, "orders", "delay")
	for range 100_000 {
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
		sameAsReadable(t, b)
	}
}

func TestDecodableBoundsWhatElementsTake(t *testing.T) {
	t.Parallel()
	arrays := func(n int) []byte {
		elements := slices.Repeat([]byte{codeArray32, 0, 0, 0x80, 4, 0, 0, 0x80, 0, codeUlong0}, n)
		elements = append(append(elements, codeBinary32, 0, 1, 0, 0), make([]byte, 1<<16)...)
		b := binary.BigEndian.AppendUint32([]byte{0, codeSmallUlong, 0x77, codeList32}, uint32(4+len(elements)))
		return append(binary.BigEndian.AppendUint32(b, uint32(n+1)), elements...)
	}
	require.NoError(t, Decodable(arrays(maxRoomless/0x8000)))
	require.True(t, decodes(arrays(maxRoomless/0x8000)))
	assert.ErrorContains(t, Decodable(arrays(maxRoomless/0x8000+1)), "take no room")
}

func TestDecodableBoundsDepth(t *testing.T) {
	t.Parallel()
	lists := func(n int) []byte {
		b := []byte{codeNull}
		for range n {
			b = append(binary.BigEndian.AppendUint32([]byte{codeList32}, uint32(4+len(b))), append([]byte{0, 0, 0, 1}, b...)...)
		}
		return append([]byte{0, codeSmallUlong, 0x77}, b...)
	}
	require.NoError(t, Decodable(lists(MaxDepth-1)))
	require.True(t, decodes(lists(MaxDepth-1)))
	require.True(t, Readable(lists(MaxDepth-1)))
	require.ErrorIs(t, Decodable(lists(MaxDepth)), errNested)
	require.False(t, Readable(lists(MaxDepth)))
}
