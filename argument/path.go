package argument

import (
	"strconv"
	"strings"
)

// Path identifies an argument, or the part of it that is invalid. The first segment is the
// argument itself. Each front end writes a path in its own form: Go code as
// Policy.Rules[0].MaxRetries, a topology file as retry.max-retries.
//
// The methods return a longer path and don't change p.
type Path []Segment

// Segment is one step of a [Path].
type Segment struct {
	// Kind is one of these:
	//
	//	"root"   the argument itself, such as Policy or QuorumQueue("orders")
	//	"field"  a field of a struct, or a member of an object
	//	"index"  an element of a list
	//	"key"    the value behind a key of a map
	//	"call"   what a function returns for the number Index, such as the delay that
	//	         Policy.Backoff returns for retry 3
	Kind string
	// Name is set for a root, a field and a key.
	Name string
	// Index is set for an index, which counts from 0, and for a call.
	Index int
}

// Root returns a path that consists of the argument's name.
func Root(name string) Path { return Path{{Kind: "root", Name: name}} }

// Field returns the path of a field of p.
func (p Path) Field(name string) Path { return p.step(Segment{Kind: "field", Name: name}) }

// Index returns the path of an element of p, counted from 0.
func (p Path) Index(i int) Path { return p.step(Segment{Kind: "index", Index: i}) }

// Key returns the path of the value for a key of p.
func (p Path) Key(key string) Path { return p.step(Segment{Kind: "key", Name: key}) }

// Call returns the path of the result of the function p for n.
func (p Path) Call(n int) Path { return p.step(Segment{Kind: "call", Index: n}) }

func (p Path) step(s Segment) Path { return append(p[:len(p):len(p)], s) }

// String returns p in the form of Go code: Policy.Rules[0].MaxRetries,
// QuorumQueue("orders").Arguments["x-a"], Policy.Backoff(3). Keys are cut to 80 bytes.
func (p Path) String() string {
	const keyLimit = 80
	var b strings.Builder
	for i, s := range p {
		switch s.Kind {
		case "index":
			b.WriteString("[" + strconv.Itoa(s.Index) + "]")
		case "call":
			b.WriteString("(" + strconv.Itoa(s.Index) + ")")
		case "key":
			b.WriteString("[" + strconv.Quote(cut(s.Name, keyLimit)) + "]")
		default:
			if i > 0 {
				b.WriteByte('.')
			}
			b.WriteString(s.Name)
		}
	}
	return b.String()
}

// from returns p without the segments that it shares with other, for a text that has already
// named other. The rest begins with a field; otherwise from returns all of p.
func (p Path) from(other Path) Path {
	shared := 0
	for shared < min(len(p), len(other)) && p[shared] == other[shared] {
		shared++
	}
	if shared == len(p) || p[shared].Kind != "field" {
		return p
	}
	return p[shared:]
}
