package message

import (
	_ "embed"
	"encoding/hex"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func ptr[T any](v T) *T { return &v }

// theirs is what go-amqp decodes; nil if it can't.
func theirs(b []byte) *amqp.Message {
	var m amqp.Message
	if decodable(b) != nil || m.UnmarshalBinary(b) != nil {
		return nil
	}
	return &m
}

// left says whether Decode leaves a message to go-amqp.
func left(b []byte) bool {
	var x Decoded
	d := newDecoder(b, &x)
	d.message()
	return d.not
}

// equal says that two messages are the same, with each type.
func equal(t testing.TB, want, got *amqp.Message, b []byte) {
	t.Helper()
	switch {
	case reflect.DeepEqual(want, got):
	case !reflect.DeepEqual(want, want): // there's a NaN, which differs from itself
		require.Equal(t, text(want), text(got), "%x", b)
	default:
		require.Equal(t, want, got, "%x", b)
		require.Fail(t, "they differ", "%x", b)
	}
}

// text has all of a message but its pointers.
func text(m *amqp.Message) string {
	s := fmt.Sprint(m.Header, m.DeliveryAnnotations, m.Annotations, m.ApplicationProperties, m.Data, m.Value, m.Sequence, m.Footer)
	if p := m.Properties; p != nil {
		v := reflect.ValueOf(*p)
		for i := range v.NumField() {
			f := v.Field(i)
			if f.Kind() == reflect.Pointer && !f.IsNil() {
				f = f.Elem()
			}
			s += fmt.Sprint(" ", f)
		}
	}
	return s
}

// decode checks that Decode does what go-amqp does.
func decode(t testing.TB, b []byte) *amqp.Message {
	t.Helper()
	want := theirs(b)
	x := Decoded{Message: amqp.Message{Format: 7, DeliveryTag: []byte("tag")}}
	kept := append([]byte(nil), b...)
	err := x.Decode(kept)
	for i := range kept {
		kept[i] = 0xee // nothing of it may be in the message
	}
	require.Equal(t, want != nil, err == nil, "%x: %v", b, err)
	require.Equal(t, want != nil, unmarshal(new(amqp.Message), b) == nil, "%x", b)
	require.Equal(t, uint32(7), x.Format)
	require.Equal(t, []byte("tag"), x.DeliveryTag)
	x.Format, x.DeliveryTag = 0, nil
	if want == nil {
		equal(t, &amqp.Message{}, &x.Message, b)
		return nil
	}
	equal(t, want, &x.Message, b)
	return &x.Message
}

// encode checks that Append writes what MarshalBinary does, but for the order of maps.
func encode(t testing.TB, m *amqp.Message) []byte {
	t.Helper()
	want, wantErr := marshal(m)
	got, err := Append([]byte("before"), m)
	require.Equal(t, wantErr == nil, err == nil, "%v, %v", wantErr, err)
	require.Equal(t, "before", string(got[:6]))
	got = got[6:]
	if err != nil {
		require.Empty(t, got) // which of two errors in a map comes first is left to chance
		return nil
	}
	require.Len(t, got, len(want))
	if theirs(want) == nil {
		require.Nil(t, theirs(got)) // what can't be read, such as a key that is a described list
		return nil
	}
	equal(t, theirs(want), theirs(got), got)
	return got
}

//go:embed testdata/deliveries.txt
var captured string

// deliveries are messages as RabbitMQ writes them.
func deliveries(t testing.TB) (all [][]byte) {
	for line := range strings.Lines(captured) {
		version, digits, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || version == "#" {
			continue
		}
		b, err := hex.DecodeString(digits)
		require.NoError(t, err)
		all = append(all, b)
	}
	require.NotEmpty(t, all)
	return all
}

func TestWhatRabbitMQDelivers(t *testing.T) {
	t.Parallel()
	for _, b := range deliveries(t) {
		require.NotNil(t, decode(t, b))
		assert.False(t, left(b), "%x", b)
	}
}

func times() time.Time { return time.UnixMilli(1790000000123) }

func messages() map[string]*amqp.Message {
	uuid := amqp.UUID{1, 2, 15: 16}
	long := strings.Repeat("é", 200)
	values := map[string]any{
		"nil": nil, "true": true, "false": false, "string": "s", "empty": "", "long": long, "symbol": amqp.Symbol("sym"), "long symbol": amqp.Symbol(long),
		"bytes": []byte("b"), "no bytes": []byte(nil), "long bytes": make([]byte, 300), "time": times(), "long ago": time.Time{}, "uuid": uuid, "null": amqp.Null{},
		"float": float32(1.5), "double": math.Pi, "inf": math.Inf(-1),
	}
	for i, n := range []int64{0, 1, -1, 127, 128, -128, -129, 255, 256, math.MaxInt16, math.MinInt16, math.MaxInt32, math.MinInt32, math.MaxInt64, math.MinInt64} {
		s := fmt.Sprint(i)
		values["int"+s], values["int8 "+s], values["int16 "+s], values["int32 "+s], values["int64 "+s] = int(n), int8(n), int16(n), int32(n), n
		values["uint"+s], values["uint8 "+s], values["uint16 "+s], values["uint32 "+s], values["uint64 "+s] = uint(n), uint8(n), uint16(n), uint32(n), uint64(n)
	}
	annotations := amqp.Annotations{}
	for k, v := range values {
		annotations["x-opt-"+k] = v
	}
	compound := []any{[]any{}, []any(nil), []any{"x", []any{int64(1), map[string]any{"k": nil}}}, map[string]any{}, map[string]any(nil), long}
	all := map[string]*amqp.Message{
		"nothing":                      {},
		"body":                         amqp.NewMessage([]byte("body")),
		"empty sections":               {Header: &amqp.MessageHeader{}, DeliveryAnnotations: amqp.Annotations{}, Annotations: amqp.Annotations{}, Properties: &amqp.MessageProperties{}, ApplicationProperties: map[string]any{}, Data: [][]byte{}, Sequence: [][]any{}, Footer: amqp.Annotations{}},
		"data":                         {Data: [][]byte{nil, {}, []byte("a"), make([]byte, 255), make([]byte, 256), make([]byte, 70000)}},
		"default header":               {Header: &amqp.MessageHeader{Priority: 4}},
		"header":                       {Header: &amqp.MessageHeader{Durable: true, Priority: 9, TTL: 1500*time.Microsecond + 3*time.Second, FirstAcquirer: true, DeliveryCount: 1000}},
		"first acquirer":               {Header: &amqp.MessageHeader{Priority: 4, FirstAcquirer: true}},
		"ttl":                          {Header: &amqp.MessageHeader{Priority: 4, TTL: time.Millisecond}},
		"ttl under a millisecond":      {Header: &amqp.MessageHeader{TTL: time.Microsecond}},
		"ttl below zero":               {Header: &amqp.MessageHeader{TTL: -time.Second}},
		"ttl of years":                 {Header: &amqp.MessageHeader{TTL: 10000 * time.Hour}},
		"annotations":                  {Annotations: annotations, DeliveryAnnotations: annotations, Footer: annotations},
		"other keys":                   {Annotations: amqp.Annotations{amqp.Symbol("x-opt-a"): "a", 1: "b", int64(-1000): "c", int64(5): "d", "": "e", "\xff": "f"}},
		"application properties":       {ApplicationProperties: values},
		"compound":                     {Annotations: amqp.Annotations{"x-cc": compound, "x-opt-m": map[string]any{"a": compound, "b": values}}, Value: compound},
		"value":                        {Value: "text"},
		"null":                         {Value: amqp.Null{}},
		"sequence":                     {Sequence: [][]any{{"a", int64(1)}, nil, {}}},
		"other compound":               {Value: map[any]any{"a": []string{"b", ""}, int64(1): []int32{1, 1000}, uuid: []amqp.UUID{uuid}, true: []bool{true}}},
		"arrays":                       {Value: []any{[]string{"a", long}, []string{}, []amqp.Symbol{"s"}, []map[any]any{{"a": "b"}, {}, {int64(1): nil}}, []int64{1}, [][]byte{{1}}, []time.Time{times()}}},
		"pointers":                     {ApplicationProperties: map[string]any{"a": ptr("b"), "c": ptr(int64(7))}},
		"deaths":                       {Annotations: amqp.Annotations{"x-opt-deaths": []map[any]any{{"queue": "q", "count": uint64(300), "routing-keys": []string{"a", "b"}}, {"queue": long}}}},
		"nobody, but annotations":      {Annotations: amqp.Annotations{"x-opt-a": int64(1)}},
		"deep":                         {Value: nested(maxDepth)},
		"deeper":                       {Value: nested(maxDepth + 1)},
		"invalid string":               {ApplicationProperties: map[string]any{"a": "\xff"}},
		"invalid key":                  {ApplicationProperties: map[string]any{"\xff": "a"}},
		"invalid subject":              {Properties: &amqp.MessageProperties{Subject: ptr("\xff")}},
		"invalid content type":         {Properties: &amqp.MessageProperties{ContentType: ptr("\xff")}},
		"invalid id":                   {Properties: &amqp.MessageProperties{MessageID: "\xff"}},
		"type that AMQP doesn't have":  {ApplicationProperties: map[string]any{"a": struct{}{}}},
		"id of a type unknown to AMQP": {Properties: &amqp.MessageProperties{CorrelationID: make(chan int)}},
		"other id":                     {Properties: &amqp.MessageProperties{MessageID: int64(5), CorrelationID: []any{"a"}}},
		"key of a wrong type":          {Annotations: amqp.Annotations{1.5: "a"}},
		"nil pointer":                  {ApplicationProperties: map[string]any{"a": (*string)(nil)}},
		"typed nil id":                 {Properties: &amqp.MessageProperties{MessageID: []byte(nil)}},
		"all properties": {Properties: &amqp.MessageProperties{
			MessageID: "id", UserID: []byte("guest"), To: ptr("to"), Subject: ptr(long), ReplyTo: ptr(""), CorrelationID: uint64(256), ContentType: ptr("text/plain"), ContentEncoding: ptr("gzip"),
			AbsoluteExpiryTime: ptr(times()), CreationTime: ptr(times().Add(time.Hour)), GroupID: ptr("group"), GroupSequence: ptr(uint32(70000)), ReplyToGroupID: ptr("g"),
		}},
		"long properties": {Properties: &amqp.MessageProperties{MessageID: strings.Repeat("i", 2*maxShared), Subject: ptr("s")}},
	}
	for i, id := range []any{"s", uint64(0), uint64(5), uuid, []byte("bytes"), []byte{}} {
		all[fmt.Sprint("id ", i)] = &amqp.Message{Properties: &amqp.MessageProperties{MessageID: id}}
		all[fmt.Sprint("correlation id ", i)] = &amqp.Message{Properties: &amqp.MessageProperties{CorrelationID: id}}
	}
	return all
}

func nested(depth int) any {
	v := any("x")
	for range depth {
		v = []any{v}
	}
	return v
}

func TestMessagesAreWrittenAndReadAsByGoAMQP(t *testing.T) {
	t.Parallel()
	// What these are left to go-amqp for.
	appended := map[string]bool{
		"sequence": true, "other compound": true, "arrays": true, "pointers": true, "deaths": true, "deeper": true,
		"invalid string": true, "invalid key": true, "invalid subject": true, "invalid id": true, "type that AMQP doesn't have": true,
		"id of a type unknown to AMQP": true, "key of a wrong type": true, "nil pointer": true,
	}
	decoded := map[string]bool{"other keys": true, "sequence": true, "other compound": true, "arrays": true, "deeper": true, "ttl of years": false}
	for name, m := range messages() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := encoder{}
			e.message(m)
			assert.Equal(t, appended[name], e.not)
			b := encode(t, m)
			if b == nil {
				return
			}
			require.NotNil(t, decode(t, b))
			assert.Equal(t, decoded[name], left(b))
		})
	}
}

// With one entry in each map there's one order, and so the bytes are the same.
func TestTheBytesAreThoseOfGoAMQP(t *testing.T) {
	t.Parallel()
	for name, m := range messages() {
		if len(m.Annotations) > 1 || len(m.ApplicationProperties) > 1 || m.Value != nil || name == "deaths" {
			continue
		}
		want, err := marshal(m)
		if err != nil {
			continue
		}
		got, err := Append(nil, m)
		require.NoError(t, err)
		assert.Equal(t, want, got, name)
	}
}

func TestErrorsOfTheEncoderAreReturned(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"invalid string", "invalid key", "invalid subject", "invalid id", "type that AMQP doesn't have", "id of a type unknown to AMQP", "key of a wrong type", "nil pointer"} {
		b := make([]byte, 3, 1000)
		got, err := Append(b, messages()[name])
		require.ErrorContains(t, err, "the message can't be encoded", name)
		assert.Equal(t, b, got)
	}
}
