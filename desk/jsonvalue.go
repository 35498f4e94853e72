package desk

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
)

// Values of AMQP as JSON. Null, booleans and strings are JSON's own. Every other value is
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
	text, _ := json.Marshal(s) // a string can be marshalled always
	return append(b, text...)
}

// appendValue writes a value of package frames.
func appendValue(b []byte, v any) ([]byte, error) {
	plain := func(name, text string) ([]byte, error) {
		return append(fmt.Appendf(b, `{"%s":`, name), text+"}"...), nil
	}
	quoted := func(name, text string) ([]byte, error) { return plain(name, `"`+text+`"`) }
	text := func(name, s string) ([]byte, error) {
		return append(appendText(fmt.Appendf(b, `{"%s":`, name), s), '}'), nil
	}
	float := func(name string, f float64, size int, bits string) ([]byte, error) {
		if math.IsNaN(f) || math.IsInf(f, 0) || f == 0 && math.Signbit(f) {
			return quoted(name, bits)
		}
		return plain(name, strconv.FormatFloat(f, 'g', -1, size))
	}
	switch v := v.(type) {
	case nil:
		return append(b, "null"...), nil
	case bool:
		return strconv.AppendBool(b, v), nil
	case string:
		if !utf8.ValidString(v) {
			return quoted("string-bytes", base64.StdEncoding.EncodeToString([]byte(v)))
		}
		return appendText(b, v), nil
	case frames.Symbol:
		if !utf8.ValidString(string(v)) {
			return quoted("symbol-bytes", base64.StdEncoding.EncodeToString([]byte(v)))
		}
		return text("symbol", string(v))
	case uint8:
		return plain("ubyte", strconv.Itoa(int(v)))
	case uint16:
		return plain("ushort", strconv.Itoa(int(v)))
	case uint32:
		return plain("uint", strconv.FormatUint(uint64(v), 10))
	case uint64:
		return quoted("ulong", strconv.FormatUint(v, 10))
	case int8:
		return plain("byte", strconv.Itoa(int(v)))
	case int16:
		return plain("short", strconv.Itoa(int(v)))
	case int32:
		return plain("int", strconv.Itoa(int(v)))
	case int64:
		return quoted("long", strconv.FormatInt(v, 10))
	case frames.Timestamp:
		return quoted("timestamp", strconv.FormatInt(int64(v), 10))
	case float32:
		return float("float", float64(v), 32, fmt.Sprintf("%08x", math.Float32bits(v)))
	case float64:
		return float("double", v, 64, fmt.Sprintf("%016x", math.Float64bits(v)))
	case frames.Decimal32:
		return quoted("decimal32", hex.EncodeToString(v[:]))
	case frames.Decimal64:
		return quoted("decimal64", hex.EncodeToString(v[:]))
	case frames.Decimal128:
		return quoted("decimal128", hex.EncodeToString(v[:]))
	case frames.Char:
		return plain("char", strconv.FormatUint(uint64(v), 10))
	case frames.UUID:
		return quoted("uuid", amqp.UUID(v).String())
	case []byte:
		return quoted("binary", base64.StdEncoding.EncodeToString(v))
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
	return b, fmt.Errorf("no AMQP type for %T", v)
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

// readValue reads what appendValue has written, from what encoding/json makes of it with
// numbers kept as they are.
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
	digits := func() (string, error) {
		switch v := v.(type) {
		case string:
			return v, nil
		case json.Number:
			return v.String(), nil
		}
		return "", errors.New("isn't a number")
	}
	signed := func(bits int) (int64, error) {
		s, err := digits()
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(s, 10, bits)
		return n, bare(err)
	}
	unsigned := func(bits int) (uint64, error) {
		s, err := digits()
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseUint(s, 10, bits)
		return n, bare(err)
	}
	text := func() (string, error) {
		s, ok := v.(string)
		if !ok {
			return "", errors.New("isn't a string")
		}
		return s, nil
	}
	fixed := func(size int) ([]byte, error) {
		s, err := text()
		if err != nil {
			return nil, err
		}
		b, err := hex.DecodeString(s)
		if err == nil && len(b) != size {
			err = fmt.Errorf("has %d bytes, not %d", len(b), size)
		}
		return b, err
	}
	raw := func() ([]byte, error) {
		s, err := text()
		if err != nil {
			return nil, err
		}
		return base64.StdEncoding.Strict().DecodeString(s)
	}
	list := func() ([]any, error) {
		l, ok := v.([]any)
		if !ok {
			return nil, errors.New("isn't a list")
		}
		return l, nil
	}
	switch name {
	case "ubyte":
		n, err := unsigned(8)
		return uint8(n), err
	case "ushort":
		n, err := unsigned(16)
		return uint16(n), err
	case "uint":
		n, err := unsigned(32)
		return uint32(n), err
	case "ulong":
		return unsignedValue(unsigned(64))
	case "char":
		n, err := unsigned(32)
		return frames.Char(n), err
	case "byte":
		n, err := signed(8)
		return int8(n), err
	case "short":
		n, err := signed(16)
		return int16(n), err
	case "int":
		n, err := signed(32)
		return int32(n), err
	case "long":
		n, err := signed(64)
		return n, err
	case "timestamp":
		n, err := signed(64)
		return frames.Timestamp(n), err
	case "float":
		if _, ok := v.(string); ok {
			b, err := fixed(4)
			if err != nil {
				return nil, err
			}
			return math.Float32frombits(uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])), nil
		}
		s, err := digits()
		if err != nil {
			return nil, err
		}
		f, err := strconv.ParseFloat(s, 32)
		return float32(f), bare(err)
	case "double":
		if s, ok := v.(string); ok {
			if _, err := fixed(8); err != nil {
				return nil, err
			}
			n, err := strconv.ParseUint(s, 16, 64)
			return math.Float64frombits(n), bare(err)
		}
		s, err := digits()
		if err != nil {
			return nil, err
		}
		f, err := strconv.ParseFloat(s, 64)
		return f, bare(err)
	case "decimal32":
		b, err := fixed(4)
		if err != nil {
			return nil, err
		}
		return frames.Decimal32(b), nil
	case "decimal64":
		b, err := fixed(8)
		if err != nil {
			return nil, err
		}
		return frames.Decimal64(b), nil
	case "decimal128":
		b, err := fixed(16)
		if err != nil {
			return nil, err
		}
		return frames.Decimal128(b), nil
	case "uuid":
		s, err := text()
		if err != nil {
			return nil, err
		}
		b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
		if err != nil || len(b) != 16 {
			return nil, errors.New("isn't a UUID")
		}
		return frames.UUID(b), nil
	case "binary":
		return bytesValue(raw())
	case "symbol":
		s, err := text()
		return frames.Symbol(s), err
	case "string-bytes":
		b, err := raw()
		return string(b), err
	case "symbol-bytes":
		b, err := raw()
		return frames.Symbol(b), err
	case "list":
		l, err := list()
		if err != nil {
			return nil, err
		}
		out, err := readList(l)
		return frames.List(out), err
	case "map":
		return readPairs(v)
	case "described":
		l, err := list()
		if err != nil || len(l) != 2 {
			return nil, errors.Join(errors.New("isn't a descriptor and a value"), err)
		}
		pair, err := readList(l)
		if err != nil {
			return nil, err
		}
		return frames.Described{Descriptor: pair[0], Value: pair[1]}, nil
	case "array":
		return readArray(v)
	}
	return nil, errors.New("isn't a type of AMQP")
}

// bare is a conversion's error without the text that it is of, which may be long.
func bare(err error) error {
	var n *strconv.NumError
	if errors.As(err, &n) {
		return n.Err
	}
	return err
}

func unsignedValue(n uint64, err error) (any, error) { return n, err }

func bytesValue(b []byte, err error) (any, error) {
	if b == nil {
		b = []byte{}
	}
	return b, err
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

// maxIndent is how deep a JSON body may be nested to be shown indented: what is nested
// deeply grows with the square of its depth.
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
