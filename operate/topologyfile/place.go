package topologyfile

import (
	"errors"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

// Values that are read from a file are checked as Go values, and their errors name the fields of
// those: Policy.MaxRetries. The code here translates them to the keys of the file,
// retry.max-retries, and to the line.

// goField is the key, or the keys, that a field of a Go value is read from.
type goField struct {
	// path has the names of the fields: DelayedRetry, Kind.
	path []string
	// keys has the alternatives, the usual one last.
	keys []string
	// within are the fields of the field's own value.
	within []goField
}

// goFields are the fields that a list of keys sets.
func goFields[T any](keys []key[T]) []goField {
	var list []goField
	for _, k := range keys {
		if len(k.field.path) > 0 {
			list = append(list, k.field)
		}
	}
	return list
}

// fieldPath finds the field of T that a function returns. The fields of this
// package's own structs stand for exported ones of the same name.
func fieldPath[T, V any](field func(*T) *V) []string {
	var zero T
	want := reflect.ValueOf(field(&zero)).Pointer()
	return fieldAt(reflect.ValueOf(&zero).Elem(), want, reflect.TypeFor[V]())
}

func fieldAt(v reflect.Value, want uintptr, typ reflect.Type) []string {
	if v.Kind() != reflect.Struct {
		return nil
	}
	for i := range v.NumField() {
		f, name := v.Field(i), v.Type().Field(i).Name
		name = strings.ToUpper(name[:1]) + name[1:]
		if f.Type() == typ && f.Addr().Pointer() == want {
			return []string{name}
		}
		if within := fieldAt(f, want, typ); within != nil {
			return append([]string{name}, within...)
		}
	}
	return nil
}

// place is where a Go value comes from.
type place struct {
	at
	// keys is the mapping that was read, or nil.
	keys   *yaml.Node
	fields []goField
}

// find translates a path in Go values to the one in the file, and finds the nearest node in the
// file. The steps before the first field are p itself.
func (p place) find(path argument.Path) (argument.Path, *yaml.Node) {
	out, here, node, fields := p.path, p.keys, p.node, p.fields
	step := func(next *yaml.Node) {
		if here = next; next != nil {
			node = next
		}
	}
	first := slices.IndexFunc(path, func(s argument.Segment) bool { return s.Kind == "field" })
	if first < 0 {
		return out, node
	}
	for i := first; i < len(path); i++ {
		switch s := path[i]; s.Kind {
		case "field":
			f, ok := match(fields, path[i:])
			if !ok {
				return out, node // the name of a queue, which the place has already
			}
			key := f.keyIn(here)
			out = out.Field(key)
			step(valueOf(here, key))
			fields = f.within
			i += len(f.path) - 1
		case "key":
			out = out.Field(short(s.Name))
			step(valueOf(here, s.Name))
		case "index":
			out = out.Index(s.Index)
			step(itemOf(here, s.Index))
		case "call":
			// A list of delays ends with the one that repeats.
			if here != nil && here.Kind == yaml.SequenceNode && len(here.Content) > 0 {
				n := min(s.Index, len(here.Content)) - 1
				out = out.Index(n)
				step(itemOf(here, n))
			}
		}
	}
	return out, node
}

// match returns the field that a path leads to first.
func match(fields []goField, path argument.Path) (best goField, ok bool) {
	for _, f := range fields {
		if len(f.path) > len(path) || len(f.path) <= len(best.path) {
			continue
		}
		same := true
		for i, name := range f.path {
			same = same && path[i] == argument.Segment{Kind: "field", Name: name}
		}
		if same {
			best, ok = f, true
		}
	}
	return best, ok
}

// keyIn is the alternative that was written, or else the last.
func (f goField) keyIn(mapping *yaml.Node) string {
	for _, key := range f.keys {
		if valueOf(mapping, key) != nil {
			return key
		}
	}
	return f.keys[len(f.keys)-1]
}

func valueOf(mapping *yaml.Node, key string) *yaml.Node {
	if mapping == nil || mapping.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1]
		}
	}
	return nil
}

