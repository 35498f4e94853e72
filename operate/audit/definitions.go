package audit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/values"
	"github.com/hopback/hopback/operate/internal/utf8text"

	"github.com/hopback/hopback/internal/rules"
)

// Definitions is RabbitMQ's definitions document. Use it to give a topology to operators who
// declare it for you. rabbitmqctl export_definitions and GET /api/definitions write such
// documents; POST /api/definitions and load_definitions read them.
//
// [Definitions.Topology] and [Definitions.Snapshot] return its queues, exchanges, bindings, and
// policies. It keeps everything else, such as users and parameters: reading and writing a
// document loses nothing. So a document can contain password hashes.
//
// The written form is sorted and has every field. Reading and writing it again gives the same
// bytes.
type Definitions struct {
	queues    []definedQueue
	exchanges []definedExchange
	bindings  []definedBinding
	policies  []definedPolicy
	// Other contains the members of the document that aren't modeled, such as "users", "vhosts",
	// or "parameters", as JSON.
	Other map[string]json.RawMessage
}

// definedQueue is a queue in a document. VHost is empty in a document of a
// single virtual host. Other has the members that aren't modelled, such as the
// "type" that RabbitMQ 4.3 writes.
type definedQueue struct {
	VHost, Name         string
	Durable, AutoDelete bool
	Arguments           map[string]any
	Other               map[string]json.RawMessage
}

// definedExchange is an exchange in a document.
type definedExchange struct {
	VHost, Name, Type             string
	Durable, AutoDelete, Internal bool
	Arguments                     map[string]any
	Other                         map[string]json.RawMessage
}

// definedBinding is a binding in a document; DestinationType is "queue" or
// "exchange".
type definedBinding struct {
	VHost, Source, Destination, DestinationType, RoutingKey string
	Arguments                                               map[string]any
	Other                                                   map[string]json.RawMessage
}

// definedPolicy is a user's policy in a document. Those of operators are among
// the parameters.
type definedPolicy struct {
	declare.Policy
	Other map[string]json.RawMessage
}

// ParseDefinitions reads a definitions document. If it is malformed, the error is an
// *[argument.Error] that names the place. The values of arguments aren't checked: use check.Verify for
// that.
func ParseDefinitions(text []byte) (Definitions, error) {
	var d Definitions
	text, _ = utf8text.Decode(text)
	doc, err := object(argument.Root("definitions"), text)
	if err != nil {
		return d, err
	}
	errs := []error{
		eachObject(doc, "queues", func(m *members) {
			d.queues = append(d.queues, definedQueue{
				VHost: m.text("vhost", false), Name: m.text("name", true), Durable: m.flag("durable", true), AutoDelete: m.flag("auto_delete", false),
				Arguments: m.arguments("arguments"), Other: m.rest(),
			})
		}),
		eachObject(doc, "exchanges", func(m *members) {
			d.exchanges = append(d.exchanges, definedExchange{
				VHost: m.text("vhost", false), Name: m.text("name", true), Type: m.text("type", true),
				Durable: m.flag("durable", true), AutoDelete: m.flag("auto_delete", false), Internal: m.flag("internal", false),
				Arguments: m.arguments("arguments"), Other: m.rest(),
			})
		}),
		eachObject(doc, "bindings", func(m *members) {
			b := definedBinding{
				VHost: m.text("vhost", false), Source: m.text("source", true), Destination: m.text("destination", true),
				DestinationType: m.text("destination_type", true), RoutingKey: m.text("routing_key", false),
				Arguments: m.arguments("arguments"), Other: m.rest(),
			}
			if b.DestinationType != "queue" && b.DestinationType != "exchange" {
				m.bad("destination_type", argument.CodeUnknown, b.DestinationType, "is neither", `write "queue" or "exchange"`)
			}
			d.bindings = append(d.bindings, b)
		}),
		eachObject(doc, "policies", func(m *members) {
			d.policies = append(d.policies, definedPolicy{declare.Policy{
				VHost: m.text("vhost", false), Name: m.text("name", true), Pattern: m.text("pattern", true),
				ApplyTo: m.text("apply-to", false), Priority: m.number("priority"), Definition: m.arguments("definition"),
			}, m.rest()})
		}),
	}
	for _, err := range errs {
		if err != nil {
			return Definitions{}, err
		}
	}
	for _, modelled := range []string{"queues", "exchanges", "bindings", "policies"} {
		delete(doc, modelled)
	}
	if len(doc) > 0 {
		d.Other = doc
	}
	d.sort()
	return d, nil
}

