package interop

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/frames"
)

// A kind is a value of AMQP.
type kind struct {
	name  string
	value any // with the types of package frames
	// here is how hopback's messages hold it. A nil can't be sent by hopback, and is compared
	// with value. They lack a symbol of their own: go-amqp reads one as a string.
	here any
	read any // what is read, if that isn't here
	// unreadable says that hopback's messages can't hold it: char and decimals. RabbitMQ itself
	// can carry them.
	unreadable bool
}

func kinds() []kind {
	type symbol = frames.Symbol
	when := frames.Timestamp(1770091506007)
	long := strings.Repeat("0123456789", 30)
	return []kind{
		{name: "null", here: amqp.Null{}},
		{name: "true", value: true, here: true},
		{name: "false", value: false, here: false},
		{name: "ubyte 0", value: uint8(0), here: uint8(0)},
		{name: "ubyte 255", value: uint8(255), here: uint8(255)},
		{name: "ushort", value: uint16(65535), here: uint16(65535)},
		{name: "uint 0", value: uint32(0), here: uint32(0)}, // 0, small and large ones are encoded in three ways
		{name: "uint 255", value: uint32(255), here: uint32(255)},
		{name: "uint 256", value: uint32(256), here: uint32(256)},
		{name: "uint, largest", value: uint32(1<<32 - 1), here: uint32(1<<32 - 1)},
		{name: "ulong 0", value: uint64(0), here: uint64(0)},
		{name: "ulong 255", value: uint64(255), here: uint64(255)},
		{name: "ulong 256", value: uint64(256), here: uint64(256)},
		{name: "ulong, largest", value: uint64(1<<64 - 1), here: uint64(1<<64 - 1)},
		{name: "byte", value: int8(-128), here: int8(-128)},
		{name: "short", value: int16(-32768), here: int16(-32768)},
		{name: "int -128", value: int32(-128), here: int32(-128)},
		{name: "int 128", value: int32(128), here: int32(128)},
		{name: "int, smallest", value: int32(-1 << 31), here: int32(-1 << 31)},
		{name: "long 127", value: int64(127), here: int64(127)},
		{name: "long -129", value: int64(-129), here: int64(-129)},
		{name: "long, smallest", value: int64(-1 << 63), here: int64(-1 << 63)},
		{name: "float", value: float32(1.5), here: float32(1.5)},
		{name: "double", value: -2.25, here: -2.25},
		{name: "decimal32", value: frames.Decimal32{1, 2, 3, 4}, unreadable: true},
		{name: "decimal64", value: frames.Decimal64{1, 2, 3, 4, 5, 6, 7, 8}, unreadable: true},
		{name: "decimal128", value: frames.Decimal128{1, 2, 3, 15: 9}, unreadable: true},
		{name: "char", value: frames.Char(0x1f407), unreadable: true},
		{name: "timestamp", value: when, here: when.Time()},
		{name: "timestamp before 1970", value: frames.Timestamp(-1), here: time.UnixMilli(-1)},
		{name: "uuid", value: frames.UUID{1, 2, 15: 3}, here: amqp.UUID{1, 2, 15: 3}},
		{name: "binary, empty", value: []byte{}, here: []byte{}},
		{name: "binary of 255", value: []byte(long[:255]), here: []byte(long[:255])},
		{name: "binary of 256", value: []byte(long[:256]), here: []byte(long[:256])},
		{name: "string, empty", value: "", here: ""},
		{name: "string", value: "text \u00e9\U0001f407", here: "text \u00e9\U0001f407"},
		{name: "string of 255", value: long[:255], here: long[:255]},
		{name: "string of 256", value: long[:256], here: long[:256]},
		{name: "symbol", value: symbol("a symbol"), here: amqp.Symbol("a symbol"), read: "a symbol"},
		{name: "symbol of 256", value: symbol(long[:256]), here: amqp.Symbol(long[:256]), read: long[:256]},
		{name: "list, empty", value: frames.List{}, here: []any{}},
		{name: "list", value: frames.List{"a", int64(1), nil, frames.List{true}}, here: []any{"a", int64(1), nil, []any{true}}},
		{name: "list of 300", value: frames.List(slicesOf(300, any("e"))), here: slicesOf(300, any("e"))},
		{name: "map, empty", value: frames.Map{}, here: map[any]any{}},
		{name: "map", value: frames.Map{{Key: "k", Value: "v"}, {Key: "n", Value: int32(7)}, {Key: "x", Value: frames.Map{{Key: "y", Value: true}}}}, here: map[string]any{"k": "v", "n": int32(7), "x": map[string]any{"y": true}}},
		{name: "map of symbols", value: frames.Map{{Key: symbol("k"), Value: symbol("v")}}, read: map[string]any{"k": "v"}},
		{name: "map with other keys", value: frames.Map{{Key: int64(1), Value: "one"}, {Key: "two", Value: nil}, {Key: uint8(5), Value: true}}, here: map[any]any{int64(1): "one", "two": nil, uint8(5): true}},
		{name: "array, empty", value: frames.Array{Type: 0xb1}, here: []string{}},
		{name: "array of booleans", value: frames.Array{Type: 0x56, Elements: []any{true, false}}, here: []bool{true, false}},
		{name: "array of bytes", value: frames.Array{Type: 0x51, Elements: []any{int8(-1), int8(2)}}, here: []int8{-1, 2}},
		{name: "array of shorts", value: frames.Array{Type: 0x61, Elements: []any{int16(-1), int16(2)}}, here: []int16{-1, 2}},
		{name: "array of small ints", value: frames.Array{Type: 0x71, Elements: []any{int32(-1), int32(2)}}, here: []int32{-1, 2}},
		{name: "array of ints", value: frames.Array{Type: 0x71, Elements: []any{int32(100_000), int32(-2)}}, here: []int32{100_000, -2}},
		{name: "array of negative ints", value: frames.Array{Type: 0x71, Elements: []any{int32(-100_000), int32(2)}}, here: []int32{-100_000, 2}},
		{name: "array of small longs", value: frames.Array{Type: 0x81, Elements: []any{int64(-1), int64(2)}}, here: []int64{-1, 2}},
		{name: "array of ushorts", value: frames.Array{Type: 0x60, Elements: []any{uint16(1), uint16(2)}}, here: []uint16{1, 2}},
		{name: "array of small uints", value: frames.Array{Type: 0x70, Elements: []any{uint32(1), uint32(2)}}, here: []uint32{1, 2}},
		{name: "array of ulongs", value: frames.Array{Type: 0x80, Elements: []any{uint64(1 << 40), uint64(2)}}, here: []uint64{1 << 40, 2}},
		{name: "array of floats", value: frames.Array{Type: 0x72, Elements: []any{float32(1), float32(2)}}, here: []float32{1, 2}},
		{name: "array of doubles", value: frames.Array{Type: 0x82, Elements: []any{1.0, 2.0}}, here: []float64{1, 2}},
		{name: "array of timestamps", value: frames.Array{Type: 0x83, Elements: []any{when}}, here: []time.Time{when.Time()}},
		{name: "array of uuids", value: frames.Array{Type: 0x98, Elements: []any{frames.UUID{1}}}, here: []amqp.UUID{{1}}},
		{name: "array of binaries", value: frames.Array{Type: 0xb0, Elements: []any{[]byte{1}, []byte{}}}, here: [][]byte{{1}, {}}},
		{name: "array of strings", value: frames.Array{Type: 0xb1, Elements: []any{"a", ""}}, here: []string{"a", ""}},
		{name: "array of symbols", value: frames.Array{Type: 0xb3, Elements: []any{symbol("a"), symbol("b")}}, here: []amqp.Symbol{"a", "b"}},
	}
}

