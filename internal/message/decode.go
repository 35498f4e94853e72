package message

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
)

// Decoded is a message with room for what most have, so that it takes one allocation.
type Decoded struct {
	amqp.Message
	header     amqp.MessageHeader
	properties amqp.MessageProperties
	data       [1][]byte
	texts      [4]string // that fields of properties point to
	created    time.Time
}

// Decode decodes b into x, in which nothing but Format and DeliveryTag may be set, and keeps
// nothing of b. The message is the one that go-amqp decodes. After an error, which says
// that the message can't be read by anybody, x is what it was. Decode doesn't panic
// for any b.
func (x *Decoded) Decode(b []byte) error {
	d := newDecoder(b, x)
	d.message()
	if !d.not {
		return nil
	}
	m := amqp.Message{Format: x.Format, DeliveryTag: x.DeliveryTag}
	*x = Decoded{Message: m}
	if err := unmarshal(&x.Message, b); err != nil {
		x.Message = m
		return err
	}
	return nil
}

// decoder reads what is common, and as it ought to be: sizes and counts have to agree.
type decoder struct {
	b   []byte
	at  int
	end int // of the compound value that is being read
	x   *Decoded
	not bool // there is something that it doesn't read

	// text is a copy of what is between start and stop, once there has been a string: the
	// strings of a section are parts of it.
	text        string
	start, stop int
	box         bool // a string is likely to be one that other messages have as well

	used int // of x.texts

	budget frames.Budget
}

func newDecoder(b []byte, x *Decoded) decoder {
	return decoder{b: b, end: len(b), x: x, budget: frames.NewBudget(len(b))}
}

// maxShared is how large a section is whose strings are in one piece, which is kept as long
// as any of them.
const maxShared = 1024

// give says that the message is left to go-amqp.
func (d *decoder) give() { d.not, d.at = true, d.end }

func (d *decoder) byte() byte {
	if d.at >= d.end {
		d.give()
		return 0
	}
	c := d.b[d.at]
	d.at++
	return c
}

// take returns the next n bytes; nil if there are fewer.
func (d *decoder) take(n int) []byte {
	if n < 0 || n > d.end-d.at {
		d.give()
		return nil
	}
	b := d.b[d.at : d.at+n]
	d.at += n
	return b
}

