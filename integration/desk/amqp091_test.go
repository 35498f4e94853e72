package desk_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// nested are headers that AMQP 1.0 can't show, and one that it can.
var nested = map[string]any{"nested": map[string]any{"a": "b"}, "list": []any{"a"}, "text": "plain"}

// publish091 publishes as an AMQP 0-9-1 client does, through the HTTP API.
func publish091(t *testing.T, s *suite.Site, queue string, properties map[string]any) {
	t.Helper()
	var reply struct{ Routed bool }
	s.HTTP(t, "POST", "/exchanges/"+s.VHost+"/amq.default/publish", map[string]any{
		"routing_key": queue, "payload": `{"order":17}`, "payload_encoding": "string", "properties": properties,
	}, &reply)
	require.True(t, reply.Routed)
}

// got091 is a message as an AMQP 0-9-1 client gets it.
type got091 struct {
	Properties map[string]any
}

// get091 gets a message as an AMQP 0-9-1 client does, and leaves it in the queue.
func get091(t *testing.T, s *suite.Site, queue string) map[string]any {
	t.Helper()
	var got []got091
	suite.Poll(t, "a message is in "+queue, func() bool {
		s.HTTP(t, "POST", "/queues/"+s.VHost+"/"+queue+"/get", map[string]any{"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}, &got)
		return len(got) == 1
	})
	return got[0].Properties
}

func headers091(t *testing.T, s *suite.Site, queue string) map[string]any {
	t.Helper()
	h, _ := get091(t, s, queue)["headers"].(map[string]any)
	return h
}

// orders091 declares orders with its dead-letter queue, and rejects what is in it.
func orders091(t *testing.T, s *suite.Site, conn *client.Conn, move bool) (reject func(n int)) {
	t.Helper()
	suite.ApplyRetry(t, conn, retry.Policy{MaxRetries: retry.NoRetries, ReplayByMove: move}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20})
	return func(n int) {
		p := s.Peer(t)
		r := p.Receiver("orders", uint32(n))
		for range n {
			require.NoError(t, r.RejectMessage(t.Context(), p.Next(r), &amqp.Error{Condition: "x:no"}))
		}
		require.NoError(t, r.Close(t.Context()))
		suite.Poll(t, "they are dead", func() bool { return suite.Ready(t, conn, "orders.dead") == n })
	}
}

// A copy of a message of AMQP 0-9-1 lacks its headers that hold tables or arrays, so a replay
// leaves such a message in the queue unless that is accepted. If the broker can move it, nothing
// is lost, not even if it had an expiration. A discard to a file leaves it, too, and an export
// counts it.
func TestHeadersOfAMQP091AreNotLostInSilence(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers { // the one in memory has no AMQP 0-9-1
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			for _, move := range []bool{false, true} {
				s := suite.NewSite(t, b)
				conn, _ := s.Connect(t)
				reject := orders091(t, s, conn, move)
				d, err := desk.New(conn, desk.Config{HTTP: s.API(t)})
				require.NoError(t, err)
				publish091(t, s, "orders", map[string]any{"delivery_mode": 2, "expiration": "600000", "type": "order.created", "headers": nested})
				reject(1)
				if !move { // to get a message and return it counts as a delivery
					require.NotNil(t, headers091(t, s, "orders.dead")["nested"])
				}
				dry, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, DryRun: true})
				require.NoError(t, err)
				report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
				require.NoError(t, err)
				if move {
					assert.EqualValues(t, 1, dry.Moved)
					assert.EqualValues(t, 1, report.Moved, "%+v", report)
					h := headers091(t, s, "orders")
					assert.Equal(t, nested["nested"], h["nested"])
					assert.Equal(t, nested["list"], h["list"])
					continue
				}
				assert.EqualValues(t, 1, dry.Hidden)
				assert.EqualValues(t, 1, dry.Failed)
				assert.EqualValues(t, 1, report.Hidden, "%+v", report)
				assert.Zero(t, report.Replayed)
				require.Len(t, report.Failures, 1)
				assert.Contains(t, report.Failures[0].Err, "hidden-headers")
				assert.NotNil(t, headers091(t, s, "orders.dead")["nested"], "it stays, whole")

				file := func() *os.File {
					f, err := os.Create(filepath.Join(t.TempDir(), "file.jsonl"))
					require.NoError(t, err)
					t.Cleanup(func() { _ = f.Close() })
					return f
				}
				export, err := d.Export(t.Context(), file(), desk.ExportConfig{Queue: "orders.dead"})
				require.NoError(t, err)
				assert.EqualValues(t, 1, export.Hidden)
				discard, err := d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", All: true, To: file()})
				require.NoError(t, err)
				assert.EqualValues(t, 1, discard.Hidden)
				assert.Zero(t, discard.Discarded+discard.Exported)
				assert.NotNil(t, headers091(t, s, "orders.dead")["nested"], "it stays, whole")

				accept := []desk.WarningCode{desk.WarningHeaders}
				report, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, Accept: accept})
				require.NoError(t, err)
				assert.EqualValues(t, 1, report.Replayed)
				assert.Nil(t, headers091(t, s, "orders")["nested"], "if this is there, RabbitMQ shows the headers, and nobody needs to accept anything")
				assert.Equal(t, "plain", headers091(t, s, "orders")["text"])
				publish091(t, s, "orders.dead", map[string]any{"headers": nested})
				discard, err = d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", All: true, To: file(), Accept: accept})
				require.NoError(t, err)
				assert.EqualValues(t, 1, discard.Discarded)
			}
		})
	}
}

