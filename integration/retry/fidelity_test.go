package retry_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// kinds are messages that between them have everything that AMQP can carry.
func kinds() map[string]*amqp.Message {
	moment := time.Date(2026, 2, 3, 4, 5, 6, int(7*time.Millisecond), time.UTC)
	uuid := amqp.UUID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	data := func() *amqp.Message { return amqp.NewMessage([]byte(`{"id":1}`)) }
	with := func(edit func(m *amqp.Message)) *amqp.Message {
		m := data()
		edit(m)
		return m
	}
	value := func(v any) *amqp.Message { return &amqp.Message{Value: v} }
	kinds := map[string]*amqp.Message{
		"all properties": with(func(m *amqp.Message) {
			m.Properties = &amqp.MessageProperties{
				MessageID: "m-1", UserID: []byte("guest"), To: new("/queues/somewhere%20else"), Subject: new("a subject"),
				ReplyTo: new("/queues/answers"), CorrelationID: "c-1", ContentType: new("application/json"), ContentEncoding: new("gzip"),
				AbsoluteExpiryTime: new(moment.Add(time.Hour)), CreationTime: &moment, GroupID: new("g"), GroupSequence: new(uint32(7)),
				ReplyToGroupID: new("rg"),
			}
		}),
		"ids of UUID": with(func(m *amqp.Message) { m.Properties = &amqp.MessageProperties{MessageID: uuid, CorrelationID: uuid} }),
		"ids of ulong": with(func(m *amqp.Message) {
			m.Properties = &amqp.MessageProperties{MessageID: uint64(math.MaxUint64), CorrelationID: uint64(0)}
		}),
		"ids of binary": with(func(m *amqp.Message) {
			m.Properties = &amqp.MessageProperties{MessageID: []byte{0, 255}, CorrelationID: []byte{1}}
		}),
		"no properties": data(),
		"empty texts": with(func(m *amqp.Message) {
			m.Properties = &amqp.MessageProperties{MessageID: "", Subject: new(""), To: new(""), ContentType: new("")}
		}),
		"application properties of every type": with(func(m *amqp.Message) {
			m.ApplicationProperties = map[string]any{
				"null": nil, "true": true, "false": false, "ubyte": uint8(255), "byte": int8(-128), "ushort": uint16(65535), "short": int16(-32768),
				"uint": uint32(math.MaxUint32), "int": int32(math.MinInt32), "ulong": uint64(math.MaxUint64), "long": int64(math.MinInt64),
				"float": float32(1.5), "double": math.Pi, "nan": math.Inf(1), "string": "text \u00e9\U0001f407", "empty": "", "binary": []byte{0, 1, 255},
				"uuid": uuid, "timestamp": moment, "": "an empty key", strings.Repeat("k", 300): strings.Repeat("v", 3000),
			}
		}),
		"a counter as text": with(func(m *amqp.Message) { m.ApplicationProperties = map[string]any{retry.CountProperty: "0"} }),
		"own annotations": with(func(m *amqp.Message) {
			m.Annotations = amqp.Annotations{
				"x-opt-tenant": "acme", "x-opt-number": int64(-7), "x-opt-true": true, "x-opt-list": []any{"a", int64(1), nil},
				"x-opt-map": map[string]any{"k": "v"}, "x-opt-double": 2.5, "x-opt-when": moment, "x-opt-bin": []byte{1},
				"x-own": "mine", "x-basis-points": int64(1),
			}
		}),
		"footer":     with(func(m *amqp.Message) { m.Footer = amqp.Annotations{"x-hash": "abc", "x-count": int64(3)} }),
		"priority 0": with(func(m *amqp.Message) { m.Header = &amqp.MessageHeader{Durable: true, Priority: 0} }),
		"priority 9": with(func(m *amqp.Message) { m.Header = &amqp.MessageHeader{Durable: true, Priority: 9} }),
		"ttl": with(func(m *amqp.Message) {
			m.Header = &amqp.MessageHeader{Durable: true, Priority: 4, TTL: time.Hour}
		}),
		"delivery annotations": with(func(m *amqp.Message) { m.DeliveryAnnotations = amqp.Annotations{"x-opt-once": "gone"} }),
		"several data":         {Data: [][]byte{[]byte("one"), {}, []byte("three")}},
		"empty data":           {Data: [][]byte{{}}},
		"large data":           {Data: [][]byte{[]byte(strings.Repeat("0123456789", 30_000))}},
		"sequence":             {Sequence: [][]any{{"a", int64(1), nil, true, 1.5, []byte{1}}}},
		"several sequences":    {Sequence: [][]any{{"a"}, {int64(2), []any{"b"}}}},
		"empty sequence":       {Sequence: [][]any{{}}},
	}
	for name, v := range map[string]any{
		"null": amqp.Null{}, "true": true, "false": false, "ubyte": uint8(1), "byte": int8(-1), "ushort": uint16(2), "short": int16(-2),
		"uint": uint32(3), "int": int32(-3), "ulong": uint64(4), "long": int64(-4), "float": float32(2.5), "double": 2.5,
		"string": "text", "empty string": "", "binary": []byte{0, 255}, "empty binary": []byte{}, "uuid": uuid, "timestamp": moment,
		"list": []any{"a", int64(1), nil, []any{true}}, "empty list": []any{}, "map": map[string]any{"k": "v", "n": int64(1), "list": []any{int64(2)}},
		"map with other keys": map[any]any{int64(1): "one", "two": int64(2), true: nil},
	} {
		kinds["value of "+name] = value(v)
	}
	return kinds
}

