package frames

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func fromHex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func TestValues(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	for wire, want := range map[string]any{
		"40": nil, "41": true, "42": false, "50 07": uint8(7), "51 f9": int8(-7),
		"60 0102": uint16(0x102), "61 fffe": int16(-2),
		"43": uint32(0), "52 05": uint32(5), "70 00000100": uint32(256),
		"44": uint64(0), "53 05": uint64(5), "80 0000000000000100": uint64(256),
		"54 fb": int32(-5), "71 00000100": int32(256), "55 fb": int64(-5), "81 ffffffffffffff00": int64(-256),
		"72 3fc00000": float32(1.5), "82 3ff8000000000000": 1.5, "73 0001f600": Char(0x1f600),
		"74 01020304": Decimal32{1, 2, 3, 4}, "84 0102030405060708": Decimal64{1, 2, 3, 4, 5, 6, 7, 8}, "94 0102030405060708 0102030405060708": Decimal128{1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
		"83 ffffffffffffffff": Timestamp(-1), "98 0102030405060708 090a0b0c0d0e0f10": UUID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
		"a0 02 0102": []byte{1, 2}, "a1 02 c3a4": "ä", "a3 01 61": Symbol("a"), "a1 00": "",
		"b1 0000012c " + hex.EncodeToString([]byte(long)): long,
		"45":                      List{},
		"c0 04 02 41 a1 00":       List{true, ""},
		"c1 01 00":                Map{},
		"c1 05 02 a3 01 6b 40":    Map{{Symbol("k"), nil}},
		"00 53 24 45":             Described{uint64(0x24), List{}},
		"00 a3 01 61 00 53 01 40": Described{Symbol("a"), Described{uint64(1), nil}},
		"e0 06 02 a1 01 61 01 62": Array{Type: 0xb1, Elements: []any{"a", "b"}},
	} {
		b := fromHex(wire)
		got, rest, err := ReadValue(append(b, 0xee))
		require.NoError(t, err, wire)
		assert.Equal(t, want, got, wire)
		assert.Equal(t, []byte{0xee}, rest, wire)
		assert.Equal(t, len(b), ValueSize(b), wire)
		if b[0] == 0xe0 {
			continue // is written with the wide constructor
		}
		again, err := AppendValue(nil, want)
		require.NoError(t, err, wire)
		assert.Equal(t, b, again, wire)
	}
	// The other forms that a value may have.
	for wire, want := range map[string]any{
		"56 01": true, "56 00": false, "52 00": uint32(0), "80 0000000000000001": uint64(1), "b0 00000001 07": []byte{7}, "b3 00000001 61": Symbol("a"),
		"c0 01 00": List{}, "d0 00000005 00000001 41": List{true}, "d1 00000004 00000000": Map{},
		"e0 02 03 41":                         Array{Type: 0x56, Elements: []any{true, true, true}},
		"e0 04 02 56 01 00":                   Array{Type: 0x56, Elements: []any{true, false}},
		"e0 02 00 a3":                         Array{Type: 0xb3, Elements: []any{}},
		"f0 00000009 00000001 00 a3 01 61 43": Array{Type: 0x70, Descriptor: Symbol("a"), Elements: []any{uint32(0)}},
		"e0 06 02 c0 01 00 01 00":             Array{Type: 0xd0, Elements: []any{List{}, List{}}},
	} {
		got, rest, err := ReadValue(fromHex(wire))
		require.NoError(t, err, wire)
		assert.Equal(t, want, got, wire)
		assert.Empty(t, rest)
		b, err := AppendValue(nil, want)
		require.NoError(t, err, wire)
		again, _, err := ReadValue(b)
		require.NoError(t, err, wire)
		assert.Equal(t, want, again, wire)
	}
}

func TestMalformedValuesAreErrors(t *testing.T) {
	t.Parallel()
	deep := append(bytes.Repeat([]byte{0, 0x53, 1}, MaxDepth+1), 0x40)
	lists := []byte{0x40}
	for range 200 {
		lists = append([]byte{0xd0, 0, 0, byte((len(lists) + 4) >> 8), byte(len(lists) + 4), 0, 0, 0, 1}, lists...)
	}
	_, _, err := ReadValue(lists)
	require.NoError(t, err, "200 deep")
	for name, b := range map[string][]byte{
		"nothing": {}, "no constructor": {0x3f}, "cut off": {0x70, 0}, "text cut off": {0xa1, 5, 'a'}, "a boolean of two": {0x56, 2},
		"more elements than bytes": fromHex("d0 00000008 ffffffff 40404040"), "a list that is too long": fromHex("c0 03 01 40 40"), "an odd map": fromHex("c1 02 01 40"),
		"a list cut off": fromHex("c0 05 01 40"), "deep": deep, "descriptors without an end": make([]byte, 1<<16),
		"as many as there are": fromHex("f0 00000005 ffffffff 40"), "an array without a type": fromHex("e0 01 00"), "of no type": fromHex("e0 02 00 3f"),
		"described twice": fromHex("e0 07 00 00 53 01 00 53 01 40"), "its descriptor is null": fromHex("e0 05 01 00 40 52 01"),
	} {
		_, _, err := ReadValue(b)
		assert.ErrorIs(t, err, ErrMalformed, name)
	}
	self := List{nil}
	self[0] = self
	for name, v := range map[string]any{
		"no type": struct{}{}, "in a list": List{1}, "itself": self, "a mixed array": Array{Elements: []any{"a", true}}, "an array of what": Array{Elements: []any{1}},
		"a narrow array": Array{Type: 0xa1}, "a pointer": new(string),
	} {
		_, err := AppendValue(nil, v)
		assert.Error(t, err, name)
	}
}

// fill sets all that can be set in a composite.
func fill(v reflect.Value, depth int) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(math.MaxUint64 >> (64 - v.Type().Bits()))
	case reflect.Int64:
		v.SetInt(-1)
	case reflect.String:
		v.SetString("text")
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth+1)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth+1)
	case reflect.Interface:
		v.Set(reflect.ValueOf(Described{uint64(0x34), List{"of another kind"}}))
	case reflect.Slice:
		switch v.Type() {
		case reflect.TypeFor[Map]():
			v.Set(reflect.ValueOf(Map{{Symbol("k"), "v"}, {"k", Timestamp(1)}}))
		case reflect.TypeFor[[]byte]():
			v.SetBytes([]byte{1, 2})
		default:
			v.Set(reflect.ValueOf([]Symbol{"a", "b"}))
		}
	default:
		panic(v.Kind())
	}
}

func TestFramesAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for key, create := range composites {
		code, isCode := key.(uint64)
		if !isCode {
			c := create()
			_, name := c.kind()
			b, err := AppendValue(nil, Described{key, List{}})
			require.NoError(t, err)
			d := newDecoder(b)
			if got := d.described(); d.err == nil {
				assert.IsType(t, c, got, "by its name")
			} else {
				assert.Contains(t, d.err.Error(), "lacks a required", name)
			}
			continue
		}
		for _, full := range []bool{false, true} {
			c := create()
			if full {
				fill(reflect.ValueOf(c).Elem(), 0)
			}
			switch c := c.(type) { // required, so never nil
			case *Challenge:
				c.Challenge = []byte{}
			case *Response:
				c.Response = []byte{}
			}
			frameType := TypeAMQP
			switch {
			case code >= 0x40 && code < 0x50:
				frameType = TypeSASL
			case code < codeOpen || code > codeClose: // a part of another
				e := encoder{}
				e.composite(c)
				require.NoError(t, e.err)
				d := newDecoder(e.b)
				got := d.described()
				require.NoError(t, d.err)
				assert.Equal(t, c, got)
				assert.Equal(t, len(e.b), ValueSize(e.b))
				continue
			}
			f := Frame{Type: frameType, Channel: 0x102, Body: c}
			if _, ok := c.(*Transfer); ok {
				f.Payload = []byte("payload")
			}
			b, err := Append([]byte("before"), f)
			require.NoError(t, err)
			h, ok := ReadHeader(b[6:])
			require.True(t, ok)
			assert.Equal(t, Header{uint32(len(b) - 6), 2, frameType, 0x102}, h)
			got, err := Decode(b[6:])
			require.NoError(t, err)
			assert.Equal(t, f, got)
			_, name := c.kind()
			seen[name] = true
		}
	}
	assert.Len(t, seen, 14)
	b, err := Append(nil, Frame{})
	require.NoError(t, err)
	assert.Equal(t, fromHex("00000008 02 00 0000"), b, "a sign of life")
	for _, one := range []Frame{
		{Body: (*Open)(nil)}, {Body: &Error{}}, {Type: TypeSASL, Body: &Open{}}, {Body: &Init{}}, {Body: &Flow{Properties: Map{{1, 2}}}}, {Body: &Transfer{State: 7}},
	} {
		_, err := Append(nil, one)
		assert.Error(t, err, "%+v", one)
	}
}

