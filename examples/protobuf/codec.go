// Package protobuf is an example of a client.Codec: Protocol Buffers. Publishers and handlers
// use generated messages, such as *orderpb.Order. Copy the package unchanged.
package protobuf

import (
	"errors"
	"fmt"
	"mime"
	"reflect"

	"google.golang.org/protobuf/proto"

	"github.com/hopback/hopback/client"
)

// Codec encodes and decodes pointers to generated messages. It writes the message's name into
// the content type, since most messages also decode as another type. A body with the name of
// another message is undecodable.
type Codec struct{}

const mediaType = "application/x-protobuf"

// Encode writes the message into the body.
func (Codec) Encode(v any, m *client.Message) error {
	msg, ok := v.(proto.Message)
	if !ok || !msg.ProtoReflect().IsValid() {
		return errors.New("the value is nil or isn't a generated message")
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

// Decode reads a message. v is a pointer to a pointer to the message.
func (Codec) Decode(m *client.Message, v any) error {
	to := reflect.ValueOf(v).Elem()
	value := reflect.New(to.Type().Elem())
	msg, ok := value.Interface().(proto.Message)
	if !ok {
		return fmt.Errorf("%v isn't a generated message", to.Type())
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
		return errors.New("the codec is for pointers to generated messages")
	}
	return nil
}

// CheckDecode refuses types that aren't generated messages.
func (c Codec) CheckDecode(t reflect.Type) error { return c.CheckEncode(t) }
