package frames

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Decodable returns why an encoded message mustn't be given to go-amqp's decoder, or why
// that can't decode it; nil if it's safe to try. What go-amqp makes of it may still be an
// error, for instance because a property is of the wrong type.
//
// go-amqp takes stack for each level of nesting, which ends the process when there are too
// many, and memory for elements that take no room in the message. It panics over map keys
// that Go can't hash, and reads neither char nor decimals.
//
// Decodable goes by the counts in compound values, as go-amqp does. Their sizes only
// mustn't promise more than there is.
func Decodable(message []byte) error {
	w := walk{b: message, roomless: maxRoomless}
	for len(w.b) > 0 {
		if err := w.section(); err != nil {
			return fmt.Errorf("at byte %d: %w", len(message)-len(w.b), err)
		}
	}
	return nil
}

// walk goes over values.
type walk struct {
	b        []byte
	roomless int // elements of arrays that take no room and may still come
}

var (
	errCut    = errors.New("the message ends within a value")
	errNested = fmt.Errorf("values are nested more than %d deep", MaxDepth)
)

func (w *walk) section() error {
	b := w.b
	var code byte
	switch {
	case b[0] != codeDescribed:
		return fmt.Errorf("no section begins with 0x%02x", b[0])
	case len(b) >= 3 && b[1] == codeSmallUlong:
		code, w.b = b[2], b[3:]
	case len(b) >= 10 && b[1] == codeUlong:
		code, w.b = b[9], b[10:]
	default:
		return errors.New("a section's descriptor isn't a ulong")
	}
	if w.startsWith(codeMap8) || w.startsWith(codeMap32) {
		constructor := w.b[0]
		w.b = w.b[1:]
		return w.compound(constructor, 1, code == sectionApplicationProperties)
	}
	return w.value(1)
}

func (w *walk) startsWith(code byte) bool { return len(w.b) > 0 && w.b[0] == code }

func (w *walk) skip(n int) error {
	if n < 0 || n > len(w.b) {
		return errCut
	}
	w.b = w.b[n:]
	return nil
}

// number reads a size or a count, whose width depends on a value's constructor.
func (w *walk) number(code byte) (n int, err error) {
	b := w.b
	if code&0x10 == 0 {
		if err := w.skip(1); err != nil {
			return 0, err
		}
		return int(b[0]), nil
	}
	if err := w.skip(4); err != nil {
		return 0, err
	}
	if n = int(binary.BigEndian.Uint32(b)); n < 0 { // where an int has 32 bits
		return 0, errCut
	}
	return n, nil
}

// value goes over a value within depth others.
func (w *walk) value(depth int) error {
	b := w.b
	if err := w.skip(1); err != nil {
		return err
	}
	if b[0] != codeDescribed {
		return w.body(b[0], depth)
	}
	if depth >= MaxDepth {
		return errNested
	}
	if err := w.value(depth + 1); err != nil {
		return err
	}
	return w.value(depth + 1)
}

// body goes over a value whose constructor, code, has been read.
func (w *walk) body(code byte, depth int) error {
	width := valueWidth(code)
	switch {
	case code == codeChar, code == codeDecimal32, code == codeDecimal64, code == codeDecimal128:
		return fmt.Errorf("go-amqp can't decode a value of type 0x%02x", code)
	case width < 0:
		return fmt.Errorf("no value begins with 0x%02x", code)
	case code < codeBinary8:
		return w.skip(width)
	case code >= codeList8:
		return w.compound(code, depth, false)
	}
	n, err := w.number(code)
	if err != nil {
		return err
	}
	return w.skip(n)
}

// compound goes over a list, map or array whose constructor has been read. text says that
// it's the map of application properties, whose keys are strings.
func (w *walk) compound(code byte, depth int, text bool) error {
	size, err := w.number(code)
	if err != nil {
		return err
	}
	if size > len(w.b) {
		return errCut
	}
	count, err := w.number(code)
	if err != nil {
		return err
	}
	if count > size {
		return fmt.Errorf("%d elements in %d bytes", count, size)
	}
	isArray, isMap := code&0x20 != 0, code&0x2f == 1
	if (count > 0 || isArray) && depth >= MaxDepth {
		return errNested
	}
	if isArray {
		return w.elements(count, depth+1)
	}
	if isMap && count%2 == 1 {
		return fmt.Errorf("a map with %d keys and values", count)
	}
	for i := range count {
		if isMap && i%2 == 0 && len(w.b) > 0 && !mayBeKey(w.b[0], text) {
			return fmt.Errorf("a map has a key of type 0x%02x", w.b[0])
		}
		if err := w.value(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

// elements goes over those of an array, and their constructor.
func (w *walk) elements(count, depth int) error {
	b := w.b
	if err := w.skip(1); err != nil {
		return err
	}
	switch {
	case b[0] == codeDescribed:
		return errors.New("go-amqp can't decode an array of described values")
	case b[0]>>4 == 4:
		if w.roomless -= count; w.roomless < 0 {
			return fmt.Errorf("%d elements that take no room", count)
		}
	}
	for range count {
		if err := w.body(b[0], depth); err != nil {
			return err
		}
	}
	return nil
}

// mayBeKey says whether go-amqp can have a value that begins with code as a key: Go can't
// hash binaries, nor most described and compound values. text is for strings only.
func mayBeKey(code byte, text bool) bool {
	switch code {
	case codeString8, codeString32, codeSymbol8, codeSymbol32:
		return true
	case codeDescribed, codeBinary8, codeBinary32, codeList0:
		return false
	}
	return !text && code < codeList8
}
