package desk

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
)

// AMQP values as JSON. Null, booleans, and strings are the same in JSON. Every other value is
// an object with one member, whose name is the type:
//
//	{"ubyte":1} {"ushort":1} {"uint":1} {"byte":-1} {"short":-1} {"int":-1}
//	{"ulong":"1"} {"long":"-1"} {"timestamp":"1700000000000"}   strings: JSON's numbers lose digits
//	{"float":1.5} {"double":1.5}                                {"double":"7ff8000000000000"} for NaN and infinities
//	{"decimal32":"hex"} {"decimal64":"hex"} {"decimal128":"hex"}
//	{"char":65} {"uuid":"xxxxxxxx-..."} {"binary":"base64"} {"symbol":"text"}
//	{"string-bytes":"base64"} {"symbol-bytes":"base64"}         what isn't valid UTF-8
//	{"list":[...]} {"map":[[key,value],...]}
//	{"array":{"type":"0x71","descriptor":...,"elements":[...]}}
//	{"described":[descriptor,value]}

func appendMember(b []byte, name string, write func([]byte) ([]byte, error)) ([]byte, error) {
	b = append(b, '{', '"')
	b = append(b, name...)
	b = append(b, '"', ':')
	b, err := write(b)
	return append(b, '}'), err
}

func appendText(b []byte, s string) []byte {
	text, _ := json.Marshal(s) // it never fails for a string
	return append(b, text...)
}

// scalar is an AMQP type without a counterpart in JSON.
type scalar struct {
	name  string
	of    reflect.Type
	write func(v any) string       // JSON
	read  func(v any) (any, error) // v is decoded by encoding/json, with numbers as json.Number
}

var (
	scalars = []scalar{
		integer[uint8]("ubyte"), integer[uint16]("ushort"), integer[uint32]("uint"), integer[uint64]("ulong"),
		integer[int8]("byte"), integer[int16]("short"), integer[int32]("int"), integer[int64]("long"),
		integer[frames.Timestamp]("timestamp"), integer[frames.Char]("char"), floating[float32]("float"), floating[float64]("double"),
		fixed[frames.Decimal32]("decimal32"), fixed[frames.Decimal64]("decimal64"), fixed[frames.Decimal128]("decimal128"),
		{"uuid", reflect.TypeFor[frames.UUID](), func(v any) string { return quote(amqp.UUID(v.(frames.UUID)).String()) }, func(v any) (any, error) {
			s, _ := v.(string)
			b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
			if err != nil || len(b) != 16 {
				return nil, errors.New("isn't a UUID")
			}
			return frames.UUID(b), nil
		}},
		{"binary", reflect.TypeFor[[]byte](), func(v any) string { return quote(base64.StdEncoding.EncodeToString(v.([]byte))) }, func(v any) (any, error) {
			b, err := unquoted(v)
			return append([]byte{}, b...), err
		}},
		{"symbol", reflect.TypeFor[frames.Symbol](), func(v any) string { return string(appendText(nil, string(v.(frames.Symbol)))) }, func(v any) (any, error) {
			s, ok := v.(string)
			if !ok {
				return nil, errors.New("isn't a string")
			}
			return frames.Symbol(s), nil
		}},
		// Strings and symbols that aren't valid UTF-8 are written as one of these.
		{name: "string-bytes", read: func(v any) (any, error) { b, err := unquoted(v); return string(b), err }},
		{name: "symbol-bytes", read: func(v any) (any, error) { b, err := unquoted(v); return frames.Symbol(b), err }},
	}
	scalarOf    = map[reflect.Type]scalar{}
	scalarNamed = map[string]scalar{}
)

func init() {
	for _, s := range scalars {
		scalarNamed[s.name] = s
		if s.of != nil {
			scalarOf[s.of] = s
		}
	}
}

func quote(s string) string { return `"` + s + `"` }

// unquoted reads base64.
func unquoted(v any) ([]byte, error) {
	s, ok := v.(string)
	if !ok {
		return nil, errors.New("isn't a string")
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}

func digits(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case json.Number:
		return v.String(), nil
	}
	return "", errors.New("isn't a number")
}

