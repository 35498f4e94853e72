// Package phash2 computes Erlang's erlang:phash2/1 for lists of binaries. RabbitMQ's exchange type
// x-modulus-hash hashes a message's routing keys with it.
//
// The Erlang manual promises that phash2 returns the same value on every machine and in every
// version of ERTS. A binary is hashed with Bob Jenkins' function of 1996 ("lookup2",
// burtleburtle.net/bob/hash/evahash.html), which starts with the hash of what came before it.
// TestModulusHashRoutesAsComputed compares the result with real brokers.
package phash2

import "encoding/binary"

// Range is the number of values that [Strings] can return.
const Range = 1 << 27

const (
	golden = 0x9e3779b9 // the golden ratio, Jenkins' arbitrary start value
	// ERTS adds a multiple of golden for each type of term, modulo 2³²: 13 for a binary, and 2 for
	// the end of a list.
	ofBinary = golden * 13 & (1<<32 - 1)
	ofEnd    = golden * 2 & (1<<32 - 1)
	endTag   = 2 // ERTS's number for the type of the end of a list
	// endAlone is the hash of a list's end if nothing has been hashed before it.
	endAlone = 3468870702
)

// Strings returns the hash of the list, from 0 to Range-1, with each string as a binary.
func Strings(list ...string) uint32 {
	h := uint32(0)
	for _, s := range list {
		h += ofBinary
		if s != "" {
			h = lookup2(s, h)
		}
	}
	if h == 0 {
		h = endAlone
	} else {
		_, _, h = mix(ofEnd+endTag, ofEnd, h)
	}
	return h % Range
}

// lookup2 hashes a string that isn't empty in blocks of twelve bytes. The length takes the place of
// a ninth byte in the last block, whose remaining bytes are zero.
func lookup2(s string, c uint32) uint32 {
	a, b := uint32(golden), uint32(golden)
	size := uint32(len(s))
	var block [12]byte
	for len(s) >= len(block) {
		s = s[copy(block[:], s):]
		a, b, c = mix(a+word(block[0:]), b+word(block[4:]), c+word(block[8:]))
	}
	block = [12]byte{}
	copy(block[:], s)
	_, _, c = mix(a+word(block[0:]), b+word(block[4:]), c+word(block[8:])<<8+size)
	return c
}

func word(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// mix makes each bit of a and b change about half of the bits of c.
func mix(a, b, c uint32) (_, _, _ uint32) {
	for _, shift := range [...]struct{ a, b, c uint }{{13, 8, 13}, {12, 16, 5}, {3, 10, 15}} {
		a = (a - b - c) ^ c>>shift.a
		b = (b - c - a) ^ a<<shift.b
		c = (c - a - b) ^ b>>shift.c
	}
	return a, b, c
}
