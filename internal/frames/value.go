package frames

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync/atomic"
	"time"
)

// The values of AMQP 1.0 (part 1.6) and their Go types:
//
//	null                      nil
//	boolean                   bool
//	ubyte to ulong            uint8, uint16, uint32, uint64
//	byte to long              int8, int16, int32, int64
//	float, double             float32, float64
//	decimal32 to decimal128   Decimal32, Decimal64, Decimal128
//	char                      Char
//	timestamp                 Timestamp
//	uuid                      UUID
//	binary                    []byte
//	string, symbol            string, Symbol
//	list, map, array          List, Map, Array
//	a described value         Described
//
// Each type is kept apart from the others, so a value is written as the type that it
// was read as. Its width may change: a ulong of 5 is written in two bytes.
type (
	// Symbol is a string of ASCII from a defined domain.
	Symbol string
	// Char is a Unicode code point.
	Char uint32
	// Timestamp is in milliseconds since 1970, UTC.
	Timestamp int64
	// UUID is in network byte order.
	UUID [16]byte
	// Decimal32 is an IEEE 754 decimal in its wire form.
	Decimal32 [4]byte
	// Decimal64 is an IEEE 754 decimal in its wire form.
	Decimal64 [8]byte
	// Decimal128 is an IEEE 754 decimal in its wire form.
	Decimal128 [16]byte
	// List is a sequence of values of any types.
	List []any
	// Map keeps the order of its entries, and keys that Go's maps can't have.
	Map []Entry
	// Entry is a key of a Map, and its value.
	Entry struct{ Key, Value any }
	// Described is a value with a descriptor that says what it stands for.
	Described struct{ Descriptor, Value any }
	// Array is a sequence of values of one type.
	Array struct {
		// Type is the wide constructor of the elements. An array without elements has
		// one, too. Zero is the type of the first element.
		Type byte
		// Descriptor, if not nil, describes each element.
		Descriptor any
		// Elements that take no room, such as nulls, are shared by all arrays that were
		// read, so that a few bytes can't take up much memory. They must not be changed.
		Elements []any
	}
)

// Time is t as a time.Time, in UTC.
func (t Timestamp) Time() time.Time { return time.UnixMilli(int64(t)).UTC() }

// Get returns the value of the first key that is this string or symbol.
func (m Map) Get(key string) (any, bool) {
	for _, e := range m {
		switch k := e.Key.(type) {
		case string:
			if k == key {
				return e.Value, true
			}
		case Symbol:
			if string(k) == key {
				return e.Value, true
			}
		}
	}
	return nil, false
}

// Set replaces the value of the first key that is this string or symbol, or appends a
// symbol. It returns the map, as append does.
func (m Map) Set(key Symbol, value any) Map {
	for i, e := range m {
		if e.Key == key || e.Key == string(key) {
			m[i].Value = value
			return m
		}
	}
	return append(m, Entry{key, value})
}

// MaxDepth is how deeply values may be nested. What is deeper is neither read nor
// written, nor passed on to go-amqp, which takes about 700 bytes of stack a level.
const MaxDepth = 512

const (
	// maxRoomless bounds the elements of all arrays in a value whose elements take no room.
	// Their number isn't bounded by the size of what holds them.
	maxRoomless = 1 << 16
	// maxMaps is how many maps may be in what is read, and mapBytes for how many bytes there may
	// be one more. In Go, a map takes about 300 bytes, and on the wire it takes three.
	maxMaps  = 1 << 16
	mapBytes = 32
)

// Budget bounds what is read from a number of bytes. A reader spends from it before it allocates,
// so what is read takes no more than a small multiple of these bytes, regardless of what they claim.
type Budget struct {
	elements int // of lists, maps, and arrays
	maps     int
}

// NewBudget returns the budget for n bytes. Each element takes at least one of them, and no byte
// belongs to the counts of two: of nested values that claim the same bytes, all but one lie.
func NewBudget(n int) Budget { return Budget{elements: n, maps: maxMaps + n/mapBytes} }

