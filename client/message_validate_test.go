package client

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/message"

	"github.com/hopback/hopback/internal/failure"
)

// full is a message with something in every place.
func full() *Message {
	return &Message{
		Format:              7,
		DeliveryTag:         []byte("tag"),
		Header:              &amqp.MessageHeader{Durable: true, Priority: 9, TTL: time.Minute, FirstAcquirer: true, DeliveryCount: 3},
		DeliveryAnnotations: amqp.Annotations{"x-opt-hop": "1"},
		Annotations:         amqp.Annotations{"x-opt-tenant": "a", "x-opt-list": []any{int64(1), "b"}, "x-exchange": "x", "x-opt-deaths": []map[any]any{{"queue": "q"}}},
		Properties: &amqp.MessageProperties{
			MessageID: "id", UserID: []byte("guest"), To: new("/queues/q"), Subject: new("s"), ReplyTo: new("/queues/r"),
			CorrelationID: amqp.UUID{1}, ContentType: new("text/plain"), ContentEncoding: new("gzip"),
			AbsoluteExpiryTime: new(time.Unix(1, 0)), CreationTime: new(time.Unix(2, 0)),
			GroupID: new("g"), GroupSequence: new(uint32(3)), ReplyToGroupID: new("rg"),
		},
		ApplicationProperties: map[string]any{"n": int64(1), "s": "text", "null": nil},
		Data:                  [][]byte{[]byte("a"), []byte("b")},
		Footer:                amqp.Annotations{"sum": int64(1)},
	}
}

// What Validate lets through is encoded unchanged. go-amqp writes small numbers in one byte
// each, and doesn't see that one below -128 isn't small if none is above 127.
func TestValidateRefusesArraysThatWouldBeCut(t *testing.T) {
	for _, a := range []any{
		[]int32{-128, 127}, []int32{-129}, []int32{math.MinInt32, 0, 127}, []int32{-129, 128}, []int32{128},
		[]int64{-128, 127}, []int64{-129}, []int64{math.MinInt64, 0, 127}, []int64{-129, 128}, []int64{128},
		[]any{[]int64{-129}}, []any{map[string]any{"a": []int32{-129}}},
	} {
		m := &Message{Value: a}
		b, err := m.MarshalBinary()
		require.NoError(t, err)
		var back Message
		require.NoError(t, back.UnmarshalBinary(b))
		err = Validate(m)
		if assert.ObjectsAreEqual(a, back.Value) {
			require.NoError(t, err, "%v", a)
			continue
		}
		var bad *argument.Error
		require.ErrorAs(t, err, &bad, "%v is %v on its way", a, back.Value)
	}
}

func TestValidateTakesWhatAMQPCanCarry(t *testing.T) {
	all := []any{
		nil, true, 1, int8(1), int16(1), int32(1), int64(1), uint(1), uint8(1), uint16(1), uint32(1), uint64(1), float32(1), 1.0,
		"text", []byte{0xff}, time.Now(), amqp.UUID{}, amqp.Symbol("ascii"), amqp.Null{},
		[]any{1, []any{nil}}, map[string]any{"a": map[any]any{int64(1): "b"}},
		[]bool{true}, []int8{1}, []int16{1}, []int32{1}, []int64{1}, []uint16{1}, []uint32{1}, []uint64{1}, []float32{1}, []float64{1},
		[]string{"a"}, []time.Time{time.Now()}, []amqp.UUID{{}}, []amqp.Symbol{"a"}, [][]byte{{1}},
		[]any{}, map[string]any{}, []string{}, []int64{},
	}
	for _, v := range all {
		m := NewMessage(nil)
		m.Data, m.Value = nil, v
		if v == nil {
			m.Value = amqp.Null{}
		}
		if checkReadable("", "", v) == nil {
			m.Annotations = amqp.Annotations{"x-opt-a": v}
		}
		require.NoError(t, Validate(m), "%T", v)
		_, err := m.MarshalBinary()
		require.NoError(t, err, "%T", v)
	}
	m := full()
	delete(m.Annotations, "x-opt-deaths")
	require.NoError(t, Validate(m))
	require.NoError(t, Validate(&Message{Sequence: [][]any{all}}))
}

