package engine

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/internal/frames"
)

// table is the arguments of a queue, an exchange or a binding, sorted by name, with
// the types that AMQP 0-9-1 has for them.
type table []argument

type argument struct {
	name, kind string
	value      any // a string, an int64, a float64, a bool, nil, a table or an array
}

// array is the value of an argument of that type. Its elements have no names.
type array []argument

// The types that are asked for. Others have the names that RabbitMQ gives them.
const (
	argText  = "longstr"
	argLong  = "long"
	argBool  = "bool"
	argVoid  = "void"
	argTable = "table"
	argArray = "array"
)

func (t table) get(name string) (argument, bool) {
	for _, a := range t {
		if a.name == name {
			return a, true
		}
	}
	return argument{}, false
}

// text is the value of an argument that is text.
func (t table) text(name string) (string, bool) {
	a, _ := t.get(name)
	s, ok := a.value.(string)
	return s, ok
}

// set is the table with another value of one argument.
func (t table) set(a argument) table {
	t = slices.DeleteFunc(slices.Clone(t), func(old argument) bool { return old.name == a.name })
	return append(t, a).sorted()
}

func (t table) sorted() table {
	slices.SortStableFunc(t, func(a, b argument) int { return strings.Compare(a.name, b.name) })
	return t
}

func (t table) equal(other table) bool { return slices.EqualFunc(t, other, argument.equal) }

func (a argument) equal(b argument) bool {
	return a.name == b.name && a.kind == b.kind && equalValue(a.value, b.value)
}

func equalValue(a, b any) bool {
	switch a := a.(type) {
	case table:
		b, ok := b.(table)
		return ok && a.equal(b)
	case array:
		b, ok := b.(array)
		return ok && slices.EqualFunc(a, b, argument.equal)
	}
	switch b.(type) {
	case table, array:
		return false
	}
	return a == b
}

// argument091 is an AMQP 1.0 value as an argument.
func argument091(name string, v any) argument {
	a := argument{name: name}
	whole := func(kind string, n int64) { a.kind, a.value = kind, n }
	switch v := v.(type) {
	case nil:
		a.kind = argVoid
	case string:
		a.kind, a.value = argText, v
	case frames.Symbol:
		a.kind, a.value = argText, string(v)
	case []byte:
		a.kind, a.value = argText, string(v)
	case bool:
		a.kind, a.value = argBool, v
	case int64:
		whole(argLong, v)
	case uint64:
		whole(argLong, int64(min(v, math.MaxInt64)))
	case int8:
		whole("byte", int64(v))
	case uint8:
		whole("unsignedbyte", int64(v))
	case int16:
		whole("short", int64(v))
	case uint16:
		whole("unsignedshort", int64(v))
	case int32:
		whole("signedint", int64(v))
	case uint32:
		whole("unsignedint", int64(v))
	case frames.Timestamp:
		whole("timestamp", int64(v)/1000)
	case float32:
		a.kind, a.value = "float", float64(v)
	case float64:
		a.kind, a.value = "double", v
	case frames.List:
		list := array{}
		for _, e := range v {
			list = append(list, argument091("", e))
		}
		a.kind, a.value = argArray, list
	case frames.Array:
		list := array{}
		for _, e := range v.Elements {
			list = append(list, argument091("", e))
		}
		a.kind, a.value = argArray, list
	case frames.Map:
		t := table{}
		for _, e := range v {
			t = append(t, argument091(fmt.Sprint(e.Key), e.Value))
		}
		a.kind, a.value = argTable, t
	default:
		a.kind, a.value = argText, fmt.Sprint(v)
	}
	return a
}

// amqp is an argument as an AMQP 1.0 value.
func (a argument) amqp() any {
	switch v := a.value.(type) {
	case string:
		if !utf8.ValidString(v) || strings.ContainsRune(v, 0) {
			return []byte(v)
		}
		return v
	case int64:
		switch a.kind {
		case "byte":
			return int8(v)
		case "unsignedbyte":
			return uint8(v)
		case "short":
			return int16(v)
		case "unsignedshort":
			return uint16(v)
		case "signedint":
			return int32(v)
		case "unsignedint":
			return uint32(v)
		case "timestamp":
			return frames.Timestamp(v * 1000)
		}
		return v
	case float64:
		if a.kind == "float" {
			return float32(v)
		}
		return v
	case table:
		m := frames.Map{}
		for _, e := range v {
			m = append(m, frames.Entry{Key: frames.Symbol(e.name), Value: e.amqp()})
		}
		return m
	case array:
		l := frames.List{}
		for _, e := range v {
			l = append(l, e.amqp())
		}
		return l
	}
	return a.value
}

// amqp is the table as an AMQP 1.0 map.
func (t table) amqp() frames.Map {
	m := make(frames.Map, 0, len(t))
	for _, a := range t {
		m = append(m, frames.Entry{Key: a.name, Value: a.amqp()})
	}
	return m
}

// plain is the table as JSON has it.
func (t table) plain() map[string]any {
	m := make(map[string]any, len(t))
	for _, a := range t {
		m[a.name] = a.plain()
	}
	return m
}

func (a argument) plain() any {
	switch v := a.value.(type) {
	case table:
		return v.plain()
	case array:
		l := make([]any, len(v))
		for i, e := range v {
			l[i] = e.plain()
		}
		return l
	}
	return a.value
}

// tableOf is a table of values as JSON has them. Whole numbers are longs.
func tableOf(m map[string]any) table {
	t := make(table, 0, len(m))
	for name, v := range m {
		t = append(t, argumentOf(name, v))
	}
	return t.sorted()
}

func argumentOf(name string, v any) argument {
	switch v := v.(type) {
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<62 {
			return argument{name, argLong, int64(v)}
		}
	case int:
		return argument{name, argLong, int64(v)}
	case map[string]any:
		return argument{name, argTable, tableOf(v)}
	case []any:
		list := array{}
		for _, e := range v {
			list = append(list, argumentOf("", e))
		}
		return argument{name, argArray, list}
	}
	return argument091(name, v)
}

// String is the value as RabbitMQ writes it into its errors.
func (a argument) String() string {
	switch v := a.value.(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	case nil:
		return "undefined"
	}
	return fmt.Sprint(a.value)
}

// quoted is the value as RabbitMQ writes it where it compares two values.
func (a argument) quoted() string {
	if a.value == nil {
		return "none"
	}
	return "'" + a.String() + "'"
}

// class is what two types have to share for their values to be compared.
func (a argument) class() string {
	switch a.kind {
	case "byte", "unsignedbyte", "short", "unsignedshort", "signedint", "unsignedint", argLong:
		return "int"
	case "float", "double":
		return "float"
	}
	return a.kind
}

// differs tells the first argument of names that is another in the new table. The text is
// RabbitMQ's.
func (t table) differs(other table, what string, names []string) (text string, ok bool) {
	for _, name := range names {
		old, had := t.get(name)
		now, has := other.get(name)
		if had == has && (!had || old.class() == now.class() && equalValue(old.value, now.value)) {
			continue
		}
		if name == "x-queue-type" && (!had && now.value == typeClassic || !has && old.value == typeClassic) {
			continue
		}
		if had && has {
			return inequivalent(name, what, now.quoted(), old.quoted()), true
		}
		val := func(a argument, there bool) string {
			if !there {
				return "none"
			}
			return "the value '" + a.String() + "' of type '" + a.kind + "'"
		}
		return inequivalent(name, what, val(now, has), val(old, had)), true
	}
	return "", false
}

func inequivalent(name, what, received, current string) string {
	return "inequivalent arg '" + name + "' for " + what + ": received " + received + " but current is " + current
}
