package topologyfile

import (
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/argument"
)

// Error is one mistake in a file, with its place. It wraps an *[argument.Error].
type Error struct {
	// File is the name that was passed to [Parse].
	File string
	// Line and Column start at 1. Both are 0 if the mistake concerns the whole file. Column is 0
	// for a syntax error.
	Line, Column int
	// Err is an *[argument.Error]. Its Path is the path of the value in the file, such as
	// work-queues.orders.delivery-limit.
	Err error
}

func (e *Error) Error() string {
	text := strings.TrimPrefix(e.Err.Error(), "hopback: ")
	switch {
	case e.Line == 0:
		return fmt.Sprintf("%s: %s", e.File, text)
	case e.Column == 0:
		return fmt.Sprintf("%s:%d: %s", e.File, e.Line, text)
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, text)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// maxErrors limits how many mistakes are reported for one file.
const maxErrors = 20

// reader collects the mistakes.
type reader struct {
	file string
	errs []error
}

func (r *reader) err() error {
	if len(r.errs) > maxErrors {
		more := fmt.Errorf("%s: and %d more", r.file, len(r.errs)-maxErrors)
		return errors.Join(append(r.errs[:maxErrors:maxErrors], more)...)
	}
	return errors.Join(r.errs...)
}

// at is a value's place: its node, and the keys on the way to it.
type at struct {
	node *yaml.Node
	path argument.Path
}

func (a at) key(n *yaml.Node, name string) at {
	name = short(name)
	if len(a.path) == 0 {
		return at{n, argument.Root(name)}
	}
	return at{n, a.path.Field(name)}
}

func (a at) item(n *yaml.Node, i int) at { return at{n, a.path.Index(i)} }

// theFile is the path of what is wrong with the whole file.
var theFile = argument.Root("the file")

// bad adds what is wrong with the YAML of a value.
func (r *reader) bad(a at, value any, problem, remedy string) {
	path := a.path
	if len(path) == 0 {
		path = theFile
	}
	r.add(a.node, argument.At(path, argument.CodeMalformed, value, problem, remedy))
}

func (r *reader) add(n *yaml.Node, err error) {
	r.errs = append(r.errs, &Error{File: r.file, Line: n.Line, Column: n.Column, Err: err})
}

// is is what a node is, in words.
func is(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!null":
			return "empty"
		case "!!bool":
			return "a bool"
		case "!!int":
			return "an integer"
		case "!!float":
			return "a number with a fraction, or one that is too large"
		case "!!timestamp":
			return "a date"
		case "!!str":
			return "text"
		}
	}
	return "a value of another type"
}

// plain refuses the parts of YAML beyond values: a reader of the file should see what is declared
// without following references.
func (r *reader) plain(a at) bool {
	n := a.node
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		r.bad(a, nil, "has a YAML anchor or alias, which topology files can't use", "write it out")
	case n.Kind == yaml.MappingNode && n.ShortTag() != "!!map", n.Kind == yaml.SequenceNode && n.ShortTag() != "!!seq":
		r.bad(a, n.Tag, "is a YAML tag, which topology files can't use", "leave it out")
	case n.Kind == yaml.ScalarNode && n.Style&yaml.TaggedStyle != 0:
		r.bad(a, n.Tag, "is a YAML tag, which topology files can't use", "leave it out; put text that looks like another type in quotes")
	default:
		return true
	}
	return false
}

// value is a scalar's text, for messages; nothing for what isn't one.
func value(n *yaml.Node) any {
	if n.Kind == yaml.ScalarNode && n.Value != "" {
		return n.Value
	}
	return nil
}

// scalar wants a scalar with one of the tags.
func (r *reader) scalar(a at, want, remedy string, tags ...string) bool {
	if !r.plain(a) {
		return false
	}
	if a.node.Kind == yaml.ScalarNode {
		for _, tag := range tags {
			if a.node.ShortTag() == tag {
				return true
			}
		}
	}
	r.bad(a, value(a.node), fmt.Sprintf("is %s, and should be %s", is(a.node), want), remedy)
	return false
}

// pair is an entry of a mapping.
type pair struct {
	name  string
	key   *yaml.Node
	value *yaml.Node
}

// mapping returns a mapping's entries, each key once; nothing for an empty value.
func (r *reader) mapping(a at, remedy string) []pair {
	n := a.node
	if !r.plain(a) || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.bad(a, value(n), fmt.Sprintf("is %s, and should be a mapping", is(n)), remedy)
		return nil
	}
	first := map[string]int{}
	var list []pair
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		ka := a.key(k, k.Value)
		switch {
		case k.Kind != yaml.ScalarNode:
			r.bad(at{k, a.path}, nil, fmt.Sprintf("has a key that is %s", is(k)), "use text as key")
			continue
		case k.ShortTag() == "!!merge":
			r.bad(at{k, a.path}, nil, "has a YAML merge key, which topology files can't use", "write it out")
			continue
		case !r.plain(ka):
			continue
		}
		if line, twice := first[k.Value]; twice {
			r.bad(ka, nil, fmt.Sprintf("is a duplicate of the key in line %d", line), "keep one of them")
			continue
		}
		first[k.Value] = k.Line
		list = append(list, pair{k.Value, k, v})
	}
	return list
}

// list returns a list's items; nothing for an empty value.
func (r *reader) list(a at, remedy string) []*yaml.Node {
	n := a.node
	if !r.plain(a) || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		r.bad(a, value(n), fmt.Sprintf("is %s, and should be a list", is(n)), remedy)
		return nil
	}
	return n.Content
}