func TestValidateRefusesWhatWouldEndTheLink(t *testing.T) {
	const bad = "\xff"
	itselfMap := map[string]any{}
	itselfMap["self"] = itselfMap
	itselfAny := map[any]any{}
	itselfAny["self"] = itselfAny
	itselfList := make([]any, 1)
	itselfList[0] = itselfList
	deep := any("x")
	for range maxNesting + 2 {
		deep = []any{deep}
	}
	values := map[string]any{
		"invalid UTF-8": bad, "a map that holds itself": itselfMap, "an any-map that holds itself": itselfAny, "a list that holds itself": itselfList,
		"too deep": deep, "a nil pointer": (*string)(nil), "a pointer": new("s"), "a channel": make(chan int), "a func": func() {},
		"a struct": struct{ A int }{1}, "complex": complex(1, 1), "a nil error": (*failure.Error)(nil), "an int slice": []int{1},
		"an error": failure.ErrClosed, "a symbol that isn't ASCII": amqp.Symbol("ü"), "a nested bad string": []any{map[string]any{"a": bad}},
		"a bad key": map[string]any{bad: 1}, "a bad any-key": map[any]any{bad: 1}, "an array of bad strings": []string{"a", bad},
		"a struct as a key": map[any]any{struct{}{}: 1}, "a nil *time.Time": (*time.Time)(nil), "a bad string among symbols": []amqp.Symbol{"ü"},
	}
	cases := map[string]func(*Message){
		"no body":                         func(m *Message) { m.Data = nil },
		"two bodies":                      func(m *Message) { m.Value = "v" },
		"three bodies":                    func(m *Message) { m.Value, m.Sequence = "v", [][]any{{1}} },
		"a negative ttl":                  func(m *Message) { m.Header.TTL = -1 },
		"a ttl beyond 32 bits":            func(m *Message) { m.Header.TTL = math.MaxInt64 },
		"a long delivery tag":             func(m *Message) { m.DeliveryTag = make([]byte, 33) },
		"an annotation without x-":        func(m *Message) { m.Annotations = amqp.Annotations{"tenant": "a"} },
		"an annotation with a number key": func(m *Message) { m.Annotations = amqp.Annotations{int64(1): "a"} },
		"an annotation with a bad key":    func(m *Message) { m.Annotations = amqp.Annotations{"x-" + bad: "a"} },
		"an annotation with a long key":   func(m *Message) { m.Annotations = amqp.Annotations{"x-" + strings.Repeat("k", 254): "a"} },
		"a null annotation":               func(m *Message) { m.Annotations = amqp.Annotations{"x-a": nil} },
		"another null annotation":         func(m *Message) { m.Annotations = amqp.Annotations{"x-a": amqp.Null{}} },
		"an array of integers":            func(m *Message) { m.Annotations = amqp.Annotations{"x-a": []int64{1}} },
		"an array of integers in a list":  func(m *Message) { m.Annotations = amqp.Annotations{"x-a": []any{[]uint32{1}}} },
		"an array of integers in a map":   func(m *Message) { m.Annotations = amqp.Annotations{"x-a": map[string]any{"k": []int32{1}}} },
		"an array of integers once":       func(m *Message) { m.DeliveryAnnotations = amqp.Annotations{"x-a": map[any]any{"k": []uint64{1}}} },
		"a delivery annotation":           func(m *Message) { m.DeliveryAnnotations = amqp.Annotations{"tenant": "a"} },
		"a footer key":                    func(m *Message) { m.Footer = amqp.Annotations{1.5: "a"} },
		"a bad footer key":                func(m *Message) { m.Footer = amqp.Annotations{bad: "a"} },
		"a bad footer symbol":             func(m *Message) { m.Footer = amqp.Annotations{amqp.Symbol(bad): "a"} },
		"a property key":                  func(m *Message) { m.ApplicationProperties = map[string]any{bad: 1} },
		"a list in a property":            func(m *Message) { m.ApplicationProperties = map[string]any{"a": []any{1}} },
		"a map in a property":             func(m *Message) { m.ApplicationProperties = map[string]any{"a": map[string]any{}} },
		"a message-id of int":             func(m *Message) { m.Properties.MessageID = 1 },
		"a message-id":                    func(m *Message) { m.Properties.MessageID = bad },
		"a correlation-id":                func(m *Message) { m.Properties.CorrelationID = bad },
		"a nil UUID pointer":              func(m *Message) { m.Properties.CorrelationID = (*amqp.UUID)(nil) },
		"to":                              func(m *Message) { m.Properties.To = new(bad) },
		"subject":                         func(m *Message) { m.Properties.Subject = new(bad) },
		"reply-to":                        func(m *Message) { m.Properties.ReplyTo = new(bad) },
		"group-id":                        func(m *Message) { m.Properties.GroupID = new(bad) },
		"reply-to-group-id":               func(m *Message) { m.Properties.ReplyToGroupID = new(bad) },
		"content-type":                    func(m *Message) { m.Properties.ContentType = new(bad) },
		"content-encoding":                func(m *Message) { m.Properties.ContentEncoding = new(bad) },
	}
	for name, v := range values {
		cases["value: "+name] = func(m *Message) { m.Data, m.Value = nil, v }
		cases["sequence: "+name] = func(m *Message) { m.Data, m.Sequence = nil, [][]any{{v}} }
		cases["annotation: "+name] = func(m *Message) { m.Annotations = amqp.Annotations{"x-a": v} }
		cases["footer: "+name] = func(m *Message) { m.Footer = amqp.Annotations{"a": v} }
		cases["property: "+name] = func(m *Message) { m.ApplicationProperties = map[string]any{"a": v} }
	}
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			m := NewMessage([]byte("body"))
			spoil(m)
			err := Validate(m)
			require.ErrorAs(t, err, new(*argument.Error))
			assert.Less(t, len(err.Error()), 1024)
		})
	}
	require.ErrorAs(t, Validate(nil), new(*argument.Error))
	require.ErrorAs(t, Validate(&Message{}), new(*argument.Error))
}

