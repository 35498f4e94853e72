package topologyfile_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/operate/topologyfile"
)

// schema is a validator for as much of JSON schema as ours uses; it refuses the rest,
// so that nothing in ours goes unchecked.
type schema struct{ root map[string]any }

func newSchema(t testing.TB) schema {
	t.Helper()
	var s schema
	require.NoError(t, json.Unmarshal(topologyfile.Schema(), &s.root))
	return s
}

// check returns what doesn't fit.
func (s schema) check(v any) []string { return conforms(s.root, v, "$") }

func conforms(s map[string]any, v any, at string) []string {
	var bad []string
	fail := func(format string, args ...any) { bad = append(bad, at+": "+fmt.Sprintf(format, args...)) }
	m, isMap := v.(map[string]any)
	list, isList := v.([]any)
	number, isNumber := v.(float64)
	for _, key := range slices.Sorted(maps.Keys(s)) {
		want := s[key]
		switch key {
		case "$schema", "$id", "title", "description":
		case "type":
			types, several := want.([]any)
			if !several {
				types = []any{want}
			}
			if !slices.ContainsFunc(types, func(t any) bool { return t == typeOf(v) || t == "number" && typeOf(v) == "integer" }) {
				fail("is %s", typeOf(v))
			}
		case "properties":
			for name, of := range want.(map[string]any) {
				if inner, ok := m[name]; isMap && ok {
					bad = append(bad, conforms(of.(map[string]any), inner, at+"."+name)...)
				}
			}
		case "additionalProperties":
			known, _ := s["properties"].(map[string]any)
			for name, inner := range m {
				if _, ok := known[name]; ok {
					continue
				}
				if of, ok := want.(map[string]any); ok {
					bad = append(bad, conforms(of, inner, at+"."+name)...)
				} else if want == false {
					fail("has %s", name)
				}
			}
		case "required":
			for _, name := range want.([]any) {
				if _, ok := m[name.(string)]; isMap && !ok {
					fail("has no %s", name)
				}
			}
		case "minProperties":
			if isMap && len(m) < int(want.(float64)) {
				fail("has %d", len(m))
			}
		case "items":
			for i, item := range list {
				bad = append(bad, conforms(want.(map[string]any), item, fmt.Sprintf("%s[%d]", at, i))...)
			}
		case "minItems":
			if isList && len(list) < int(want.(float64)) {
				fail("has %d items", len(list))
			}
		case "enum":
			if !slices.Contains(want.([]any), v) {
				fail("is none of %v", want)
			}
		case "const":
			if !reflect.DeepEqual(want, v) {
				fail("isn't %v", want)
			}
		case "pattern":
			if text, ok := v.(string); ok && !regexp.MustCompile(want.(string)).MatchString(text) {
				fail("doesn't match")
			}
		case "minimum":
			if isNumber && number < want.(float64) {
				fail("is below %v", want)
			}
		case "exclusiveMinimum":
			if isNumber && number <= want.(float64) {
				fail("isn't above %v", want)
			}
		case "anyOf", "oneOf":
			fits := 0
			for _, of := range want.([]any) {
				if len(conforms(of.(map[string]any), v, at)) == 0 {
					fits++
				}
			}
			if fits == 0 || key == "oneOf" && fits > 1 {
				fail("fits %d of %s", fits, key)
			}
		case "not":
			if len(conforms(want.(map[string]any), v, at)) == 0 {
				fail("fits what it must not")
			}
		default:
			fail("the validator knows no %q", key)
		}
	}
	return bad
}

func typeOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return "string"
	case bool:
		return "boolean"
	case float64:
		if v == math.Trunc(v) {
			return "integer"
		}
		return "number"
	case []any:
		return "array"
	}
	return "object"
}

// paths are all properties, as the ways to them.
func (s schema) paths() []string {
	var list []string
	walk(s.root, "", func(path string) { list = append(list, path) })
	return list
}

func walk(s map[string]any, path string, do func(string)) {
	for name, of := range mapOf(s["properties"]) {
		do(path + "." + name)
		walk(mapOf(of), path+"."+name, do)
	}
	if more := mapOf(s["additionalProperties"]); more != nil {
		walk(more, path+".*", do)
	}
	if items := mapOf(s["items"]); items != nil {
		walk(items, path+"[]", do)
	}
	for _, key := range []string{"anyOf", "oneOf"} {
		for i, of := range listOf(s[key]) {
			walk(mapOf(of), fmt.Sprintf("%s|%d", path, i), do)
		}
	}
}

// seen marks the ways to what v has.
func (s schema) seen(v any, into map[string]bool) { seen(s.root, v, "", into) }

func seen(s map[string]any, v any, path string, into map[string]bool) {
	properties := mapOf(s["properties"])
	for name, inner := range mapOf(v) {
		if of, ok := properties[name]; ok {
			into[path+"."+name] = true
			seen(mapOf(of), inner, path+"."+name, into)
		} else if more := mapOf(s["additionalProperties"]); more != nil {
			seen(more, inner, path+".*", into)
		}
	}
	if items := mapOf(s["items"]); items != nil {
		for _, item := range listOf(v) {
			seen(items, item, path+"[]", into)
		}
	}
	for _, key := range []string{"anyOf", "oneOf"} {
		for i, of := range listOf(s[key]) {
			if len(conforms(mapOf(of), v, "")) == 0 {
				seen(mapOf(of), v, fmt.Sprintf("%s|%d", path, i), into)
			}
		}
	}
}

func mapOf(v any) map[string]any {
	m, _ := v.(map[string]any)
	return m
}

func listOf(v any) []any {
	l, _ := v.([]any)
	return l
}

// mappings are all mappings in a document but those of free names, in one order.
func mappings(v any) []map[string]any {
	var all []map[string]any
	var visit func(v any, name string)
	visit = func(v any, name string) {
		switch v := v.(type) {
		case map[string]any:
			free := []string{"work-queues", "queues", "exchanges", "arguments", "headers"}
			if !slices.Contains(free, name) {
				all = append(all, v)
			}
			if name == "arguments" || name == "headers" {
				return
			}
			for _, k := range slices.Sorted(maps.Keys(v)) {
				visit(v[k], k)
			}
		case []any:
			for _, item := range v {
				visit(item, "")
			}
		}
	}
	visit(v, "")
	return all
}

// decode is a YAML document as an editor takes it: as JSON, keys as text.
func decode(t testing.TB, text string) any {
	t.Helper()
	var n yaml.Node
	require.NoError(t, yaml.Unmarshal([]byte(text), &n))
	if len(n.Content) == 0 {
		return nil
	}
	return plain(t, n.Content[0])
}

func plain(t testing.TB, n *yaml.Node) any {
	t.Helper()
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			m[n.Content[i].Value] = plain(t, n.Content[i+1])
		}
		return m
	case yaml.SequenceNode:
		list := []any{}
		for _, c := range n.Content {
			list = append(list, plain(t, c))
		}
		return list
	case yaml.AliasNode:
		return plain(t, n.Alias)
	}
	switch n.ShortTag() {
	case "!!null":
		return nil
	case "!!bool":
		return strings.EqualFold(n.Value, "true")
	case "!!int", "!!float":
		f, err := strconv.ParseFloat(n.Value, 64)
		require.NoError(t, err)
		return f
	}
	return n.Value
}
