package frames

import (
	"crypto/rand"
	"encoding/binary"
)

// RabbitMQ writes the history of a message's deaths into its annotations: an array of
// maps, which takes go-amqp 66 allocations. Where a session asks for it, the reader folds
// the array into a binary of the same bytes, which takes go-amqp one, and renames it.

const deathsKey = "x-opt-deaths"

// FoldedDeaths is the annotation that a folded death history is in. A publisher can't
// foresee it, so what a publisher calls a death history isn't taken for the broker's.
var FoldedDeaths = rand.Text()[:len(deathsKey)]

// foldDeaths folds the death history in the first bytes of an encoded message, if all of
// it is there.
func foldDeaths(message []byte) {
	b := message
	for len(b) > 3 && b[0] == codeDescribed && b[1] == codeSmallUlong {
		switch b[2] {
		case sectionHeader, sectionDeliveryAnnotations:
			size := valueSize(b)
			if size == 0 || size > len(b) {
				return
			}
			b = b[size:]
		case sectionAnnotations:
			fold(b[3:])
			return
		default:
			return
		}
	}
}

// fold folds the death history in a map.
func fold(b []byte) {
	for b = mapItems(b); len(b) > 0; {
		size := entrySize(b)
		if size == 0 {
			return
		}
		if key, n := shortText(b, codeSymbol8); n > 0 && string(key) == deathsKey {
			// An array's size counts what a binary's does.
			switch v := b[n:]; v[0] {
			case codeArray8:
				v[0] = codeBinary8
			case codeArray32:
				v[0] = codeBinary32
			default:
				return
			}
			copy(b[n-len(deathsKey):n], FoldedDeaths)
			return
		}
		b = b[size:]
	}
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
	return b[head:size]
}

// entrySize is the length of a key and its value; 0 if they aren't all there.
func entrySize(b []byte) int {
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

// Death is an entry of RabbitMQ's death history. A text that the broker hasn't written is
// empty.
type Death struct{ Queue, Reason, Exchange, RoutingKey string }

// Deaths reads a death history that was folded, the last death first.
func Deaths(folded []byte) []Death {
	// A count and a constructor: of one byte each, or of four and one.
	if len(folded) < 2 {
		return nil
	}
	code, b := folded[1], folded[2:]
	if folded[0] == 0 && len(folded) >= 5 {
		code, b = folded[4], folded[5:]
	}
	if code != codeMap8 && code != codeMap32 {
		return nil
	}
	var all []Death
	for len(b) > 0 {
		size := 0
		if code == codeMap8 {
			size = 1 + int(b[0])
		} else if len(b) > 4 {
			size = 4 + int(binary.BigEndian.Uint32(b))
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

// readDeath reads a map, from its count on.
func readDeath(code byte, b []byte) (d Death) {
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
			switch string(key) {
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
func text(b []byte) string {
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
	return string(b[head:size])
}

// firstText is the first string of the list or array that b encodes.
func firstText(b []byte) string {
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
		size = int(binary.BigEndian.Uint32(b))
	}
	if code != codeString8 && code != codeString32 && code != codeSymbol8 && code != codeSymbol32 || size < 0 || size > len(b)-head {
		return ""
	}
	return string(b[head : head+size])
}
