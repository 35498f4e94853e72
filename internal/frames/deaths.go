package frames

import (
	"crypto/rand"
	"encoding/binary"
)

// RabbitMQ writes the history of a message's deaths into its annotations: an array of
// maps, and six texts. With two texts on how it was routed they take go-amqp a hundred
// allocations. Where a session asks for it, the reader folds the nine annotations into one,
// which takes go-amqp four. What doesn't fit stays as it is: a reader of a message looks
// for both.
//
// The folded annotation is a string, so that what is read from it shares its memory. It
// holds, for each annotation, its number in folds and its encoded value. A zero ends it,
// and zeros fill it up: the map's size stays as it was.

// folds are the annotations that are folded, in the order in which they are kept.
var folds = [...]string{
	"x-opt-deaths",
	"x-exchange", "x-routing-key",
	"x-first-death-exchange", "x-first-death-queue", "x-first-death-reason",
	"x-last-death-exchange", "x-last-death-queue", "x-last-death-reason",
}

// FoldedDeaths is the annotation that others are folded into. A publisher can't foresee it,
// so what a publisher calls a death history isn't taken for the broker's.
var FoldedDeaths = rand.Text()[:foldedKeySize]

const foldedKeySize = 12

// maxFolded bounds what a folder keeps for the next message. A longer history isn't folded.
const maxFolded = 8 << 10

// foldNumber is the number of an annotation in folds, from 1; 0 if it isn't folded.
func foldNumber[T []byte | string](key T) byte {
	switch string(key) {
	case folds[0]:
		return 1
	case folds[1]:
		return 2
	case folds[2]:
		return 3
	case folds[3]:
		return 4
	case folds[4]:
		return 5
	case folds[5]:
		return 6
	case folds[6]:
		return 7
	case folds[7]:
		return 8
	case folds[8]:
		return 9
	}
	return 0
}

// Folds says whether an annotation may be folded.
func Folds(key string) bool { return foldNumber(key) > 0 }

// Fold folds the annotations of an encoded message in its place, for tests.
func Fold(message []byte) { new(Folder).Fold(message) }

// Folder folds the annotations of messages, one after the other.
type Folder struct{ values []byte }

// Fold folds the annotations in the first bytes of an encoded message, if all of them
// are there. It doesn't look into values: what it leaves is to be scanned.
func (f *Folder) Fold(b []byte) {
	for len(b) > 3 && b[0] == codeDescribed && b[1] == codeSmallUlong {
		switch b[2] {
		case sectionHeader, sectionDeliveryAnnotations:
			size := valueSize(b)
			if size == 0 || size > len(b) {
				return
			}
			b = b[size:]
		case sectionAnnotations:
			f.annotations(b[3:])
			return
		default:
			return
		}
	}
}

// span is where an entry of a map is, from the begin of its items.
type span struct{ key, value, end int }

// annotations folds the entries of a map.
func (f *Folder) annotations(b []byte) {
	items := mapItems(b)
	var found [len(folds)]span    // in the order of the map
	var place [len(folds) + 1]int // in found, from 1, by number
	n, entries := 0, 0
	had, needs := 0, 0 // bytes of what is folded, before and after
	for at := 0; at < len(items); entries++ {
		size := entrySize(items[at:])
		if size == 0 {
			return
		}
		if key, k := shortText(items[at:], codeSymbol8); k > 0 {
			if number := foldNumber(key); number > 0 && foldable(number, items[at+k:]) {
				if place[number] > 0 {
					return // twice: go-amqp takes the last
				}
				found[n] = span{at, at + k, at + size}
				n++
				place[number] = n
				had += size
				needs += 1 + size - k
			}
		}
		at += size
	}
	// The key of what they are folded into, and the head of its value.
	const key = 2 + foldedKeySize
	code, head := byte(codeString8), 2
	if had-key-head > 255 {
		code, head = codeString32, 5
	}
	room := had - key - head
	if n == 0 || needs > room || needs > maxFolded || !setCount(b, entries, entries-n+1) {
		return
	}
	f.values = f.values[:0]
	for number, i := range place {
		if i > 0 {
			s := found[i-1]
			f.values = append(append(f.values, byte(number)), items[s.value:s.end]...)
		}
	}
	at := found[0].key
	for i, s := range found[:n] {
		next := len(items)
		if i+1 < n {
			next = found[i+1].key
		}
		at += copy(items[at:], items[s.end:next])
	}
	b = append(append(items[at:at], codeSymbol8, foldedKeySize), FoldedDeaths...)
	if b = append(b, code); code == codeString8 {
		b = append(b, byte(room))
	} else {
		b = binary.BigEndian.AppendUint32(b, uint32(room))
	}
	b = append(b, f.values...)
	clear(items[at+len(b):])
}

// foldable says whether an annotation that is to be folded has the form that RabbitMQ gives
// it: an array of maps, and texts.
func foldable(number byte, value []byte) bool {
	switch code := value[0]; {
	case number > 1:
		return code == codeString8 || code == codeString32
	case code == codeArray8:
		return len(value) > 3 && (value[3] == codeMap8 || value[3] == codeMap32)
	default:
		return code == codeArray32 && len(value) > 9 && (value[9] == codeMap8 || value[9] == codeMap32)
	}
}

// setCount changes how many entries a map has, if it had so many.
func setCount(b []byte, had, has int) bool {
	switch b[0] {
	case codeMap8:
		if int(b[2]) != 2*had {
			return false
		}
		b[2] = byte(2 * has)
	default:
		if binary.BigEndian.Uint32(b[5:]) != uint32(2*had) {
			return false
		}
		binary.BigEndian.PutUint32(b[5:], uint32(2*has))
	}
	return true
}

