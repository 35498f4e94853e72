package topologyfile

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/declare"
)

// shape is what a value can be: how it is read, how it is written, and what the
// schema says of it.
type shape[V any] struct {
	schema map[string]any
	// read reports what is wrong to r, and whether nothing is.
	read  func(r *reader, a at) (V, bool)
	write func(V) *yaml.Node
	// within are the fields of a struct's value.
	within []goField
}

// key is a key of a mapping that becomes a T. Parser, writer, and schema all use the same list of
// keys, so that they can't differ.
type key[T any] struct {
	name     string
	about    string
	required bool
	schema   map[string]any
	read     func(r *reader, a at, into *T)
	write    func(from *T) *yaml.Node // nil for what isn't set
	field    goField
}

// with is a key whose value goes into a field.
func with[T, V any](name, about string, s shape[V], field func(*T) *V) key[T] {
	return key[T]{
		name: name, about: about, schema: s.schema,
		field: goField{path: fieldPath(field), keys: []string{name}, within: s.within},
		read: func(r *reader, a at, into *T) {
			if v, ok := s.read(r, a); ok {
				*field(into) = v
			}
		},
		write: func(from *T) *yaml.Node {
			v := *field(from)
			if s.write == nil || reflect.ValueOf(&v).Elem().IsZero() {
				return nil
			}
			return s.write(v)
		},
	}
}

func (k key[T]) must() key[T] {
	k.required = true
	return k
}

// object is a mapping with these keys and no others.
func object[T any](keys []key[T]) shape[T] {
	return shape[T]{
		schema: objectSchema(keys),
		read: func(r *reader, a at) (T, bool) {
			var v T
			before := len(r.errs)
			readKeys(r, a, keys, &v)
			return v, len(r.errs) == before
		},
		write:  func(v T) *yaml.Node { return writeKeys(keys, &v) },
		within: goFields(keys),
	}
}

func objectSchema[T any](keys []key[T]) map[string]any {
	properties := map[string]any{}
	var required []string
	for _, k := range keys {
		s := map[string]any{"description": k.about}
		for name, v := range k.schema {
			s[name] = v
		}
		properties[k.name] = s
		if k.required {
			required = append(required, k.name)
		}
	}
	s := map[string]any{"type": []string{"object", "null"}, "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		s["required"] = required
		s["type"] = "object"
	}
	return s
}

func readKeys[T any](r *reader, a at, keys []key[T], into *T) {
	found := map[string]bool{}
	for _, p := range r.mapping(a, "write key: value lines, indented") {
		i := slices.IndexFunc(keys, func(k key[T]) bool { return k.name == p.name })
		if i < 0 {
			names := make([]string, len(keys))
			for i, k := range keys {
				names[i] = k.name
			}
			r.bad(a.key(p.key, p.name), nil, "isn't a known key", r.hint(p.name, names))
			continue
		}
		found[p.name] = true
		keys[i].read(r, a.key(p.value, p.name), into)
	}
	for _, k := range keys {
		if k.required && !found[k.name] {
			r.bad(a, nil, fmt.Sprintf("has no %s", k.name), "add it: "+k.about)
		}
	}
}

func writeKeys[T any](keys []key[T], v *T) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, k := range keys {
		if w := k.write(v); w != nil {
			n.Content = append(n.Content, textNode(k.name), w)
		}
	}
	return n
}

func textNode(s string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(s)
	n.Style &^= yaml.LiteralStyle
	// A name that could be read as another type gets quotes.
	if probe := (&yaml.Node{Kind: yaml.ScalarNode, Value: s}); probe.ShortTag() != "!!str" {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}

func plainNode(tag, text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}
}

// text is a string.
var text = shape[string]{
	schema: map[string]any{"type": "string"},
	read: func(r *reader, a at) (string, bool) {
		ok := r.scalar(a, "text", "put it in quotes", "!!str")
		return a.node.Value, ok
	},
	write: textNode,
}

// like is a shape of strings for a named type.
func like[V ~string](s shape[string]) shape[V] {
	return shape[V]{
		schema: s.schema,
		read: func(r *reader, a at) (V, bool) {
			v, ok := s.read(r, a)
			return V(v), ok
		},
		write: func(v V) *yaml.Node { return s.write(string(v)) },
	}
}