func slicesOf[T any](n int, v T) []T {
	all := make([]T, n)
	for i := range all {
		all[i] = v
	}
	return all
}

// A place is where in a message a value can be.
type place struct {
	name     string
	sections func(v any) []section
	here     func(m *client.Message, v any)
	there    func(m *client.Message) any
}

const annotated = "x-opt-value"

var body = section{frames.SectionData, []byte("body")}

func places() []place {
	const key = frames.Symbol(annotated)
	return []place{
		{
			"value", func(v any) []section { return []section{{frames.SectionValue, v}} },
			func(m *client.Message, v any) { m.Value = v },
			func(m *client.Message) any { return m.Value },
		},
		{
			"sequences", func(v any) []section {
				return []section{{frames.SectionSequence, frames.List{"first", v}}, {frames.SectionSequence, frames.List{v}}}
			},
			func(m *client.Message, v any) { m.Sequence = [][]any{{"first", v}, {v}} },
			func(m *client.Message) any {
				if len(m.Sequence) != 2 || len(m.Sequence[0]) != 2 || len(m.Sequence[1]) != 1 || m.Sequence[0][0] != "first" {
					return fmt.Sprint("not what was sent: ", m.Sequence)
				}
				return m.Sequence[1][0]
			},
		},
		{
			"application property", func(v any) []section {
				return []section{{frames.SectionApplicationProperties, frames.Map{{Key: "value", Value: v}}}, body}
			},
			func(m *client.Message, v any) {
				m.Data, m.ApplicationProperties = [][]byte{[]byte("body")}, map[string]any{"value": v}
			},
			func(m *client.Message) any { return m.ApplicationProperties["value"] },
		},
		{
			"annotation", func(v any) []section {
				return []section{{frames.SectionAnnotations, frames.Map{{Key: key, Value: v}}}, body}
			},
			func(m *client.Message, v any) {
				m.Data, m.Annotations = [][]byte{[]byte("body")}, amqp.Annotations{annotated: v}
			},
			func(m *client.Message) any { return m.Annotations[annotated] },
		},
		{
			"footer", func(v any) []section {
				return []section{body, {frames.SectionFooter, frames.Map{{Key: key, Value: v}}}}
			},
			func(m *client.Message, v any) {
				m.Data, m.Footer = [][]byte{[]byte("body")}, amqp.Annotations{annotated: v}
			},
			func(m *client.Message) any { return m.Footer[annotated] },
		},
	}
}