// Elements spends the count of a list, a map (keys and values), or an array whose elements take
// room. It returns false if there can't be so many.
func (b *Budget) Elements(count int) bool {
	b.elements -= count
	return count >= 0 && b.elements >= 0
}

// Map spends a map. It returns false if there are more than anybody has a use for.
func (b *Budget) Map() bool {
	b.maps--
	return b.maps >= 0
}

// ErrMalformed is in the error for bytes that aren't AMQP.
var ErrMalformed = errors.New("malformed AMQP")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// The constructors of values (AMQP 1.0, part 1.6).
const (
	CodeDescribed  = 0x00
	CodeNull       = 0x40
	CodeTrue       = 0x41
	CodeFalse      = 0x42
	CodeUint0      = 0x43
	CodeUlong0     = 0x44
	CodeList0      = 0x45
	CodeUbyte      = 0x50
	CodeByte       = 0x51
	CodeSmallUint  = 0x52
	CodeSmallUlong = 0x53
	CodeSmallInt   = 0x54
	CodeSmallLong  = 0x55
	CodeBool       = 0x56
	CodeUshort     = 0x60
	CodeShort      = 0x61
	CodeUint       = 0x70
	CodeInt        = 0x71
	CodeFloat      = 0x72
	CodeChar       = 0x73
	CodeDecimal32  = 0x74
	CodeUlong      = 0x80
	CodeLong       = 0x81
	CodeDouble     = 0x82
	CodeTimestamp  = 0x83
	CodeDecimal64  = 0x84
	CodeDecimal128 = 0x94
	CodeUUID       = 0x98
	CodeBinary8    = 0xa0
	CodeString8    = 0xa1
	CodeSymbol8    = 0xa3
	CodeBinary32   = 0xb0
	CodeString32   = 0xb1
	CodeSymbol32   = 0xb3
	CodeList8      = 0xc0
	CodeMap8       = 0xc1
	CodeList32     = 0xd0
	CodeMap32      = 0xd1
	CodeArray8     = 0xe0
	CodeArray32    = 0xf0
)

// wide is the constructor that holds any value of the type of code.
func wide(code byte) byte {
	switch code {
	case CodeTrue, CodeFalse:
		return CodeBool
	case CodeUint0, CodeSmallUint:
		return CodeUint
	case CodeUlong0, CodeSmallUlong:
		return CodeUlong
	case CodeSmallInt:
		return CodeInt
	case CodeSmallLong:
		return CodeLong
	case CodeBinary8, CodeString8, CodeSymbol8, CodeList8, CodeMap8, CodeArray8:
		return code + 0x10
	case CodeList0:
		return CodeList32
	}
	return code
}

// ReadValue reads the value at the beginning of b, and returns what is behind it. Binary
// values are parts of b.
func ReadValue(b []byte) (v any, rest []byte, err error) {
	d := newDecoder(b)
	v = d.value()
	return v, d.b, d.err
}

// ReadValues reads all values in b, which are in sequence, within one [Budget], and calls f with
// each. It returns the first error, and where the value begins that it's about.
func ReadValues(b []byte, f func(v any) error) (at int, err error) {
	d := newDecoder(b)
	for len(d.b) > 0 {
		at = len(b) - len(d.b)
		v := d.value()
		if err = d.err; err == nil {
			err = f(v)
		}
		if err != nil {
			return at, err
		}
	}
	return len(b), nil
}

// decoder reads values. After an error all that it reads is nil.
type decoder struct {
	b        []byte
	err      error
	depth    int
	roomless int // elements without room that may still come
	budget   Budget
}

func newDecoder(b []byte) decoder {
	return decoder{b: b, roomless: maxRoomless, budget: NewBudget(len(b))}
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = malformed(format, args...)
		d.b = nil
	}
}