// qpid-proton's Python binding writes a list of symbols where AMQP has an array.
func TestListOfSymbolsIsReadAsAnArray(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		value any
		want  []Symbol
	}{
		"a list":          {List{Symbol("a"), Symbol("b")}, []Symbol{"a", "b"}},
		"an empty list":   {List{}, []Symbol{}},
		"a list of texts": {List{"a"}, nil},
	} {
		b, err := AppendValue(make([]byte, HeaderSize), Described{uint64(codeOpen), List{"peer", nil, nil, nil, nil, nil, nil, test.value}})
		require.NoError(t, err, name)
		b[4] = 2
		Complete(b, 0)
		f, err := Decode(b)
		if test.want == nil {
			require.ErrorIs(t, err, ErrMalformed, name)
			continue
		}
		require.NoError(t, err, name)
		assert.Equal(t, test.want, f.Body.(*Open).OfferedCapabilities, name)
	}
}

func TestMalformedFramesAreErrors(t *testing.T) {
	t.Parallel()
	for name, b := range map[string][]byte{
		"nothing": {}, "no header": fromHex("00000007 02 00 00"), "too large": fromHex("00000009 02 00 0000"), "a low offset": fromHex("00000008 01 00 0000"),
		"an offset behind it": fromHex("00000008 03 00 0000"), "of no type": fromHex("00000008 02 02 0000"), "no descriptor": fromHex("00000009 02 00 0000 45"),
		"an unknown one": fromHex("0000000c 02 00 0000 00 53 77 45"), "a state": fromHex("0000000c 02 00 0000 00 53 24 45"), "SASL in AMQP": fromHex("0000000c 02 00 0000 00 53 42 45"),
		"without a required field": fromHex("0000000c 02 00 0000 00 53 10 45"), "of the wrong type": fromHex("0000000f 02 00 0000 00 53 10 c0 02 01 41"),
		"a payload in a close": fromHex("0000000d 02 00 0000 00 53 18 45 00"), "not a list": fromHex("0000000e 02 00 0000 00 53 18 a1 01 61"),
	} {
		_, err := Decode(b)
		assert.ErrorIs(t, err, ErrMalformed, name)
	}
	// Fields of a later version are no fault.
	f, err := Decode(fromHex("00000011 02 00 0000 00 53 17 c0 04 03 40 41 42"))
	require.NoError(t, err)
	assert.Equal(t, &End{}, f.Body)
}