// What hopback and go-amqp publish can't be a message of AMQP 0-9-1, however few properties it
// has, and is replayed and discarded as before. Every message of AMQP 0-9-1 may hide headers.
func TestMessagesThatMayHideHeaders(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			s := suite.NewSite(t, b)
			conn, _ := s.Connect(t)
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited}}})
			d, err := desk.New(conn, desk.Config{HTTP: s.API(t)})
			require.NoError(t, err)
			long := make([]byte, 300)
			for i := range long {
				long[i] = 'x'
			}
			hidden := []map[string]any{
				{}, {"delivery_mode": 2}, {"headers": nested}, {"message_id": "m", "headers": map[string]any{"n": 7}},
				{"message_id": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "correlation_id": string(long[:200]), "content_type": "application/json", "app_id": string(long[:100])},
				{"headers": map[string]any{"long": string(long), "n": 1.5, "t": true}}, {"timestamp": 1700000000, "type": "x", "user_id": "guest", "reply_to": "r"},
			}
			for _, properties := range hidden {
				publish091(t, s, "dead", properties)
			}
			n := len(hidden)
			publisher, err := client.NewPublisher[map[string]int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, publisher.Publish(t.Context(), map[string]int{"order": 17}))
			require.NoError(t, publisher.Publish(t.Context(), map[string]int{"order": 17}, func(m *client.Message) { m.ApplicationProperties = map[string]any{"a": "b"} }))
			p := s.Peer(t)
			for _, m := range []*amqp.Message{
				{Data: [][]byte{[]byte("m")}, Properties: &amqp.MessageProperties{MessageID: "m"}},
				{Data: [][]byte{[]byte("m")}, ApplicationProperties: map[string]any{"a": "b"}},
				{Value: "m"},
			} {
				p.Put("dead", m)
			}
			list, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Limit: 100})
			require.NoError(t, err)
			require.Len(t, list.Messages, n+5)
			for i, m := range list.Messages {
				assert.Equal(t, i < n, m.HiddenHeaders, "message %d", i)
			}
		})
	}
}

// all091 has every property of AMQP 0-9-1 that the HTTP API can set, except cluster-id, which
// nothing uses.
var all091 = map[string]any{
	"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2, "priority": 3, "correlation_id": "c-1", "reply_to": "replies",
	"expiration": "600000", "message_id": "m-1", "timestamp": 1700000000, "type": "order.placed", "user_id": "guest", "app_id": "shop",
	"headers": map[string]any{
		"text": "plain", "number": 7, "float": 1.5, "yes": true, "nested": map[string]any{"a": "b"}, "list": []any{"a"},
		"x-text": "plain", "x-nested": map[string]any{"a": "b"}, "x-list": []any{"a"}, "CC": []any{"also"}, "BCC": []any{"hidden"},
	},
}

