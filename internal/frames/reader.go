package frames

import (
	"crypto/rand"
	"encoding/binary"
	"io"
	"sync/atomic"
)

// reader follows the frames that come. It tells the sessions what concerns them, and
// keeps messages from go-amqp which it can't decode: those with a char or a decimal,
// which would end the link, so that RabbitMQ delivers them again, on 4.3 for ever; those
// nested so deeply that decoding them would overflow the stack and end the process, for
// which a body of a megabyte suffices; and those with a key that Go can't hash, over which
// go-amqp panics, for which a footer of ten bytes suffices. In their place it passes on their
// bytes as one data section that begins with undecodableMark. The broker has the
// message as it was sent: what is settled is that.
//
// Frames are short to look at: bodies of bytes are skipped. What is found in a later
// frame than a delivery's first comes too late to be replaced; the rest is spoilt then,
// so that go-amqp ends the link with an error before the stack does.
type reader struct {
	src      io.Reader
	sessions *sessions
	refusal  atomic.Pointer[Error] // of the last close
	answers  atomic.Uint64
	// sessionMax is how many sessions the open allows; 0: it hasn't come.
	sessionMax atomic.Uint32

	in     []byte // what was read
	looked int    // how much of in was looked at
	ready  []byte // the part of that which isn't passed on
	raw    bool   // what comes aren't frames

	// deliveries of more than one frame, by channel and handle.
	open map[uint64]*scan

	folder Folder
}

func newReader(src io.Reader, s *sessions) *reader { return &reader{src: src, sessions: s} }

// undecodableMark can't be foreseen by a sender.
var undecodableMark = rand.Text()[:markLen]

const (
	markLen = 16
	// dataHead is a data section's: 00 53 75 b0, and 32 bits of length.
	dataHead = 8
	// maxFrame is above what go-amqp offers the broker (its default is 64 KiB, and
	// RabbitMQ's limit 128 KiB).
	maxFrame = 4 << 20
)

// Undecodable says whether a message with these data sections stands for one that
// go-amqp can't decode.
func Undecodable(data [][]byte) bool {
	return len(data) > 0 && len(data[0]) >= markLen && string(data[0][:markLen]) == undecodableMark
}

