package message

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/frames"
)

// cost is how many bytes Decode allocates for a message. No other test may run at the same time.
func cost(b []byte) (bytes int, err error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err = new(Decoded).Decode(b)
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc), err
}

// claims nests compound values of size bytes in all. Each claims the most elements that go-amqp
// reads, or as many as bytes are left in it, and has as its first element, behind head, the next.
func claims(code byte, head []byte, depth, size, most int) []byte {
	b := make([]byte, 0, size)
	for range depth {
		left := size - len(b) - 9
		b = append(b, code)
		b = binary.BigEndian.AppendUint32(b, uint32(left+4))
		b = binary.BigEndian.AppendUint32(b, uint32(min(left, most)&^1))
		b = append(b, head...)
	}
	return append(b, bytes.Repeat([]byte{frames.CodeNull}, size-len(b))...)
}

// many is a list of lists with n copies of an element.
func many(element []byte, n int) []byte {
	var lists []byte
	count := 0
	for ; n > 0; n -= maxCount {
		count++
		lists = append(lists, list(bytes.Repeat(element, min(n, maxCount)), min(n, maxCount))...)
	}
	return list(lists, count)
}

func list(elements []byte, count int) []byte {
	b := binary.BigEndian.AppendUint32([]byte{frames.CodeList32}, uint32(len(elements)+4))
	return append(binary.BigEndian.AppendUint32(b, uint32(count)), elements...)
}

// A message that claims to have more than it has is refused before it has cost much.
func TestAnUndecodableMessageCostsASmallMultipleOfItsSize(t *testing.T) {
	const most = 64
	text := []byte{frames.CodeString8, 1, 'k'}
	described := []byte{frames.CodeDescribed, frames.CodeSmallUlong, 200}
	for _, size := range []int{2000, 70_000, 400_000, 2_000_000} {
		for _, limit := range []int{maxCount, size} {
			for _, depth := range []int{2, maxDepth, 400} {
				depth = min(depth, size/20)
				for name, value := range map[string][]byte{
					"lists":            claims(frames.CodeList32, nil, depth, size, limit),
					"described lists":  claims(frames.CodeList32, described, depth/2, size, limit),
					"maps":             claims(frames.CodeMap32, text, depth, size, limit),
					"arrays of maps":   claims(frames.CodeArray32, []byte{frames.CodeMap32, 0, 0, 0, 9, 0, 0, 0, 2, frames.CodeString8, 0}, depth, size, limit),
					"arrays of lists":  claims(frames.CodeArray32, []byte{frames.CodeList32}, 1, size, limit),
					"array of texts":   claims(frames.CodeArray32, []byte{frames.CodeString32}, 1, size, limit),
					"array of symbols": claims(frames.CodeArray32, []byte{frames.CodeSymbol32}, 1, size, limit),
				} {
					for _, code := range []byte{frames.SectionDeliveryAnnotations, frames.SectionAnnotations, frames.SectionApplicationProperties, frames.SectionSequence, frames.SectionValue, frames.SectionFooter} {
						if code != frames.SectionValue && name != "maps" && name != "lists" {
							continue
						}
						b := section(code, value...)
						c, err := cost(b)
						assert.Error(t, err, name)
						assert.LessOrEqual(t, c, most*len(b)+8192, "%d bytes of %s, %d deep, in section 0x%02x: %d bytes", len(b), name, depth, code, c)
					}
				}
			}
		}
	}
}

// A map of three bytes takes hundreds of them in Go, so a message that is nothing but small maps
// would take a hundred times its size.
func TestManySmallMapsAreUndecodable(t *testing.T) {
	small := []byte{frames.CodeMap8, 4, 2, frames.CodeString8, 0, frames.CodeNull}
	for _, code := range []byte{frames.SectionValue, frames.SectionSequence} {
		c, err := cost(section(code, many(small, 60_000)...))
		assert.NoError(t, err, "as many as anybody sends")
		assert.Less(t, c, 80<<20)
		b := section(code, many(small, 2_500_000)...)
		c, err = cost(b)
		assert.Error(t, err)
		assert.Less(t, c, 16*len(b)+80<<20, "%d bytes take %d", len(b), c)
	}
	sections := bytes.Repeat(section(frames.SectionSequence, many(small, 30_000)...), 50)
	c, err := cost(sections)
	assert.Error(t, err, "the sections of a message share one budget")
	assert.Less(t, c, 16*len(sections)+80<<20, "%d bytes take %d", len(sections), c)
	large := append([]byte{frames.CodeMap8, 39, 2, frames.CodeString8, 0, frames.CodeString8, 34}, bytes.Repeat([]byte{'v'}, 34)...)
	_, err = cost(section(frames.SectionValue, many(large, 300_000)...))
	assert.NoError(t, err, "maps of a usual size")
}

// A message can have an array of 65,536 nulls in each of its sections, for 13 bytes.
func TestElementsWithoutRoomTakeNoMemory(t *testing.T) {
	nulls := section(frames.SectionFooter, frames.CodeArray32, 0, 0, 0, 5, 0, 0, 0xff, 0xff, frames.CodeNull)
	_, err := cost(nulls) // they are made once, and shared
	assert.Error(t, err)
	b := bytes.Repeat(nulls, 1000)
	c, err := cost(b)
	assert.Error(t, err)
	assert.LessOrEqual(t, c, 16*len(b)+8192)
}