func (d *decoder) two() uint16 {
	if b := d.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) four() uint32 {
	if b := d.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) eight() uint64 {
	if b := d.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// size reads the size of a value, or a count, of a width that depends on its constructor.
func (d *decoder) size(code byte) int {
	if code&0x10 == 0 {
		return int(d.byte())
	}
	return int(d.four())
}

func (d *decoder) message() {
	for d.at < d.end && !d.not {
		if d.byte() != 0 || d.byte() != frames.CodeSmallUlong {
			d.give()
			return
		}
		d.section(d.byte())
	}
}

func (d *decoder) section(code byte) {
	d.text, d.start, d.stop, d.box = "", 0, 0, false
	switch code {
	case frames.SectionHeader:
		d.header()
	case frames.SectionDeliveryAnnotations:
		d.x.DeliveryAnnotations = d.annotations()
	case frames.SectionAnnotations:
		d.x.Annotations = d.annotations()
	case frames.SectionProperties:
		d.properties()
	case frames.SectionApplicationProperties:
		count, outer := d.enter(d.byte(), frames.CodeMap8)
		d.shared()
		m := make(map[string]any, count/2)
		for range count / 2 {
			k := d.string(d.byte())
			m[k] = d.value(0)
			if d.not {
				return
			}
		}
		d.leave(outer)
		d.x.ApplicationProperties = m
	case frames.SectionData:
		data := d.binary(d.byte())
		if d.x.Data == nil {
			d.x.data[0] = data
			d.x.Data = d.x.data[:]
		} else {
			d.x.Data = append(d.x.Data, data)
		}
	case frames.SectionValue:
		if v := d.value(0); v != nil {
			d.x.Value = v
		}
	case frames.SectionFooter:
		d.x.Footer = d.annotations()
	default: // a sequence, or what isn't AMQP
		d.give()
	}
}

// enter begins to read a list or map. short is the short constructor that it ought to have,
// or it has the long one.
func (d *decoder) enter(code, short byte) (count, outer int) {
	if code != short && code != short+0x10 {
		d.give()
		return 0, d.end
	}
	size := d.size(code)
	if size < 0 || size > d.end-d.at {
		d.give()
		return 0, d.end
	}
	outer, d.end = d.end, d.at+size
	count = d.size(code)
	if count < 0 || count > d.end-d.at || count > maxCount || !d.budget.Elements(count) ||
		short == frames.CodeMap8 && (count%2 == 1 || !d.budget.Map()) {
		d.give()
		return 0, outer
	}
	return count, outer
}

// maxCount is go-amqp's.
const maxCount = 65536

// leave continues behind a compound value, which must have been read to its end.
func (d *decoder) leave(outer int) {
	if d.at != d.end {
		d.not = true
	}
	d.end = outer
	if d.not {
		d.at = outer
	}
}

// shared says that the strings of this section are to be in one piece.
func (d *decoder) shared() {
	if d.end-d.at <= maxShared {
		d.start, d.stop = d.at, d.end
	}
}

// null says whether there's a null, which it goes over.
func (d *decoder) null() bool {
	if d.at < d.end && d.b[d.at] == frames.CodeNull {
		d.at++
		return true
	}
	return false
}

// fields begins to read the list that a section is.
func (d *decoder) fields(most int) (count, outer int) {
	code := d.byte()
	if code == frames.CodeList0 {
		outer, d.end = d.end, d.at
		return 0, outer
	}
	count, outer = d.enter(code, frames.CodeList8)
	if count > most {
		d.give()
	}
	return count, outer
}

func (d *decoder) header() {
	if d.x.Header != nil {
		d.give() // go-amqp merges two
		return
	}
	h := &d.x.header
	d.x.Header = h
	h.Priority = defaultPriority
	count, outer := d.fields(5)
	for i := range count {
		if d.null() {
			continue
		}
		switch i {
		case 0:
			h.Durable = d.bool()
		case 1:
			if d.byte() != frames.CodeUbyte {
				d.give()
				return
			}
			h.Priority = d.byte()
		case 2:
			h.TTL = time.Duration(d.uint()) * time.Millisecond
		case 3:
			h.FirstAcquirer = d.bool()
		case 4:
			h.DeliveryCount = d.uint()
		}
	}
	d.leave(outer)
}

func (d *decoder) properties() {
	if d.x.Properties != nil {
		d.give()
		return
	}
	p := &d.x.properties
	d.x.Properties = p
	count, outer := d.fields(13)
	d.shared()
	for i := range count {
		if d.null() {
			continue
		}
		switch i {
		case 0:
			p.MessageID = d.value(0)
		case 1:
			p.UserID = d.binary(d.byte())
		case 2:
			p.To = d.stringPointer()
		case 3:
			p.Subject = d.stringPointer()
		case 4:
			p.ReplyTo = d.stringPointer()
		case 5:
			p.CorrelationID = d.value(0)
		case 6:
			p.ContentType = d.stringPointer()
		case 7:
			p.ContentEncoding = d.stringPointer()
		case 8:
			t := d.time(d.byte())
			p.AbsoluteExpiryTime = &t
		case 9:
			d.x.created = d.time(d.byte())
			p.CreationTime = &d.x.created
		case 10:
			p.GroupID = d.stringPointer()
		case 11:
			n := d.uint()
			p.GroupSequence = &n
		case 12:
			p.ReplyToGroupID = d.stringPointer()
		}
	}
	d.leave(outer)
}

// stringPointer reads a string or symbol.
func (d *decoder) stringPointer() *string {
	var t *string
	if d.used < len(d.x.texts) {
		t = &d.x.texts[d.used]
		d.used++
	} else {
		t = new(string)
	}
	*t = d.string(d.byte())
	return t
}

func (d *decoder) annotations() amqp.Annotations {
	count, outer := d.enter(d.byte(), frames.CodeMap8)
	d.box = true
	a := make(amqp.Annotations, count/2)
	for range count / 2 {
		k := d.boxed(d.byte())
		a[k] = d.value(0)
		if d.not {
			return nil
		}
	}
	d.leave(outer)
	return a
}

// textOf returns the bytes of a string or symbol.
func (d *decoder) textOf(code byte) []byte {
	switch code {
	case frames.CodeString8, frames.CodeSymbol8, frames.CodeString32, frames.CodeSymbol32:
		return d.take(d.size(code))
	}
	d.give()
	return nil
}

// boxed reads a string or symbol as a string that is a value of type any.
func (d *decoder) boxed(code byte) any { return boxed(&boxes, d.textOf(code)) }

// string reads a string or symbol.
func (d *decoder) string(code byte) string {
	b := d.textOf(code)
	switch {
	case len(b) == 0:
		return ""
	case d.box:
		return boxed(&boxes, b).(string)
	case d.stop == 0:
		return string(b)
	case d.text == "":
		d.text = string(d.b[d.start:d.stop])
	}
	to := d.at - d.start
	return d.text[to-len(b) : to]
}

func (d *decoder) binary(code byte) []byte {
	if code != frames.CodeBinary8 && code != frames.CodeBinary32 {
		d.give()
		return nil
	}
	b := d.take(d.size(code))
	if d.not {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}

func (d *decoder) bool() bool {
	switch d.byte() {
	case frames.CodeTrue:
		return true
	case frames.CodeFalse:
		return false
	case frames.CodeBool:
		return d.byte() != 0
	}
	d.give()
	return false
}

func (d *decoder) uint() uint32 {
	switch d.byte() {
	case frames.CodeUint0:
		return 0
	case frames.CodeSmallUint:
		return uint32(d.byte())
	case frames.CodeUint:
		return d.four()
	}
	d.give()
	return 0
}

func (d *decoder) time(code byte) time.Time {
	if code != frames.CodeTimestamp {
		d.give()
		return time.Time{}
	}
	return time.UnixMilli(int64(d.eight()))
}

// value reads a value of any type that is within depth others.
func (d *decoder) value(depth int) any {
	switch code := d.byte(); code {
	case frames.CodeNull:
		return nil
	case frames.CodeTrue:
		return true
	case frames.CodeFalse:
		return false
	case frames.CodeBool:
		return d.byte() != 0
	case frames.CodeString8, frames.CodeString32, frames.CodeSymbol8, frames.CodeSymbol32:
		if d.box {
			return d.boxed(code)
		}
		return d.string(code)
	case frames.CodeBinary8, frames.CodeBinary32:
		return d.binary(code)
	case frames.CodeUbyte:
		return d.byte()
	case frames.CodeByte:
		return int8(d.byte())
	case frames.CodeUshort:
		return d.two()
	case frames.CodeShort:
		return int16(d.two())
	case frames.CodeUint0:
		return uint32(0)
	case frames.CodeSmallUint:
		return uint32(d.byte())
	case frames.CodeUint:
		return d.four()
	case frames.CodeSmallInt:
		return int32(int8(d.byte()))
	case frames.CodeInt:
		return int32(d.four())
	case frames.CodeUlong0:
		return uint64(0)
	case frames.CodeSmallUlong:
		return uint64(d.byte())
	case frames.CodeUlong:
		return d.eight()
	case frames.CodeSmallLong:
		return int64(int8(d.byte()))
	case frames.CodeLong:
		return int64(d.eight())
	case frames.CodeFloat:
		return math.Float32frombits(d.four())
	case frames.CodeDouble:
		return math.Float64frombits(d.eight())
	case frames.CodeTimestamp:
		return d.time(code)
	case frames.CodeUUID:
		var u amqp.UUID
		copy(u[:], d.take(len(u)))
		return u
	default:
		return d.compound(code, depth+1)
	}
}

func (d *decoder) compound(code byte, depth int) any {
	if depth > maxDepth {
		d.give()
		return nil
	}
	switch code {
	case frames.CodeList0:
		return []any(nil)
	case frames.CodeList8, frames.CodeList32:
		return d.list(code, depth)
	case frames.CodeMap8, frames.CodeMap32:
		return d.mapping(code, depth)
	case frames.CodeArray8, frames.CodeArray32:
		return d.array(code, depth)
	}
	d.give()
	return nil
}

func (d *decoder) list(code byte, depth int) []any {
	count, outer := d.enter(code, frames.CodeList8)
	var l []any
	if count > 0 {
		l = make([]any, count)
	}
	for i := range l {
		l[i] = d.value(depth)
		if d.not {
			return nil
		}
	}
	d.leave(outer)
	return l
}

// mapping reads a map with strings as keys: go-amqp has another type for an empty one.
func (d *decoder) mapping(code byte, depth int) any {
	count, outer := d.enter(code, frames.CodeMap8)
	if count == 0 {
		d.leave(outer)
		return map[any]any{}
	}
	m := make(map[string]any, count/2)
	for range count / 2 {
		k := d.string(d.byte())
		m[k] = d.value(depth)
		if d.not {
			return nil
		}
	}
	d.leave(outer)
	return m
}

// array reads one of strings or of maps: RabbitMQ's x-opt-deaths is of maps, in which
// routing-keys are of strings.
func (d *decoder) array(code byte, depth int) any {
	count, outer := d.enter(code, frames.CodeArray8)
	switch element := d.byte(); element {
	case frames.CodeString8, frames.CodeString32:
		return d.strings(element, count, outer)
	case frames.CodeMap8, frames.CodeMap32:
		return d.maps(element, count, outer, depth)
	}
	d.give()
	return nil
}

func (d *decoder) strings(element byte, count, outer int) any {
	// go-amqp refuses this, with the element's constructor among the bytes: it doesn't know
	// how short a string is.
	if 2*count > len(d.b)-d.at+1 {
		d.give()
		return nil
	}
	var a []string
	if count > 0 {
		a = make([]string, count)
	}
	for i := range a {
		a[i] = d.string(element)
		if d.not {
			return nil
		}
	}
	d.leave(outer)
	return a
}

func (d *decoder) maps(element byte, count, outer, depth int) any {
	var a []map[any]any
	if count > 0 {
		a = make([]map[any]any, count)
	}
	for i := range a {
		pairs, behind := d.enter(element, frames.CodeMap8)
		a[i] = make(map[any]any, pairs/2)
		for range pairs / 2 {
			k := d.boxed(d.byte())
			a[i][k] = d.value(depth + 1)
			if d.not {
				return nil
			}
		}
		d.leave(behind)
	}
	d.leave(outer)
	return a
}