func TestModifiedAnnotationsThatPoisonAreRefused(t *testing.T) {
	itself := map[string]any{}
	itself["self"] = itself
	for name, a := range map[string]map[string]any{
		"null": {"x-a": nil}, "float": {"x-a": 1.5}, "float32": {"x-a": float32(1)}, "a float in a list": {"x-a": []any{1, 1.5}},
		"a null in a map": {"x-a": map[string]any{"b": nil}}, "binary": {"x-a": []byte("b")}, "uuid": {"x-a": amqp.UUID{}},
		"invalid UTF-8": {"x-a": "\xff"}, "a key of invalid UTF-8": {"x-\xff": "a"}, "a key without x-": {"a": "a"},
		"a nested key of invalid UTF-8": {"x-a": map[string]any{"\xff": 1}}, "what holds itself": {"x-a": itself},
		"too large": {"x-a": strings.Repeat("a", maxSettlementBytes)}, "too large together": {"x-a": strings.Repeat("a", maxSettlementBytes/2), "x-b": strings.Repeat("a", maxSettlementBytes/2)},
		"a large list": {"x-a": []any{strings.Repeat("a", maxSettlementBytes-10), "bbbbbbbbbb"}}, "any-map": {"x-a": map[any]any{"a": 1}},
	} {
		require.ErrorAs(t, checkModified(a), new(*argument.Error), name)
	}
	require.NoError(t, checkModified(nil))
	require.NoError(t, checkModified(map[string]any{"x-a": "s", "x-b": true, "x-c": 1, "x-d": int64(1), "x-e": []any{"a", map[string]any{"b": 1}}}))
}

