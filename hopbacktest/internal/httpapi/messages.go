package httpapi

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// Messages by the HTTP API are those of AMQP 0-9-1: they have headers, which are
// annotations where their names begin with x-, and application properties otherwise.
// Tables and arrays among these are kept, and not shown to clients of AMQP 1.0.

func (a *api) messages() {
	a.handle("POST /exchanges/{vhost}/{name}/publish", management, a.publish)
	a.handle("POST /queues/{vhost}/{name}/get", management, a.get)
}

// lacks is the reply to a body without keys that it must have.
func lacks(body map[string]json.RawMessage, keys ...string) *reply {
	var terms []string
	for _, k := range keys {
		if _, ok := body[k]; !ok {
			terms = append(terms, "{key_missing,"+k+"}")
		}
	}
	if terms == nil {
		return nil
	}
	r := bad("[" + strings.Join(terms, ",") + "]")
	return &r
}

// term is a refusal whose reason is a term of Erlang.
func term(of ...any) *reply {
	return &reply{status: http.StatusBadRequest, body: object{"error": "bad_request", "reason": of}}
}

func (a *api) publish(c *call) reply {
	var body map[string]json.RawMessage
	var spec struct {
		Key        string `json:"routing_key"`
		Payload    string `json:"payload"`
		Encoding   string `json:"payload_encoding"`
		Properties object `json:"properties"`
	}
	if err := errors.Join(c.read(&body), c.read(&spec)); err != nil {
		return failed(err)
	}
	if r := lacks(body, "routing_key", "properties", "payload", "payload_encoding"); r != nil {
		return *r
	}
	payload := []byte(spec.Payload)
	switch spec.Encoding {
	case "string":
	case "base64":
		var err error
		if payload, err = base64.StdEncoding.DecodeString(spec.Payload); err != nil {
			return *term("not_base64", spec.Payload)
		}
	default:
		return *term("unsupported_encoding", spec.Encoding)
	}
	m, refused := a.fromLegacy(c.user, spec.Properties)
	if refused != nil {
		return *refused
	}
	headers, _ := spec.Properties["headers"].(object)
	hidden := setHeaders(m, headers)
	delete(spec.Properties, "headers")
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
		Payload: encoded, Durable: m.Header.Durable, Hidden: hidden, Properties: spec.Properties,
	})
	if err != nil {
		return failed(err)
	}
	return ok(object{"routed": routed})
}

// fromLegacy is a message with what AMQP 1.0 has of properties of AMQP 0-9-1.
func (a *api) fromLegacy(user engine.UserInfo, properties object) (*frames.Message, *reply) {
	refuse := func(reason string) (*frames.Message, *reply) { r := bad(reason); return nil, &r }
	m, p := &frames.Message{Header: &frames.MessageHeader{}}, &frames.Properties{}
	bare := 0 // fields of p
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		v := properties[name]
		n, isInt := value(v).(int64)
		text, isText := v.(string)
		bare++
		switch name {
		case "delivery_mode", "priority", "timestamp":
			if !isInt {
				return nil, term("not_int", name)
			}
		case "content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id", "type", "user_id", "app_id", "cluster_id":
			if !isText {
				return nil, term("not_string", name)
			}
		case "headers":
			if _, ok := v.(object); !ok {
				return refuse("headers must be an object")
			}
		}
		switch name {
		case "timestamp":
			p.CreationTime = frames.Some(frames.Timestamp(n * 1000))
		case "content_type":
			p.ContentType = frames.Some(frames.Symbol(text))
		case "content_encoding":
			p.ContentEncoding = frames.Some(frames.Symbol(text))
		case "correlation_id":
			p.CorrelationID = text
		case "reply_to":
			p.ReplyTo = text
			if a.newer() {
				p.ReplyTo = queuePrefix + url.PathEscape(text)
			}
		case "message_id":
			p.MessageID = text
		case "app_id":
			p.GroupID = frames.Some(text)
		case "user_id":
			if text != user.Name && !slices.Contains(user.Tags, "impersonator") {
				return refuse("406 PRECONDITION_FAILED - user_id property set to '" + text + "' but authenticated user was '" + user.Name + "'")
			}
			p.UserID = []byte(text)
		default:
			bare--
		}
		switch name {
		case "delivery_mode":
			m.Header.Durable = n == 2
		case "priority":
			if n < 0 || n > math.MaxUint8 {
				return refuse(fmt.Sprintf("a priority of %d", n))
			}
			m.Header.Priority = frames.Some(uint8(n))
		case "expiration":
			ttl, err := strconv.ParseInt(text, 10, 64)
			switch {
			case err != nil || ttl > math.MaxUint32:
				return refuse("406 PRECONDITION_FAILED - invalid expiration '" + text + "'")
			case ttl < 0:
				return refuse(fmt.Sprintf("406 PRECONDITION_FAILED - invalid expiration '%s': {value_negative,%d}", text, ttl))
			}
			m.Header.TTL = frames.Some(uint32(ttl))
		case "type":
			m.Annotations = append(m.Annotations, frames.Entry{Key: frames.Symbol(annotationType), Value: text})
		}
	}
	if bare > 0 {
		m.Properties = p
	}
	return m, nil
}

const (
	// annotationType is the annotation that a message's type of AMQP 0-9-1 is in.
	annotationType = "x-basic-type"
	// queuePrefix begins the address that RabbitMQ 4.3 makes of a reply_to.
	queuePrefix = "/queues/"
)