// word is one of a few.
func word(words ...string) shape[string] {
	return shape[string]{
		schema: map[string]any{"enum": words},
		read: func(r *reader, a at) (string, bool) {
			if !r.scalar(a, "one of "+strings.Join(words, ", "), "write one of those", "!!str") {
				return "", false
			}
			if !slices.Contains(words, a.node.Value) {
				r.bad(a, a.node.Value, "isn't one of "+strings.Join(words, ", "), r.hint(a.node.Value, words))
				return "", false
			}
			return a.node.Value, true
		},
		write: textNode,
	}
}

// flag is true or false.
var flag = shape[bool]{
	schema: map[string]any{"type": "boolean"},
	read: func(r *reader, a at) (bool, bool) {
		ok := r.scalar(a, "true or false", "write true or false", "!!bool")
		return ok && strings.EqualFold(a.node.Value, "true"), ok
	},
	write: func(v bool) *yaml.Node { return plainNode("!!bool", strconv.FormatBool(v)) },
}

// integer is a whole number from least on.
func integer[V ~int | ~int64](least int64) shape[V] {
	return shape[V]{
		schema: map[string]any{"type": "integer", "minimum": least},
		read: func(r *reader, a at) (V, bool) {
			n, ok := r.integer(a, least)
			return V(n), ok
		},
		write: func(v V) *yaml.Node { return plainNode("!!int", strconv.FormatInt(int64(v), 10)) },
	}
}

var decimal = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)

func (r *reader) integer(a at, least int64) (int64, bool) {
	if !r.scalar(a, "a whole number", "write it in digits", "!!int") {
		return 0, false
	}
	n, err := strconv.ParseInt(a.node.Value, 10, 64)
	switch {
	case !decimal.MatchString(a.node.Value) || err != nil:
		// To YAML, 010 is 8 and 1_000 is a thousand. The writer has to choose.
		r.bad(a, a.node.Value, "isn't a valid whole number", "write decimal digits without leading zeros, below 9223372036854775808")
	case n < least:
		r.bad(a, n, fmt.Sprintf("is below %d", least), fmt.Sprintf("write at least %d, or leave it out", least))
	default:
		return n, true
	}
	return 0, false
}

// factor is a number above zero.
var factor = shape[float64]{
	schema: map[string]any{"type": "number", "exclusiveMinimum": 0},
	read: func(r *reader, a at) (float64, bool) {
		if !r.scalar(a, "a number", "write it in digits, such as 1.5", "!!int", "!!float") {
			return 0, false
		}
		f, err := strconv.ParseFloat(a.node.Value, 64)
		if err != nil || !(f > 0) || f > 1e6 || !numeric.MatchString(a.node.Value) {
			r.bad(a, a.node.Value, "isn't a number above zero and at most a million", "write it in digits, such as 1.5")
			return 0, false
		}
		return f, true
	},
}

var numeric = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

const durationPattern = `^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`

var durationForm = regexp.MustCompile(durationPattern)

// duration is a time with its unit.
var duration = shape[time.Duration]{
	schema: map[string]any{"type": "string", "pattern": durationPattern},
	read: func(r *reader, a at) (time.Duration, bool) {
		const remedy = "write it with its unit: 250ms, 10s, 1m30s, 2h"
		if a.node.Kind == yaml.ScalarNode && (a.node.ShortTag() == "!!int" || a.node.ShortTag() == "!!float") && r.plain(a) {
			r.bad(a, a.node.Value, "has no unit", remedy)
			return 0, false
		}
		if !r.scalar(a, "a time", remedy, "!!str") {
			return 0, false
		}
		d, err := time.ParseDuration(a.node.Value)
		switch {
		case !durationForm.MatchString(a.node.Value) || err != nil:
			if strings.HasSuffix(a.node.Value, "d") {
				r.bad(a, a.node.Value, "isn't a valid duration", "write days in hours: 24h")
			} else {
				r.bad(a, a.node.Value, "isn't a valid duration", remedy)
			}
		case d == 0:
			r.bad(a, a.node.Value, "is zero", "write a duration above zero, or leave it out")
		default:
			return d, true
		}
		return 0, false
	},
	write: func(d time.Duration) *yaml.Node { return textNode(span(d)) },
}

