// Package values contains what packages declare and audit both do with the values of arguments.
package values

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/hopback/hopback/internal/queuearg"
)

// SortedKeys returns the keys of m in order.
func SortedKeys(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }

// Cut returns s, or its first n bytes with an ellipsis.
func Cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "�") + "…"
}

// JSON returns v with sorted keys, and without the escapes that are for HTML pages.
func JSON(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return []byte("null") // a float that isn't finite, in arguments that nothing can send
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// Describe returns the text of an argument's value and the name of its type.
func Describe(v any) (text, typ string) {
	typ = strings.TrimPrefix(strings.TrimPrefix(queuearg.TypeName(v), "an "), "a ")
	if s, ok := v.(string); ok {
		return s, typ
	}
	return string(JSON(v)), typ
}

// SplitBinding splits a binding's arguments, as the broker has them, into x-match,
// the headers that are matched, and the rest.
func SplitBinding(args map[string]any) (match string, headers, rest map[string]any) {
	match, isHeaders := args["x-match"].(string)
	withX := match == "all-with-x" || match == "any-with-x"
	for k, v := range args {
		if k == "x-match" {
			continue
		}
		into := &rest
		if isHeaders && (withX || !strings.HasPrefix(k, "x-")) {
			into = &headers
		}
		if *into == nil {
			*into = map[string]any{}
		}
		(*into)[k] = v
	}
	return match, headers, rest
}

// Count returns n with its noun, in the singular or with an "s".
func Count[N int | int64 | uint64](n N, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
