// Package cloudevents is an example of a client.Codec: CloudEvents 1.0 in binary mode, as their
// AMQP protocol binding defines it. An event's attributes are application properties whose
// names start with "cloudEvents:", and its data is the body. Copy the package and adapt it to
// your events.
package cloudevents

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
)

// Event is a CloudEvent with data of type T, encoded as JSON.
type Event[T any] struct {
	// ID, Source, and Type are required. Source and ID together identify an event.
	ID, Source, Type string
	Subject          string
	Time             time.Time
	// Extensions are more attributes. Their names consist of lower-case letters and digits.
	Extensions map[string]string
	Data       T
}

// Codec encodes and decodes values of type Event[T]. It refuses to send an event without the
// required attributes. A received event without them is undecodable.
type Codec[T any] struct{}

const (
	prefix      = "cloudEvents:"
	otherPrefix = "cloudEvents_" // for producers whose library allows no colon
	version     = "1.0"
)

// Encode writes the event's attributes and its data. It also sets the message-id to the event's
// ID, so that consumers can recognize duplicates.
func (Codec[T]) Encode(v any, m *client.Message) error {
	e, ok := v.(Event[T])
	if !ok {
		return fmt.Errorf("the codec encodes %T, not %T", e, v)
	}
	if err := e.check(); err != nil {
		return err
	}
	if err := (client.JSONCodec{}).Encode(e.Data, m); err != nil {
		return err
	}
	m.ApplicationProperties = map[string]any{
		prefix + "specversion": version, prefix + "id": e.ID, prefix + "source": e.Source, prefix + "type": e.Type,
	}
	if e.Subject != "" {
		m.ApplicationProperties[prefix+"subject"] = e.Subject
	}
	if !e.Time.IsZero() {
		m.ApplicationProperties[prefix+"time"] = e.Time
	}
	for name, value := range e.Extensions {
		m.ApplicationProperties[prefix+name] = value
	}
	m.Properties.MessageID = e.ID
	return nil
}

func (e Event[T]) check() error {
	if e.ID == "" || e.Source == "" || e.Type == "" {
		return errors.New("a CloudEvent needs an ID, a Source, and a Type")
	}
	return nil
}

// Decode reads an event.
func (Codec[T]) Decode(m *client.Message, v any) error {
	e, ok := v.(*Event[T])
	if !ok {
		return fmt.Errorf("the codec decodes %T, not %T", *new(Event[T]), v)
	}
	specversion := ""
	for key, value := range m.ApplicationProperties {
		name, ok := strings.CutPrefix(key, prefix)
		if !ok {
			if name, ok = strings.CutPrefix(key, otherPrefix); !ok {
				continue
			}
		}
		text := fmt.Sprint(value)
		switch name {
		case "specversion":
			specversion = text
		case "id":
			e.ID = text
		case "source":
			e.Source = text
		case "type":
			e.Type = text
		case "subject":
			e.Subject = text
		case "time":
			if e.Time, ok = value.(time.Time); !ok {
				var err error
				if e.Time, err = time.Parse(time.RFC3339Nano, text); err != nil {
					return err
				}
			}
		default:
			if e.Extensions == nil {
				e.Extensions = map[string]string{}
			}
			e.Extensions[name] = text
		}
	}
	if specversion != version {
		return fmt.Errorf("specversion %.20q isn't %q", specversion, version)
	}
	if err := e.check(); err != nil {
		return err
	}
	body, err := client.Body(m)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, &e.Data)
}

// CheckEncode refuses every type except Event[T].
func (Codec[T]) CheckEncode(t reflect.Type) error {
	if want := reflect.TypeFor[Event[T]](); t != want {
		return fmt.Errorf("the codec is for %v", want)
	}
	return nil
}

// CheckDecode refuses every type except Event[T].
func (c Codec[T]) CheckDecode(t reflect.Type) error { return c.CheckEncode(t) }