// MarshalJSON writes the document, with sorted members and lists.
func (d Definitions) MarshalJSON() ([]byte, error) {
	d.queues, d.exchanges = slices.Clone(d.queues), slices.Clone(d.exchanges)
	d.bindings, d.policies = slices.Clone(d.bindings), slices.Clone(d.policies)
	d.sort()
	doc := map[string]any{}
	for k, v := range d.Other {
		doc[k] = canonical(v)
	}
	queues, exchanges, bindings, policies := []any{}, []any{}, []any{}, []any{}
	for _, q := range d.queues {
		queues = append(queues, withOther(q.Other, q.VHost, map[string]any{
			"name": q.Name, "durable": q.Durable, "auto_delete": q.AutoDelete, "arguments": written(q.Arguments),
		}))
	}
	for _, x := range d.exchanges {
		exchanges = append(exchanges, withOther(x.Other, x.VHost, map[string]any{
			"name": x.Name, "type": x.Type, "durable": x.Durable, "auto_delete": x.AutoDelete, "internal": x.Internal, "arguments": written(x.Arguments),
		}))
	}
	for _, b := range d.bindings {
		bindings = append(bindings, withOther(b.Other, b.VHost, map[string]any{
			"source": b.Source, "destination": b.Destination, "destination_type": b.DestinationType,
			"routing_key": b.RoutingKey, "arguments": written(b.Arguments),
		}))
	}
	for _, p := range d.policies {
		applyTo := p.ApplyTo
		if applyTo == "" {
			applyTo = "all"
		}
		policies = append(policies, withOther(p.Other, p.VHost, map[string]any{
			"name": p.Name, "pattern": p.Pattern, "apply-to": applyTo, "priority": p.Priority, "definition": written(p.Definition),
		}))
	}
	doc["queues"], doc["exchanges"], doc["bindings"], doc["policies"] = queues, exchanges, bindings, policies
	return values.JSON(doc), nil
}

// UnmarshalJSON reads the document as [ParseDefinitions] does.
func (d *Definitions) UnmarshalJSON(text []byte) error {
	parsed, err := ParseDefinitions(text)
	if err == nil {
		*d = parsed
	}
	return err
}

// Encode returns the document as the content of a file: indented JSON with a final line feed.
func (d Definitions) Encode() []byte {
	text, _ := d.MarshalJSON()
	var b bytes.Buffer
	if json.Indent(&b, text, "", "  ") != nil {
		return append(text, '\n') // can't be: it was just written
	}
	b.WriteByte('\n')
	return b.Bytes()
}

func (d *Definitions) sort() {
	slices.SortStableFunc(d.queues, func(a, b definedQueue) int {
		return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name))
	})
	slices.SortStableFunc(d.exchanges, func(a, b definedExchange) int {
		return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name))
	})
	slices.SortStableFunc(d.bindings, func(a, b definedBinding) int {
		return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Source, b.Source), cmp.Compare(a.DestinationType, b.DestinationType),
			cmp.Compare(a.Destination, b.Destination), cmp.Compare(a.RoutingKey, b.RoutingKey),
			bytes.Compare(values.JSON(notNil(a.Arguments)), values.JSON(notNil(b.Arguments))))
	})
	slices.SortStableFunc(d.policies, func(a, b definedPolicy) int { return rules.ComparePolicies(a.Policy, b.Policy) })
}