// setHeaders makes annotations and application properties of headers, and returns those
// that can be neither.
func setHeaders(m *frames.Message, headers object) (hidden object) {
	hidden = object{}
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		v := value(headers[name])
		_, isMap := v.(frames.Map)
		_, isList := v.(frames.List)
		switch {
		case strings.HasPrefix(name, "x-"):
			m.Annotations = append(m.Annotations, frames.Entry{Key: frames.Symbol(name), Value: v})
		case isMap || isList:
			hidden[name] = headers[name]
		default:
			m.ApplicationProperties = append(m.ApplicationProperties, frames.Entry{Key: name, Value: v})
		}
	}
	return hidden
}

func (a *api) get(c *call) reply {
	var body map[string]json.RawMessage
	spec := struct {
		Count    int
		Mode     string `json:"ackmode"`
		Encoding string
		Truncate *int
	}{}
	if err := errors.Join(c.read(&body), c.read(&spec)); err != nil {
		return failed(err)
	}
	if r := lacks(body, "ackmode", "count", "encoding"); r != nil {
		return *r
	}
	modes := []string{engine.AckAndRequeue, engine.Ack, engine.RejectAndRequeue, engine.Reject}
	switch {
	case !slices.Contains(modes, spec.Mode):
		return bad("Invalid ackmode value: " + spec.Mode + ". Valid values are: " + strings.Join(modes, ", "))
	case spec.Encoding != "auto" && spec.Encoding != "base64":
		return bad("Unsupported encoding. Please use auto or base64.")
	}
	all, err := a.b.Get(c.vhost(), c.name(), spec.Count, spec.Mode)
	if err != nil {
		return failed(err)
	}
	most := math.MaxInt
	if spec.Truncate != nil {
		most = max(*spec.Truncate, 0)
	}
	return ok(list(all, func(got engine.MessageInfo) object { return a.message(got, spec.Encoding, most) }))
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

func (a *api) message(got engine.MessageInfo, encoding string, most int) object {
	m := got.Message
	annotation := func(key string) any {
		v, _ := m.Annotations.Get(key)
		return v
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
	part := payload[:min(len(payload), most)]
	o := object{
		"exchange": annotation("x-exchange"), "routing_key": annotation("x-routing-key"), "redelivered": !m.Header.FirstAcquirer, "message_count": got.Left,
		"properties": a.toLegacy(got), "payload_bytes": len(payload), "payload": string(part), "payload_encoding": "string",
	}
	if encoding == "base64" || !utf8.Valid(part) {
		o["payload"], o["payload_encoding"] = base64.StdEncoding.EncodeToString(part), "base64"
	}
	return o
}

// toLegacy is a message's properties of AMQP 0-9-1. Without any it is an empty list.
func (a *api) toLegacy(got engine.MessageInfo) any {
	m, headers := got.Message, object{}
	maps.Copy(headers, got.Hidden)
	for _, e := range slices.Concat(m.Annotations, m.ApplicationProperties) {
		switch name := fmt.Sprint(e.Key); name {
		case "x-exchange", "x-routing-key", annotationType:
		case "x-opt-deaths":
			headers["x-death"] = deaths(e.Value)
		default:
			headers[name] = plain(e.Value)
		}
	}
	all := maps.Clone(got.Properties)
	if all == nil {
		all = a.converted(m)
	}
	if !m.Header.TTL.Set { // it was dead-lettered
		delete(all, "expiration")
	}
	if len(headers) > 0 {
		all["headers"] = headers
	}
	if len(all) == 0 {
		return []any{}
	}
	return all
}

// converted are the properties of AMQP 0-9-1 of a message that was published by AMQP 1.0.
func (a *api) converted(m *frames.Message) object {
	all := object{"delivery_mode": 1}
	if m.Header.Durable {
		all["delivery_mode"] = 2
	}
	if m.Header.Priority.Set {
		all["priority"] = m.Header.Priority.Value
	}
	if m.Header.TTL.Set {
		all["expiration"] = strconv.FormatUint(uint64(m.Header.TTL.Value), 10)
	}
	if v, ok := m.Annotations.Get(annotationType); ok {
		all["type"] = plain(v)
	}
	p := m.Properties
	if p == nil {
		return all
	}
	set := func(name string, v any) {
		if v != nil {
			all[name] = plain(v)
		}
	}
	replyTo := p.ReplyTo
	if text, ok := replyTo.(string); ok && a.newer() {
		if escaped, ok := strings.CutPrefix(text, queuePrefix); ok {
			if name, err := url.PathUnescape(escaped); err == nil {
				replyTo = name
			}
		}
	}
	set("message_id", p.MessageID)
	set("correlation_id", p.CorrelationID)
	set("reply_to", replyTo)
	if p.UserID != nil {
		set("user_id", p.UserID)
	}
	if p.ContentType.Set {
		set("content_type", p.ContentType.Value)
	}
	if p.ContentEncoding.Set {
		set("content_encoding", p.ContentEncoding.Value)
	}
	if p.CreationTime.Set {
		all["timestamp"] = int64(p.CreationTime.Value) / 1000
	}
	if p.GroupID.Set {
		set("app_id", p.GroupID.Value)
	}
	return all
}

// deaths is x-opt-deaths as AMQP 0-9-1 has it.
func deaths(v any) []object {
	all := []object{}
	array, _ := v.(frames.Array)
	for _, e := range array.Elements {
		d, _ := e.(frames.Map)
		out := object{}
		for _, name := range []string{"queue", "reason", "count", "exchange", "routing-keys"} {
			v, _ := d.Get(name)
			out[name] = plain(v)
		}
		if t, ok := d.Get("first-time"); ok {
			ms, _ := t.(frames.Timestamp)
			out["time"] = int64(ms) / 1000
		}
		if ttl, ok := d.Get("ttl"); ok {
			out["original-expiration"] = fmt.Sprint(ttl)
		}
		all = append(all, out)
	}
	return all
}
