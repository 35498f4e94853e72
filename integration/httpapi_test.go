package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// object is JSON's.
type object = map[string]any

// A policy with a key that the queue's type doesn't have doesn't apply to the queue at all,
// and the next one does. Both versions agree.
func TestAPolicyWithAnUnsupportedKeyDoesNotApply(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		all := []string{"classic", "quorum", "stream"}
		keys := map[string]struct {
			value any
			types []string // it applies to
		}{
			"max-length": {5, all[:2]}, "max-length-bytes": {5000, all}, "overflow": {"reject-publish", all[:2]}, "delivery-limit": {3, all[1:2]},
			"expires": {600_000, all[:2]}, "message-ttl": {1000, all[:2]}, "dead-letter-exchange": {"x", all[:2]}, "dead-letter-routing-key": {"k", all[:2]},
			"dead-letter-strategy": {"at-least-once", all[1:2]}, "alternate-exchange": {"x", all}, "queue-leader-locator": {"balanced", all},
			"target-group-size": {1, all[1:2]}, "max-age": {"1h", all[2:]}, "stream-max-segment-size-bytes": {100_000, all[2:]}, "queue-version": {2, all},
			"max-in-memory-length": {5, all[1:2]}, "max-in-memory-bytes": {5, all[1:2]}, "queue-mode": {"lazy", all[:1]}, "initial-cluster-size": {1, all[2:]},
			"stream-filter-size-bytes": {16, all}, "consumer-timeout": {60_000, all},
		}
		if s.newer() {
			keys["consumer-disconnected-timeout"] = struct {
				value any
				types []string
			}{60_000, all}
		}
		put := func(path string, body object) { s.http(t, http.MethodPut, path, body, nil) }
		want := map[string]string{}
		for key, k := range keys {
			put("/policies/"+s.vhost+"/"+key, object{"pattern": "^" + key + "-(classic|quorum|stream)$", "apply-to": "queues", "definition": object{key: k.value}})
			for _, kind := range all {
				put("/queues/"+s.vhost+"/"+key+"-"+kind, object{"durable": true, "arguments": object{"x-queue-type": kind}})
				want[key+"-"+kind] = ""
			}
			for _, kind := range k.types {
				want[key+"-"+kind] = key
			}
		}
		put("/policies/"+s.vhost+"/high", object{"pattern": "^both-", "apply-to": "queues", "priority": 9, "definition": object{"max-length": 5, "max-age": "1h"}})
		put("/policies/"+s.vhost+"/low", object{"pattern": "^both-", "apply-to": "queues", "priority": 1, "definition": object{"max-length-bytes": 5000}})
		for _, kind := range all {
			put("/queues/"+s.vhost+"/both-"+kind, object{"durable": true, "arguments": object{"x-queue-type": kind}})
			want["both-"+kind] = "low"
		}
		// RabbitMQ 4.0 shows a policy once it has collected statistics, every 5 s.
		var got map[string]string
		deadline := time.Now().Add(patience)
		for {
			got = map[string]string{}
			var queues []struct{ Name, Policy string }
			s.http(t, http.MethodGet, "/queues/"+s.vhost, nil, &queues)
			for _, q := range queues {
				got[q.Name] = q.Policy
			}
			if assert.ObjectsAreEqual(want, got) || time.Now().After(deadline) {
				break
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-t.Context().Done():
			}
		}
		assert.Equal(t, want, got)

		// An operator policy has the keys that bound what users may have.
		for _, key := range []string{"dead-letter-exchange", "dead-letter-strategy", "alternate-exchange", "queue-leader-locator", "max-age", "consumer-timeout", "queue-mode"} {
			status, text, err := s.httpStatus(http.MethodPut, "/operator-policies/"+s.vhost+"/p", object{"pattern": ".*", "definition": object{key: keys[key].value}})
			require.NoError(t, err)
			assert.Equal(t, 400, status, key)
			assert.Contains(t, string(text), "are not recognised policy settings", key)
		}
		// A key of a plugin that isn't enabled, one that no policy has, and one that needs another.
		for _, key := range []string{"federation-upstream", "max-priority", "ha-mode", "delayed-retry-type"} {
			status, _, err := s.httpStatus(http.MethodPut, "/policies/"+s.vhost+"/p", object{"pattern": ".*", "definition": object{key: "all"}})
			require.NoError(t, err)
			assert.Equal(t, 400, status, key)
		}
	})
}

