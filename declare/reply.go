package declare

import (
	"errors"
	"math"
	"reflect"
)

// The replies come from AMQP, in the types that a client library decodes into: named strings for
// symbols, several widths of integers, maps with keys of any type. These readers accept all of
// them and never panic; for a missing or unexpected value they return the zero value and false.

func badReply(op string, resource Resource, method, path string, status int, text string) *Error {
	return &Error{Op: op, Resource: resource, Method: method, Path: path, Status: status, Reason: ErrBadReply, Err: errors.New(text)}
}

func replyString(v any) (string, bool) {
	if v == nil {
		return "", false
	}
	if rv := reflect.ValueOf(v); rv.Kind() == reflect.String {
		return rv.String(), true
	}
	return "", false
}

func replyUint(v any) (uint64, bool) {
	if v == nil {
		return 0, false
	}
	switch rv := reflect.ValueOf(v); rv.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return uint64(max(rv.Int(), 0)), rv.Int() >= 0
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return rv.Uint(), true
	}
	return 0, false
}

// replyMap returns the entries whose keys are strings; nil when v is no map.
func replyMap(v any) map[string]any {
	if m, ok := v.(map[string]any); ok {
		return m
	}
	rv := reflect.ValueOf(v)
	if rv.Kind() != reflect.Map {
		return nil
	}
	m := make(map[string]any, rv.Len())
	for it := rv.MapRange(); it.Next(); {
		if key, ok := replyString(it.Key().Interface()); ok {
			m[key] = it.Value().Interface()
		}
	}
	return m
}

func replyStrings(v any) []string {
	rv := reflect.ValueOf(v)
	if rv.Kind() != reflect.Slice {
		return nil
	}
	list := make([]string, 0, rv.Len())
	for i := range rv.Len() {
		if s, ok := replyString(rv.Index(i).Interface()); ok {
			list = append(list, s)
		}
	}
	return list
}

// replyArguments brings arguments into the form of normal, so that they can be
// compared with what was declared. It is never nil.
func replyArguments(v any) map[string]any {
	args := map[string]any{}
	for k, v := range replyMap(v) {
		args[k] = replyValue(v, 0)
	}
	return args
}

func replyValue(v any, depth int) any {
	if v == nil || depth > maxArgumentDepth {
		return nil
	}
	if s, ok := replyString(v); ok {
		return s
	}
	if b, ok := v.([]byte); ok {
		// RabbitMQ answers with binary where a text has a NUL in it.
		return string(b)
	}
	if n, ok := replyUint(v); ok && n <= math.MaxInt64 {
		return int64(n)
	}
	rv := reflect.ValueOf(v)
	switch {
	case rv.Kind() >= reflect.Int && rv.Kind() <= reflect.Int64:
		return rv.Int()
	case rv.CanFloat():
		return rv.Float()
	case rv.Kind() == reflect.Slice:
		list := make([]any, rv.Len())
		for i := range list {
			list[i] = replyValue(rv.Index(i).Interface(), depth+1)
		}
		return list
	case rv.Kind() == reflect.Map:
		m := map[string]any{}
		for k, v := range replyMap(v) {
			m[k] = replyValue(v, depth+1)
		}
		return m
	}
	return v
}