func TestCopyKeepsWhatTheSenderSetAndNothingElse(t *testing.T) {
	m := full()
	c := Copy(m)
	want := full()
	want.DeliveryTag, want.DeliveryAnnotations = nil, nil
	want.Header = &amqp.MessageHeader{Durable: true, Priority: 9}
	delete(want.Annotations, "x-exchange")
	delete(want.Annotations, "x-opt-deaths")
	assert.Equal(t, want, c)
	assert.Equal(t, full(), m, "the original is left alone")
	require.NoError(t, Validate(c))

	c.ApplicationProperties["new"] = 1
	c.Annotations["x-opt-new"] = 1
	c.Footer["new"] = 1
	c.Properties.Subject = new("changed")
	c.Header.Priority = 1
	assert.Equal(t, full(), m, "the copy's maps are its own")
}

func TestCopyOfBareMessages(t *testing.T) {
	c := Copy(&Message{})
	assert.Equal(t, &Message{Header: &amqp.MessageHeader{Durable: true, Priority: defaultPriority}, Value: amqp.Null{}}, c, "a null body is restored")
	c = Copy(&Message{Value: false, Header: &amqp.MessageHeader{}, Annotations: amqp.Annotations{"x-exchange": "x"}})
	assert.Equal(t, &Message{Header: &amqp.MessageHeader{Durable: true}, Value: false}, c)
	assert.Equal(t, [][]any{{1}}, Copy(&Message{Sequence: [][]any{{1}}}).Sequence)
	for name := range brokerAnnotations {
		assert.Nil(t, Copy(&Message{Annotations: amqp.Annotations{name: "v"}}).Annotations, name)
	}
}

func TestNewMessageIsDurableWithAPriorityAndAnID(t *testing.T) {
	m := NewMessage(nil)
	assert.Equal(t, &amqp.MessageHeader{Durable: true, Priority: 4}, m.Header)
	assert.NotEqual(t, m.Properties.MessageID, NewMessage(nil).Properties.MessageID)
	require.NoError(t, Validate(m), "an empty body is a body")
}

// taken is a message built of fuzz bytes, as wild as they are.
func taken(b []byte) *Message {
	text := func() string {
		if len(b) == 0 {
			return ""
		}
		n := min(int(b[0]%8), len(b)-1)
		s := string(b[1 : 1+n])
		b = b[1+n:]
		return s
	}
	var value func(depth int) any
	value = func(depth int) any {
		if len(b) == 0 || depth > maxNesting+3 {
			return nil
		}
		kind := b[0]
		b = b[1:]
		switch kind % 16 {
		case 0:
			return text()
		case 1:
			return []byte(text())
		case 2:
			return amqp.Symbol(text())
		case 3:
			return []any{value(depth + 1), value(depth + 1)}
		case 4:
			return map[string]any{text(): value(depth + 1)}
		case 5:
			return map[any]any{text(): value(depth + 1), int64(kind): value(depth + 1)}
		case 6:
			return []string{text(), text()}
		case 7:
			return (*string)(nil)
		case 8:
			return float64(kind)
		case 9:
			return time.Unix(int64(kind), 0)
		case 10:
			return [][]byte{[]byte(text())}
		case 11:
			return struct{}{}
		case 12:
			return []any{}
		case 13:
			return []amqp.Symbol{amqp.Symbol(text())}
		case 14:
			return amqp.Null{}
		}
		return int64(kind)
	}
	m := &Message{Properties: &amqp.MessageProperties{}}
	for len(b) > 0 {
		kind := b[0]
		b = b[1:]
		switch kind % 10 {
		case 0:
			m.Data = append(m.Data, []byte(text()))
		case 1:
			m.Value = value(0)
		case 2:
			m.Sequence = append(m.Sequence, []any{value(0)})
		case 3:
			m.Annotations = amqp.Annotations{text(): value(0), "x-opt-" + text(): value(0)}
		case 4:
			m.ApplicationProperties = map[string]any{text(): value(0)}
		case 5:
			m.Properties.MessageID, m.Properties.CorrelationID = value(0), value(0)
		case 6:
			m.Properties.To, m.Properties.Subject = new(text()), new(text())
		case 7:
			m.Header = &amqp.MessageHeader{TTL: time.Duration(int8(kind)) * time.Hour, Priority: kind}
		case 8:
			m.Footer = amqp.Annotations{text(): value(0)}
		case 9:
			m.DeliveryAnnotations = amqp.Annotations{"x-" + text(): value(0)}
		}
	}
	return m
}