// take returns the next n bytes, or nil.
func (d *decoder) take(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.fail("%d bytes are left of a value of %d", len(d.b), n)
		return nil
	}
	b := d.b[:n:n]
	d.b = d.b[n:]
	return b
}

// number reads n bytes.
func (d *decoder) number(n int) (v uint64) {
	for _, c := range d.take(n) {
		v = v<<8 | uint64(c)
	}
	return v
}

func (d *decoder) deeper() bool {
	if d.depth++; d.depth > MaxDepth {
		d.fail("values are nested more than %d deep", MaxDepth)
	}
	return d.err == nil
}

func (d *decoder) value() any {
	code := byte(d.number(1))
	if d.err != nil {
		return nil
	}
	if code != CodeDescribed {
		return d.body(code)
	}
	if !d.deeper() {
		return nil
	}
	descriptor := d.value()
	v := d.value()
	d.depth--
	if d.err != nil {
		return nil
	}
	return Described{descriptor, v}
}

// body reads a value whose constructor has been read.
func (d *decoder) body(code byte) any {
	switch code {
	case CodeNull:
		return nil
	case CodeTrue:
		return true
	case CodeFalse:
		return false
	case CodeBool:
		n := d.number(1)
		if n > 1 {
			d.fail("a boolean of %d", n)
		}
		return n == 1
	case CodeUint0:
		return uint32(0)
	case CodeUlong0:
		return uint64(0)
	case CodeList0:
		return emptyList
	case CodeBinary8, CodeBinary32, CodeString8, CodeString32, CodeSymbol8, CodeSymbol32:
		return d.text(code)
	case CodeList8, CodeList32:
		return d.list(code)
	case CodeMap8, CodeMap32:
		return d.mapping(code)
	case CodeArray8, CodeArray32:
		return d.array(code)
	}
	return d.fixed(code)
}

// text decodes a value of bytes behind its constructor.
func (d *decoder) text(code byte) any {
	switch code {
	case CodeBinary8:
		return d.take(int(d.number(1)))
	case CodeBinary32:
		return d.take(int(d.number(4)))
	case CodeString8:
		return string(d.take(int(d.number(1))))
	case CodeString32:
		return string(d.take(int(d.number(4))))
	case CodeSymbol8:
		return Symbol(d.take(int(d.number(1))))
	default:
		return Symbol(d.take(int(d.number(4))))
	}
}

// fixed decodes a value of a fixed width behind its constructor.
func (d *decoder) fixed(code byte) any {
	switch code {
	case CodeUbyte:
		return uint8(d.number(1))
	case CodeByte:
		return int8(d.number(1))
	case CodeSmallUint:
		return uint32(d.number(1))
	case CodeSmallUlong:
		return d.number(1)
	case CodeSmallInt:
		return int32(int8(d.number(1)))
	case CodeSmallLong:
		return int64(int8(d.number(1)))
	case CodeUshort:
		return uint16(d.number(2))
	case CodeShort:
		return int16(d.number(2))
	case CodeUint:
		return uint32(d.number(4))
	case CodeInt:
		return int32(d.number(4))
	case CodeFloat:
		return math.Float32frombits(uint32(d.number(4)))
	case CodeChar:
		return Char(d.number(4))
	case CodeDecimal32:
		return Decimal32(bytesOf[[4]byte](d))
	case CodeUlong:
		return d.number(8)
	case CodeLong:
		return int64(d.number(8))
	case CodeDouble:
		return math.Float64frombits(d.number(8))
	case CodeTimestamp:
		return Timestamp(d.number(8))
	case CodeDecimal64:
		return Decimal64(bytesOf[[8]byte](d))
	case CodeDecimal128:
		return Decimal128(bytesOf[[16]byte](d))
	case CodeUUID:
		return UUID(bytesOf[[16]byte](d))
	}
	d.fail("no value begins with 0x%02x", code)
	return nil
}

func bytesOf[T [4]byte | [8]byte | [16]byte](d *decoder) (v T) {
	var size = len(v)
	b := d.take(size)
	for i := range b {
		v[i] = b[i]
	}
	return v
}

