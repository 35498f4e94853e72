package stream

import (
	"fmt"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
)

// Filter selects messages on the broker. The zero Filter selects all. A message must match each
// field that is set.
//
//	Values                             RabbitMQ 4.0 and later
//	Properties, ApplicationProperties  RabbitMQ 4.1 and later
//	SQL                                RabbitMQ 4.2 and later, without the two above
//
// Earlier brokers claim to apply filters that they don't support, and deliver everything. So
// [Consume] checks the broker's version first, and returns a [*FilterError].
type Filter struct {
	// Values selects messages whose filter value is one of these: see [FilterValue]. The broker
	// skips whole chunks, using a Bloom filter. The consumer skips the other messages of a chunk,
	// without decoding their bodies.
	Values []string
	// MatchUnfiltered also selects messages without a filter value. It needs Values. Default:
	// false.
	MatchUnfiltered bool
	// Properties selects by AMQP properties: "message-id", "user-id", "to", "subject",
	// "reply-to", "correlation-id", "content-type", "content-encoding", "absolute-expiry-time",
	// "creation-time", "group-id", "group-sequence", and "reply-to-group-id". Values are strings,
	// [Prefix], [Suffix], or of the property's type.
	Properties map[string]any
	// ApplicationProperties selects by application properties. Values are strings, [Prefix],
	// [Suffix], booleans, numbers, times, or []byte. Numbers of different types can be equal.
	ApplicationProperties map[string]any
	// SQL is a condition in RabbitMQ's SQL filter syntax, such as
	//
	//	properties.subject LIKE 'order.%' AND amount > 100
	//
	// If the broker can't parse it, [Consume] returns a [*FilterError].
	SQL string
}

// Prefix is a value in a [Filter] that matches strings that start with it.
type Prefix string

// Suffix is a value in a [Filter] that matches strings that end with it.
type Suffix string

// FilterValue returns an edit for client.Publisher.Publish that sets the value that
// [Filter.Values] selects by. A message can have one value. An empty value sets none.
func FilterValue(value string) func(*client.Message) {
	return func(m *client.Message) {
		// A message's map may be its owner's.
		m.Annotations = maps.Clone(m.Annotations)
		if value == "" {
			delete(m.Annotations, annotationFilterValue)
			return
		}
		if m.Annotations == nil {
			m.Annotations = amqp.Annotations{}
		}
		m.Annotations[annotationFilterValue] = value
	}
}

// annotationFilterValue is RabbitMQ's.
const annotationFilterValue = "x-stream-filter-value"

// The names of filters and of their descriptors. RabbitMQ accepts the SQL filter only by its code
// (TestStreamFilters).
const (
	filterOffset      = "rabbitmq:stream-offset-spec"
	filterValues      = "rabbitmq:stream-filter"
	filterUnfiltered  = "rabbitmq:stream-match-unfiltered"
	filterProperties  = "amqp:properties-filter"
	filterApplication = "amqp:application-properties-filter"
	filterSQL         = "sql-filter"

	codeProperties  = uint64(0x173)
	codeApplication = uint64(0x174)
	codeSQL         = uint64(0x120)
)

// maxFilterBytes bounds each string of a Filter, so that the attach fits into a frame.
const maxFilterBytes = 8 << 10

// maxFilters bounds the entries of each part.
const maxFilters = 32

func (f Filter) validate(at argument.Path) error {
	if len(f.Values) > maxFilters || len(f.Properties) > maxFilters || len(f.ApplicationProperties) > maxFilters {
		return argument.At(at, argument.CodeTooLong, nil, "has too many entries", fmt.Sprintf("use at most %d in each part", maxFilters))
	}
	for i, v := range f.Values {
		if err := checkText(at.Field("Values").Index(i), v); err != nil {
			return err
		}
		if v == "" {
			return argument.At(at.Field("Values").Index(i), argument.CodeMissing, nil, "is empty", "set MatchUnfiltered to select messages without a filter value")
		}
	}
	if f.MatchUnfiltered && len(f.Values) == 0 {
		return argument.At(at.Field("MatchUnfiltered"), argument.CodeConflict, true, "has no effect without Values", "add Values, or leave it out")
	}
	if err := checkText(at.Field("SQL"), f.SQL); err != nil {
		return err
	}
	if f.SQL != "" && len(f.Properties)+len(f.ApplicationProperties) > 0 {
		return argument.At(at.Field("SQL"), argument.CodeConflict, f.SQL, "can't be combined with Properties and ApplicationProperties", "write the whole condition in SQL")
	}
	if _, err := propertiesMap(at.Field("Properties"), f.Properties); err != nil {
		return err
	}
	_, err := applicationMap(at.Field("ApplicationProperties"), f.ApplicationProperties)
	return err
}

func checkText(at argument.Path, s string) error {
	switch {
	case len(s) > maxFilterBytes:
		return argument.At(at, argument.CodeTooLong, nil, fmt.Sprintf("has %d bytes", len(s)), fmt.Sprintf("use at most %d", maxFilterBytes))
	case !utf8.ValidString(s):
		return argument.At(at, argument.CodeMalformed, s, "isn't valid UTF-8", "encode it as UTF-8")
	}
	return nil
}