// mapItems returns the encoded keys and values of a map; none if it isn't all there.
func mapItems(b []byte) []byte {
	head := 0
	switch {
	case len(b) > 3 && b[0] == codeMap8:
		head = 3
	case len(b) > 9 && b[0] == codeMap32:
		head = 9
	default:
		return nil
	}
	size := plainSize(b)
	if size < head || size > len(b) {
		return nil
	}
	return b[head:size:size]
}

// entrySize is the length of a key and its value; 0 if they aren't all there.
func entrySize[T []byte | string](b T) int {
	key := valueSize(b)
	if key == 0 || key >= len(b) {
		return 0
	}
	value := valueSize(b[key:])
	if value == 0 || key+value > len(b) {
		return 0
	}
	return key + value
}

// foldedValue is the encoded value of an annotation that was folded; empty if there is none.
func foldedValue(folded string, number byte) string {
	for len(folded) > 1 && folded[0] > 0 {
		size := valueSize(folded[1:])
		if size == 0 {
			return ""
		}
		if folded[0] == number {
			return folded[1 : 1+size]
		}
		folded = folded[1+size:]
	}
	return ""
}

// FoldedText is the text of an annotation that was folded; false if it wasn't, or isn't a
// text.
func FoldedText(folded, key string) (string, bool) {
	number := foldNumber(key)
	if number < 2 {
		return "", false
	}
	value := foldedValue(folded, number)
	return text(value), value != ""
}

// FoldedTexts are the annotations that were folded and are texts.
func FoldedTexts(folded string) map[any]any {
	all := map[any]any{}
	for _, key := range folds {
		if s, ok := FoldedText(folded, key); ok {
			all[key] = s
		}
	}
	return all
}

// Unfolded returns an encoded message that has the annotations which were folded, and
// nothing else. It is empty if they can't be read.
func Unfolded(folded string) []byte {
	b := make([]byte, 0, len(folded)+256)
	b = append(b, codeDescribed, codeSmallUlong, sectionAnnotations, codeMap32, 0, 0, 0, 0, 0, 0, 0, 0)
	count := uint32(0)
	for i, key := range folds {
		if value := foldedValue(folded, byte(i+1)); value != "" {
			b = append(append(b, codeSymbol8, byte(len(key))), key...)
			b = append(b, value...)
			count += 2
		}
	}
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-8))
	binary.BigEndian.PutUint32(b[8:], count)
	if Decodable(b) != nil {
		return nil
	}
	return b
}

// Death is an entry of RabbitMQ's death history. A text that the broker hasn't written is
// empty.
type Death struct{ Queue, Reason, Exchange, RoutingKey string }

// Deaths appends a death history that was folded to all, the last death first.
func Deaths(all []Death, folded string) []Death {
	// A count and a constructor: of one byte each, or of four and one.
	b := foldedValue(folded, 1)
	switch {
	case len(b) > 4 && b[0] == codeArray8:
		b = b[3:]
	case len(b) > 10 && b[0] == codeArray32:
		b = b[9:]
	default:
		return all
	}
	code := b[0]
	if code != codeMap8 && code != codeMap32 {
		return all
	}
	for b = b[1:]; len(b) > 0; {
		size := 0
		if code == codeMap8 {
			size = 1 + int(b[0])
		} else if len(b) > 4 {
			size = 4 + int(uint32At(b))
		}
		if size < 2 || size > len(b) {
			break
		}
		// What is behind the sizes: the count, and then the items.
		items := b[1:size]
		if code == codeMap32 {
			items = b[4:size]
		}
		all = append(all, readDeath(code, items))
		b = b[size:]
	}
	return all
}

func uint32At[T []byte | string](b T) uint32 {
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

// readDeath reads a map, from its count on.
func readDeath(code byte, b string) (d Death) {
	count := 1
	if code == codeMap32 {
		count = 4
	}
	for b = b[min(count, len(b)):]; len(b) > 0; {
		size := entrySize(b)
		if size == 0 {
			return d
		}
		key, n := shortText(b, codeSymbol8)
		if n == 0 {
			key, n = shortText(b, codeString8)
		}
		if n > 0 {
			value := b[n:size]
			switch key {
			case "queue":
				d.Queue = text(value)
			case "reason":
				d.Reason = text(value)
			case "exchange":
				d.Exchange = text(value)
			case "routing-keys":
				d.RoutingKey = firstText(value)
			}
		}
		b = b[size:]
	}
	return d
}

// text is the string or symbol that b encodes; empty if it is something else.
func text(b string) string {
	head := 0
	switch {
	case len(b) > 1 && (b[0] == codeString8 || b[0] == codeSymbol8):
		head = 2
	case len(b) > 4 && (b[0] == codeString32 || b[0] == codeSymbol32):
		head = 5
	default:
		return ""
	}
	size := plainSize(b)
	if size < head {
		return ""
	}
	return b[head:size]
}

// firstText is the first string of the list or array that b encodes.
func firstText(b string) string {
	var code byte
	switch {
	case len(b) > 4 && b[0] == codeArray8:
		code, b = b[3], b[4:]
	case len(b) > 10 && b[0] == codeArray32:
		code, b = b[9], b[10:]
	case len(b) > 3 && b[0] == codeList8:
		return text(b[3:])
	case len(b) > 9 && b[0] == codeList32:
		return text(b[9:])
	default:
		return ""
	}
	// An array has one constructor for all of its elements.
	head := 1
	if code>>4 == 0xb {
		head = 4
	}
	if len(b) < head {
		return ""
	}
	size := int(b[0])
	if head == 4 {
		size = int(uint32At(b))
	}
	if code != codeString8 && code != codeString32 && code != codeSymbol8 && code != codeSymbol32 || size < 0 || size > len(b)-head {
		return ""
	}
	return b[head : head+size]
}