// enter reads size and count of a compound value. What d reads then ends with it; leave
// continues behind it.
func (d *decoder) enter(code byte) (count int, behind []byte) {
	width := 1
	if code&0x10 != 0 {
		width = 4
	}
	all := d.take(int(d.number(width)))
	behind = d.b
	d.b = all
	count = int(d.number(width))
	if count < 0 { // where an int has 32 bits
		d.fail("%d elements", uint32(count))
	}
	if !d.deeper() {
		return 0, nil
	}
	return count, behind
}

func (d *decoder) leave(behind []byte) {
	if d.err != nil {
		return
	}
	if len(d.b) > 0 {
		d.fail("%d bytes too many in a compound value", len(d.b))
		return
	}
	d.b = behind
	d.depth--
}

// emptyList takes no allocation where a list without elements comes.
var emptyList any = List{}

// room checks that count elements may be in what is left, and spends them.
func (d *decoder) room(count int) bool {
	if d.err == nil && (count > len(d.b) || !d.budget.Elements(count)) {
		d.fail("%d elements in %d bytes", count, len(d.b))
	}
	return d.err == nil
}

func (d *decoder) list(code byte) any {
	count, behind := d.enter(code)
	if !d.room(count) {
		return nil
	}
	l := make(List, 0, count)
	for range count {
		l = append(l, d.value())
		if d.err != nil {
			return nil
		}
	}
	d.leave(behind)
	return l
}

func (d *decoder) mapping(code byte) any {
	count, behind := d.enter(code)
	if !d.room(count) {
		return nil
	}
	if count%2 == 1 {
		d.fail("a map with %d keys and values", count)
		return nil
	}
	if !d.budget.Map() {
		d.fail("more maps than a value of this size may have")
		return nil
	}
	m := make(Map, 0, count/2)
	for range count / 2 {
		k := d.value()
		m = append(m, Entry{k, d.value()})
		if d.err != nil {
			return nil
		}
	}
	d.leave(behind)
	return m
}

func (d *decoder) array(code byte) any {
	count, behind := d.enter(code)
	var a Array
	element := byte(d.number(1))
	if d.err == nil && element == CodeDescribed {
		a.Descriptor = d.value()
		if d.err == nil && a.Descriptor == nil {
			d.fail("an array whose descriptor is null")
		}
		element = byte(d.number(1))
	}
	if d.err != nil {
		return nil
	}
	if element == CodeDescribed {
		d.fail("an array whose elements have two descriptors")
		return nil
	}
	if element>>4 == 4 { // they take no room
		if d.roomless -= count; d.roomless < 0 {
			d.fail("%d elements that take no room", count)
			return nil
		}
	} else if !d.room(count) {
		return nil
	}
	if !isConstructor(element) {
		d.fail("no value begins with 0x%02x", element)
		return nil
	}
	a.Type = wide(element)
	if element>>4 == 4 {
		a.Elements = roomless(element)[:count:count]
		d.leave(behind)
		return a
	}
	a.Elements = make([]any, 0, count)
	for range count {
		a.Elements = append(a.Elements, d.body(element))
		if d.err != nil {
			return nil
		}
	}
	d.leave(behind)
	return a
}

// Shared reports whether the elements are those that all such arrays share.
func (a Array) Shared() bool {
	if len(a.Elements) == 0 {
		return true
	}
	for i := range sharedElements {
		if all := sharedElements[i].Load(); all != nil && &all[0] == &a.Elements[0] {
			return true
		}
	}
	return false
}

// roomless returns maxRoomless elements of a type whose elements take no room.
func roomless(code byte) []any {
	shared := &sharedElements[code&0xf]
	if shared.Load() == nil {
		var all [maxRoomless]any
		var d decoder
		element := d.body(code)
		for i := range all {
			all[i] = element
		}
		shared.CompareAndSwap(nil, &all)
	}
	return shared.Load()[:]
}