// What the sender has set arrives after two retries the same as the first time, and the
// same as sent, except for documented changes: the ttl is removed, the
// delivery's own parts are dropped, and the counter and our and the broker's
// annotations are added.
func TestEverythingTheSenderSetSurvivesTwoHops(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond)}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
		peer := s.Peer(t)
		type seen struct {
			count int
			m     *amqp.Message
		}
		attempts := make(chan seen, 8)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			n := retry.Count(d.Message())
			attempts <- seen{n, d.Message()}
			if n < 2 {
				return errors.New("not yet")
			}
			return nil
		})), client.ConsumerConfig{})
		for name, sent := range kinds() {
			peer.Put("orders", sent)
			first := suite.Await(t, attempts, name)
			require.Equal(t, 0, first.count, name)
			require.Equal(t, 1, suite.Await(t, attempts, name).count, name)
			last := suite.Await(t, attempts, name)
			require.Equal(t, 2, last.count, name)
			assertSame(t, name+": sent, and after two hops", sent, last.m)
			assertSame(t, name+": first received, and after two hops", first.m, last.m)
			assert.True(t, last.m.Header.Durable, name)
			assert.Zero(t, last.m.Header.TTL, name)
			assert.Zero(t, last.m.Header.DeliveryCount, name)
			assert.Empty(t, last.m.DeliveryAnnotations, name)
			if name == "a counter as text" {
				assert.Equal(t, "2", last.m.ApplicationProperties[retry.CountProperty], "it stays text, for those who write it so")
			} else {
				assert.Equal(t, int64(2), last.m.ApplicationProperties[retry.CountProperty], name)
			}
		}
		suite.Report(t, s, "%d kinds of messages, the same after two hops", len(kinds()))
	})
}

// The same for what is dead-lettered at the first attempt, which isn't copied.
func TestEverythingTheSenderSetSurvivesDeadLettering(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: retry.NoRetries}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		peer := s.Peer(t)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			return errors.New("no")
		})), client.ConsumerConfig{})
		for name, sent := range kinds() {
			peer.Put("orders", sent)
			m := peer.Take("orders.dead", 1)[0]
			assertSame(t, name, sent, m)
			assert.Equal(t, string(retry.ReasonExhausted), m.Annotations[client.AnnotationReason], name)
		}
	})
}

// assertSame compares what a sender sets.
func assertSame(t *testing.T, what string, want, got *amqp.Message) {
	t.Helper()
	assert.Equal(t, body(want), body(got), "%s: body", what)
	assert.Equal(t, propertiesOf(want), propertiesOf(got), "%s: properties", what)
	assert.Equal(t, applicationProperties(want), applicationProperties(got), "%s: application properties", what)
	assert.Equal(t, ownAnnotations(want), ownAnnotations(got), "%s: annotations", what)
	assert.Equal(t, len(want.Footer), len(got.Footer), "%s: footer", what)
	for k, v := range want.Footer {
		assert.Equal(t, v, got.Footer[k], "%s: footer %v", what, k)
	}
	priority := uint8(4)
	if want.Header != nil {
		priority = want.Header.Priority
	}
	if assert.NotNil(t, got.Header, what) {
		assert.Equal(t, priority, got.Header.Priority, "%s: priority", what)
	}
}

// body is a message's body in one form: go-amqp reads a null as no value.
func body(m *amqp.Message) string {
	v := m.Value
	if _, null := v.(amqp.Null); null {
		v = nil
	}
	return fmt.Sprintf("data %d %q, value %T %v, sequence %d %v", len(m.Data), m.Data, v, normal(v), len(m.Sequence), m.Sequence)
}

// normal brings a map with string keys into the form that go-amqp reads one in.
func normal(v any) any {
	if t, ok := v.(time.Time); ok {
		return t.UTC()
	}
	return v
}

func propertiesOf(m *amqp.Message) amqp.MessageProperties {
	if m.Properties == nil {
		return amqp.MessageProperties{}
	}
	p := *m.Properties
	for _, t := range []**time.Time{&p.AbsoluteExpiryTime, &p.CreationTime} {
		if *t != nil {
			*t = new((*t).UTC())
		}
	}
	return p
}

func applicationProperties(m *amqp.Message) map[string]any {
	all := map[string]any{}
	for k, v := range m.ApplicationProperties {
		if k != retry.CountProperty {
			all[k] = normal(v)
		}
	}
	return all
}

// ownAnnotations are those that neither the broker nor hopback writes.
func ownAnnotations(m *amqp.Message) map[string]any {
	all := map[string]any{}
	for k, v := range m.Annotations {
		key := fmt.Sprint(k)
		switch {
		case strings.HasPrefix(key, "x-opt-hopback-"), strings.HasPrefix(key, "x-first-death-"), strings.HasPrefix(key, "x-last-death-"),
			key == "x-opt-deaths", key == "x-exchange", key == "x-routing-key":
		default:
			all[key] = normal(v)
		}
	}
	return all
}

// A publisher without a fixed address puts the address into To, where it
// stays through the hops.
func TestToSurvivesHopsOfAMessageThatWasSentByIt(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond)}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		last := make(chan *amqp.Message, 1)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if retry.Count(d.Message()) < 2 {
				return errors.New("not yet")
			}
			last <- d.Message()
			return nil
		})), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Address{})
		suite.Publish(t, p, suite.Order{ID: 1}, client.PublishTo(address.Queue("orders")), func(m *client.Message) { m.Properties.Subject = new("s") })
		m := suite.Await(t, last, "the last attempt")
		assert.Equal(t, "/queues/orders", *m.Properties.To)
		assert.Equal(t, "s", *m.Properties.Subject)
	})
}
