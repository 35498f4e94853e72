package client

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
)

// Limits that keep hostile values from hanging the encoder or the broker.
const (
	maxNesting = 32 // of maps and lists within a value; also ends a value that holds itself
	maxParts   = 1 << 20
	// A delivery's settlement must fit into one frame (131,072 bytes by default
	// on RabbitMQ), or it can't be sent.
	maxSettlementBytes = 60_000
)

// Validate returns an [*argument.Error] that names the invalid field if sending m would make the
// broker end the link, the session, or the connection. Publishers and forwards call it for every
// message.
func Validate(m *Message) error {
	if m == nil {
		return argument.New("message", nil, "is nil", "pass a message, such as client.NewMessage(body)")
	}
	bodies := 0
	for _, has := range []bool{len(m.Data) > 0, m.Value != nil, len(m.Sequence) > 0} {
		if has {
			bodies++
		}
	}
	switch {
	case bodies == 0:
		return argument.New("message body", nil, "is missing", "set one of Data, Value (amqp.Null{} for a null) or Sequence")
	case bodies > 1:
		return argument.New("message body", nil, "is set twice", "set only one of Data, Value and Sequence")
	}
	if h := m.Header; h != nil {
		if h.TTL < 0 || h.TTL.Milliseconds() > math.MaxUint32 {
			return argument.New("message Header.TTL", h.TTL, "is out of range", "use 0 (none) to 49 days")
		}
	}
	if len(m.DeliveryTag) > 32 {
		return argument.New("message DeliveryTag", len(m.DeliveryTag), "has more than 32 bytes", "leave it empty: the client numbers its deliveries")
	}
	for _, s := range []struct {
		name string
		a    amqp.Annotations
	}{{"message Annotations", m.Annotations}, {"message DeliveryAnnotations", m.DeliveryAnnotations}} {
		for k, v := range s.a {
			if err := checkAnnotation(s.name, k, v); err != nil {
				return err
			}
			if err := checkReadable(s.name, k, v); err != nil {
				return err
			}
		}
	}
	for k, v := range m.Footer {
		if err := checkKey("message Footer", k); err != nil {
			return err
		}
		if err := checkValue("message Footer", v, 0); err != nil {
			return err
		}
	}
	if m.Properties != nil {
		if err := checkProperties(m.Properties); err != nil {
			return err
		}
	}
	for k, v := range m.ApplicationProperties {
		if !utf8.ValidString(k) {
			return argument.New("message ApplicationProperties key", k, "is not valid UTF-8", "use a valid string")
		}
		if simple(v) {
			continue
		}
		if kind := reflect.ValueOf(v).Kind(); kind == reflect.Map || (kind == reflect.Slice && reflect.TypeOf(v) != reflect.TypeFor[[]byte]()) {
			return argument.New("message ApplicationProperties["+failure.Quote(k)+"]", fmt.Sprintf("%T", v), "is a list or map", "AMQP allows simple values here; put it into an annotation or the body")
		}
		if err := checkValue("message ApplicationProperties["+failure.Quote(k)+"]", v, 0); err != nil {
			return err
		}
	}
	if m.Value != nil {
		if err := checkValue("message Value", m.Value, 0); err != nil {
			return err
		}
	}
	for _, seq := range m.Sequence {
		for _, v := range seq {
			if err := checkValue("message Sequence", v, 1); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkProperties(p *amqp.MessageProperties) error {
	for _, id := range []struct {
		name string
		v    any
	}{{"MessageID", p.MessageID}, {"CorrelationID", p.CorrelationID}} {
		switch v := id.v.(type) {
		case nil, uint64, amqp.UUID, []byte:
		case string:
			if !utf8.ValidString(v) {
				return argument.New("message Properties."+id.name, v, "is not valid UTF-8", "use a valid string, or []byte")
			}
		default:
			return argument.New("message Properties."+id.name, fmt.Sprintf("%T", v), "has a type that AMQP doesn't allow for an id", "use string, uint64, amqp.UUID or []byte")
		}
	}
	for _, s := range []struct {
		name string
		v    *string
	}{
		{"To", p.To}, {"Subject", p.Subject}, {"ReplyTo", p.ReplyTo}, {"GroupID", p.GroupID}, {"ReplyToGroupID", p.ReplyToGroupID},
		{"ContentType", p.ContentType}, {"ContentEncoding", p.ContentEncoding},
	} {
		if s.v != nil && !utf8.ValidString(*s.v) {
			return argument.New("message Properties."+s.name, *s.v, "is not valid UTF-8", "use a valid string")
		}
	}
	return nil
}

func checkKey(name string, key any) error {
	switch k := key.(type) {
	case string:
		if !utf8.ValidString(k) {
			return argument.New(name+" key", k, "is not valid UTF-8", "use a valid string")
		}
	case amqp.Symbol:
		if !utf8.ValidString(string(k)) {
			return argument.New(name+" key", string(k), "is not valid UTF-8", "use a valid string")
		}
	case int64, int:
		// AMQP reserves numeric keys; RabbitMQ carries them in a footer.
	default:
		return argument.New(name+" key", fmt.Sprintf("%T", key), "is not a string", "use a string key")
	}
	return nil
}

// checkAnnotation refuses a key that isn't a string beginning with "x-": RabbitMQ ends the
// session for it.
func checkAnnotation(name string, key, value any) error {
	var k string
	switch s := key.(type) {
	case string:
		k = s
	case amqp.Symbol:
		k = string(s)
	default:
		return argument.New(name+" key", fmt.Sprintf("%T", key), "is not a string", `use a string that begins with "x-", such as "x-opt-tenant"`)
	}
	if err := checkAnnotationKey(name, k); err != nil || simple(value) {
		return err
	}
	return checkValue(name+"["+failure.Quote(k)+"]", value, 0)
}

// checkReadable refuses annotations that RabbitMQ can't read or write again. RabbitMQ 4.0 and
// 4.3 accept a message with a null annotation and then close the connection of every consumer
// that they deliver it to. They can't read an array of integers as go-amqp encodes it, with
// small numbers in one byte: 4.0 ends the session, 4.3 the link.
func checkReadable(name string, key, v any) error {
	switch v.(type) {
	case nil, amqp.Null: // a delivery annotation wouldn't reach anybody in any case
		return argument.New(fmt.Sprintf("%s[%.70q]", name, fmt.Sprint(key)), nil, "is null, which ends the connection of each consumer that it is delivered to", "leave it out")
	}
	if hasIntegerArray(v) {
		return argument.New(fmt.Sprintf("%s[%.70q]", name, fmt.Sprint(key)), fmt.Sprintf("%T", v), "has an array of integers, which RabbitMQ can't read in an annotation", "use []any")
	}
	return nil
}

// simple is the fast path of checkValue.
func simple(v any) bool {
	switch v := v.(type) {
	case nil, bool, int, int8, int16, int32, int64, uint, uint8, uint16, uint32, uint64, float32, float64, time.Time, amqp.UUID, []byte:
		return true
	case string:
		return utf8.ValidString(v)
	}
	return false
}

// checkValue refuses values that go-amqp's encoder can't encode or panics on (such as a nil
// *string), and values that contain themselves.
func checkValue(name string, v any, depth int) error {
	if simple(v) {
		return nil
	}
	parts := maxParts
	return checkParts(name, v, depth, &parts)
}

// checkParts counts the parts: values that share parts can be far larger, once encoded, than in
// memory.
func checkParts(name string, v any, depth int, left *int) error {
	if *left--; *left < 0 {
		return argument.New(name, nil, fmt.Sprintf("has more than %d parts", maxParts), "send it as bytes")
	}
	if simple(v) {
		return nil
	}
	if depth > maxNesting {
		return argument.New(name, nil, fmt.Sprintf("is nested deeper than %d", maxNesting), "flatten it, or send it as bytes")
	}
	switch v := v.(type) {
	case string:
		return argument.New(name, v, "is not valid UTF-8", "use a valid string, or []byte")
	case amqp.Symbol:
		return checkSymbol(name, v)
	case []amqp.Symbol:
		for _, e := range v {
			if err := checkSymbol(name, e); err != nil {
				return err
			}
		}
		return nil
	case amqp.Null:
		return nil
	case []any:
		for _, e := range v {
			if err := checkParts(name, e, depth+1, left); err != nil {
				return err
			}
		}
		return nil
	case map[string]any:
		for k, e := range v {
			if !utf8.ValidString(k) {
				return argument.New(name+" key", k, "is not valid UTF-8", "use a valid string")
			}
			if err := checkParts(name, e, depth+1, left); err != nil {
				return err
			}
		}
		return nil
	case map[any]any:
		for k, e := range v {
			if err := checkParts(name+" key", k, depth+1, left); err != nil {
				return err
			}
			if err := checkParts(name, e, depth+1, left); err != nil {
				return err
			}
		}
		return nil
	case []string:
		for _, s := range v {
			if !utf8.ValidString(s) {
				return argument.New(name, s, "is not valid UTF-8", "use valid strings")
			}
		}
		return nil
	case []int32:
		return checkArray(name, v)
	case []int64:
		return checkArray(name, v)
	case []bool, []int8, []int16, []uint16, []uint32, []uint64, []float32, []float64, []time.Time, []amqp.UUID, [][]byte:
		return nil
	}
	return argument.New(name, fmt.Sprintf("%T", v), "is of a type that can't be sent over AMQP", "use a string, number, bool, time.Time, []byte, amqp.UUID, []any or map[string]any")
}

// checkArray refuses an array whose numbers go-amqp would cut to one byte each: its encoder
// checks only for a number above 127, so -100,000 becomes 96.
func checkArray[T int32 | int64](name string, a []T) error {
	if len(a) > 0 && slices.Min(a) < math.MinInt8 && slices.Max(a) <= math.MaxInt8 {
		return argument.New(name, fmt.Sprintf("%T", a), "is an array with a number below -128 and none above 127, which go-amqp can't encode", "use []any")
	}
	return nil
}

func checkSymbol(name string, s amqp.Symbol) error {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return argument.New(name, string(s), "is a symbol with characters beyond ASCII", "use a string")
		}
	}
	return nil
}

// checkModified refuses annotations of a modified outcome that poison the message
// or close the connection. RabbitMQ 4.0 and 4.3 both crash each later consumer's
// session over a null or a float, see TestModifiedAnnotations.
func checkModified(annotations map[string]any) error {
	size := 0
	for k, v := range annotations {
		if err := checkAnnotationKey("annotations", k); err != nil {
			return err
		}
		n, err := modifiedValue(k, v, 0)
		if err != nil {
			return err
		}
		if size += n + len(k); size > maxSettlementBytes {
			return argument.New("annotations", size, fmt.Sprintf("hold more than %d bytes", maxSettlementBytes), "use less: a settlement must fit into one frame")
		}
	}
	return nil
}

// modifiedValue checks the value of the annotation key, or a part of it.
func modifiedValue(key string, v any, depth int) (size int, err error) {
	const remedy = "use string, bool, int, int64, []any or map[string]any of these"
	if depth > maxNesting {
		return 0, argument.New(annotationName(key), nil, fmt.Sprintf("is nested deeper than %d", maxNesting), "flatten it")
	}
	switch v := v.(type) {
	case string:
		if !utf8.ValidString(v) {
			return 0, argument.New(annotationName(key), v, "is not valid UTF-8", "use a valid string")
		}
		return len(v) + 5, nil
	case bool, int, int64, int32, uint32, uint64:
		return 9, nil
	case []any:
		size = 9
		for _, e := range v {
			n, err := modifiedValue(key, e, depth+1)
			if err != nil {
				return 0, err
			}
			if size += n; size > maxSettlementBytes {
				return size, nil
			}
		}
		return size, nil
	case map[string]any:
		size = 9
		for k, e := range v {
			if !utf8.ValidString(k) {
				return 0, argument.New(annotationName(key)+" key", k, "is not valid UTF-8", "use a valid string")
			}
			n, err := modifiedValue(key, e, depth+1)
			if err != nil {
				return 0, err
			}
			if size += n + len(k) + 5; size > maxSettlementBytes {
				return size, nil
			}
		}
		return size, nil
	case time.Time:
		return 9, nil
	case nil, float32, float64:
		return 0, argument.New(annotationName(key), fmt.Sprintf("%T", v), "would poison the message: RabbitMQ can't deliver it again", remedy)
	}
	return 0, argument.New(annotationName(key), fmt.Sprintf("%T", v), "is of a type that RabbitMQ doesn't keep in a modified message", remedy)
}

// annotationName is how an error names the annotation key.
func annotationName(key string) string { return "annotations[" + failure.Quote(key) + "]" }

// checkAnnotationKey refuses keys of annotations that RabbitMQ ignores or changes.
func checkAnnotationKey(name, k string) error {
	if !strings.HasPrefix(k, "x-") || !utf8.ValidString(k) || len(k) > 255 {
		return argument.New(name+" key", k, `doesn't begin with "x-", is over 255 bytes, or is not valid UTF-8`, `use a key such as "x-opt-tenant"`)
	}
	return nil
}