var sharedElements [CodeList0&0xf + 1]atomic.Pointer[[maxRoomless]any]

// widths are how many bytes are behind a constructor, or hold the size of what is: the upper half
// of a constructor says that.
var widths = [16]int{0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16, 0xa: 1, 0xb: 4, 0xc: 1, 0xd: 4, 0xe: 1, 0xf: 4}

// isConstructor says whether a value that isn't described can begin with code.
func isConstructor(code byte) bool {
	switch code {
	case CodeNull, CodeTrue, CodeFalse, CodeUint0, CodeUlong0, CodeList0,
		CodeUbyte, CodeByte, CodeSmallUint, CodeSmallUlong, CodeSmallInt, CodeSmallLong, CodeBool,
		CodeUshort, CodeShort, CodeUint, CodeInt, CodeFloat, CodeChar, CodeDecimal32,
		CodeUlong, CodeLong, CodeDouble, CodeTimestamp, CodeDecimal64, CodeDecimal128, CodeUUID,
		CodeBinary8, CodeString8, CodeSymbol8, CodeBinary32, CodeString32, CodeSymbol32,
		CodeList8, CodeMap8, CodeList32, CodeMap32, CodeArray8, CodeArray32:
		return true
	}
	return false
}

// AppendValue writes v behind b. The types that it takes are those that ReadValue
// returns.
func AppendValue(b []byte, v any) ([]byte, error) {
	e := encoder{b: b}
	e.value(v)
	return e.b, e.err
}

// encoder writes values, and keeps the first error.
type encoder struct {
	b     []byte
	err   error
	depth int
}

func (e *encoder) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf("frames: "+format, args...)
	}
}

func (e *encoder) value(v any) {
	switch v := v.(type) {
	case nil:
		e.b = append(e.b, CodeNull)
	case bool:
		if v {
			e.b = append(e.b, CodeTrue)
		} else {
			e.b = append(e.b, CodeFalse)
		}
	case uint32:
		switch {
		case v == 0:
			e.b = append(e.b, CodeUint0)
		case v < 256:
			e.b = append(e.b, CodeSmallUint, byte(v))
		default:
			e.wide(CodeUint, v)
		}
	case uint64:
		switch {
		case v == 0:
			e.b = append(e.b, CodeUlong0)
		case v < 256:
			e.b = append(e.b, CodeSmallUlong, byte(v))
		default:
			e.wide(CodeUlong, v)
		}
	case int32:
		if v == int32(int8(v)) {
			e.b = append(e.b, CodeSmallInt, byte(v))
		} else {
			e.wide(CodeInt, v)
		}
	case int64:
		if v == int64(int8(v)) {
			e.b = append(e.b, CodeSmallLong, byte(v))
		} else {
			e.wide(CodeLong, v)
		}
	case []byte:
		e.sized(CodeBinary8, len(v))
		e.b = append(e.b, v...)
	case string:
		e.sized(CodeString8, len(v))
		e.b = append(e.b, v...)
	case Symbol:
		e.sized(CodeSymbol8, len(v))
		e.b = append(e.b, v...)
	case List:
		if len(v) == 0 {
			e.b = append(e.b, CodeList0)
		} else {
			e.compound(CodeList32, v)
		}
	case Map:
		e.compound(CodeMap32, v)
	case Array:
		e.compound(CodeArray32, v)
	case Described:
		e.b = append(e.b, CodeDescribed)
		if e.depth++; e.depth > MaxDepth {
			e.fail("values are nested more than %d deep", MaxDepth)
			return
		}
		e.value(v.Descriptor)
		e.value(v.Value)
		e.depth--
	default:
		code := typeOf(v)
		if code == 0 {
			e.fail("no AMQP type for %T", v)
			return
		}
		e.wide(code, v)
	}
}

