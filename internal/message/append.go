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
)

// The constructors of values (AMQP 1.0, part 1.6) and the codes of sections (part 3.2).
const (
	codeNull       = 0x40
	codeTrue       = 0x41
	codeFalse      = 0x42
	codeUint0      = 0x43
	codeUlong0     = 0x44
	codeList0      = 0x45
	codeUbyte      = 0x50
	codeByte       = 0x51
	codeSmallUint  = 0x52
	codeSmallUlong = 0x53
	codeSmallInt   = 0x54
	codeSmallLong  = 0x55
	codeBool       = 0x56
	codeUshort     = 0x60
	codeShort      = 0x61
	codeUint       = 0x70
	codeInt        = 0x71
	codeFloat      = 0x72
	codeUlong      = 0x80
	codeLong       = 0x81
	codeDouble     = 0x82
	codeTimestamp  = 0x83
	codeUUID       = 0x98
	codeBinary8    = 0xa0
	codeString8    = 0xa1
	codeSymbol8    = 0xa3
	codeBinary32   = 0xb0
	codeString32   = 0xb1
	codeSymbol32   = 0xb3
	codeList8      = 0xc0
	codeMap8       = 0xc1
	codeList32     = 0xd0
	codeMap32      = 0xd1
	codeArray8     = 0xe0
	codeArray32    = 0xf0

	sectionHeader                = 0x70
	sectionDeliveryAnnotations   = 0x71
	sectionAnnotations           = 0x72
	sectionProperties            = 0x73
	sectionApplicationProperties = 0x74
	sectionData                  = 0x75
	sectionValue                 = 0x77
	sectionFooter                = 0x78
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

func (e *encoder) section(code byte) { e.put(0, codeSmallUlong, code) }

func (e *encoder) message(m *amqp.Message) {
	if len(m.Sequence) > 0 {
		e.not = true
		return
	}
	if m.Header != nil {
		e.header(m.Header)
	}
	if m.DeliveryAnnotations != nil {
		e.annotations(sectionDeliveryAnnotations, m.DeliveryAnnotations)
	}
	if m.Annotations != nil {
		e.annotations(sectionAnnotations, m.Annotations)
	}
	if m.Properties != nil {
		e.properties(m.Properties)
	}
	if m.ApplicationProperties != nil {
		e.section(sectionApplicationProperties)
		e.mapping(m.ApplicationProperties, 0)
	}
	for _, d := range m.Data {
		e.section(sectionData)
		e.binary(d)
	}
	if m.Value != nil {
		e.section(sectionValue)
		e.value(m.Value, 0)
	}
	if m.Footer != nil {
		e.annotations(sectionFooter, m.Footer)
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
	e.section(sectionHeader)
	at := e.begin(codeList32)
	e.bool(h.Durable)
	if count >= 2 {
		if h.Priority != defaultPriority {
			e.put(codeUbyte, h.Priority)
		} else {
			e.put(codeNull)
		}
	}
	if count >= 3 {
		if h.TTL != 0 {
			e.uint(uint32(h.TTL / time.Millisecond))
		} else {
			e.put(codeNull)
		}
	}
	if count >= 4 {
		if h.FirstAcquirer {
			e.put(codeTrue)
		} else {
			e.put(codeNull)
		}
	}
	if count >= 5 {
		e.uint(h.DeliveryCount)
	}
	e.end(at, count)
}

func (e *encoder) properties(p *amqp.MessageProperties) {
	e.section(sectionProperties)
	f := fields{encoder: e}
	start := len(e.b)
	at := e.begin(codeList32)
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
		e.b = append(e.b[:start], codeList0)
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
		f.put(codeNull)
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
		f.sized(codeSymbol8, *s)
	}
}

func (f *fields) time(t *time.Time) {
	if f.next(t != nil) {
		f.encoder.time(*t)
	}
}

func (e *encoder) annotations(code byte, a amqp.Annotations) {
	e.section(code)
	at := e.begin(codeMap32)
	for k, v := range a {
		switch k := k.(type) {
		case string:
			e.sized(codeSymbol8, k)
		case amqp.Symbol:
			e.sized(codeSymbol8, string(k))
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
	at := e.begin(codeMap32)
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
		e.put(codeList0)
		return
	}
	at := e.begin(codeList32)
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
		e.put(codeNull)
	case bool:
		e.bool(v)
	case string:
		e.string(v)
	case amqp.Symbol:
		e.sized(codeSymbol8, string(v))
	case []byte:
		e.binary(v)
	case int:
		e.long(int64(v))
	case int64:
		e.long(v)
	case int32:
		if v == int32(int8(v)) {
			e.put(codeSmallInt, byte(v))
		} else {
			e.four(codeInt, uint32(v))
		}
	case int16:
		e.put(codeShort, byte(v>>8), byte(v))
	case int8:
		e.put(codeByte, byte(v))
	case uint:
		e.ulong(uint64(v))
	case uint64:
		e.ulong(v)
	case uint32:
		e.uint(v)
	case uint16:
		e.put(codeUshort, byte(v>>8), byte(v))
	case uint8:
		e.put(codeUbyte, v)
	case float64:
		e.eight(codeDouble, math.Float64bits(v))
	case float32:
		e.four(codeFloat, math.Float32bits(v))
	case time.Time:
		e.time(v)
	case amqp.UUID:
		e.put(codeUUID)
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
		e.put(codeTrue)
	} else {
		e.put(codeFalse)
	}
}

func (e *encoder) string(s string) {
	if !utf8.ValidString(s) {
		e.not = true
		return
	}
	e.sized(codeString8, s)
}

// sized writes text behind its size. code is the constructor for a short one.
func (e *encoder) sized(code byte, s string) {
	if e.size(code, len(s)) {
		e.b = append(e.b, s...)
	}
}

func (e *encoder) binary(b []byte) {
	if e.size(codeBinary8, len(b)) {
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
		e.put(codeUint0)
	case v < 256:
		e.put(codeSmallUint, byte(v))
	default:
		e.four(codeUint, v)
	}
}

func (e *encoder) ulong(v uint64) {
	switch {
	case v == 0:
		e.put(codeUlong0)
	case v < 256:
		e.put(codeSmallUlong, byte(v))
	default:
		e.eight(codeUlong, v)
	}
}

func (e *encoder) long(v int64) {
	if v == int64(int8(v)) {
		e.put(codeSmallLong, byte(v))
	} else {
		e.eight(codeLong, uint64(v))
	}
}

func (e *encoder) time(t time.Time) { e.eight(codeTimestamp, uint64(t.UnixMilli())) }

func (e *encoder) four(code byte, v uint32) {
	e.b = binary.BigEndian.AppendUint32(append(e.b, code), v)
}

func (e *encoder) eight(code byte, v uint64) {
	e.b = binary.BigEndian.AppendUint64(append(e.b, code), v)
}