func itemOf(list *yaml.Node, i int) *yaml.Node {
	if list == nil || list.Kind != yaml.SequenceNode || i < 0 || i >= len(list.Content) {
		return nil
	}
	return list.Content[i]
}

// check adds the errors of a Go value, each at its place in the file.
func (r *reader) check(p place, err error) {
	if err == nil {
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			r.check(p, err)
		}
		return
	}
	var e *argument.Error
	if !errors.As(err, &e) {
		r.add(p.node, err)
		return
	}
	logged := *e
	var node *yaml.Node
	logged.Path, node = p.find(e.Path)
	if len(e.Other) > 0 {
		logged.Other, _ = p.find(e.Other)
	}
	if remedy := remedies[faultOf(e)]; remedy != "" {
		logged.Remedy = remedy
	}
	r.add(node, &logged)
}

// fault is a field and what is wrong with it.
type fault struct {
	field string
	code  argument.Code
}

func faultOf(e *argument.Error) fault {
	for i := len(e.Path) - 1; i >= 0; i-- {
		if e.Path[i].Kind == "field" {
			return fault{e.Path[i].Name, e.Code}
		}
	}
	return fault{"", e.Code}
}

// remedies replace the remedies for Go code with those for a file.
var remedies = map[fault]string{
	{"MaxRetries", argument.CodeOutOfRange}:                "use a value in that range, or none",
	{"Backoff", argument.CodeTooLong}:                      "use fewer retries, set exponential.max, or use any-delay",
	{"Overflow", argument.CodeConflict}:                    "leave it out, or set the strategy of dead-letter to at-most-once",
	{"DeadLetter", argument.CodeMissing}:                   "write dead-letter: {queue: NAME}, {exchange: NAME} or drop; or put it under work-queues, which get a separate dead-letter queue",
	{"AtMostOnce", argument.CodeUnsupported}:               "add strategy: at-most-once to its dead-letter, or make it a quorum queue",
	{"Kind", argument.CodeUnknown}:                         "write delayed-retry-type: all, failed, or returned",
	{"Headers", argument.CodeMissing}:                      "write a header, or match: all, which matches every message",
	{"Headers", argument.CodeConflict}:                     "use match: all-with-x or any-with-x",
	{"Arguments", argument.CodeReserved}:                   "use the key type, under queues; all work-queues are quorum queues",
	{"MessageTTL", argument.CodeNotWhole}:                  wholeMillis,
	{"Expires", argument.CodeNotWhole}:                     wholeMillis,
	{"ConsumerTimeout", argument.CodeNotWhole}:             wholeMillis,
	{"Min", argument.CodeNotWhole}:                         wholeMillis,
	{"Max", argument.CodeNotWhole}:                         wholeMillis,
	{"MaxAge", argument.CodeNotWhole}:                      "write whole seconds",
	{"ConsumerDisconnectedTimeout", argument.CodeNotWhole}: wholeMillis,
}

const wholeMillis = "write whole milliseconds"

// contradiction is what the Path of an error of declare.Merge is about: a queue or an
// exchange of t.
func contradiction(path argument.Path, t declare.Topology) (kind, name string) {
	if len(path) < 3 || path[2].Kind != "index" {
		return "", ""
	}
	switch i := path[2].Index; {
	case path[1].Name == "Queues" && i < len(t.Queues):
		return path[1].Name, t.Queues[i].Address().QueueName()
	case path[1].Name == "Exchanges" && i < len(t.Exchanges):
		return path[1].Name, t.Exchanges[i].Name
	}
	return "", ""
}

// short keeps a huge key from flooding a log line.
func short(key string) string {
	const limit = 100
	if len(key) <= limit {
		return key
	}
	return strings.ToValidUTF8(key[:limit], "") + "…" + strconv.Itoa(len(key)) + " bytes"
}
