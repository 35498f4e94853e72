package message

import (
	"math/rand/v2"
	"sync/atomic"
)

// boxes has strings as values of type any, as annotations want their keys and values. For a
// string that was seen of late this takes no allocation: the keys, and names of exchanges and
// queues, are the same in message after message.
var boxes boxCache

// BoxedKey returns key as a map of annotations wants it, without an allocation if it was seen of late.
func BoxedKey(key string) any { return boxed(&boxes, key) }

// boxCache keeps strings by a hash: two for each, until others push them out.
type boxCache [256][2]atomic.Pointer[box]

type box struct {
	s string
	v any // s
}

const (
	maxBoxed = 64 // bytes of a string that is kept
	// A string takes another's place one time in so many, so that those that come once
	// don't push out those that come always.
	pushOneIn = 16
)

func boxed[T string | []byte](c *boxCache, s T) any {
	if len(s) > maxBoxed {
		return string(s)
	}
	ways := &c[hash(s)%uint64(len(c))]
	free := -1
	for i := range ways {
		switch b := ways[i].Load(); {
		case b == nil:
			free = i
		case b.s == string(s):
			return b.v
		}
	}
	text := string(s)
	b := box{text, text}
	if free < 0 && rand.Uint32N(pushOneIn) == 0 {
		free = rand.IntN(len(ways))
	}
	if free >= 0 {
		ways[free].Store(&box{b.s, b.v})
	}
	return b.v
}

// hash doesn't have to be unpredictable: an attacker with colliding strings can only make the
// cache useless.
func hash[T string | []byte](s T) uint64 {
	const factor = 0x9e3779b97f4a7c15
	h := uint64(len(s))
	i := 0
	for ; i+8 <= len(s); i += 8 {
		h ^= uint64(s[i]) | uint64(s[i+1])<<8 | uint64(s[i+2])<<16 | uint64(s[i+3])<<24 |
			uint64(s[i+4])<<32 | uint64(s[i+5])<<40 | uint64(s[i+6])<<48 | uint64(s[i+7])<<56
		h *= factor
		h ^= h >> 32
	}
	var tail uint64
	for ; i < len(s); i++ {
		tail = tail<<8 | uint64(s[i])
	}
	h = (h ^ tail) * factor
	return h >> 40
}