// set is the filter set of an attach. f has been validated.
func (f Filter) set(from Offset) frames.Map {
	m := frames.Map{described(filterOffset, frames.Symbol(filterOffset), from.value())}
	if len(f.Values) > 0 {
		var l frames.List
		for _, v := range f.Values {
			l = append(l, v)
		}
		m = append(m, described(filterValues, frames.Symbol(filterValues), l))
		if f.MatchUnfiltered {
			m = append(m, described(filterUnfiltered, frames.Symbol(filterUnfiltered), true))
		}
	}
	if p, _ := propertiesMap(nil, f.Properties); len(p) > 0 {
		m = append(m, described(filterProperties, codeProperties, p))
	}
	if p, _ := applicationMap(nil, f.ApplicationProperties); len(p) > 0 {
		m = append(m, described(filterApplication, codeApplication, p))
	}
	if f.SQL != "" {
		m = append(m, described(filterSQL, codeSQL, f.SQL))
	}
	return m
}

func described(key string, descriptor, value any) frames.Entry {
	return frames.Entry{Key: frames.Symbol(key), Value: frames.Described{Descriptor: descriptor, Value: value}}
}

// fieldOf names the field of a Filter that a filter comes from.
var fieldOf = map[string]string{
	filterOffset: "From", filterValues: "Values", filterUnfiltered: "MatchUnfiltered",
	filterProperties: "Properties", filterApplication: "ApplicationProperties", filterSQL: "SQL",
}

// missing returns the field of the first filter that the broker doesn't apply.
func missing(asked, effective frames.Map) string {
	for _, e := range asked {
		key := string(e.Key.(frames.Symbol))
		if _, ok := effective.Get(key); !ok {
			return fieldOf[key]
		}
	}
	return ""
}

// matches reports whether Values select a message: the broker selects whole chunks.
func (f Filter) matches(m *client.Message) bool {
	if len(f.Values) == 0 {
		return true
	}
	v, ok := m.Annotations[annotationFilterValue].(string)
	if !ok {
		return f.MatchUnfiltered
	}
	return slices.Contains(f.Values, v)
}

// kind is the type of one of AMQP's properties.
type kind int8

const (
	kindText kind = iota
	kindSymbol
	kindID
	kindOctets
	kindMoment
	kindSequence
)

var properties = map[string]kind{
	"message-id": kindID, "user-id": kindOctets, "to": kindText, "subject": kindText, "reply-to": kindText, "correlation-id": kindID,
	"content-type": kindSymbol, "content-encoding": kindSymbol, "absolute-expiry-time": kindMoment, "creation-time": kindMoment,
	"group-id": kindText, "group-sequence": kindSequence, "reply-to-group-id": kindText,
}

func propertiesMap(at argument.Path, m map[string]any) (frames.Map, error) {
	var out frames.Map
	for _, key := range slices.Sorted(maps.Keys(m)) {
		k, ok := properties[key]
		if !ok {
			return nil, argument.At(at.Key(key), argument.CodeUnknown, key, "isn't an AMQP property", `use an AMQP name, such as "subject" or "message-id"`)
		}
		v, ok := property(k, m[key])
		if !ok {
			return nil, argument.At(at.Key(key), argument.CodeWrongType, m[key], fmt.Sprintf("can't be a %T", m[key]), "use a string, or a value of the property's type")
		}
		if err := checkValue(at.Key(key), m[key]); err != nil {
			return nil, err
		}
		out = append(out, frames.Entry{Key: frames.Symbol(key), Value: v})
	}
	return out, nil
}

func property(k kind, v any) (any, bool) {
	s, isText := pattern(v)
	switch k {
	case kindOctets:
		if b, ok := v.([]byte); ok {
			return b, true
		}
		if s, ok := v.(string); ok {
			return []byte(s), true
		}
		return nil, false
	case kindMoment:
		t, ok := v.(time.Time)
		return frames.Timestamp(t.UnixMilli()), ok
	case kindSequence:
		n, ok := v.(uint32)
		return n, ok
	case kindSymbol:
		return frames.Symbol(s), isText
	case kindID:
		switch v := v.(type) {
		case uint64, []byte:
			return v, true
		case amqp.UUID:
			return frames.UUID(v), true
		}
	}
	return s, isText
}

func applicationMap(at argument.Path, m map[string]any) (frames.Map, error) {
	var out frames.Map
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if err := checkText(at.Key(key), key); err != nil {
			return nil, err
		}
		if err := checkValue(at.Key(key), m[key]); err != nil {
			return nil, err
		}
		var v any
		switch x := m[key].(type) {
		case bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64, []byte:
			v = x
		case int:
			v = int64(x)
		case time.Time:
			v = frames.Timestamp(x.UnixMilli())
		default:
			s, ok := pattern(x)
			if !ok {
				return nil, argument.At(at.Key(key), argument.CodeWrongType, x, fmt.Sprintf("can't be a %T", x), "use a string, Prefix, Suffix, boolean, number, time, or []byte")
			}
			v = s
		}
		out = append(out, frames.Entry{Key: key, Value: v})
	}
	return out, nil
}

func checkValue(at argument.Path, v any) error {
	switch v := v.(type) {
	case string:
		return checkText(at, v)
	case Prefix:
		return checkText(at, string(v))
	case Suffix:
		return checkText(at, string(v))
	case []byte:
		if len(v) > maxFilterBytes {
			return argument.At(at, argument.CodeTooLong, nil, fmt.Sprintf("has %d bytes", len(v)), fmt.Sprintf("use at most %d", maxFilterBytes))
		}
	}
	return nil
}

// pattern encodes a string for the filter: a string that starts with & is a modifier.
func pattern(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		if len(v) > 0 && v[0] == '&' {
			return "&" + v, true
		}
		return v, true
	case Prefix:
		return "&p:" + string(v), true
	case Suffix:
		return "&s:" + string(v), true
	}
	return "", false
}