// What each property of AMQP 0-9-1 becomes over AMQP 1.0, and what a client of AMQP 0-9-1 gets of
// a copy that hopback has made of the message. docs/messages.md has it as a table.
func TestWhatBecomesOfAMQP091Properties(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers { // the one in memory has no AMQP 0-9-1
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			s := suite.NewSite(t, b)
			conn, _ := s.Connect(t)
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "in", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "copies", DeadLetter: declare.Drop()}}})
			publish091(t, s, "in", all091)
			copies := suite.Publisher[*client.Message](t, conn, address.Queue("copies"))
			arrived := make(chan *client.Message, 1)
			suite.Consume(t, conn, "in", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				arrived <- d.Message()
				return nil
			}), client.ConsumerConfig{})
			m := suite.Await(t, arrived, "the message")

			p := m.Properties
			require.NotNil(t, p)
			assert.Equal(t, "application/json", *p.ContentType)
			assert.Equal(t, "utf-8", *p.ContentEncoding)
			assert.Equal(t, "c-1", p.CorrelationID)
			assert.Equal(t, "m-1", p.MessageID)
			assert.Equal(t, time.Unix(1700000000, 0).UTC(), p.CreationTime.UTC())
			assert.Equal(t, []byte("guest"), p.UserID)
			require.NotNil(t, p.GroupID)
			assert.Equal(t, "shop", *p.GroupID, "app-id")
			assert.Nil(t, p.Subject, "type isn't the subject")
			assert.Nil(t, p.To)
			require.NotNil(t, p.ReplyTo)
			assert.Equal(t, map[bool]string{true: "/queues/replies", false: "replies"}[s.Newer()], *p.ReplyTo)
			require.NotNil(t, m.Header)
			assert.True(t, m.Header.Durable)
			assert.EqualValues(t, 3, m.Header.Priority)
			assert.Equal(t, 600*time.Second, m.Header.TTL)
			assert.Equal(t, map[string]any{"text": "plain", "number": int64(7), "float": 1.5, "yes": true}, m.ApplicationProperties, "no nested, no list, no CC, no BCC")
			for name, want := range map[any]any{
				"x-basic-type": "order.placed", "x-text": "plain", "x-nested": map[string]any{"a": "b"}, "x-list": []any{"a"}, "x-cc": []any{"also"}, "x-exchange": "", "x-routing-key": "in",
			} {
				assert.Equal(t, want, m.Annotations[name], name)
			}

			suite.Publish(t, copies, client.Copy(m))
			got := get091(t, s, "copies")
			headers, _ := got["headers"].(map[string]any)
			delete(got, "headers")
			t.Logf("REPORT %s: a copy over AMQP 0-9-1: %v, headers %v", b.Version, got, headers)
			for _, name := range []string{"content_type", "content_encoding", "delivery_mode", "correlation_id", "message_id", "timestamp", "type", "user_id", "app_id", "priority"} {
				assert.EqualValues(t, all091[name], got[name], name)
			}
			for _, name := range []string{"text", "number", "float", "yes", "x-text", "x-nested", "x-list"} {
				assert.EqualValues(t, all091["headers"].(map[string]any)[name], headers[name], name)
			}
			for _, name := range []string{"nested", "list", "CC", "BCC"} {
				assert.Nil(t, headers[name], name)
			}

			// The other way round, a subject doesn't become the type. The annotation does.
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "back", DeadLetter: declare.Drop()}}})
			suite.Publish(t, suite.Publisher[*client.Message](t, conn, address.Queue("back")), client.NewMessage([]byte("m")), func(m *client.Message) {
				m.Properties.Subject = new("a subject")
				m.Annotations = map[any]any{"x-basic-type": "a type"}
			})
			back := get091(t, s, "back")
			assert.Equal(t, "a type", back["type"])
			assert.NotContains(t, fmt.Sprint(back), "a subject")
		})
	}
}

// RabbitMQ removes the time to live of a message that it dead-letters. It continues to deliver
// that of AMQP 0-9-1 in the header, where it has no effect: behind the messages, the queue has another
// one with a longer time to live, which does expire.
func TestARejectedMessageExpiresNoMore(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			s := suite.NewSite(t, b)
			conn, _ := s.Connect(t)
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
				declare.QuorumQueue{Name: "in", DeadLetter: declare.ToQueue("dead")}, declare.QuorumQueue{Name: "dead", DeadLetter: declare.ToQueue("expired")},
				declare.QuorumQueue{Name: "expired", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "later", DeadLetter: declare.ToQueue("expired")},
			}})
			p := s.Peer(t)
			publish091(t, s, "in", map[string]any{"expiration": "1000"})
			native := amqp.NewMessage([]byte("m"))
			native.Header = &amqp.MessageHeader{Durable: true, TTL: time.Second}
			p.Put("in", native)
			r := p.Receiver("in", 2)
			for range 2 {
				require.NoError(t, r.RejectMessage(t.Context(), p.Next(r), nil))
			}
			suite.Poll(t, "both are dead", func() bool { return suite.Ready(t, conn, "dead") == 2 })
			publish091(t, s, "later", map[string]any{"expiration": "2000"})
			suite.Poll(t, "the later one has expired", func() bool { return suite.Ready(t, conn, "expired") > 0 })
			require.Equal(t, 1, suite.Ready(t, conn, "expired"))
			require.Equal(t, 2, suite.Ready(t, conn, "dead"))
			var shown []time.Duration
			for _, m := range p.Take("dead", 2) {
				shown = append(shown, m.Header.TTL)
			}
			assert.Equal(t, []time.Duration{time.Second, 0}, shown)
		})
	}
}
