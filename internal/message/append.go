// Package message encodes and decodes messages of go-amqp's type. It does itself what common
// messages need, with a fraction of the allocations, and leaves the others to go-amqp. The
// results are go-amqp's.
package message

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
)

const (
	defaultPriority = 4
	// maxDepth is how deeply values are nested that aren't left to go-amqp.
	maxDepth = 8
)

// Append writes m behind b, as the bytes that m.MarshalBinary returns; only the order of
// entries in maps is another each time. It takes no allocation for what most messages have.
func Append(b []byte, m *amqp.Message) ([]byte, error) {
	size := 0
	for _, d := range m.Data {
		size += len(d)
	}
	e := encoder{b: b}
	if cap(b)-len(b) < size {
		e.b = append(make([]byte, 0, max(len(b)+size+512, 2*cap(b))), b...) // with room for what else there is
	}
	e.message(m)
	if !e.not {
		return e.b, nil
	}
	encoded, err := marshal(m)
	if err != nil {
		return b, err
	}
	return append(b, encoded...), nil
}

// marshal is m.MarshalBinary, which panics over a nil pointer among the values.
func marshal(m *amqp.Message) (b []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the message can't be encoded: go-amqp panics: %v", r)
		}
	}()
	if b, err = m.MarshalBinary(); err != nil {
		return nil, fmt.Errorf("the message can't be encoded: %w", err)
	}
	return b, nil
}

// encoder writes what it can.
type encoder struct {
	b   []byte
	not bool // there is something that it doesn't write
}

func (e *encoder) put(b ...byte) { e.b = append(e.b, b...) }

func (e *encoder) section(code byte) { e.put(0, frames.CodeSmallUlong, code) }

func (e *encoder) message(m *amqp.Message) {
	if len(m.Sequence) > 0 {
		e.not = true
		return
	}
	if m.Header != nil {
		e.header(m.Header)
	}
	if m.DeliveryAnnotations != nil {
		e.annotations(frames.SectionDeliveryAnnotations, m.DeliveryAnnotations)
	}
	if m.Annotations != nil {
		e.annotations(frames.SectionAnnotations, m.Annotations)
	}
	if m.Properties != nil {
		e.properties(m.Properties)
	}
	if m.ApplicationProperties != nil {
		e.section(frames.SectionApplicationProperties)
		e.mapping(m.ApplicationProperties, 0)
	}
	for _, d := range m.Data {
		e.section(frames.SectionData)
		e.binary(d)
	}
	if m.Value != nil {
		e.section(frames.SectionValue)
		e.value(m.Value, 0)
	}
	if m.Footer != nil {
		e.annotations(frames.SectionFooter, m.Footer)
	}
}

// begin begins a compound value: with a constructor, and room for size and count, which end
// fills in.
func (e *encoder) begin(code byte) (at int) {
	e.put(code, 0, 0, 0, 0, 0, 0, 0, 0)
	return len(e.b) - 8
}

func (e *encoder) end(at, count int) {
	size := len(e.b) - at - 4
	if uint64(size) > math.MaxUint32 {
		e.not = true
	}
	binary.BigEndian.PutUint32(e.b[at:], uint32(size))
	binary.BigEndian.PutUint32(e.b[at+4:], uint32(count))
}

func (e *encoder) header(h *amqp.MessageHeader) {
	count := 1 // go-amqp writes always whether a message is durable
	switch {
	case h.DeliveryCount != 0:
		count = 5
	case h.FirstAcquirer:
		count = 4
	case h.TTL != 0:
		count = 3
	case h.Priority != defaultPriority:
		count = 2
	}
	e.section(frames.SectionHeader)
	at := e.begin(frames.CodeList32)
	e.bool(h.Durable)
	if count >= 2 {
		if h.Priority != defaultPriority {
			e.put(frames.CodeUbyte, h.Priority)
		} else {
			e.put(frames.CodeNull)
		}
	}
	if count >= 3 {
		if h.TTL != 0 {
			e.uint(uint32(h.TTL / time.Millisecond))
		} else {
			e.put(frames.CodeNull)
		}
	}
	if count >= 4 {
		if h.FirstAcquirer {
			e.put(frames.CodeTrue)
		} else {
			e.put(frames.CodeNull)
		}
	}
	if count >= 5 {
		e.uint(h.DeliveryCount)
	}
	e.end(at, count)
}

func (e *encoder) properties(p *amqp.MessageProperties) {
	e.section(frames.SectionProperties)
	f := fields{encoder: e}
	start := len(e.b)
	at := e.begin(frames.CodeList32)
	f.any(p.MessageID)
	if f.next(len(p.UserID) > 0) {
		e.binary(p.UserID)
	}
	f.string(p.To)
	f.string(p.Subject)
	f.string(p.ReplyTo)
	f.any(p.CorrelationID)
	f.symbol(p.ContentType)
	f.symbol(p.ContentEncoding)
	f.time(p.AbsoluteExpiryTime)
	f.time(p.CreationTime)
	f.string(p.GroupID)
	if f.next(p.GroupSequence != nil) {
		e.uint(*p.GroupSequence)
	}
	f.string(p.ReplyToGroupID)
	if f.count == 0 {
		e.b = append(e.b[:start], frames.CodeList0)
		return
	}
	e.end(at, f.count)
}

// fields writes those of the properties. One that isn't there is null, if another comes
// behind it.
type fields struct {
	*encoder
	count, nulls int
}

