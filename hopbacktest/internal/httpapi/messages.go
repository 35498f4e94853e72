package httpapi

import (
	"encoding/base64"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// Messages by the HTTP API are those of AMQP 0-9-1: they have headers, which are
// annotations where their names begin with x-, and application properties otherwise.
// Tables and arrays among these are kept, and not shown to clients of AMQP 1.0.

func (a *api) messages() {
	a.handle("POST /exchanges/{vhost}/{name}/publish", management, func(c *call) reply {
		spec := struct {
			Key        string `json:"routing_key"`
			Payload    string `json:"payload"`
			Encoding   string `json:"payload_encoding"`
			Properties struct {
				DeliveryMode int            `json:"delivery_mode"`
				Priority     *uint8         `json:"priority"`
				MessageID    string         `json:"message_id"`
				ContentType  string         `json:"content_type"`
				Headers      map[string]any `json:"headers"`
			} `json:"properties"`
		}{}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		payload := []byte(spec.Payload)
		if spec.Encoding == "base64" {
			var err error
			if payload, err = base64.StdEncoding.DecodeString(spec.Payload); err != nil {
				return failed(err)
			}
		}
		m := &frames.Message{Header: &frames.MessageHeader{}, Properties: &frames.Properties{}}
		if p := spec.Properties.Priority; p != nil {
			m.Header.Priority = frames.Some(*p)
		}
		if id := spec.Properties.MessageID; id != "" {
			m.Properties.MessageID = id
		}
		if kind := spec.Properties.ContentType; kind != "" {
			m.Properties.ContentType = frames.Some(frames.Symbol(kind))
		}
		hidden := map[string]any{}
		for _, name := range slices.Sorted(maps.Keys(spec.Properties.Headers)) {
			v := value(spec.Properties.Headers[name])
			switch v.(type) {
			case frames.Map, frames.List:
				if strings.HasPrefix(name, "x-") {
					m.Annotations = append(m.Annotations, frames.Entry{Key: frames.Symbol(name), Value: v})
				} else {
					hidden[name] = spec.Properties.Headers[name]
				}
			default:
				if strings.HasPrefix(name, "x-") {
					m.Annotations = append(m.Annotations, frames.Entry{Key: frames.Symbol(name), Value: v})
				} else {
					m.ApplicationProperties = append(m.ApplicationProperties, frames.Entry{Key: name, Value: v})
				}
			}
		}
		var err error
		if m.Body, err = frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x75), Value: payload}); err != nil {
			return failed(err)
		}
		encoded, err := m.Append(nil)
		if err != nil {
			return failed(err)
		}
		name := c.name()
		if name == "amq.default" {
			name = ""
		}
		routed, err := a.b.Publish(c.vhost(), name, spec.Key, engine.Publishing{
			Payload: encoded, Durable: spec.Properties.DeliveryMode == 2, Hidden: hidden,
		})
		if err != nil {
			return failed(err)
		}
		return ok(object{"routed": routed})
	})
	a.handle("POST /queues/{vhost}/{name}/get", management, func(c *call) reply {
		spec := struct {
			Count    int    `json:"count"`
			Mode     string `json:"ackmode"`
			Encoding string `json:"encoding"`
		}{Count: 1}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		all, err := a.b.Get(c.vhost(), c.name(), spec.Count, strings.HasSuffix(spec.Mode, "requeue_true"))
		if err != nil {
			return failed(err)
		}
		out := []object{}
		for i, got := range all {
			out = append(out, message(got, spec.Encoding, len(all)-i-1))
		}
		return ok(out)
	})
}

// value is a value of JSON as AMQP has it.
func value(v any) any {
	switch v := v.(type) {
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<62 {
			return int64(v)
		}
	case map[string]any:
		m := frames.Map{}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			m = append(m, frames.Entry{Key: frames.Symbol(k), Value: value(v[k])})
		}
		return m
	case []any:
		l := frames.List{}
		for _, e := range v {
			l = append(l, value(e))
		}
		return l
	}
	return v
}

// plain is a value of AMQP as JSON has it.
func plain(v any) any {
	switch v := v.(type) {
	case frames.Map:
		o := object{}
		for _, e := range v {
			o[fmt.Sprint(e.Key)] = plain(e.Value)
		}
		return o
	case frames.List:
		l := make([]any, len(v))
		for i := range v {
			l[i] = plain(v[i])
		}
		return l
	case frames.Array:
		return plain(frames.List(v.Elements))
	case frames.Described:
		return plain(v.Value)
	case frames.Symbol:
		return string(v)
	case []byte:
		return string(v)
	case frames.UUID:
		return fmt.Sprintf("%x-%x-%x-%x-%x", v[:4], v[4:6], v[6:8], v[8:10], v[10:])
	}
	return v
}

func message(got engine.MessageInfo, encoding string, left int) object {
	m, headers := got.Message, object{}
	maps.Copy(headers, got.Hidden)
	for _, e := range slices.Concat(m.Annotations, m.ApplicationProperties) {
		name := fmt.Sprint(e.Key)
		if name != "x-exchange" && name != "x-routing-key" {
			headers[name] = plain(e.Value)
		}
	}
	text := func(key string) any {
		v, _ := m.Annotations.Get(key)
		return v
	}
	properties := object{"headers": headers, "delivery_mode": 1}
	if m.Header.Durable {
		properties["delivery_mode"] = 2
	}
	if m.Header.Priority.Set {
		properties["priority"] = m.Header.Priority.Value
	}
	if m.Properties != nil {
		if m.Properties.MessageID != nil {
			properties["message_id"] = plain(m.Properties.MessageID)
		}
		if m.Properties.ContentType.Set {
			properties["content_type"] = m.Properties.ContentType.Value
		}
	}
	var payload []byte
	if v, _, err := frames.ReadValue(m.Body); err == nil {
		if d, ok := v.(frames.Described); ok {
			switch body := d.Value.(type) {
			case []byte:
				payload = body
			case string:
				payload = []byte(body)
			}
		}
	}
	o := object{
		"exchange": text("x-exchange"), "routing_key": text("x-routing-key"), "redelivered": !m.Header.FirstAcquirer, "message_count": left,
		"properties": properties, "payload_bytes": len(payload), "payload": string(payload), "payload_encoding": "string",
	}
	if encoding == "base64" || !utf8.Valid(payload) {
		o["payload"], o["payload_encoding"] = base64.StdEncoding.EncodeToString(payload), "base64"
	}
	return o
}
