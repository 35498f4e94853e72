// Package protobuf is an example of a client.Codec: Protocol Buffers. The values of its
// publishers and handlers are generated messages, such as *orderpb.Order. Copy it as it is.
package protobuf

import (
	"errors"
	"fmt"
	"mime"
	"reflect"

	"google.golang.org/protobuf/proto"

	"github.com/hopback/hopback/client"
)

// Codec carries pointers to generated messages. It names the message in the content type,
// since bytes of one message mostly decode as another, too: bytes that are said to be of
// another message are undecodable.
type Codec struct{}

const mediaType = "application/x-protobuf"

// Encode writes the message into the body.
func (Codec) Encode(v any, m *client.Message) error {
	msg, ok := v.(proto.Message)
	if !ok || !msg.ProtoReflect().IsValid() {
		return errors.New("the value is nil, or no generated message")
	}
	b, err := proto.Marshal(msg)
	if err != nil {
		return err
	}
	m.Data = [][]byte{b}
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	contentType := mime.FormatMediaType(mediaType, map[string]string{"messagetype": string(msg.ProtoReflect().Descriptor().FullName())})
	m.Properties.ContentType = &contentType
	return nil
}

// Decode reads a message. v is a pointer to a pointer to it.
func (Codec) Decode(m *client.Message, v any) error {
	to := reflect.ValueOf(v).Elem()
	value := reflect.New(to.Type().Elem())
	msg, ok := value.Interface().(proto.Message)
	if !ok {
		return fmt.Errorf("%v is no generated message", to.Type())
	}
	if m.Properties != nil && m.Properties.ContentType != nil {
		_, params, err := mime.ParseMediaType(*m.Properties.ContentType)
		want := string(msg.ProtoReflect().Descriptor().FullName())
		if got := params["messagetype"]; err == nil && got != "" && got != want {
			return fmt.Errorf("the body is a %.100q, not a %s", got, want)
		}
	}
	b, err := client.Body(m)
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(b, msg); err != nil {
		return err
	}
	to.Set(value)
	return nil
}

// CheckEncode refuses types that aren't generated messages.
func (Codec) CheckEncode(t reflect.Type) error {
	if t == nil || t.Kind() != reflect.Pointer || !t.Implements(reflect.TypeFor[proto.Message]()) {
		return errors.New("the codec carries pointers to generated messages")
	}
	return nil
}

// CheckDecode refuses the same.
func (c Codec) CheckDecode(t reflect.Type) error { return c.CheckEncode(t) }