func integer[T any](name string) scalar {
	of := reflect.TypeFor[T]()
	return scalar{name, of, func(v any) string {
		text := fmt.Sprintf("%d", v)
		if of.Bits() == 64 {
			return quote(text)
		}
		return text
	}, func(v any) (any, error) {
		s, err := digits(v)
		if err != nil {
			return nil, err
		}
		out := reflect.New(of).Elem()
		if out.CanInt() {
			var n int64
			n, err = strconv.ParseInt(s, 10, of.Bits())
			out.SetInt(n)
		} else {
			var n uint64
			n, err = strconv.ParseUint(s, 10, of.Bits())
			out.SetUint(n)
		}
		return out.Interface(), bare(err)
	}}
}

// floating writes what JSON has no number for as the bits.
func floating[T float32 | float64](name string) scalar {
	of := reflect.TypeFor[T]()
	return scalar{name, of, func(v any) string {
		f := reflect.ValueOf(v).Float()
		switch {
		case !math.IsNaN(f) && !math.IsInf(f, 0) && (f != 0 || !math.Signbit(f)):
			return strconv.FormatFloat(f, 'g', -1, of.Bits())
		case of.Bits() == 32:
			return fmt.Sprintf(`"%08x"`, math.Float32bits(v.(float32)))
		}
		return fmt.Sprintf(`"%016x"`, math.Float64bits(f))
	}, func(v any) (any, error) {
		out := reflect.New(of).Elem()
		if s, ok := v.(string); ok {
			if len(s) != of.Bits()/4 {
				return nil, fmt.Errorf("has %d hex digits, not %d", len(s), of.Bits()/4)
			}
			n, err := strconv.ParseUint(s, 16, 64)
			if of.Bits() == 32 {
				return math.Float32frombits(uint32(n)), bare(err)
			}
			return math.Float64frombits(n), bare(err)
		}
		s, err := digits(v)
		if err != nil {
			return nil, err
		}
		f, err := strconv.ParseFloat(s, of.Bits())
		out.SetFloat(f)
		return out.Interface(), bare(err)
	}}
}

// fixed is for arrays of bytes.
func fixed[T any](name string) scalar {
	of := reflect.TypeFor[T]()
	return scalar{name, of, func(v any) string { return fmt.Sprintf(`"%x"`, v) }, func(v any) (any, error) {
		s, ok := v.(string)
		if !ok {
			return nil, errors.New("isn't a string")
		}
		b, err := hex.DecodeString(s)
		if err == nil && len(b) != of.Len() {
			err = fmt.Errorf("has %d bytes, not %d", len(b), of.Len())
		}
		out := reflect.New(of).Elem()
		reflect.Copy(out, reflect.ValueOf(b))
		return out.Interface(), err
	}}
}

// appendValue writes a value of package frames.
func appendValue(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...), nil
	case bool:
		return strconv.AppendBool(b, v), nil
	case string:
		if !utf8.ValidString(v) {
			return fmt.Appendf(b, `{"string-bytes":"%s"}`, base64.StdEncoding.EncodeToString([]byte(v))), nil
		}
		return appendText(b, v), nil
	case frames.Symbol:
		if !utf8.ValidString(string(v)) {
			return fmt.Appendf(b, `{"symbol-bytes":"%s"}`, base64.StdEncoding.EncodeToString([]byte(v))), nil
		}
	case frames.List:
		return appendMember(b, "list", func(b []byte) ([]byte, error) { return appendList(b, v) })
	case frames.Map:
		return appendMember(b, "map", func(b []byte) ([]byte, error) { return appendPairs(b, v) })
	case frames.Array:
		return appendMember(b, "array", func(b []byte) ([]byte, error) {
			b = fmt.Appendf(b, `{"type":"0x%02x",`, v.Type)
			var err error
			if v.Descriptor != nil {
				if b, err = appendValue(append(b, `"descriptor":`...), v.Descriptor); err != nil {
					return b, err
				}
				b = append(b, ',')
			}
			if b, err = appendList(append(b, `"elements":`...), v.Elements); err != nil {
				return b, err
			}
			return append(b, '}'), nil
		})
	case frames.Described:
		return appendMember(b, "described", func(b []byte) ([]byte, error) {
			return appendList(b, frames.List{v.Descriptor, v.Value})
		})
	}
	s, ok := scalarOf[reflect.TypeOf(v)]
	if !ok {
		return b, fmt.Errorf("no AMQP type for %T", v)
	}
	return fmt.Appendf(b, `{"%s":%s}`, s.name, s.write(v)), nil
}

func appendList(b []byte, l []any) (_ []byte, err error) {
	b = append(b, '[')
	for i, e := range l {
		if i > 0 {
			b = append(b, ',')
		}
		if b, err = appendValue(b, e); err != nil {
			return b, err
		}
	}
	return append(b, ']'), nil
}