// deadly are what RabbitMQ takes and then can't deliver: it closes the connection of each consumer
// that it delivers them to.
func deadly(version, place, kind string) bool {
	return place == "annotation" && (kind == "null" || version == "4.0" && strings.HasPrefix(kind, "decimal"))
}

// refused is what hopback doesn't send: lists, maps and arrays as application properties, which AMQP
// doesn't allow, though RabbitMQ and proton do; what RabbitMQ couldn't read or deliver; and an array
// that go-amqp would cut.
func refused(place string, k kind) bool {
	array := strings.HasPrefix(k.name, "array")
	switch {
	case k.name == "array of negative ints":
		return true
	case place == "application property":
		return array || strings.HasPrefix(k.name, "list") || strings.HasPrefix(k.name, "map")
	case place == "annotation":
		return k.name == "null" || array && slices.ContainsFunc([]string{" ints", " longs", " uints", " ulongs"}, func(s string) bool { return strings.HasSuffix(k.name, s) })
	}
	return false
}

// protonMessage is what the client's script says of a message.
type protonMessage struct {
	Sections [][2]any
	API      map[string]note
}

// section returns the value of the first section with a code, in its notation.
func (m protonMessage) section(code int) note {
	for _, s := range m.Sections {
		if s[0] == float64(code) {
			return sorted(note(s[1].([]any)))
		}
	}
	return nil
}

