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

// Codec encodes values into message bodies and decodes them. It must be safe for
// concurrent use. It may be a TypeChecker.
type Codec interface {
	// Encode sets m's body, and its content type if there is one.
	Encode(v any, m *Message) error
	// Decode reads m's body into v, a pointer. An error or a panic dead-letters the
	// message with ReasonUndecodable, since it would fail again.
	Decode(m *Message, v any) error
}

// TypeChecker is a Codec that knows which types it can never carry. NewPublisher and
// Typed ask it once, so a wrong type fails at the start and not at the first message.
type TypeChecker interface {
	// CheckEncode returns an error if no value of type t can be encoded.
	CheckEncode(t reflect.Type) error
	// CheckDecode returns an error if no body can be decoded into a value of type t.
	CheckDecode(t reflect.Type) error
}

// JSONCodec writes JSON into one data section, with content type
// application/json. It reads JSON from data sections, or from an amqp-value of
// string or binary, whatever the content type says.
type JSONCodec struct{}

// contentTypeJSON is the content type that JSONCodec sets.
const contentTypeJSON = "application/json"

// Encode writes v as JSON.
func (JSONCodec) Encode(v any, m *Message) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	m.Data = [][]byte{b}
	properties(m).ContentType = new(contentTypeJSON)
	return nil
}

// Decode reads JSON into v. An empty body is an error.
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

// CheckEncode refuses channels, functions and complex numbers, pointers to them and
// lists of them, maps whose keys can't be strings, and structs with a field of such a
// type. A type with a marshaler of its own is never refused.
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

// CheckDecode refuses channels, functions, complex numbers and interfaces with
// methods, and pointers to them and lists of them. A type with an unmarshaler of its
// own is never refused, and neither is a field of a struct.
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

// maxElems ends the walk down a type that contains itself, such as type P *P.
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

// RawCodec carries bytes as they are: values are []byte or string. It sets no content
// type, and reads what JSONCodec reads.
type RawCodec struct{}

// Encode writes v into one data section, without a content type.
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

// Decode reads the body into v.
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

// CheckEncode refuses all but []byte, string, and any, whose values are looked at one
// by one.
func (RawCodec) CheckEncode(t reflect.Type) error {
	if t == reflect.TypeFor[any]() {
		return nil
	}
	return RawCodec{}.CheckDecode(t)
}

// CheckDecode refuses all but []byte and string.
func (RawCodec) CheckDecode(t reflect.Type) error {
	if t != reflect.TypeFor[[]byte]() && t != reflect.TypeFor[string]() {
		return errors.New("RawCodec carries []byte and string only")
	}
	return nil
}

// checkEncode asks c whether it can encode values of type T.
func checkEncode[T any](c Codec) error {
	// A *Message is sent as it is.
	if k, ok := c.(TypeChecker); ok && reflect.TypeFor[T]() != reflect.TypeFor[*Message]() {
		if err := k.CheckEncode(reflect.TypeFor[T]()); err != nil {
			return argument.New("value", reflect.TypeFor[T]().String(), "can't be encoded", "publish values of another type, or use another PublisherConfig.Codec").Because(err)
		}
	}
	return nil
}

// checkDecode asks c whether it can decode into values of type T.
func checkDecode[T any](c Codec) error {
	if k, ok := c.(TypeChecker); ok {
		if err := k.CheckDecode(reflect.TypeFor[T]()); err != nil {
			return argument.New("value", reflect.TypeFor[T]().String(), "can't be decoded", "handle values of another type, or use another Codec").Because(err)
		}
	}
	return nil
}

// ErrNoBytes means that a message's body isn't bytes. Body returns it.
var ErrNoBytes = errors.New("the message's body is not bytes")

// Body returns the body's bytes: its data sections joined, or an amqp-value that
// is binary or a string. The result must not be changed.
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

// JSON returns a Handler that decodes the body as JSON and calls handle. In handle,
// DeliveryFrom(ctx) returns the delivery. JSON(handle) is Typed(JSONCodec{}, handle).
func JSON[T any](handle func(ctx context.Context, v T) error) Handler {
	return Typed(JSONCodec{}, handle)
}

// Typed returns a Handler that decodes the body with codec and calls handle. A
// body that can't be decoded is dead-lettered with ReasonUndecodable, and
// handle isn't called.
//
// A nil codec, a nil handle, and a T that the codec's TypeChecker refuses stop the
// consumer at its start with an *argument.Error.
func Typed[T any](codec Codec, handle func(ctx context.Context, v T) error) Handler {
	h := typed[T]{codec: codec, handle: handle}
	switch {
	case codec == nil:
		h.invalid = argument.New("codec", nil, "is nil", "give Typed a Codec, such as client.JSONCodec{}")
	case handle == nil:
		h.invalid = argument.New("handle", nil, "is nil", "give the handler a function")
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

// decode runs a codec on a hostile body: one that makes it panic is undecodable,
// not a fault of the handler.
func decode(c Codec, m *Message, v any) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("codec panicked: %v", r)
		}
	}()
	return c.Decode(m, v)
}
