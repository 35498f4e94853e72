package message

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// value is a message whose body is a value.
func value(b ...byte) []byte {
	return append([]byte{0, frames.CodeSmallUlong, frames.SectionValue}, b...)
}

func section(code byte, b ...byte) []byte {
	return append([]byte{0, frames.CodeSmallUlong, code}, b...)
}

type broken struct {
	b   []byte
	why string
}

// refused are messages that can't be decoded.
func refused() map[string]broken {
	described := bytes.Repeat([]byte{0}, 100_000)
	// Arrays of 65,536 numbers that take no room: ten bytes become half a megabyte.
	arrays := bytes.Repeat([]byte{frames.CodeArray32, 0, 1, 0, 4, 0, 1, 0, 0, frames.CodeUlong0}, 1000)
	arrays = append(append(arrays, frames.CodeBinary32, 0, 2, 0, 0), make([]byte, 0x20000)...)
	roomless := binary.BigEndian.AppendUint32([]byte{frames.CodeList32}, uint32(4+len(arrays)))
	roomless = append(binary.BigEndian.AppendUint32(roomless, 1001), arrays...)
	return map[string]broken{
		"char":                   {value(0x73, 0, 0, 0, 'a'), "a Char"},
		"decimal":                {value(0x74, 0, 0, 0, 1), "a Decimal32"},
		"decimal in a list":      {value(frames.CodeList8, 10, 1, 0x84, 0, 0, 0, 0, 0, 0, 0, 1), "a Decimal64"},
		"long decimal":           {value(append([]byte{0x94}, make([]byte, 16)...)...), "a Decimal128"},
		"not a type":             {value(0x3f), "begins with 0x3f"},
		"no value":               {value(), "are left of a value"},
		"half a section":         {[]byte{0, frames.CodeSmallUlong}, "are left of a value"},
		"no section":             {[]byte{frames.CodeString8, 1, 'a'}, "no section is a string"},
		"section by name":        {[]byte{0, frames.CodeSymbol8, 1, 'a', frames.CodeNull}, "isn't a ulong"},
		"unknown section":        {section(0x79, frames.CodeNull), "unknown message section"},
		"deep":                   {value(nestedLists(frames.MaxDepth)...), "nested"},
		"list that is too small": {value(frames.CodeList8, 3, 2, frames.CodeBool, 1, frames.CodeBool, 0), "are left of a value"},
		"list that is too large": {value(frames.CodeList8, 4, 1, frames.CodeNull, 0, frames.CodeSmallUlong, frames.SectionValue, frames.CodeTrue), "bytes too many"},
		"deeply described":       {value(described...), "nested"},
		"list as a key":          {section(frames.SectionAnnotations, frames.CodeMap8, 3, 2, frames.CodeList0, frames.CodeNull), "a List for a key"},
		"binary as a key":        {section(frames.SectionAnnotations, frames.CodeMap8, 4, 2, frames.CodeBinary8, 0, frames.CodeNull), "a binary for a key"},
		"map as a key":           {value(frames.CodeMap8, 5, 2, frames.CodeMap8, 1, 0, frames.CodeNull), "a Map for a key"},
		"described key":          {value(frames.CodeMap8, 6, 2, 0, frames.CodeNull, frames.CodeBinary8, 0, frames.CodeNull), "a Described for a key"},
		"array as a key":         {section(frames.SectionFooter, frames.CodeMap8, 6, 2, frames.CodeArray8, 2, 0, frames.CodeString8, frames.CodeNull), "an Array for a key"},
		"number as a key":        {section(frames.SectionApplicationProperties, frames.CodeMap8, 3, 2, frames.CodeUint0, frames.CodeNull), "a uint32 for a key"},
		"key without a value":    {value(frames.CodeMap8, 2, 1, frames.CodeNull, frames.CodeNull), "1 keys"},
		"long text":              {value(frames.CodeString8, 2, 'a'), "are left of a value"},
		"very long text":         {value(frames.CodeString32, 0xff, 0xff, 0xff, 0xff, 'a'), "are left of a value"},
		"long list":              {value(frames.CodeList8, 9, 1, frames.CodeNull), "are left of a value"},
		"very long list":         {value(frames.CodeList32, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, frames.CodeNull), "are left of a value"},
		"many elements":          {value(frames.CodeList32, 0, 0, 0, 5, 0xff, 0xff, 0xff, 0xff, frames.CodeNull), "elements in"},
		"more elements":          {value(frames.CodeList8, 4, 2, frames.CodeNull), "are left of a value"},
		"array of described":     {value(frames.CodeArray8, 5, 1, 0, frames.CodeUint0, frames.CodeString8, 0), "described"},
		"elements of no room":    {value(frames.CodeArray32, 0, 0, 0, 5, 0, 0xff, 0xff, 0xff, frames.CodeNull), "take no room"},
		"arrays of no room":      {value(roomless...), "bytes too many"},
		"array of lists":         {value(frames.CodeArray8, 2, 1, frames.CodeList0), "not implemented"},
		"array of empty text":    {value(frames.CodeArray8, 4, 2, frames.CodeString8, 0, 0), "invalid length"},
		"message id in a chain":  {section(frames.SectionProperties, frames.CodeList8, 2, 1, frames.CodeString8), "are left of a value"},
		"too many fields":        {section(frames.SectionHeader, frames.CodeList8, 7, 6, frames.CodeTrue, frames.CodeNull, frames.CodeNull, frames.CodeNull, frames.CodeNull, frames.CodeNull), "invalid field count"},
		"subject of a number":    {section(frames.SectionProperties, frames.CodeList8, 5, 4, frames.CodeNull, frames.CodeNull, frames.CodeNull, frames.CodeUint0), "not a recognized string"},
		"data of a string":       {section(frames.SectionData, frames.CodeString8, 0), "not a recognized binary"},
	}
}