// field is a field of the properties or of another section that is a list.
func (m protonMessage) field(code, n int) note {
	if s := m.section(code); s != nil {
		if list := s[1].([]any); n < len(list) {
			return note(list[n].([]any))
		}
	}
	return note{"null"}
}

// entry is the value of a key in a section that is a map.
func (m protonMessage) entry(code int, key string) note {
	if s := m.section(code); s != nil {
		for _, pair := range s[1].([]any) {
			if p := pair.([]any); p[0].([]any)[1] == key {
				return note(p[1].([]any))
			}
		}
	}
	return nil
}

func (m protonMessage) id() string { return m.field(frames.SectionProperties, 0)[1].(string) }

// named gives a message an id.
func named(id string, sections []section) order {
	properties := section{frames.SectionProperties, frames.List{id}}
	at := 0
	for at < len(sections) && sections[at].code < properties.code {
		at++
	}
	all := append(append(append([]section(nil), sections[:at]...), properties), sections[at:]...)
	return order{"sections": all}
}

// protonAnswer is what the broker has answered to a message of proton's, and protonEnd how it
// has ended something.
type protonAnswer struct{ State, Condition string }
type protonEnd struct{ Scope, Condition, Description string }

// send has proton send messages, which the broker must accept.
func (p *proton) send(t *testing.T, to string, messages []order) {
	t.Helper()
	var answer struct {
		Answers []protonAnswer
		End     *protonEnd
	}
	p.do(t, order{"do": "send", "to": to, "messages": messages}, &answer)
	require.Nil(t, answer.End)
	require.Len(t, answer.Answers, len(messages))
	for i, a := range answer.Answers {
		require.Equal(t, "ACCEPTED", a.State, "message %d", i)
	}
}

// receive has proton receive n messages, and settle them all in one way.
func (p *proton) receive(t *testing.T, from string, n int, outcome order) map[string]protonMessage {
	t.Helper()
	var answer struct {
		Messages []protonMessage
		End      *protonEnd
	}
	p.do(t, order{"do": "receive", "from": from, "n": n, "outcome": outcome}, &answer)
	require.Nil(t, answer.End)
	all := map[string]protonMessage{}
	for _, m := range answer.Messages {
		all[m.id()] = m
	}
	require.Len(t, all, n, "by their ids")
	return all
}

var protonAccepts = order{"outcome": "accept"}

// at is where a queue is.
func at(queue string) string { return "/queues/" + queue }

// queues declares queues whose dead letters go to the queue "dead".
func (s *site) queues(t *testing.T, names ...string) {
	t.Helper()
	all := []declare.Queue{declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited}}
	for _, n := range names {
		all = append(all, declare.QuorumQueue{Name: n, DeadLetter: declare.ToQueue("dead")})
	}
	_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Queues: all})
	require.NoError(t, err)
}

// publisher publishes messages of hopback's as they are.
func (s *site) publisher(t *testing.T, queue string) *client.Publisher[*client.Message] {
	t.Helper()
	p, err := client.NewPublisher[*client.Message](t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	return p
}

// take has hopback take n messages of a queue and accept them.
func (s *site) take(t *testing.T, queue string, n int) map[string]*client.Message {
	t.Helper()
	got := make(chan *client.Message, n)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- s.conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message()
			return nil
		}), client.ConsumerConfig{Concurrency: 10})
	}()
	all := map[string]*client.Message{}
	timeout := time.After(patience)
	for range n {
		select {
		case m := <-got:
			all[fmt.Sprint(m.Properties.MessageID)] = m
		case <-timeout:
			require.FailNow(t, "too few messages", "%s: %d of %d", queue, len(all), n)
		}
	}
	cancel()
	require.NoError(t, <-done)
	require.Len(t, all, n, "by their ids")
	return all
}

