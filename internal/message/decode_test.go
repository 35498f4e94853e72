package message

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// value is a message whose body is a value.
func value(b ...byte) []byte { return append([]byte{0, codeSmallUlong, sectionValue}, b...) }

func section(code byte, b ...byte) []byte { return append([]byte{0, codeSmallUlong, code}, b...) }

type broken struct {
	b   []byte
	why string
}

// refused are messages that can't be decoded.
func refused() map[string]broken {
	described := bytes.Repeat([]byte{0}, 100_000)
	// Arrays of 65,536 numbers that take no room: ten bytes become half a megabyte.
	arrays := bytes.Repeat([]byte{codeArray32, 0, 1, 0, 4, 0, 1, 0, 0, codeUlong0}, 1000)
	arrays = append(append(arrays, codeBinary32, 0, 2, 0, 0), make([]byte, 0x20000)...)
	roomless := binary.BigEndian.AppendUint32([]byte{codeList32}, uint32(4+len(arrays)))
	roomless = append(binary.BigEndian.AppendUint32(roomless, 1001), arrays...)
	return map[string]broken{
		"char":                   {value(0x73, 0, 0, 0, 'a'), "a Char"},
		"decimal":                {value(0x74, 0, 0, 0, 1), "a Decimal32"},
		"decimal in a list":      {value(codeList8, 10, 1, 0x84, 0, 0, 0, 0, 0, 0, 0, 1), "a Decimal64"},
		"long decimal":           {value(append([]byte{0x94}, make([]byte, 16)...)...), "a Decimal128"},
		"not a type":             {value(0x3f), "begins with 0x3f"},
		"no value":               {value(), "are left of a value"},
		"half a section":         {[]byte{0, codeSmallUlong}, "are left of a value"},
		"no section":             {[]byte{codeString8, 1, 'a'}, "no section is a string"},
		"section by name":        {[]byte{0, codeSymbol8, 1, 'a', codeNull}, "isn't a ulong"},
		"unknown section":        {section(0x79, codeNull), "unknown message section"},
		"deep":                   {value(nestedLists(frames.MaxDepth)...), "nested"},
		"list that is too small": {value(codeList8, 3, 2, codeBool, 1, codeBool, 0), "are left of a value"},
		"list that is too large": {value(codeList8, 4, 1, codeNull, 0, codeSmallUlong, sectionValue, codeTrue), "bytes too many"},
		"deeply described":       {value(described...), "nested"},
		"list as a key":          {section(sectionAnnotations, codeMap8, 3, 2, codeList0, codeNull), "a List for a key"},
		"binary as a key":        {section(sectionAnnotations, codeMap8, 4, 2, codeBinary8, 0, codeNull), "a binary for a key"},
		"map as a key":           {value(codeMap8, 5, 2, codeMap8, 1, 0, codeNull), "a Map for a key"},
		"described key":          {value(codeMap8, 6, 2, 0, codeNull, codeBinary8, 0, codeNull), "a Described for a key"},
		"array as a key":         {section(sectionFooter, codeMap8, 6, 2, codeArray8, 2, 0, codeString8, codeNull), "an Array for a key"},
		"number as a key":        {section(sectionApplicationProperties, codeMap8, 3, 2, codeUint0, codeNull), "a uint32 for a key"},
		"key without a value":    {value(codeMap8, 2, 1, codeNull, codeNull), "1 keys"},
		"long text":              {value(codeString8, 2, 'a'), "are left of a value"},
		"very long text":         {value(codeString32, 0xff, 0xff, 0xff, 0xff, 'a'), "are left of a value"},
		"long list":              {value(codeList8, 9, 1, codeNull), "are left of a value"},
		"very long list":         {value(codeList32, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, codeNull), "are left of a value"},
		"many elements":          {value(codeList32, 0, 0, 0, 5, 0xff, 0xff, 0xff, 0xff, codeNull), "elements in"},
		"more elements":          {value(codeList8, 4, 2, codeNull), "are left of a value"},
		"array of described":     {value(codeArray8, 5, 1, 0, codeUint0, codeString8, 0), "described"},
		"elements of no room":    {value(codeArray32, 0, 0, 0, 5, 0, 0xff, 0xff, 0xff, codeNull), "take no room"},
		"arrays of no room":      {value(roomless...), "bytes too many"},
		"array of lists":         {value(codeArray8, 2, 1, codeList0), "not implemented"},
		"array of empty text":    {value(codeArray8, 4, 2, codeString8, 0, 0), "invalid length"},
		"message id in a chain":  {section(sectionProperties, codeList8, 2, 1, codeString8), "are left of a value"},
		"too many fields":        {section(sectionHeader, codeList8, 7, 6, codeTrue, codeNull, codeNull, codeNull, codeNull, codeNull), "invalid field count"},
		"subject of a number":    {section(sectionProperties, codeList8, 5, 4, codeNull, codeNull, codeNull, codeUint0), "not a recognized string"},
		"data of a string":       {section(sectionData, codeString8, 0), "not a recognized binary"},
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
			assert.Equal(t, err, Check(r.b))
		})
	}
}

// unusual are messages that only go-amqp reads.
func unusual() map[string][]byte {
	return map[string][]byte{
		"descriptor of eight bytes": {0, codeUlong, 0, 0, 0, 0, 0, 0, 0, sectionValue, codeTrue},
		"no data":                   section(sectionData, codeNull),
		"no annotations":            section(sectionAnnotations, codeNull),
		"no header":                 section(sectionHeader, codeList0, 0, codeSmallUlong, sectionHeader, codeList8, 2, 1, codeTrue),
		"two properties":            section(sectionProperties, codeList8, 4, 2, codeString8, 0, codeNull, 0, codeSmallUlong, sectionProperties, codeList0),
		"number as a key":           section(sectionAnnotations, codeMap8, 3, 2, codeUlong0, codeNull),
		"null as a key":             value(codeMap8, 3, 2, codeNull, codeNull),
		"error":                     value(0, codeSmallUlong, 0x1d, codeList8, 4, 1, codeSymbol8, 1, 'e'),
		"described":                 value(0, codeSymbol8, 1, 'd', codeList0),
		"array of numbers":          value(codeArray8, 4, 2, codeSmallUint, 1, 2),
		"array of nothing":          value(codeArray8, 2, 1, codeUint0),
		"ttl of eight bytes":        section(sectionHeader, codeList8, 5, 3, codeNull, codeNull, codeSmallUlong, 9),
		"nested":                    value(append(bytes.Repeat([]byte{0, codeNull}, frames.MaxDepth-1), codeTrue)...),
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
			for _, c := range []byte{0, 1, 0xff, b[i] ^ 1, b[i] ^ 0x10, codeNull, codeMap32, codeList0} {
				other := bytes.Clone(b)
				other[i] = c
				decode(t, other)
			}
		}
	}
}
