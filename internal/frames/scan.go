package frames

import "encoding/binary"

// scan looks through an encoded message, a part at a time, for what go-amqp can't
// decode. It keeps no more than where it is.
type scan struct {
	bad bool
	// at is how far into the last part it came before that.
	at               int
	replaced, spoilt bool

	section byte // the code of the last section that began

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
	keys  keys // of a map; 0 for others
}

// keys are those that go-amqp can have in a map.
type keys byte

const (
	// textKeys are those of application properties.
	textKeys keys = 1 + iota
	// plainKeys are all but described and compound ones, and binaries. go-amqp panics over
	// those, which ends the process: Go can't hash them.
	plainKeys
)

// may says whether a key may have a constructor.
func (k keys) may(code byte) bool {
	switch code {
	case codeString8, codeString32, codeSymbol8, codeSymbol32:
		return true
	case codeDescribed, codeBinary8, codeBinary32, codeList0:
		return false
	}
	return k == plainKeys && code < 0xc0
}

func (s *scan) top() *level {
	if s.depth <= len(s.few) {
		return &s.few[s.depth-1]
	}
	return &s.many[s.depth-1-len(s.few)]
}

func (s *scan) push(l level) {
	if s.depth++; s.depth > MaxDepth {
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
	if s.depth > 0 {
		if t := s.top(); t.keys > 0 && t.left%2 == 0 && !t.keys.may(code) {
			s.bad = true
			return
		}
		if s.depth == 1 && s.top().left == 2 && (code == codeSmallUlong || code == codeUlong) {
			s.head[0], s.have, s.want = code, 1, 2 // a section's descriptor
			if code == codeUlong {
				s.want = 9
			}
			return
		}
	}
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
	case codeSmallUlong:
		s.section = s.head[1]
		s.done()
		return
	case codeUlong:
		s.section = s.head[8]
		s.done()
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
	l := level{left: count}
	if kind&1 == 1 {
		l.keys = plainKeys
		if s.depth == 1 && s.section == sectionApplicationProperties {
			l.keys = textKeys
		}
	}
	s.push(l)
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
	if size > 1<<30 {
		s.bad = true // and might not fit into an int
		return
	}
	s.skip = int(size)
}

// Readable says whether go-amqp can decode an encoded message, and survives it.
func Readable(message []byte) bool {
	var s scan
	s.feed(message)
	return !s.bad && s.whole()
}