// Each type of AMQP in each place of a message: what proton sends arrives at proton
// unchanged, and at hopback in the form of its messages. What hopback can't hold is dead-lettered unread.
// What hopback sends arrives at proton with its type.
func TestEveryTypeBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "proton", "hopback", "back")
		var sent []order
		readable := 0
		for _, k := range kinds() {
			for _, pl := range places() {
				if !deadly(s.Version, pl.name, k.name) {
					sent = append(sent, named(pl.name+" of "+k.name, pl.sections(k.value)))
					if !k.unreadable {
						readable++
					}
				}
			}
		}
		p.send(t, at("proton"), sent)
		p.send(t, at("hopback"), sent)
		round := p.receive(t, at("proton"), len(sent), protonAccepts)
		here := s.take(t, "hopback", readable)
		dead := p.receive(t, at("dead"), len(sent)-readable, protonAccepts)
		for _, k := range kinds() {
			for _, pl := range places() {
				if deadly(s.Version, pl.name, k.name) {
					continue
				}
				name := pl.name + " of " + k.name
				assertSections(t, "proton to proton: "+name, pl.sections(k.value), round[name])
				if k.unreadable {
					require.Contains(t, dead, name)
					assertSections(t, "dead: "+name, pl.sections(k.value), dead[name])
					assert.Equal(t, note{"string", string(client.ReasonUndecodable)}, dead[name].entry(frames.SectionAnnotations, client.AnnotationReason))
					continue
				}
				want := k.here
				if k.read != nil {
					want = k.read
				}
				if assert.Contains(t, here, name) {
					assert.Equal(t, fmt.Sprint(sorted(noted(noteOf(want)))), fmt.Sprint(sorted(noted(noteOf(pl.there(here[name]))))), "proton to hopback: %s", name)
				}
			}
		}
		s.everyTypeBack(t, p)
	})
}

// everyTypeBack is the way from hopback to proton. What hopback refuses, it refuses before it
// sends anything.
func (s *site) everyTypeBack(t *testing.T, p *proton) {
	pub := s.publisher(t, "back")
	want := map[string]kind{}
	in := map[string]place{}
	for _, k := range kinds() {
		for _, pl := range places() {
			if k.here == nil {
				continue
			}
			name := pl.name + " of " + k.name
			m := &client.Message{Properties: &client.Properties{MessageID: name}}
			pl.here(m, k.here)
			err := pub.Publish(t.Context(), m)
			if refused(pl.name, k) {
				var bad *argument.Error
				require.ErrorAs(t, err, &bad, name)
				continue
			}
			require.NoError(t, err, name)
			want[name], in[name] = k, pl
		}
	}
	for name, m := range p.receive(t, at("back"), len(want), protonAccepts) {
		assertSections(t, "hopback to proton: "+name, in[name].sections(want[name].value), m)
	}
}

// assertSections compares what was sent with what proton has got of these sections. Annotations
// of others don't count.
func assertSections(t *testing.T, what string, sent []section, got protonMessage) {
	t.Helper()
	var want, have []string
	codes := map[int]bool{}
	for _, s := range sent {
		codes[s.code] = true
		want = append(want, fmt.Sprint(s.code, sorted(noted(noteOf(s.value)))))
	}
	for _, s := range got.Sections {
		code := int(s[0].(float64))
		value := sorted(note(s[1].([]any)))
		if code == frames.SectionAnnotations {
			value = note{"map", slices.DeleteFunc(value[1].([]any), func(pair any) bool { return pair.([]any)[0].([]any)[1] != annotated })}
		}
		if codes[code] {
			have = append(have, fmt.Sprint(code, value))
		}
	}
	assert.Equal(t, want, have, what)
}

// sorted is a note with all its maps in order.
func sorted(n note) note {
	out := make(note, len(n))
	for i, part := range n {
		if inner, ok := part.([]any); ok {
			out[i] = []any(sorted(inner))
		} else {
			out[i] = part
		}
	}
	if len(out) == 2 && out[0] == "map" && out[1] != nil {
		sortPairs(out[1].([]any))
	}
	return out
}