// sized writes the constructor and size of a binary or text.
func (e *encoder) sized(code byte, n int) {
	if n < 256 {
		e.b = append(e.b, code, byte(n))
	} else {
		e.b = binary.BigEndian.AppendUint32(append(e.b, code+0x10), e.size(n))
	}
}

func (e *encoder) size(n int) uint32 {
	if uint64(n) > math.MaxUint32 {
		e.fail("a value of %d bytes", n)
	}
	return uint32(n)
}

// types are the wide constructors of Go's types.
var types = map[reflect.Type]byte{
	nil: CodeNull, reflect.TypeFor[bool](): CodeBool,
	reflect.TypeFor[uint8](): CodeUbyte, reflect.TypeFor[uint16](): CodeUshort, reflect.TypeFor[uint32](): CodeUint, reflect.TypeFor[uint64](): CodeUlong,
	reflect.TypeFor[int8](): CodeByte, reflect.TypeFor[int16](): CodeShort, reflect.TypeFor[int32](): CodeInt, reflect.TypeFor[int64](): CodeLong,
	reflect.TypeFor[float32](): CodeFloat, reflect.TypeFor[float64](): CodeDouble, reflect.TypeFor[Char](): CodeChar, reflect.TypeFor[Timestamp](): CodeTimestamp,
	reflect.TypeFor[Decimal32](): CodeDecimal32, reflect.TypeFor[Decimal64](): CodeDecimal64, reflect.TypeFor[Decimal128](): CodeDecimal128,
	reflect.TypeFor[UUID](): CodeUUID, reflect.TypeFor[[]byte](): CodeBinary32, reflect.TypeFor[string](): CodeString32, reflect.TypeFor[Symbol](): CodeSymbol32,
	reflect.TypeFor[List](): CodeList32, reflect.TypeFor[Map](): CodeMap32, reflect.TypeFor[Array](): CodeArray32,
}

// typeOf is the wide constructor for v, 0 if there is none.
func typeOf(v any) byte { return types[reflect.TypeOf(v)] }

// wide writes the constructor code, a wide one, and v.
func (e *encoder) wide(code byte, v any) {
	e.b = append(e.b, code)
	e.body(v)
}

// body writes v behind its wide constructor.
func (e *encoder) body(v any) {
	switch v := v.(type) {
	case nil:
	case bool:
		if v {
			e.b = append(e.b, 1)
		} else {
			e.b = append(e.b, 0)
		}
	case uint8:
		e.b = append(e.b, v)
	case int8:
		e.b = append(e.b, byte(v))
	case uint16:
		e.b = binary.BigEndian.AppendUint16(e.b, v)
	case int16:
		e.b = binary.BigEndian.AppendUint16(e.b, uint16(v))
	case uint32:
		e.b = binary.BigEndian.AppendUint32(e.b, v)
	case int32:
		e.b = binary.BigEndian.AppendUint32(e.b, uint32(v))
	case float32:
		e.b = binary.BigEndian.AppendUint32(e.b, math.Float32bits(v))
	case Char:
		e.b = binary.BigEndian.AppendUint32(e.b, uint32(v))
	case Decimal32:
		e.b = append(e.b, v[:]...)
	case uint64:
		e.b = binary.BigEndian.AppendUint64(e.b, v)
	case int64:
		e.b = binary.BigEndian.AppendUint64(e.b, uint64(v))
	case float64:
		e.b = binary.BigEndian.AppendUint64(e.b, math.Float64bits(v))
	case Timestamp:
		e.b = binary.BigEndian.AppendUint64(e.b, uint64(v))
	case Decimal64:
		e.b = append(e.b, v[:]...)
	case Decimal128:
		e.b = append(e.b, v[:]...)
	case UUID:
		e.b = append(e.b, v[:]...)
	case []byte:
		e.b = append(binary.BigEndian.AppendUint32(e.b, e.size(len(v))), v...)
	case string:
		e.b = append(binary.BigEndian.AppendUint32(e.b, e.size(len(v))), v...)
	case Symbol:
		e.b = append(binary.BigEndian.AppendUint32(e.b, e.size(len(v))), v...)
	case List, Map, Array:
		at := e.begin()
		n := e.elements(v)
		e.end(at, n)
	}
}