func TestReaderReadsAStream(t *testing.T) {
	t.Parallel()
	stream := ProtocolSASL.Header()
	var err error
	for _, f := range []Frame{{}, {Type: TypeSASL, Body: &Outcome{Code: 1}}, {Channel: 3, Body: &End{Error: &Error{Condition: "amqp:internal-error", Description: "no"}}}} {
		stream, err = Append(stream, f)
		require.NoError(t, err)
	}
	r := NewReader(bytes.NewReader(stream), 64<<10, 1000)
	p, err := r.AwaitProtocol()
	require.NoError(t, err)
	assert.Equal(t, ProtocolSASL, p)
	f, err := r.AwaitFrame()
	require.NoError(t, err)
	assert.Equal(t, Frame{}, f)
	_, err = r.AwaitProtocol()
	require.ErrorIs(t, err, ErrMalformed, "which takes nothing")
	f, err = r.AwaitFrame()
	require.NoError(t, err)
	assert.Equal(t, &Outcome{Code: 1}, f.Body)
	f, err = r.AwaitFrame()
	require.NoError(t, err)
	assert.EqualError(t, f.Body.(*End).Error, "amqp:internal-error: no")
	_, err = r.AwaitFrame()
	require.Equal(t, io.EOF, err)
	_, err = r.AwaitProtocol()
	require.Equal(t, io.EOF, err)
	_, err = NewReader(bytes.NewReader(stream[:5]), 64<<10, 1000).AwaitProtocol()
	require.Equal(t, io.ErrUnexpectedEOF, err)
	for n := 9; n < len(stream); n++ {
		r := NewReader(bytes.NewReader(stream[8:n]), 64<<10, 1000)
		for err = nil; err == nil; {
			_, err = r.AwaitFrame()
		}
		assert.True(t, err == io.EOF || err == io.ErrUnexpectedEOF)
	}
	_, err = NewReader(bytes.NewReader(fromHex("7fffffff 02 00 0000")), 64<<10, 1000).AwaitFrame()
	require.ErrorIs(t, err, ErrMalformed)
}

// messages that go-amqp writes.
func messages() []*amqp.Message {
	now := time.UnixMilli(1_700_000_000_123).UTC()
	text := "text"
	sequence := uint32(7)
	return []*amqp.Message{
		amqp.NewMessage([]byte("body")),
		{Data: [][]byte{{1}, {}, make([]byte, 300)}, Footer: amqp.Annotations{"x-f": "f"}},
		{Value: []any{"a", int64(1), []any{map[string]any{"k": []string{"v"}}}}},
		{Sequence: [][]any{{"a"}, {int32(1)}}},
		{
			Header:                &amqp.MessageHeader{Durable: true, Priority: 9, TTL: time.Second, DeliveryCount: 300, FirstAcquirer: true},
			DeliveryAnnotations:   amqp.Annotations{"x-d": int64(1)},
			Annotations:           amqp.Annotations{"x-a": "a", "x-opt-list": []any{"l", int64(-1)}, "x-u": amqp.UUID{1}},
			Properties:            &amqp.MessageProperties{MessageID: amqp.UUID{2}, UserID: []byte("u"), To: &text, Subject: &text, ReplyTo: &text, CorrelationID: uint64(7), ContentType: &text, ContentEncoding: &text, AbsoluteExpiryTime: &now, CreationTime: &now, GroupID: &text, GroupSequence: &sequence, ReplyToGroupID: &text},
			ApplicationProperties: map[string]any{"s": "v", "n": nil, "t": now, "b": []byte{1}, "f": 1.5, "u8": uint8(1), "i16": int16(-300), "yes": true},
			Value:                 map[string]any{"k": uint64(1)},
		},
	}
}

func TestMessagesOfGoAMQPAreReadTheSame(t *testing.T) {
	t.Parallel()
	for _, theirs := range messages() {
		b, err := theirs.MarshalBinary()
		require.NoError(t, err)
		ours, err := DecodeMessage(b)
		require.NoError(t, err)
		again, err := ours.Append(nil)
		require.NoError(t, err)
		var want, got amqp.Message
		require.NoError(t, want.UnmarshalBinary(b))
		require.NoError(t, got.UnmarshalBinary(again))
		assert.Equal(t, want, got)
	}
	full := messages()[4]
	b, err := full.MarshalBinary()
	require.NoError(t, err)
	m, err := DecodeMessage(b)
	require.NoError(t, err)
	assert.Equal(t, &MessageHeader{Durable: true, Priority: Some[uint8](9), TTL: Some[uint32](1000), FirstAcquirer: true, DeliveryCount: 300}, m.Header)
	assert.Equal(t, UUID{2}, m.Properties.MessageID)
	assert.Equal(t, "text", m.Properties.To)
	assert.Equal(t, Some(Timestamp(1_700_000_000_123)), m.Properties.CreationTime)
	v, ok := m.Annotations.Get("x-opt-list")
	assert.True(t, ok)
	assert.Equal(t, List{"l", int64(-1)}, v)
	m.Annotations = m.Annotations.Set("x-a", "b").Set("x-new", int64(1))
	again, err := m.Append(nil)
	require.NoError(t, err)
	var changed amqp.Message
	require.NoError(t, changed.UnmarshalBinary(again))
	assert.Equal(t, "b", changed.Annotations["x-a"])
	assert.Equal(t, int64(1), changed.Annotations["x-new"])
	assert.Equal(t, full.Value, mapOf(changed.Value))
}

