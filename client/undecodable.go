package client

import (
	"crypto/rand"
	"encoding/binary"
	"net"
)

// decodable is a net.Conn that keeps messages from go-amqp which it can't decode:
// those with a char or a decimal, which would end the link, so that RabbitMQ delivers
// them again, on 4.3 for ever; and those nested so deeply that decoding them would
// overflow the stack and end the process, for which a body of a megabyte suffices.
// In their place it is given their bytes as one data section that begins with
// undecodableMark. The broker has the message as it was sent: what is settled is that.
//
// It follows the frames that come, which are short to look at: bodies of bytes are
// skipped. What is found in a later frame than a delivery's first comes too late to
// be replaced; the rest is spoilt then, so that go-amqp ends the link with an error
// before the stack does.
type decodable struct {
	net.Conn

	in     []byte // what was read
	looked int    // how much of in was looked at
	ready  []byte // the part of that which isn't passed on
	raw    bool   // what comes aren't frames

	// deliveries of more than one frame, by channel and handle.
	open map[uint64]*scan
}

// undecodableMark can't be foreseen by a sender.
var undecodableMark = rand.Text()[:markLen]

const (
	markLen = 16
	// dataHead is a data section's: 00 53 75 b0, and 32 bits of length.
	dataHead = 8
	// maxDepth is how deeply a message may be nested; go-amqp takes about 700 bytes
	// of stack a level.
	maxDepth      = 512
	frameTransfer = 0x14
	// maxFrame is above what go-amqp offers the broker (its default is 64 KiB, and
	// RabbitMQ's limit 128 KiB).
	maxFrame = 4 << 20
)

// undecodable says whether m stands for a message that go-amqp can't decode.
func undecodable(m *Message) bool {
	return len(m.Data) > 0 && len(m.Data[0]) >= markLen && string(m.Data[0][:markLen]) == undecodableMark
}