func (r *reader) Read(b []byte) (int, error) {
	for len(r.ready) == 0 {
		if r.raw && len(r.in) == 0 {
			return r.src.Read(b)
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(b, r.ready)
	r.ready = r.ready[n:]
	return n, nil
}

// fill reads once, and makes ready what is complete. Nothing is ready when it is
// called, so what was looked at before is done with.
func (r *reader) fill() error {
	if r.looked > 0 { // not for each piece of a long frame
		r.in = r.in[:copy(r.in, r.in[r.looked:])]
		r.looked = 0
	}
	if cap(r.in)-len(r.in) < 4<<10 {
		grown := make([]byte, len(r.in), max(2*cap(r.in), 32<<10))
		copy(grown, r.in)
		r.in = grown
	}
	n, err := r.src.Read(r.in[len(r.in):cap(r.in)])
	r.in = r.in[:len(r.in)+n]
	for !r.raw {
		b := r.in[r.looked:]
		if len(b) < 8 {
			break
		}
		size := int(binary.BigEndian.Uint32(b))
		if string(b[:4]) == "AMQP" {
			size = 8
		} else if size < 8 || size > maxFrame {
			r.raw = true // go-amqp ends the connection over it
			break
		}
		if size > len(b) {
			break
		}
		r.frame(b[:size])
		r.looked += size
	}
	if r.raw || err != nil {
		r.looked = len(r.in)
	}
	r.ready = r.in[:r.looked]
	if len(r.ready) > 0 {
		return nil // the error comes again with the next read
	}
	return err
}

// frame looks at a whole frame, and changes what go-amqp mustn't see.
func (r *reader) frame(b []byte) {
	code, channel := frameKind(b)
	switch code {
	case codeBegin, codeAttach, codeDisposition, codeDetach, codeEnd:
		r.answers.Add(1)
	}
	switch code {
	case codeTransfer:
		r.transfer(b, channel)
		return
	case codeBegin, codeFlow:
		if n, ok := incomingWindow(b); ok {
			r.sessions.window(channel, n)
		}
	case codeDisposition:
		// go-amqp looks at each delivery of a range, and never ends with the last of
		// all. RabbitMQ's ranges are as long as what it was sent and hasn't answered.
		f := itemsOf(b[frameHead:])
		first, ok := f.number(1)
		if last, has := f.number(2); has && (!ok || last < first || last-first > 1<<20) {
			spoil(b[HeaderSize:])
		}
	case codeEnd:
		r.sessions.end(channel)
		for key := range r.open {
			if uint16(key>>32) == channel {
				delete(r.open, key)
			}
		}
	case codeDetach:
		// A link may end amid a delivery, and another may get its handle.
		if handle, ok := itemsOf(b[frameHead:]).number(0); ok {
			delete(r.open, uint64(channel)<<32|uint64(handle))
		}
	case codeOpen:
		if f, err := Decode(b); err == nil {
			r.sessionMax.Store(uint32(f.Body.(*Open).ChannelMax.Or(65535)) + 1)
		}
	case codeClose:
		if f, err := Decode(b); err == nil {
			r.refusal.Store(f.Body.(*Close).Error)
		}
	}
	if len(b) > 4<<10 {
		var s scan
		if s.feed(b[HeaderSize:]); s.bad {
			spoil(b[HeaderSize:])
		}
	}
}

// incomingWindow reads the incoming-window of a begin or flow: the third field of the
// one and the second of the other.
func incomingWindow(frame []byte) (n uint32, ok bool) {
	f := itemsOf(frame[frameHead:])
	if frame[frameHead-1] == codeBegin {
		return f.number(2)
	}
	return f.number(1)
}

// transfer follows a delivery.
func (r *reader) transfer(b []byte, channel uint16) {
	f := itemsOf(b[frameHead:])
	if f.size == 0 {
		return // go-amqp ends the connection
	}
	payload := b[frameHead+f.size:]
	handle, _ := f.number(0)
	key := uint64(channel)<<32 | uint64(handle)
	more, aborted := f.truth(5), f.truth(9)
	s := r.open[key]
	first := s == nil
	switch {
	case aborted:
		delete(r.open, key)
		return
	case first && !more:
		r.fold(payload, channel)
		var one scan // on the stack: most deliveries have one frame
		one.feed(payload)
		if one.bad || !one.whole() {
			replace(payload, true)
		}
		return
	case first:
		r.fold(payload, channel)
		s = &scan{}
		if r.open == nil {
			r.open = map[uint64]*scan{}
		}
		r.open[key] = s
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
		delete(r.open, key)
	}
}

// fold folds the death history in a delivery's first bytes, if the session asks for that.
// What it leaves is looked through like any message, since sizes in it may lie.
func (r *reader) fold(payload []byte, channel uint16) {
	if r.sessions.folds(channel) {
		r.folder.Fold(payload)
	}
}

// replace makes data sections of what can't be decoded.
func replace(payload []byte, first bool) {
	switch n := len(payload); {
	case first && n < dataHead+markLen:
		spoil(payload) // nothing that RabbitMQ sends is as short
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

// items are the fields of a performative: the encoded elements of its list.
type items struct {
	size    int // of the whole list
	count   int
	encoded []byte
}

func itemsOf(b []byte) (f items) {
	size := 0
	switch {
	case len(b) >= 3 && b[0] == 0xc0:
		f.count, f.encoded, size = int(b[2]), b[3:], 2+int(b[1])
	case len(b) >= 9 && b[0] == 0xd0:
		n := binary.BigEndian.Uint32(b[1:])
		if n > maxFrame {
			return items{}
		}
		f.count, f.encoded, size = int(binary.BigEndian.Uint32(b[5:])), b[9:], 5+int(n)
	}
	if size == 0 || size > len(b) || size < len(b)-len(f.encoded) {
		return items{}
	}
	f.encoded = f.encoded[:size-(len(b)-len(f.encoded))]
	f.size = size
	return f
}

// item is the nth element, nil if there is none. Elements of a performative that
// come before those that are looked for are short and simple.
func (f items) item(n int) []byte {
	if n >= f.count {
		return nil
	}
	b := f.encoded
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

func (f items) number(n int) (uint32, bool) {
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

func (f items) truth(n int) bool {
	b := f.item(n)
	return len(b) >= 1 && b[0] == 0x41 || len(b) >= 2 && b[0] == 0x56 && b[1] == 1
}