// span is a duration as people write it: 10m, not 10m0s.
func span(d time.Duration) string {
	if d%time.Second != 0 {
		return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
	}
	s := d.String()
	if d%time.Minute == 0 {
		s = strings.TrimSuffix(s, "0s")
	}
	if d%time.Hour == 0 {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// listOf is a list of at least one.
func listOf[V any](of shape[V], remedy string) shape[[]V] {
	return shape[[]V]{
		schema: map[string]any{"type": "array", "items": of.schema, "minItems": 1},
		read: func(r *reader, a at) ([]V, bool) {
			before := len(r.errs)
			var list []V
			for i, n := range r.list(a, remedy) {
				if v, ok := of.read(r, a.item(n, i)); ok {
					list = append(list, v)
				}
			}
			if len(list) == 0 && len(r.errs) == before {
				r.bad(a, nil, "is empty", remedy)
			}
			return list, len(r.errs) == before
		},
	}
}

// limit is a delivery limit.
var limit = shape[declare.Limit]{
	schema: map[string]any{"anyOf": []any{
		map[string]any{"type": "integer", "minimum": -1}, map[string]any{"const": "unlimited"},
	}},
	read: func(r *reader, a at) (declare.Limit, bool) {
		if a.node.Kind == yaml.ScalarNode && a.node.Value == "unlimited" && r.plain(a) {
			return declare.Unlimited, true
		}
		if a.node.Kind != yaml.ScalarNode || a.node.ShortTag() != "!!int" {
			r.bad(a, value(a.node), fmt.Sprintf("is %s, and should be a whole number or unlimited", is(a.node)), "write, for example, 5")
			return 0, false
		}
		n, ok := r.integer(a, -1)
		if n == 0 {
			return declare.NoRedelivery, ok
		}
		return declare.Limit(n), ok
	},
	write: func(l declare.Limit) *yaml.Node {
		switch l {
		case declare.Unlimited:
			return textNode("unlimited")
		case declare.NoRedelivery:
			l = 0
		}
		return plainNode("!!int", strconv.FormatInt(int64(l), 10))
	},
}

// maxDepth bounds lists within lists; declare allows as many.
const maxDepth = 8

// further are arguments or headers: any names, and values of any plain type.
var further = shape[map[string]any]{
	schema: map[string]any{"type": []string{"object", "null"}, "additionalProperties": map[string]any{
		"type": []string{"string", "boolean", "number", "array", "null"},
	}},
	read: func(r *reader, a at) (map[string]any, bool) {
		before := len(r.errs)
		var m map[string]any
		for _, p := range r.mapping(a, "write name: value lines, indented") {
			v, ok := r.any(a.key(p.value, p.name), 0)
			if !ok {
				continue
			}
			if m == nil {
				m = map[string]any{}
			}
			m[p.name] = v
		}
		return m, len(r.errs) == before
	},
	write: func(m map[string]any) *yaml.Node {
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, k := range sortedKeys(m) {
			n.Content = append(n.Content, textNode(k), anyNode(m[k]))
		}
		return n
	},
}

func (r *reader) any(a at, depth int) (any, bool) {
	n := a.node
	if !r.plain(a) {
		return nil, false
	}
	switch n.Kind {
	case yaml.SequenceNode:
		if depth >= maxDepth {
			r.bad(a, nil, "is nested too deeply", fmt.Sprintf("nest lists at most %d deep", maxDepth))
			return nil, false
		}
		list := make([]any, 0, len(n.Content))
		for i, item := range n.Content {
			v, ok := r.any(a.item(item, i), depth+1)
			if !ok {
				return nil, false
			}
			list = append(list, v)
		}
		return list, true
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!str":
			return n.Value, true
		case "!!null":
			return nil, true
		case "!!bool":
			return flag.read(r, a)
		case "!!int":
			const least = -1 << 63
			v, ok := r.integer(a, least)
			return v, ok
		case "!!float":
			var f float64
			if n.Decode(&f) == nil && f == f && f-f == 0 {
				return f, true
			}
		}
	}
	r.bad(a, value(n), fmt.Sprintf("is %s", is(n)), "write text, a number, true, false, or a list of these; put dates in quotes")
	return nil, false
}

func anyNode(v any) *yaml.Node {
	switch v := v.(type) {
	case string:
		return textNode(v)
	case bool:
		return flag.write(v)
	case int64:
		return plainNode("!!int", strconv.FormatInt(v, 10))
	case float64:
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return plainNode("!!float", text)
	case []any:
		n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for _, item := range v {
			n.Content = append(n.Content, anyNode(item))
		}
		return n
	}
	return plainNode("!!null", "null")
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