// next says whether a field is there and is to be written.
func (f *fields) next(is bool) bool {
	if !is {
		f.nulls++
		return false
	}
	f.count += f.nulls + 1
	for ; f.nulls > 0; f.nulls-- {
		f.put(frames.CodeNull)
	}
	return true
}

func (f *fields) any(v any) {
	if f.next(v != nil) {
		f.value(v, 0)
	}
}

func (f *fields) string(s *string) {
	if f.next(s != nil) {
		f.encoder.string(*s)
	}
}

func (f *fields) symbol(s *string) {
	if f.next(s != nil) {
		f.sized(frames.CodeSymbol8, *s)
	}
}

func (f *fields) time(t *time.Time) {
	if f.next(t != nil) {
		f.encoder.time(*t)
	}
}

func (e *encoder) annotations(code byte, a amqp.Annotations) {
	e.section(code)
	at := e.begin(frames.CodeMap32)
	for k, v := range a {
		switch k := k.(type) {
		case string:
			e.sized(frames.CodeSymbol8, k)
		case amqp.Symbol:
			e.sized(frames.CodeSymbol8, string(k))
		case int64:
			e.long(k)
		case int:
			e.long(int64(k))
		default:
			e.not = true
		}
		e.value(v, 0)
		if e.not {
			return
		}
	}
	e.end(at, 2*len(a))
}

func (e *encoder) mapping(m map[string]any, depth int) {
	at := e.begin(frames.CodeMap32)
	for k, v := range m {
		e.string(k)
		e.value(v, depth)
		if e.not {
			return
		}
	}
	e.end(at, 2*len(m))
}

func (e *encoder) list(l []any, depth int) {
	if len(l) == 0 {
		e.put(frames.CodeList0)
		return
	}
	at := e.begin(frames.CodeList32)
	for _, v := range l {
		e.value(v, depth)
		if e.not {
			return
		}
	}
	e.end(at, len(l))
}

func (e *encoder) value(v any, depth int) {
	switch v := v.(type) {
	case nil, amqp.Null:
		e.put(frames.CodeNull)
	case bool:
		e.bool(v)
	case string:
		e.string(v)
	case amqp.Symbol:
		e.sized(frames.CodeSymbol8, string(v))
	case []byte:
		e.binary(v)
	case int:
		e.long(int64(v))
	case int64:
		e.long(v)
	case int32:
		if v == int32(int8(v)) {
			e.put(frames.CodeSmallInt, byte(v))
		} else {
			e.four(frames.CodeInt, uint32(v))
		}
	case int16:
		e.put(frames.CodeShort, byte(v>>8), byte(v))
	case int8:
		e.put(frames.CodeByte, byte(v))
	case uint:
		e.ulong(uint64(v))
	case uint64:
		e.ulong(v)
	case uint32:
		e.uint(v)
	case uint16:
		e.put(frames.CodeUshort, byte(v>>8), byte(v))
	case uint8:
		e.put(frames.CodeUbyte, v)
	case float64:
		e.eight(frames.CodeDouble, math.Float64bits(v))
	case float32:
		e.four(frames.CodeFloat, math.Float32bits(v))
	case time.Time:
		e.time(v)
	case amqp.UUID:
		e.put(frames.CodeUUID)
		e.b = append(e.b, v[:]...)
	default:
		e.compound(v, depth+1)
	}
}

func (e *encoder) compound(v any, depth int) {
	if depth > maxDepth {
		e.not = true
		return
	}
	switch v := v.(type) {
	case []any:
		e.list(v, depth)
	case map[string]any:
		e.mapping(v, depth)
	default:
		e.not = true
	}
}

func (e *encoder) bool(v bool) {
	if v {
		e.put(frames.CodeTrue)
	} else {
		e.put(frames.CodeFalse)
	}
}

func (e *encoder) string(s string) {
	if !utf8.ValidString(s) {
		e.not = true
		return
	}
	e.sized(frames.CodeString8, s)
}

// sized writes text behind its size. code is the constructor for a short one.
func (e *encoder) sized(code byte, s string) {
	if e.size(code, len(s)) {
		e.b = append(e.b, s...)
	}
}

func (e *encoder) binary(b []byte) {
	if e.size(frames.CodeBinary8, len(b)) {
		e.b = append(e.b, b...)
	}
}

func (e *encoder) size(code byte, n int) bool {
	switch {
	case n < 256:
		e.put(code, byte(n))
	case uint64(n) < math.MaxUint32:
		e.four(code+0x10, uint32(n))
	default:
		e.not = true
	}
	return !e.not
}

func (e *encoder) uint(v uint32) {
	switch {
	case v == 0:
		e.put(frames.CodeUint0)
	case v < 256:
		e.put(frames.CodeSmallUint, byte(v))
	default:
		e.four(frames.CodeUint, v)
	}
}

func (e *encoder) ulong(v uint64) {
	switch {
	case v == 0:
		e.put(frames.CodeUlong0)
	case v < 256:
		e.put(frames.CodeSmallUlong, byte(v))
	default:
		e.eight(frames.CodeUlong, v)
	}
}

func (e *encoder) long(v int64) {
	if v == int64(int8(v)) {
		e.put(frames.CodeSmallLong, byte(v))
	} else {
		e.eight(frames.CodeLong, uint64(v))
	}
}

func (e *encoder) time(t time.Time) { e.eight(frames.CodeTimestamp, uint64(t.UnixMilli())) }

func (e *encoder) four(code byte, v uint32) {
	e.b = binary.BigEndian.AppendUint32(append(e.b, code), v)
}

func (e *encoder) eight(code byte, v uint64) {
	e.b = binary.BigEndian.AppendUint64(append(e.b, code), v)
}