func (d *decodable) Read(b []byte) (int, error) {
	for len(d.ready) == 0 {
		if d.raw && len(d.in) == 0 {
			return d.Conn.Read(b)
		}
		if err := d.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(b, d.ready)
	d.ready = d.ready[n:]
	return n, nil
}

// fill reads once, and makes ready what is complete. Nothing is ready when it is
// called, so what was looked at before is done with.
func (d *decodable) fill() error {
	d.in = d.in[:copy(d.in, d.in[d.looked:])]
	d.looked = 0
	if cap(d.in)-len(d.in) < 4<<10 {
		grown := make([]byte, len(d.in), max(2*cap(d.in), 32<<10))
		copy(grown, d.in)
		d.in = grown
	}
	n, err := d.Conn.Read(d.in[len(d.in):cap(d.in)])
	d.in = d.in[:len(d.in)+n]
	for !d.raw {
		b := d.in[d.looked:]
		if len(b) < 8 {
			break
		}
		size := int(binary.BigEndian.Uint32(b))
		if string(b[:4]) == "AMQP" {
			size = 8
		} else if size < 8 || size > maxFrame {
			d.raw = true // go-amqp ends the connection over it
			break
		}
		if size > len(b) {
			break
		}
		d.frame(b[:size])
		d.looked += size
	}
	if d.raw || err != nil {
		d.looked = len(d.in)
	}
	d.ready = d.in[:d.looked]
	if len(d.ready) > 0 {
		return nil // the error comes again with the next read
	}
	return err
}

// frame looks at a whole frame, and changes what go-amqp mustn't see.
func (d *decodable) frame(b []byte) {
	code, channel := frameKind(b)
	switch {
	case code == frameTransfer:
		d.transfer(b, channel)
	case code == frameDisposition:
		// go-amqp looks at each delivery of a range, and never ends with the last of
		// all. RabbitMQ's ranges are as long as what it was sent and hasn't answered.
		f := fieldsOf(b[frameHead:])
		first, ok := f.number(1)
		if last, has := f.number(2); has && (!ok || last < first || last-first > 1<<20) {
			spoil(b[8:])
		}
	case code == frameEnd && len(d.open) > 0:
		for key := range d.open {
			if uint16(key>>32) == channel {
				delete(d.open, key)
			}
		}
	case len(b) > 4<<10:
		var s scan
		if s.feed(b[min(8, len(b)):]); s.bad {
			spoil(b[8:])
		}
	}
}

// transfer follows a delivery.
func (d *decodable) transfer(b []byte, channel uint16) {
	f := fieldsOf(b[frameHead:])
	if f.size == 0 {
		return // go-amqp ends the connection
	}
	payload := b[frameHead+f.size:]
	handle, _ := f.number(0)
	key := uint64(channel)<<32 | uint64(handle)
	more, aborted := f.truth(5), f.truth(9)
	s := d.open[key]
	first := s == nil
	switch {
	case aborted:
		delete(d.open, key)
		return
	case first && !more:
		var one scan // on the stack: most deliveries have one frame
		one.feed(payload)
		if one.bad || !one.whole() {
			replace(payload, true)
		}
		return
	case first:
		s = &scan{}
		if d.open == nil {
			d.open = map[uint64]*scan{}
		}
		d.open[key] = s
	}
	if !s.bad {
		s.feed(payload)
		s.replaced = s.bad && first
		if s.bad && !first {
			s.spoilt = true
		}
	}
	switch {
	case s.replaced:
		replace(payload, first)
	case s.spoilt:
		spoil(payload[min(s.at, len(payload)):])
		s.at = 0
	}
	if !more {
		delete(d.open, key)
	}
}

// replace makes data sections of what can't be decoded.
func replace(payload []byte, first bool) {
	switch n := len(payload); {
	case first && n < dataHead+markLen:
		// Nothing that RabbitMQ sends is as short.
	case n >= dataHead:
		copy(payload, "\x00\x53\x75\xb0")
		binary.BigEndian.PutUint32(payload[4:], uint32(n-dataHead))
		if first {
			copy(payload[dataHead:], undecodableMark)
		}
	case n >= 5:
		copy(payload, "\x00\x53\x75\xa0")
		payload[4] = byte(n - 5)
	}
}

// spoil leaves nothing that could be decoded.
func spoil(b []byte) {
	for i := range b {
		b[i] = 0xff
	}
}

// fields are those of a performative: the encoded elements of its list.
type fields struct {
	size  int // of the whole list
	count int
	items []byte
}

func fieldsOf(b []byte) (f fields) {
	size := 0
	switch {
	case len(b) >= 3 && b[0] == 0xc0:
		f.count, f.items, size = int(b[2]), b[3:], 2+int(b[1])
	case len(b) >= 9 && b[0] == 0xd0:
		n := binary.BigEndian.Uint32(b[1:])
		if n > maxFrame {
			return fields{}
		}
		f.count, f.items, size = int(binary.BigEndian.Uint32(b[5:])), b[9:], 5+int(n)
	}
	if size == 0 || size > len(b) || size < len(b)-len(f.items) {
		return fields{}
	}
	f.items = f.items[:size-(len(b)-len(f.items))]
	f.size = size
	return f
}

// item is the nth element, nil if there is none. Elements of a performative that
// come before those that are looked for are short and simple.
func (f fields) item(n int) []byte {
	if n >= f.count {
		return nil
	}
	b := f.items
	for range n {
		if len(b) == 0 || b[0] == 0 {
			return nil
		}
		size := valueSize(b)
		if size == 0 {
			return nil
		}
		b = b[size:]
	}
	return b
}

func (f fields) number(n int) (uint32, bool) {
	switch b := f.item(n); {
	case len(b) >= 1 && b[0] == 0x43:
		return 0, true
	case len(b) >= 2 && b[0] == 0x52:
		return uint32(b[1]), true
	case len(b) >= 5 && b[0] == 0x70:
		return binary.BigEndian.Uint32(b[1:]), true
	}
	return 0, false
}

func (f fields) truth(n int) bool {
	b := f.item(n)
	return len(b) >= 1 && b[0] == 0x41 || len(b) >= 2 && b[0] == 0x56 && b[1] == 1
}

// scan looks through an encoded message, a part at a time, for what go-amqp can't
// decode. It keeps no more than where it is.
type scan struct {
	bad bool
	// at is how far into the last part it came before that.
	at               int
	replaced, spoilt bool

	skip int // bytes of a value to come
	head [9]byte
	have int // bytes in head: of a constructor with sizes
	want int

	depth int
	few   [8]level // the first levels, so that most messages need no more
	many  []level
}

// level is a compound value that has begun.
type level struct {
	left  uint32 // elements to come
	array bool
	code  byte // of an array's elements
}

func (s *scan) top() *level {
	if s.depth <= len(s.few) {
		return &s.few[s.depth-1]
	}
	return &s.many[s.depth-1-len(s.few)]
}

func (s *scan) push(l level) {
	if s.depth++; s.depth > maxDepth {
		s.bad = true
		return
	}
	if s.depth <= len(s.few) {
		s.few[s.depth-1] = l
		return
	}
	s.many = append(s.many[:s.depth-1-len(s.few)], l)
}

// done is told that a value has ended.
func (s *scan) done() {
	for s.depth > 0 {
		t := s.top()
		if t.left--; t.left > 0 {
			return
		}
		s.depth--
	}
}

// whole says that what has come is complete.
func (s *scan) whole() bool { return s.depth == 0 && s.skip == 0 && s.want == 0 }

// feed goes on with the next part.
func (s *scan) feed(b []byte) {
	n := len(b)
	for !s.bad {
		switch {
		case s.skip > 0:
			k := min(s.skip, len(b))
			s.skip, b = s.skip-k, b[k:]
			if s.skip > 0 {
				return
			}
			s.done()
			continue
		case s.want > 0:
			k := copy(s.head[s.have:s.want], b)
			s.have, b = s.have+k, b[k:]
			if s.have < s.want {
				return
			}
			s.want = 0
			s.sized()
			continue
		case s.depth > 0 && s.top().array:
			s.value(s.top().code)
			continue
		case len(b) == 0:
			return
		}
		code := b[0]
		b = b[1:]
		s.value(code)
	}
	s.at = n - len(b)
}

// value begins the value that code is of.
func (s *scan) value(code byte) {
	switch code {
	case 0x00: // a descriptor and what it describes
		s.push(level{left: 2})
	case 0x40, 0x41, 0x42, 0x43, 0x44, 0x45:
		if s.depth > 0 && s.top().array && s.top().left > 1<<16 {
			s.bad = true // takes no room, and so could be any number
			return
		}
		s.done()
	case 0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56:
		s.skip = 1
	case 0x60, 0x61:
		s.skip = 2
	case 0x70, 0x71, 0x72:
		s.skip = 4
	case 0x80, 0x81, 0x82, 0x83:
		s.skip = 8
	case 0x98:
		s.skip = 16
	case 0xa0, 0xa1, 0xa3:
		s.head[0], s.have, s.want = code, 1, 2
	case 0xb0, 0xb1, 0xb3:
		s.head[0], s.have, s.want = code, 1, 5
	case 0xc0, 0xc1, 0xe0:
		s.head[0], s.have, s.want = code, 1, 3
	case 0xd0, 0xd1:
		s.head[0], s.have, s.want = code, 1, 9
	case 0xf0:
		s.head[0], s.have, s.want = code, 1, 9
	default: // char, decimals, and what AMQP doesn't have
		s.bad = true
	}
}

// sized goes on when the sizes of a value are there.
func (s *scan) sized() {
	var size, count uint32
	switch s.head[0] {
	case 0xa0, 0xa1, 0xa3:
		s.fixed(uint32(s.head[1]))
		return
	case 0xb0, 0xb1, 0xb3:
		s.fixed(binary.BigEndian.Uint32(s.head[1:]))
		return
	case 0xff: // an array's constructor, kept in head[1]
		s.element(s.head[1])
		return
	case 0xc0, 0xc1, 0xe0:
		size, count = uint32(s.head[1]), uint32(s.head[2])
	default:
		size, count = binary.BigEndian.Uint32(s.head[1:]), binary.BigEndian.Uint32(s.head[5:])
	}
	kind := s.head[0] & 0x2f // 0x20 for arrays; the last bit for maps
	if count > size || kind&1 == 1 && count%2 == 1 {
		s.bad = true
		return
	}
	if kind&0x20 != 0 {
		s.push(level{left: max(count, 1), array: false, code: byte(min(count, 1))})
		s.head[0], s.have, s.want = 0xff, 1, 2
		return
	}
	if count == 0 {
		s.done()
		return
	}
	s.push(level{left: count})
}

// element begins the elements of an array, whose constructor has come.
func (s *scan) element(code byte) {
	t := s.top()
	if code == 0 {
		s.bad = true // described: go-amqp can't
		return
	}
	if t.code == 0 { // none
		s.done()
		return
	}
	t.array, t.code = true, code
}

func (s *scan) fixed(size uint32) {
	if size == 0 {
		s.done()
		return
	}
	s.skip = int(size)
}
