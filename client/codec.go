package client

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/hopback/hopback/argument"
)

// Codec encodes values into message bodies and decodes them. Implement it for formats other than
// JSON, such as Protocol Buffers, and set it as [PublisherConfig.Codec] or pass it to [Typed].
// It must be safe for concurrent use. A Codec may also implement [TypeChecker].
type Codec interface {
	// Encode sets the body of m, and its content type if there is one. An error makes Publish
	// return an [*argument.Error], and nothing is sent.
	Encode(v any, m *Message) error
	// Decode decodes the body of m into v, a pointer. If it returns an error or panics, the
	// message is dead-lettered with [ReasonUndecodable], because another attempt would fail the
	// same way.
	Decode(m *Message, v any) error
}

// TypeChecker is implemented by a [Codec] that knows which types it can't encode or decode.
// [NewPublisher] and [Typed] call it once, so a wrong type fails at the start rather than with
// the first message.
type TypeChecker interface {
	// CheckEncode returns an error if Encode fails for every value of type t.
	CheckEncode(t reflect.Type) error
	// CheckDecode returns an error if Decode fails for every value of type t.
	CheckDecode(t reflect.Type) error
}

// JSONCodec encodes values as JSON into one data section, with content type application/json. It
// decodes JSON from data sections, or from an amqp-value that is a string or binary. It ignores
// the content type of received messages.
type JSONCodec struct{}

// contentTypeJSON is the content type that JSONCodec sets.
const contentTypeJSON = "application/json"

// Encode encodes v as JSON.
func (JSONCodec) Encode(v any, m *Message) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	m.Data = [][]byte{b}
	properties(m).ContentType = new(contentTypeJSON)
	return nil
}