// written is arguments in their written form: a whole float keeps its point, or else it would be
// an integer when it is read again.
func written(m map[string]any) map[string]any {
	out := make(map[string]any, len(m))
	for k, v := range m {
		out[k] = writtenValue(v)
	}
	return out
}

func writtenValue(v any) any {
	switch v := v.(type) {
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return json.Number(strconv.FormatFloat(v, 'f', 1, 64))
		}
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = writtenValue(v[i])
		}
		return list
	case map[string]any:
		return written(v)
	}
	return v
}

func notNil(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return m
}

func withOther(other map[string]json.RawMessage, vhost string, m map[string]any) map[string]any {
	for k, v := range other {
		m[k] = canonical(v)
	}
	if vhost != "" {
		m["vhost"] = vhost
	}
	return m
}

// canonical brings JSON into the order in which Go writes it, and doesn't change how numbers are
// written.
func canonical(text json.RawMessage) any {
	var v any
	if rules.DecodeJSON(text, &v) != nil {
		return text
	}
	return v
}

func object(what argument.Path, text []byte) (map[string]json.RawMessage, error) {
	var m map[string]json.RawMessage
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&m); err != nil {
		return nil, argument.At(what, argument.CodeMalformed, nil, "isn't a JSON object", "pass the output of rabbitmqctl export_definitions or GET /api/definitions").Because(err)
	}
	if m == nil {
		return nil, argument.At(what, argument.CodeMissing, nil, "is null", "pass a JSON object")
	}
	if len(bytes.TrimSpace(text[d.InputOffset():])) > 0 {
		return nil, argument.At(what, argument.CodeMalformed, nil, "has text after the JSON object", "pass a single document")
	}
	return m, nil
}

// members reads an object's members and remembers the first that is wrong.
type members struct {
	where argument.Path
	m     map[string]json.RawMessage
	err   error
}

func eachObject(doc map[string]json.RawMessage, key string, read func(*members)) error {
	raw, ok := doc[key]
	if !ok || string(raw) == "null" {
		return nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return argument.At(argument.Root("definitions").Field(key), argument.CodeWrongType, nil, "isn't a list", "write a list of objects").Because(err)
	}
	for i, text := range list {
		where := argument.Root("definitions").Field(key).Index(i)
		m, err := object(where, text)
		if err != nil {
			return err
		}
		o := &members{where: where, m: m}
		read(o)
		if o.err != nil {
			return o.err
		}
	}
	return nil
}

func (m *members) bad(key string, code argument.Code, value any, problem, remedy string) {
	if m.err == nil {
		m.err = argument.At(m.where.Field(key), code, value, problem, remedy)
	}
}

// take reads a member and removes it from those that aren't modeled.
func (m *members) take(key string, into any, kind string) (there bool) {
	raw, there := m.m[key]
	delete(m.m, key)
	if there && rules.DecodeJSON(raw, into) != nil {
		m.bad(key, argument.CodeWrongType, string(raw), "isn't "+kind, "write "+kind)
	}
	return there
}

func (m *members) text(key string, required bool) (s string) {
	if !m.take(key, &s, "a string") && required {
		m.bad(key, argument.CodeMissing, nil, "is missing", "add it")
	}
	return s
}

// flag is true or false. What isn't there has the broker's default.
func (m *members) flag(key string, b bool) bool {
	m.take(key, &b, "true or false")
	return b
}

func (m *members) number(key string) (n int64) {
	m.take(key, &n, "an integer")
	return n
}

// arguments may also be an empty list, which is what Erlang makes of no arguments.
func (m *members) arguments(key string) map[string]any {
	if raw := strings.TrimSpace(string(m.m[key])); raw == "[]" || raw == "null" {
		delete(m.m, key)
		return map[string]any{}
	}
	var args map[string]any
	m.take(key, &args, "an object")
	return rules.JSONArguments(args)
}

func (m *members) rest() map[string]json.RawMessage {
	if len(m.m) == 0 {
		return nil
	}
	return m.m
}