func TestPathsOfTheHTTPAPIMayEndInASlash(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.http(t, http.MethodPut, "/queues/"+s.vhost+"/q/", object{"durable": true}, nil)
		for path, want := range map[string]int{
			"/queues/" + s.vhost + "/q/?disable_stats=true": 200, "/queues/" + s.vhost + "/": 200, "/overview/": 200, "/nodes/": 200,
			"/queues/" + s.vhost + "/q/bindings/": 200, "/queues//" + s.vhost: 404, "/queues/" + s.vhost + "//": 404,
		} {
			status, _, err := s.httpStatus(http.MethodGet, path, nil)
			require.NoError(t, err)
			assert.Equal(t, want, status, path)
		}
	})
}

// got is a message as the HTTP API returns it.
type got struct {
	Exchange    string
	Key         string `json:"routing_key"`
	Left        int    `json:"message_count"`
	Bytes       int    `json:"payload_bytes"`
	Redelivered bool
	Payload     string
	Encoding    string `json:"payload_encoding"`
	Properties  any    // an empty list if there are none
}

// The HTTP API publishes and gets messages of AMQP 0-9-1.
func TestMessagesByTheHTTPAPI(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "q", DeadLetter: declare.ToQueue("dead")},
			declare.QuorumQueue{Name: "full", DeadLetter: declare.Drop(), MaxLength: 2, Overflow: declare.RejectPublish},
		}})
		post := func(path string, body any) (int, string) {
			status, text, err := s.httpStatus(http.MethodPost, path, body)
			require.NoError(t, err)
			return status, strings.TrimSpace(string(text))
		}
		send := func(key string, properties object) (int, string) {
			return post("/exchanges/"+s.vhost+"/amq.default/publish", object{"routing_key": key, "payload": "{}", "payload_encoding": "string", "properties": properties})
		}
		get := func(queue, mode string, more object) (all []got) {
			body := object{"count": 5, "ackmode": mode, "encoding": "auto"}
			for k, v := range more {
				body[k] = v
			}
			status, text := post("/queues/"+s.vhost+"/"+queue+"/get", body)
			require.Equal(t, 200, status, text)
			require.NoError(t, json.Unmarshal([]byte(text), &all), text)
			return all
		}
		headers := object{"a": 1.0, "b": "two", "c": true, "x-mine": "v", "f": 1.5, "nested": object{"k": []any{1.0, 2.0}}}
		full := object{
			"delivery_mode": 2.0, "priority": 5.0, "message_id": "mid", "content_type": "application/json", "content_encoding": "utf-8", "correlation_id": "corr",
			"reply_to": "a/b", "expiration": "600000", "timestamp": 1700000000.0, "type": "order.created", "user_id": "guest", "app_id": "shop", "cluster_id": "c",
			"headers": headers,
		}
		for _, p := range []object{full, {}, {"delivery_mode": 1}} {
			status, text := send("q", p)
			require.Equal(t, 200, status, text)
			assert.JSONEq(t, `{"routed":true}`, text)
		}
		status, text := send("nobody", object{})
		assert.Equal(t, 200, status)
		assert.JSONEq(t, `{"routed":false}`, text)

		all := get("q", "ack_requeue_true", nil)
		assert.Equal(t, []got{
			{"", "q", 2, 2, false, "{}", "string", full}, {"", "q", 1, 2, false, "{}", "string", []any{}}, {"", "q", 0, 2, false, "{}", "string", object{"delivery_mode": 1.0}},
		}, all)
		// What is returned is counted as the version counts.
		counted := []object{{"x-acquired-count": 1.0}, {"x-acquired-count": 2.0, "x-delivery-count": 1.0}}
		if !s.newer() {
			counted = []object{{"x-delivery-count": 1.0}, {"x-delivery-count": 2.0}}
		}
		assert.Equal(t, got{"", "q", 1, 2, true, "{}", "string", object{"headers": counted[0]}}, get("q", "reject_requeue_true", nil)[1])
		assert.Equal(t, got{"", "q", 1, 2, true, "{}", "string", object{"headers": counted[1]}}, get("q", "ack_requeue_true", nil)[1])

		// They are these messages of AMQP 1.0.
		messages := make(chan *client.Message, 3)
		stop := consume(t, conn, "q", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			messages <- d.Message()
			return nil
		}), client.ConsumerConfig{Concurrency: 1})
		m := await(t, messages, "the first")
		plain := await(t, messages, "the second")
		await(t, messages, "the third")
		require.NoError(t, stop())
		replyTo := "a/b"
		if s.newer() {
			replyTo = "/queues/a%2Fb"
		}
		assert.Equal(t, &amqp.MessageProperties{
			MessageID: "mid", UserID: []byte("guest"), ReplyTo: &replyTo, CorrelationID: "corr", ContentType: new("application/json"),
			ContentEncoding: new("utf-8"), CreationTime: new(time.Unix(1700000000, 0)), GroupID: new("shop"),
		}, m.Properties)
		assert.Equal(t, map[string]any{"a": int64(1), "b": "two", "c": true, "f": 1.5}, m.ApplicationProperties)
		assert.Equal(t, "order.created", m.Annotations["x-basic-type"])
		assert.Equal(t, "v", m.Annotations["x-mine"])
		assert.True(t, m.Header.Durable)
		assert.Equal(t, uint8(5), m.Header.Priority)
		assert.Equal(t, 10*time.Minute, m.Header.TTL)
		assert.Nil(t, plain.Properties)
		assert.Nil(t, plain.ApplicationProperties)
		assert.False(t, plain.Header.Durable)

		// And the other way round, and dead-lettered.
		out := client.NewMessage([]byte("{}"))
		out.Properties = &amqp.MessageProperties{
			MessageID: "mid", UserID: []byte("guest"), Subject: new("s"), ReplyTo: new("rq"), CorrelationID: "corr", ContentType: new("application/json"),
			ContentEncoding: new("utf-8"), CreationTime: new(time.Unix(1700000000, 0)), GroupID: new("grp"),
		}
		out.ApplicationProperties = map[string]any{"a": int64(1)}
		out.Annotations = amqp.Annotations{"x-mine": "v", "x-opt-mine": "w", "x-basic-type": "ty"}
		out.Header = &amqp.MessageHeader{Durable: true, Priority: 7, TTL: 10 * time.Minute}
		publish(t, publisher[*client.Message](t, conn, address.Queue("q")), out)
		properties := object{
			"app_id": "grp", "user_id": "guest", "type": "ty", "timestamp": 1700000000.0, "message_id": "mid", "expiration": "600000", "reply_to": "rq",
			"correlation_id": "corr", "priority": 7.0, "delivery_mode": 2.0, "content_encoding": "utf-8", "content_type": "application/json",
			"headers": object{"a": 1.0, "x-mine": "v", "x-opt-mine": "w"},
		}
		assert.Equal(t, []got{{"", "q", 0, 2, false, "{", "string", properties}}, get("q", "reject_requeue_false", object{"truncate": 1}))
		var dead []got
		poll(t, "it is dead-lettered", func() bool {
			dead = get("dead", "ack_requeue_false", object{"encoding": "base64"})
			return len(dead) == 1
		})
		assert.Equal(t, "e30=", dead[0].Payload)
		assert.True(t, dead[0].Redelivered)
		p, _ := dead[0].Properties.(object)
		assert.NotContains(t, p, "expiration")
		h, _ := p["headers"].(object)
		assert.NotContains(t, h, "x-opt-deaths")
		deaths, _ := h["x-death"].([]any)
		require.Len(t, deaths, 1)
		death, _ := deaths[0].(object)
		assert.InDelta(t, float64(time.Now().Unix()), death["time"], 300)
		delete(death, "time")
		assert.Equal(t, object{"count": 1.0, "exchange": "", "original-expiration": "600000", "queue": "q", "reason": "rejected", "routing-keys": []any{"q"}}, death)
		assert.Equal(t, "rejected", h["x-first-death-reason"])

		// A full queue takes one more than it may have, and then nothing.
		for range 3 {
			status, _ := send("full", object{})
			assert.Equal(t, 200, status)
		}
		status, text = send("full", object{})
		assert.Equal(t, 400, status)
		assert.Contains(t, text, "rejected Unable to publish message. Check queue limits.")

		for want, p := range map[string]object{
			`["not_int","priority"]`: {"priority": "high"}, `["not_string","expiration"]`: {"expiration": 1000}, `["not_int","timestamp"]`: {"timestamp": "x"},
			"user_id property set to 'other' but authenticated user was 'guest'": {"user_id": "other"}, "invalid expiration '-1': {value_negative,-1}": {"expiration": "-1"},
		} {
			status, text := send("q", p)
			assert.Equal(t, 400, status, want)
			assert.Contains(t, text, want)
		}
		status, text = post("/exchanges/"+s.vhost+"/amq.default/publish", object{"routing_key": "q", "payload": "x"})
		assert.Equal(t, 400, status)
		assert.Contains(t, text, "{key_missing,properties},{key_missing,payload_encoding}")
		status, text = post("/exchanges/"+s.vhost+"/amq.default/publish", object{"routing_key": "q", "payload": "x", "payload_encoding": "base64", "properties": object{}})
		assert.Equal(t, 400, status)
		assert.Contains(t, text, `["not_base64","x"]`)
		status, text = post("/queues/"+s.vhost+"/q/get", object{"count": 1})
		assert.Equal(t, 400, status)
		assert.Contains(t, text, "{key_missing,ackmode},{key_missing,encoding}")
		for i := range 2 { // neither more nor fewer than there are
			assert.Empty(t, get("q", "ack_requeue_true", object{"count": -i}), fmt.Sprint(-i))
		}
	})
}
