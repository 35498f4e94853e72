package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/hopback/hopback/argument"
)

// Codec turns values into message bodies and back. It must be safe for
// concurrent use.
type Codec interface {
	// Encode sets m's body, and its content type where it has one.
	Encode(v any, m *Message) error
	// Decode reads m's body into v, a pointer. An error dead-letters the
	// message with ReasonUndecodable: it would fail again the next time.
	Decode(m *Message, v any) error
}

// JSONCodec writes JSON into one data section, with content type
// application/json. It reads JSON from data sections, or from an amqp-value of
// string or binary, whatever the content type says.
type JSONCodec struct{}

// ContentTypeJSON is what JSONCodec sets.
const ContentTypeJSON = "application/json"

// Encode writes v as JSON.
func (JSONCodec) Encode(v any, m *Message) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	m.Data = [][]byte{b}
	properties(m).ContentType = new(ContentTypeJSON)
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

// RawCodec passes bytes through: values are []byte or string, pointers to them
// when decoding.
type RawCodec struct{}

// Encode writes v into one data section, without a content type.
func (RawCodec) Encode(v any, m *Message) error {
	switch v := v.(type) {
	case []byte:
		m.Data = [][]byte{v}
	case string:
		m.Data = [][]byte{[]byte(v)}
	default:
		return fmt.Errorf("RawCodec takes []byte or string, not %T", v)
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
		return fmt.Errorf("RawCodec gives []byte or string, not %T", v)
	}
	return nil
}

// ErrNoBytes is returned by Body for a message whose body isn't bytes.
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

// JSON returns a Handler that decodes the body as JSON and calls handle.
// DeliveryFrom(ctx) gives handle the delivery itself.
func JSON[T any](handle func(ctx context.Context, v T) error) Handler {
	return Typed(JSONCodec{}, handle)
}

// Typed returns a Handler that decodes the body with codec and calls handle. A
// body that can't be decoded is dead-lettered with ReasonUndecodable, and
// handle isn't called.
func Typed[T any](codec Codec, handle func(ctx context.Context, v T) error) Handler {
	return typed[T]{codec, handle}
}

type typed[T any] struct {
	codec  Codec
	handle func(context.Context, T) error
}

func (h typed[T]) Prepare(context.Context, Start) error {
	if h.codec == nil {
		return argument.New("codec", nil, "is nil", "give Typed a Codec, such as client.JSONCodec{}")
	}
	if h.handle == nil {
		return argument.New("handle", nil, "is nil", "give the handler a function")
	}
	return nil
}

func (h typed[T]) Handle(ctx context.Context, d *Delivery) error {
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
