package frames

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// allocated is how many bytes f allocates. No other test may run at the same time.
func allocated(f func()) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc)
}

// claims nests depth compound values of size bytes in all. Each claims as many elements as bytes
// are left in it, and has as its first element, behind head, the next one.
func claims(code byte, head []byte, depth, size int) []byte {
	b := make([]byte, 0, size)
	for range depth {
		left := size - len(b) - 9
		b = append(b, code)
		b = binary.BigEndian.AppendUint32(b, uint32(left+4))
		b = binary.BigEndian.AppendUint32(b, uint32(left&^1))
		b = append(b, head...)
	}
	return append(b, bytes.Repeat([]byte{CodeNull}, size-len(b))...)
}

// many is a list of n copies of an element.
func many(element []byte, n int) []byte {
	b := []byte{CodeList32}
	b = binary.BigEndian.AppendUint32(b, uint32(4+n*len(element)))
	b = binary.BigEndian.AppendUint32(b, uint32(n))
	return append(b, bytes.Repeat(element, n)...)
}

// The bytes of a value bound its cost, regardless of what it claims to have.
func TestAValueCostsASmallMultipleOfItsSize(t *testing.T) {
	const size, most = 400_000, 48
	for name, b := range map[string][]byte{
		"lists in lists":        claims(CodeList32, nil, MaxDepth-2, size),
		"maps in maps":          claims(CodeMap32, []byte{CodeNull}, MaxDepth-2, size),
		"lists of an array":     claims(CodeArray32, []byte{CodeList32}, 1, size),
		"arrays of arrays":      claims(CodeArray32, []byte{CodeArray32}, 1, size),
		"described lists":       claims(CodeList32, []byte{CodeDescribed, CodeSmallUlong, 1}, MaxDepth/2-2, size),
		"empty lists":           many([]byte{CodeList0}, size),
		"empty maps":            many([]byte{CodeMap8, 1, 0}, size/3),
		"small maps":            many([]byte{CodeMap8, 3, 2, CodeNull, CodeNull}, size/5),
		"described values":      many([]byte{CodeDescribed, CodeNull, CodeNull}, size/3),
		"arrays of nulls":       many([]byte{CodeArray8, 2, 1, CodeNull}, size/4),
		"numbers":               many([]byte{CodeSmallUint, 200}, size/2),
		"texts":                 many([]byte{CodeString8, 1, 'a'}, size/3),
		"binaries of an array":  claims(CodeArray32, []byte{CodeBinary8}, 1, size),
		"an array of nulls":     {CodeArray32, 0, 0, 0, 5, 0, 0, 0xff, 0xff, CodeNull},
		"an array of too many":  {CodeArray32, 0, 0, 0, 5, 0, 1, 0, 1, CodeNull},
		"a list of many claims": {CodeList32, 0, 0, 0, 5, 0xff, 0xff, 0xff, 0xff, CodeNull},
	} {
		_, _, _ = ReadValue(b) // shared elements are made once
		cost := allocated(func() { _, _, _ = ReadValue(b) })
		assert.LessOrEqual(t, cost, most*len(b)+4096, "%s: %d bytes for %d", name, cost, len(b))
		section := append([]byte{CodeDescribed, CodeSmallUlong, SectionAnnotations}, b...)
		cost = allocated(func() { _, _ = DecodeMessage(section) })
		assert.LessOrEqual(t, cost, most*len(section)+4096, "%s in a message: %d bytes for %d", name, cost, len(b))
		frame := append(append([]byte{0, 0, 0, 0, 2, TypeAMQP, 0, 0, CodeDescribed, CodeSmallUlong, codeOpen}, CodeList32), b...)
		binary.BigEndian.PutUint32(frame, uint32(len(frame)))
		cost = allocated(func() { _, _ = Decode(frame) })
		assert.LessOrEqual(t, cost, most*len(frame)+4096, "%s in a frame: %d bytes for %d", name, cost, len(b))
	}
}

// A frame may name more capabilities than there are bytes, if they take no room.
func TestSymbolsThatAreNoneCostNothing(t *testing.T) {
	nulls := []byte{CodeArray32, 0, 0, 0, 5, 0, 0, 0xff, 0xff, CodeNull}
	fields := append([]byte{CodeString8, 1, 'a', CodeNull, CodeNull, CodeNull, CodeNull}, nulls...)
	body := append([]byte{CodeList8, byte(len(fields) + 1), 6}, fields...)
	frame := append([]byte{0, 0, 0, 0, 2, TypeAMQP, 0, 0, CodeDescribed, CodeSmallUlong, codeOpen}, body...)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)))
	_, err := Decode(frame)
	require.ErrorIs(t, err, ErrMalformed)
	cost := allocated(func() { _, _ = Decode(frame) })
	assert.LessOrEqual(t, cost, 8192)
}

// The bound is never below what a value has.
func TestHonestCountsAreRead(t *testing.T) {
	t.Parallel()
	var v any = List{}
	for range MaxDepth - 1 {
		v = List{v}
	}
	for name, v := range map[string]any{
		"nested":          v,
		"nothing but one": List{List{}},
		"maps":            Map{{"a", Map{}}, {"b", Map{{"c", nil}}}},
		"arrays":          Array{Elements: []any{Array{Elements: []any{List{nil, nil}, List{}}}, Array{Type: CodeUlong}}},
		"described":       Described{List{nil}, Described{uint64(1), List{nil, nil}}},
	} {
		b, err := AppendValue(nil, v)
		require.NoError(t, err, name)
		_, rest, err := ReadValue(b)
		require.NoError(t, err, name)
		require.Empty(t, rest, name)
	}
}
