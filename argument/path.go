package argument

import (
	"strconv"
	"strings"
)

// Path leads from an argument to the part of it that can't be used. The first
// segment is the argument itself. Each front end writes a path in its own form: Go
// code as Policy.Rules[0].MaxRetries, a topology file as retry.max-retries.
//
// The methods return a longer path and leave p as it is.
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

// Root begins a path with the argument's name.
func Root(name string) Path { return Path{{Kind: "root", Name: name}} }

// Field leads to a field of p.
func (p Path) Field(name string) Path { return p.step(Segment{Kind: "field", Name: name}) }

// Index leads to an element of p, counted from 0.
func (p Path) Index(i int) Path { return p.step(Segment{Kind: "index", Index: i}) }

// Key leads to the value behind a key of p.
func (p Path) Key(key string) Path { return p.step(Segment{Kind: "key", Name: key}) }

// Call leads to what the function p returns for n.
func (p Path) Call(n int) Path { return p.step(Segment{Kind: "call", Index: n}) }

func (p Path) step(s Segment) Path { return append(p[:len(p):len(p)], s) }

// String writes p as Go code does: Policy.Rules[0].MaxRetries,
// QuorumQueue("orders").Arguments["x-a"], Policy.Backoff(3). Keys are cut to 80
// bytes.
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

// from is p without the segments that it shares with other, for text that has
// named other already. The rest begins with a field, or from returns all of p.
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