func TestWhatCannotBeDecodedIsRefused(t *testing.T) {
	t.Parallel()
	for name, r := range refused() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var x Decoded
			err := x.Decode(r.b)
			require.ErrorContains(t, err, "the message can't be decoded: ")
			require.ErrorContains(t, err, r.why)
			assert.Equal(t, Decoded{}, x)
			assert.Equal(t, err, unmarshal(new(amqp.Message), r.b))
		})
	}
}

// unusual are messages that only go-amqp reads.
func unusual() map[string][]byte {
	return map[string][]byte{
		"descriptor of eight bytes": {0, frames.CodeUlong, 0, 0, 0, 0, 0, 0, 0, frames.SectionValue, frames.CodeTrue},
		"no data":                   section(frames.SectionData, frames.CodeNull),
		"no annotations":            section(frames.SectionAnnotations, frames.CodeNull),
		"no header":                 section(frames.SectionHeader, frames.CodeList0, 0, frames.CodeSmallUlong, frames.SectionHeader, frames.CodeList8, 2, 1, frames.CodeTrue),
		"two properties":            section(frames.SectionProperties, frames.CodeList8, 4, 2, frames.CodeString8, 0, frames.CodeNull, 0, frames.CodeSmallUlong, frames.SectionProperties, frames.CodeList0),
		"number as a key":           section(frames.SectionAnnotations, frames.CodeMap8, 3, 2, frames.CodeUlong0, frames.CodeNull),
		"null as a key":             value(frames.CodeMap8, 3, 2, frames.CodeNull, frames.CodeNull),
		"error":                     value(0, frames.CodeSmallUlong, 0x1d, frames.CodeList8, 4, 1, frames.CodeSymbol8, 1, 'e'),
		"described":                 value(0, frames.CodeSymbol8, 1, 'd', frames.CodeList0),
		"array of numbers":          value(frames.CodeArray8, 4, 2, frames.CodeSmallUint, 1, 2),
		"array of nothing":          value(frames.CodeArray8, 2, 1, frames.CodeUint0),
		"ttl of eight bytes":        section(frames.SectionHeader, frames.CodeList8, 5, 3, frames.CodeNull, frames.CodeNull, frames.CodeSmallUlong, 9),
		"nested":                    value(append(bytes.Repeat([]byte{0, frames.CodeNull}, frames.MaxDepth-1), frames.CodeTrue)...),
	}
}

func TestTheRestIsLeftToGoAMQP(t *testing.T) {
	t.Parallel()
	for name, b := range unusual() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.True(t, left(b))
			require.NotNil(t, decode(t, b))
		})
	}
}

// What is cut off at any byte, or has a byte that is another, is what go-amqp makes of it.
func TestBrokenMessages(t *testing.T) {
	t.Parallel()
	all := deliveries(t)
	for _, b := range all[len(all)-4:] {
		for i := range b {
			decode(t, b[:i])
			for _, c := range []byte{0, 1, 0xff, b[i] ^ 1, b[i] ^ 0x10, frames.CodeNull, frames.CodeMap32, frames.CodeList0} {
				other := bytes.Clone(b)
				other[i] = c
				decode(t, other)
			}
		}
	}
}