// begin leaves room for a size and a count, which end fills in.
func (e *encoder) begin() (at int) {
	at = len(e.b)
	e.b = append(e.b, 0, 0, 0, 0, 0, 0, 0, 0)
	return at
}

func (e *encoder) end(at, count int) {
	binary.BigEndian.PutUint32(e.b[at:], e.size(len(e.b)-at-4))
	binary.BigEndian.PutUint32(e.b[at+4:], e.size(count))
}

// compound writes a list, map or array in the shorter form if it fits.
func (e *encoder) compound(code byte, v any) {
	at := len(e.b)
	e.wide(code, v)
	e.shorten(at)
}

// shorten writes the compound value at the end of what is written, which begins at at,
// in its short form if it fits.
func (e *encoder) shorten(at int) {
	if e.err != nil {
		return
	}
	size, count := binary.BigEndian.Uint32(e.b[at+1:])-3, binary.BigEndian.Uint32(e.b[at+5:])
	if size > 255 || count > 255 {
		return
	}
	e.b[at] -= 0x10
	e.b[at+1], e.b[at+2] = byte(size), byte(count)
	e.b = append(e.b[:at+3], e.b[at+9:]...)
}

// elements writes what is in v, and returns how many values that is.
func (e *encoder) elements(v any) (count int) {
	if e.depth++; e.depth > MaxDepth {
		e.fail("values are nested more than %d deep", MaxDepth)
		return 0
	}
	defer func() { e.depth-- }()
	switch v := v.(type) {
	case List:
		for _, element := range v {
			e.value(element)
			if e.err != nil {
				return 0
			}
		}
		return len(v)
	case Map:
		for _, entry := range v {
			e.value(entry.Key)
			e.value(entry.Value)
			if e.err != nil {
				return 0
			}
		}
		return 2 * len(v)
	case Array:
		code := v.Type
		if code == 0 {
			code = CodeNull
			if len(v.Elements) > 0 {
				code = typeOf(v.Elements[0])
			}
		}
		if code != wide(code) || !isConstructor(code) {
			e.fail("no array of type 0x%02x", code)
			return 0
		}
		if v.Descriptor != nil {
			e.b = append(e.b, CodeDescribed)
			e.value(v.Descriptor)
		}
		e.b = append(e.b, code)
		for _, element := range v.Elements {
			if typeOf(element) != code {
				e.fail("a %T in an array of type 0x%02x", element, code)
			}
			if e.err != nil {
				return 0
			}
			e.body(element)
		}
		return len(v.Elements)
	}
	return 0
}

// ValueSize is how many bytes the value at the beginning of b takes, 0 if that can't be
// told. It doesn't look into compound values.
func ValueSize(b []byte) int {
	n, depth := 0, 0
	for {
		if len(b) <= n {
			return 0
		}
		code := b[n]
		if code != CodeDescribed {
			break
		}
		// A descriptor, and then the value. RabbitMQ's and go-amqp's descriptors are
		// numbers and symbols.
		if depth++; depth > MaxDepth || len(b) <= n+1 || b[n+1] == CodeDescribed {
			return 0
		}
		size := plainSize(b[n+1:])
		if size == 0 {
			return 0
		}
		n += 1 + size
	}
	size := plainSize(b[n:])
	if size == 0 {
		return 0
	}
	return n + size
}

// plainSize is ValueSize for a value that isn't described.
func plainSize(b []byte) int {
	half := b[0] >> 4
	if half < 4 || len(b) <= widths[half] {
		return 0
	}
	n := 1 + widths[half]
	if half >= 0xa { // its size is there
		size := 0
		for _, c := range b[1:n] {
			size = size<<8 | int(c)
		}
		n += size
	}
	if n < 0 || n > len(b) {
		return 0
	}
	return n
}