// What Validate lets through, go-amqp can encode.
func FuzzValidate(f *testing.F) {
	f.Add([]byte{1, 0, 3, 'a', 'b', 'c'})
	f.Add([]byte{3, 1, 'x', 3, 4, 1, 'k', 15})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := taken(b)
		if err := Validate(m); err != nil {
			require.ErrorAs(t, err, new(*argument.Error))
			return
		}
		_, err := m.MarshalBinary()
		require.NoError(t, err)
	})
}

// Anything that the broker delivers can be copied; the copy is refused or can be sent.
func FuzzCopy(f *testing.F) {
	seed := full()
	delete(seed.Annotations, "x-opt-deaths")
	b, err := seed.MarshalBinary()
	require.NoError(f, err)
	f.Add(b)
	b, err = (&Message{Value: []any{map[string]any{"a": nil}, []int64{1}, amqp.Symbol("s"), []string{}}}).MarshalBinary()
	require.NoError(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &Message{}
		if !unmarshal(m, b) {
			return
		}
		c := Copy(m)
		_ = message.ID(c)
		_, _ = Body(m)
		if Validate(c) != nil {
			return
		}
		sent, err := c.MarshalBinary()
		require.NoError(t, err)
		require.NoError(t, new(Message).UnmarshalBinary(sent))
	})
}

// unmarshal says whether go-amqp could decode b. What its decoder makes of bad
// bytes isn't the matter here.
func unmarshal(m *Message, b []byte) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	return m.UnmarshalBinary(b) == nil
}

func BenchmarkValidate(b *testing.B) {
	m := full()
	delete(m.Annotations, "x-opt-deaths")
	b.ReportAllocs()
	for b.Loop() {
		if err := Validate(m); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCopy(b *testing.B) {
	m := full()
	b.ReportAllocs()
	for b.Loop() {
		Copy(m)
	}
}

// What RabbitMQ delivers in annotations and can't read again is made into what it can.
func TestCopyMakesListsOfIntegerArrays(t *testing.T) {
	m := NewMessage([]byte("body"))
	m.Annotations = amqp.Annotations{
		"x-opt-a": []int32{1, 2}, "x-opt-b": []any{[]uint64{3}, "s"}, "x-opt-c": map[any]any{"k": []int64{4}},
		"x-opt-d": map[string]any{"k": []uint32{5}}, "x-opt-e": []string{"kept"},
	}
	require.Error(t, Validate(m))
	c := Copy(m)
	require.NoError(t, Validate(c))
	assert.Equal(t, amqp.Annotations{
		"x-opt-a": []any{int32(1), int32(2)}, "x-opt-b": []any{[]any{uint64(3)}, "s"}, "x-opt-c": map[any]any{"k": []any{int64(4)}},
		"x-opt-d": map[string]any{"k": []any{uint32(5)}}, "x-opt-e": []string{"kept"},
	}, c.Annotations)
	assert.Equal(t, []int32{1, 2}, m.Annotations["x-opt-a"], "the original is left alone")
}