// Decode decodes JSON into v. An empty body is an error.
func (JSONCodec) Decode(m *Message, v any) error {
	b, err := Body(m)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

var (
	jsonMarshaler   = reflect.TypeFor[json.Marshaler]()
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textMarshaler   = reflect.TypeFor[encoding.TextMarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// CheckEncode returns an error for types that encoding/json can't encode:
//
//   - channels, functions, and complex numbers;
//   - pointers to them, lists of them, and structs with a field of such a type;
//   - maps whose keys can't be strings.
//
// It accepts every type that implements [json.Marshaler] or [encoding.TextMarshaler].
func (JSONCodec) CheckEncode(t reflect.Type) error {
	for range maxElems {
		if marshalsItself(t) {
			return nil
		}
		if _, err := json.Marshal(reflect.Zero(t).Interface()); err != nil {
			if bad, ok := err.(*json.UnsupportedTypeError); ok {
				return fmt.Errorf("JSON can't hold a %s", bad.Type)
			}
			return nil // another value may do
		}
		if !hasElem(t) {
			return nil
		}
		t = t.Elem()
	}
	return nil
}

// CheckDecode returns an error for types that encoding/json can't decode into: channels,
// functions, complex numbers, interfaces with methods, and pointers to them and lists of them.
// It accepts every type that implements [json.Unmarshaler] or [encoding.TextUnmarshaler], and
// doesn't check the fields of structs.
func (JSONCodec) CheckDecode(t reflect.Type) error {
	for range maxElems {
		if p := reflect.PointerTo(t); p.Implements(jsonUnmarshaler) || p.Implements(textUnmarshaler) {
			return nil
		}
		switch k := t.Kind(); {
		case k == reflect.Interface && t.NumMethod() > 0, k == reflect.Chan, k == reflect.Func,
			k == reflect.Complex64, k == reflect.Complex128, k == reflect.UnsafePointer:
			return fmt.Errorf("JSON can't be read into a %s", t)
		}
		if !hasElem(t) {
			return nil
		}
		t = t.Elem()
	}
	return nil
}

// maxElems ends the loop for a type that contains itself, such as type P *P.
const maxElems = 16

func hasElem(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return true
	}
	return false
}

func marshalsItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(jsonMarshaler) || p.Implements(textMarshaler)
}

// RawCodec sends and receives bytes unchanged: values are []byte or string. It sets no content
// type, and decodes the same kinds of body as [JSONCodec].
type RawCodec struct{}

// Encode writes v into one data section, without a content type. v must be a []byte or a string.
func (RawCodec) Encode(v any, m *Message) error {
	switch v := v.(type) {
	case []byte:
		m.Data = [][]byte{v}
	case string:
		m.Data = [][]byte{[]byte(v)}
	default:
		return fmt.Errorf("RawCodec encodes []byte or string, not %T", v)
	}
	return nil
}

// Decode sets v, a *[]byte or a *string, to the body.
func (RawCodec) Decode(m *Message, v any) error {
	b, err := Body(m)
	if err != nil {
		return err
	}
	switch v := v.(type) {
	case *[]byte:
		*v = b
	case *string:
		*v = string(b)
	default:
		return fmt.Errorf("RawCodec decodes to []byte or string, not %T", v)
	}
	return nil
}

// CheckEncode returns an error for all types except []byte, string, and any. For any, Encode
// checks each value.
func (RawCodec) CheckEncode(t reflect.Type) error {
	if t == reflect.TypeFor[any]() {
		return nil
	}
	return RawCodec{}.CheckDecode(t)
}

// CheckDecode returns an error for all types except []byte and string.
func (RawCodec) CheckDecode(t reflect.Type) error {
	if t != reflect.TypeFor[[]byte]() && t != reflect.TypeFor[string]() {
		return errors.New("RawCodec carries []byte and string only")
	}
	return nil
}

// checkEncode returns an error if c can't encode values of type T.
func checkEncode[T any](c Codec) error {
	// A *Message is sent without a codec.
	if k, ok := c.(TypeChecker); ok && reflect.TypeFor[T]() != reflect.TypeFor[*Message]() {
		if err := k.CheckEncode(reflect.TypeFor[T]()); err != nil {
			return argument.New("value", reflect.TypeFor[T]().String(), "can't be encoded", "publish values of another type, or use another PublisherConfig.Codec").Because(err)
		}
	}
	return nil
}

// checkDecode returns an error if c can't decode into values of type T.
func checkDecode[T any](c Codec) error {
	if k, ok := c.(TypeChecker); ok {
		if err := k.CheckDecode(reflect.TypeFor[T]()); err != nil {
			return argument.New("value", reflect.TypeFor[T]().String(), "can't be decoded", "handle values of another type, or use another Codec").Because(err)
		}
	}
	return nil
}

// ErrNoBytes is the error of [Body] for a message whose body isn't bytes.
var ErrNoBytes = errors.New("the message's body is not bytes")

// Body returns the body's bytes: its data sections joined, or an amqp-value that is binary or a
// string. For any other body, and for a nil m, it returns [ErrNoBytes]. Don't change the result.
func Body(m *Message) ([]byte, error) {
	switch {
	case m == nil:
		return nil, ErrNoBytes
	case len(m.Data) == 1:
		return m.Data[0], nil
	case len(m.Data) > 1:
		n := 0
		for _, d := range m.Data {
			n += len(d)
		}
		b := make([]byte, 0, n)
		for _, d := range m.Data {
			b = append(b, d...)
		}
		return b, nil
	}
	switch v := m.Value.(type) {
	case []byte:
		return v, nil
	case string:
		return []byte(v), nil
	case nil:
		if len(m.Sequence) > 0 {
			return nil, fmt.Errorf("%w: it is an amqp-sequence", ErrNoBytes)
		}
		return nil, fmt.Errorf("%w: it is null", ErrNoBytes)
	default:
		return nil, fmt.Errorf("%w: it is an amqp-value of type %T", ErrNoBytes, v)
	}
}

// JSON returns a [Handler] that decodes the body as JSON and calls handle. Inside handle,
// [DeliveryFrom] returns the delivery with its headers and properties. JSON(handle) is
// Typed(JSONCodec{}, handle).
func JSON[T any](handle func(ctx context.Context, v T) error) Handler {
	return Typed(JSONCodec{}, handle)
}

// Typed returns a [Handler] that decodes the body with codec and calls handle. If a body can't
// be decoded, handle isn't called, and the message is dead-lettered with [ReasonUndecodable].
//
// If codec or handle is nil, or codec is a [TypeChecker] that rejects T, [Conn.Consume] returns
// an [*argument.Error] when it starts.
func Typed[T any](codec Codec, handle func(ctx context.Context, v T) error) Handler {
	h := typed[T]{codec: codec, handle: handle}
	switch {
	case codec == nil:
		h.invalid = argument.New("codec", nil, "is nil", "pass a Codec, such as client.JSONCodec{}")
	case handle == nil:
		h.invalid = argument.New("handle", nil, "is nil", "pass a function")
	default:
		h.invalid = checkDecode[T](codec)
	}
	return h
}

type typed[T any] struct {
	codec   Codec
	handle  func(context.Context, T) error
	invalid error // why it can't handle anything
}

func (h typed[T]) Prepare(context.Context, Start) error { return h.invalid }

func (h typed[T]) check() error { return h.invalid }

func (h typed[T]) Handle(ctx context.Context, d *Delivery) error {
	if h.invalid != nil {
		return Requeue{Failed: true, Err: h.invalid} // the message isn't at fault
	}
	var v T
	if err := decode(h.codec, d.Message(), &v); err != nil {
		return DeadLetter{Reason: ReasonUndecodable, Err: err}
	}
	return h.handle(ctx, v)
}

// decode calls a codec with a body that may be hostile. If the codec panics, the body counts as
// undecodable, rather than as a failure of the handler.
func decode(c Codec, m *Message, v any) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("codec panicked: %v", r)
		}
	}()
	return c.Decode(m, v)
}
