package frames

import (
	"bytes"
	"encoding/binary"
	"io"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func created(code byte) Performative { return composites[uint64(code)]() }

// A Codec reads and writes what Decode and Append do.
func TestCodecReadsAndWritesTheSame(t *testing.T) {
	t.Parallel()
	var c Codec
	for code := byte(codeOpen); code <= codeClose; code++ {
		for i := range 3 {
			p := created(code)
			if i > 0 {
				fill(reflect.ValueOf(p).Elem(), i)
			}
			f := Frame{Channel: 258, Body: p}
			if code == codeTransfer {
				f.Payload = []byte("payload")
			}
			b, err := Append(nil, f)
			require.NoError(t, err)
			kind, channel := Kind(b)
			assert.Equal(t, code, kind)
			assert.Equal(t, uint16(258), channel)
			got := created(code)
			fill(reflect.ValueOf(got).Elem(), 2) // all of it is overwritten
			payload, err := c.Decode(b, got)
			require.NoError(t, err)
			assert.Equal(t, string(f.Payload), string(payload))
			want, err := Decode(b)
			require.NoError(t, err)
			assert.Equal(t, want.Body, got)
			again, err := c.Begin([]byte("before"), 258, p)
			require.NoError(t, err)
			again = append(again, f.Payload...)
			Complete(again, len("before"))
			assert.Equal(t, b, again[len("before"):])
		}
	}
	for name, b := range map[string][]byte{"cut off": {0, 0, 0, 12, 2, 0, 0, 0, 0, 0x53, codeFlow}, "another kind": performative(codeFlow, 1, 3), "bytes behind": append(performative(codeDetach, 0, 0)[:11], 0x45, 0x45)} {
		_, err := c.Decode(b, &Disposition{})
		assert.ErrorIs(t, err, ErrMalformed, name)
	}
}

func TestCodecAllocatesNothing(t *testing.T) {
	var c Codec
	transfer, err := Append(nil, Frame{Channel: 1, Body: &Transfer{Handle: 3, DeliveryID: Some[uint32](70000), DeliveryTag: []byte{1, 2, 3, 4}, MessageFormat: Some[uint32](0), Settled: Some(false)}, Payload: []byte("x")})
	require.NoError(t, err)
	disposition, err := Append(nil, Frame{Channel: 1, Body: &Disposition{Role: true, First: 70000, Last: Some[uint32](70009), Settled: Some(true), State: &Accepted{}}})
	require.NoError(t, err)
	flow, err := Append(nil, Frame{Channel: 1, Body: &Flow{NextIncomingID: Some[uint32](70000), IncomingWindow: 70000, Handle: Some[uint32](300), LinkCredit: Some[uint32](1000)}})
	require.NoError(t, err)
	var (
		tr  Transfer
		d   Disposition
		fl  Flow
		out = make([]byte, 0, 1024)
	)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = c.Decode(transfer, &tr)
		out, _ = c.Append(out[:0], 1, &tr)
		_, _ = c.Decode(flow, &fl)
		out, _ = c.Append(out[:0], 1, &fl)
	}))
	assert.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = c.Decode(disposition, &d) }), 1.0)
	assert.Equal(t, uint32(70000), tr.DeliveryID.Value)
	assert.Equal(t, uint32(1000), fl.LinkCredit.Value)
	assert.IsType(t, &Accepted{}, d.State)
}

func TestReaderShowsWhatComesNext(t *testing.T) {
	t.Parallel()
	small, large := performative(codeFlow, 1, 10), performative(codeTransfer, 1, 100)
	r := NewReader(bytes.NewReader(append(append(bytes.Clone(small), large...), small[:12]...)), 32, 1000)
	for _, want := range [][]byte{small, large} {
		start, err := r.AwaitHeader()
		require.NoError(t, err)
		assert.Equal(t, want[:HeaderSize], start)
		b, err := r.Next()
		for ; b == nil && err == nil; b, err = r.Next() {
			require.NoError(t, r.Fill())
		}
		require.NoError(t, err)
		assert.Equal(t, want, b)
	}
	_, err := r.AwaitHeader()
	require.NoError(t, err)
	b, err := r.Next()
	require.NoError(t, err)
	assert.Nil(t, b, "it isn't there")
	assert.Equal(t, io.ErrUnexpectedEOF, r.Fill())
}

func BenchmarkCodec(b *testing.B) {
	var c Codec
	frame, err := Append(nil, Frame{Channel: 1, Body: &Transfer{Handle: 3, DeliveryID: Some[uint32](70000), DeliveryTag: []byte{1, 2, 3, 4}, MessageFormat: Some[uint32](0), Settled: Some(false)}, Payload: make([]byte, 300)})
	require.NoError(b, err)
	var tr Transfer
	b.Run("Decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Decode(frame, &tr); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Append", func(b *testing.B) {
		b.ReportAllocs()
		out := make([]byte, 0, 1024)
		for b.Loop() {
			if out, err = c.Append(out[:0], 1, &tr); err != nil {
				b.Fatal(err)
			}
		}
	})
	m, err := (&Message{Header: &MessageHeader{Durable: true, Priority: Some[uint8](4)}, Properties: &Properties{MessageID: "01234567890", ContentType: Some[Symbol]("application/json")}, Body: []byte{0, 0x53, 0x75, 0xa0, 1, 1}}).Append(nil)
	require.NoError(b, err)
	b.Run("Message", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := DecodeMessage(m); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// performative is a frame with a body that is cut off behind its descriptor.
func performative(code byte, channel uint16, padding int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(frameHead+padding))
	b = append(b, 2, 0)
	b = binary.BigEndian.AppendUint16(b, channel)
	return append(append(b, 0, 0x53, code), make([]byte, padding)...)
}