func appendPairs(b []byte, m frames.Map) (_ []byte, err error) {
	b = append(b, '[')
	for i, e := range m {
		if i > 0 {
			b = append(b, ',')
		}
		if b, err = appendList(b, frames.List{e.Key, e.Value}); err != nil {
			return b, err
		}
	}
	return append(b, ']'), nil
}

// readValue reads what appendValue wrote. v is decoded by encoding/json, with numbers as
// json.Number.
func readValue(v any) (any, error) {
	switch v := v.(type) {
	case nil, bool, string:
		return v, nil
	case map[string]any:
		if len(v) != 1 {
			return nil, fmt.Errorf("a value with %d members, not one that names its type", len(v))
		}
		for name, of := range v {
			out, err := readTyped(name, of)
			if err != nil {
				return nil, fmt.Errorf("%.40q: %w", name, err)
			}
			return out, nil
		}
	case json.Number:
		return nil, fmt.Errorf("the number %.40s without a type, such as {\"int\":1}", v)
	}
	return nil, fmt.Errorf("a list without a type, such as {\"list\":[]}")
}

func readTyped(name string, v any) (any, error) {
	if s, ok := scalarNamed[name]; ok {
		return s.read(v)
	}
	switch name {
	case "list", "described":
		l, ok := v.([]any)
		if !ok {
			return nil, errors.New("isn't a list")
		}
		out, err := readList(l)
		if name == "list" || err != nil {
			return frames.List(out), err
		}
		if len(out) != 2 {
			return nil, errors.New("isn't a descriptor and a value")
		}
		return frames.Described{Descriptor: out[0], Value: out[1]}, nil
	case "map":
		return readPairs(v)
	case "array":
		return readArray(v)
	}
	return nil, errors.New("isn't a type of AMQP")
}

// bare is a conversion's error without the converted text, which may be long.
func bare(err error) error {
	var n *strconv.NumError
	if errors.As(err, &n) {
		return n.Err
	}
	return err
}

func readList(l []any) ([]any, error) {
	out := make([]any, len(l))
	for i, e := range l {
		v, err := readValue(e)
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		out[i] = v
	}
	return out, nil
}

func readPairs(v any) (frames.Map, error) {
	l, ok := v.([]any)
	if !ok {
		return nil, errors.New("isn't a list of pairs")
	}
	m := make(frames.Map, len(l))
	for i, e := range l {
		pair, ok := e.([]any)
		if !ok || len(pair) != 2 {
			return nil, fmt.Errorf("[%d] isn't a key and a value", i)
		}
		out, err := readList(pair)
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		m[i] = frames.Entry{Key: out[0], Value: out[1]}
	}
	return m, nil
}

func readArray(v any) (any, error) {
	m, ok := v.(map[string]any)
	if !ok {
		return nil, errors.New("isn't an array with a type and elements")
	}
	for k := range m {
		if k != "type" && k != "descriptor" && k != "elements" {
			return nil, fmt.Errorf("has a member %.40q", k)
		}
	}
	code, _ := m["type"].(string)
	n, err := strconv.ParseUint(strings.TrimPrefix(code, "0x"), 16, 8)
	if err != nil {
		return nil, errors.New("has no type such as \"0x71\"")
	}
	l, ok := m["elements"].([]any)
	if !ok {
		return nil, errors.New("has no list of elements")
	}
	a := frames.Array{Type: byte(n)}
	if a.Elements, err = readList(l); err != nil {
		return nil, err
	}
	if d, has := m["descriptor"]; has {
		if a.Descriptor, err = readValue(d); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// maxIndent is the deepest nesting of a JSON body that is shown indented: the size of the
// indented text grows with the square of the depth.
const maxIndent = 64

var errTooDeep = errors.New("nested too deep")

// indent writes valid JSON in indented form.
func indent(out *strings.Builder, text []byte) error {
	depth, quoted, escaped := 0, false, false
	for _, c := range text {
		switch {
		case escaped:
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			if depth++; depth > maxIndent {
				return errTooDeep
			}
		case c == ']' || c == '}':
			depth--
		}
	}
	var b bytes.Buffer
	if err := json.Indent(&b, bytes.TrimSpace(text), "", "  "); err != nil {
		return err
	}
	_, err := out.Write(b.Bytes())
	return err
}