func mapOf(v any) map[string]any {
	m := map[string]any{}
	switch v := v.(type) {
	case map[any]any:
		for k, e := range v {
			m[k.(string)] = e
		}
	case map[string]any:
		return v
	}
	return m
}

func TestMalformedMessagesAreErrors(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]string{
		"no section": "41", "an unknown one": "00 53 24 45", "two headers": "00 53 70 45 00 53 70 45", "the wrong order": "00 53 73 45 00 53 70 45",
		"two kinds of bodies": "00 53 75 a0 00 00 53 76 45", "two values": "00 53 77 40 00 53 77 40", "annotations of a list": "00 53 72 45", "cut off": "00 53 75 a0 05 01", "a body behind the footer": "00 53 78 c1 01 00 00 53 75 a0 00",
	} {
		_, err := DecodeMessage(fromHex(b))
		assert.ErrorIs(t, err, ErrMalformed, name)
	}
}

// FuzzValue: what can be read can be written, and is then read the same.
func FuzzValue(f *testing.F) {
	for _, s := range []string{"00 a3 01 61 00 53 01 40", "e0 04 02 56 01 00", "f0 00000009 00000001 00 a3 01 61 43", "d1 00000004 00000000", "c1 05 02 a3 01 6b 40", "e0 06 02 c0 01 00 01 00", "94 0102030405060708 0102030405060708", "72 7fc00001"} {
		f.Add(fromHex(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, rest, err := ReadValue(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		size := len(b) - len(rest)
		if n := ValueSize(b); n != 0 { // it doesn't look into descriptors that are described
			require.Equal(t, size, n)
		}
		again, err := AppendValue(nil, v)
		require.NoError(t, err)
		same, rest, err := ReadValue(again)
		require.NoError(t, err)
		require.Empty(t, rest)
		third, err := AppendValue(nil, same)
		require.NoError(t, err)
		require.Equal(t, again, third)
	})
}

// FuzzFrame: what can be decoded can be encoded, and is then decoded the same.
func FuzzFrame(f *testing.F) {
	for key, create := range composites {
		if code, ok := key.(uint64); ok && (code <= codeClose || code >= 0x40 && code < 0x50) {
			c := create()
			fill(reflect.ValueOf(c).Elem(), 0)
			one := Frame{Body: c}
			if code >= 0x40 {
				one.Type = TypeSASL
			}
			b, err := Append(nil, one)
			require.NoError(f, err)
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for r := NewReader(bytes.NewReader(b), 64<<10, 1<<20); ; {
			one, err := r.AwaitFrame()
			if err != nil {
				require.True(t, errors.Is(err, ErrMalformed) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), err)
				return
			}
			again, err := Append(nil, one)
			require.NoError(t, err)
			same, err := Decode(again)
			require.NoError(t, err)
			third, err := Append(nil, same)
			require.NoError(t, err)
			require.Equal(t, again, third)
		}
	})
}

// FuzzMessage: what can be decoded is the same to go-amqp when it was encoded again, if
// go-amqp can decode it at all.
func FuzzMessage(f *testing.F) {
	for _, m := range messages() {
		b, err := m.MarshalBinary()
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeMessage(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		again, err := m.Append(nil)
		require.NoError(t, err)
		same, err := DecodeMessage(again)
		require.NoError(t, err)
		third, err := same.Append(nil)
		require.NoError(t, err)
		require.Equal(t, again, third)
	})
}
