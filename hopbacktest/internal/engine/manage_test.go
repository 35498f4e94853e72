package engine

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// declared is the body of a request for a queue.
func declared(args m) frames.Map {
	return frames.Map{
		{Key: "durable", Value: true}, {Key: "exclusive", Value: false}, {Key: "auto_delete", Value: false}, {Key: "arguments", Value: args.strings()},
	}
}

func TestQueuesByManagement(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		args := m{"x-queue-type": "quorum", "x-message-ttl": int64(1000), "x-single-active-consumer": true, "x-unknown": "u"}
		status, body := l.request("PUT", "/queues/a%2Fb", declared(args))
		require.Equal(t, 201, status)
		for key, want := range map[string]any{
			"name": "a/b", "vhost": "/", "type": "quorum", "durable": true, "auto_delete": false, "exclusive": false, "message_count": uint64(0),
			"consumer_count": uint32(0), "leader": "rabbit@memory",
		} {
			got, _ := body.(frames.Map).Get(key)
			assert.Equal(t, want, got, key)
		}
		got, _ := body.(frames.Map).Get("arguments")
		for key, want := range args {
			v, _ := got.(frames.Map).Get(key)
			assert.Equal(t, want, v, key)
		}
		status, _ = l.request("PUT", "/queues/a%2Fb", declared(args))
		assert.Equal(t, 200, status)
		l.put("a/b", "1", "2")
		_, body = l.request("GET", "/queues/a%2Fb", nil)
		count, _ := body.(frames.Map).Get("message_count")
		assert.Equal(t, uint64(2), count)
		status, body = l.request("DELETE", "/queues/a%2Fb/messages", nil)
		assert.Equal(t, 200, status)
		assert.Equal(t, frames.Map{{Key: "message_count", Value: uint64(2)}}, body)
		l.put("a/b", "1")
		status, body = l.request("DELETE", "/queues/a%2Fb", nil)
		assert.Equal(t, 200, status)
		assert.Equal(t, frames.Map{{Key: "message_count", Value: uint64(1)}}, body)
		status, body = l.request("DELETE", "/queues/a%2Fb", nil)
		assert.Equal(t, 200, status)
		assert.Equal(t, frames.Map{{Key: "message_count", Value: uint64(0)}}, body)
		status, body = l.request("GET", "/queues/a%2Fb", nil)
		assert.Equal(t, 404, status)
		assert.Equal(t, "queue 'a/b' in vhost '/' not found", body)
	})
}

func TestRefusalsOfTheManagement(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-message-ttl": int64(1000)})
		l.exchange("x", "headers", nil)
		quorum := func(args m) any {
			args["x-queue-type"] = "quorum"
			return declared(args)
		}
		bind := func(source, queue string, args m) any {
			return m{"source": source, "destination_queue": queue, "binding_key": "", "arguments": args.strings()}.strings()
		}
		property := func(kind, property string, v any) any {
			return frames.Map{{Key: property, Value: v}, {Key: "arguments", Value: m{"x-queue-type": kind}.strings()}}
		}
		purge := 404
		if !l.newer() {
			purge = 400
		}
		for _, c := range []struct {
			request string
			body    any
			status  int
			text    string
		}{
			{"PUT /queues/q", quorum(m{"x-message-ttl": int64(2000)}), 409, "inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '2000' but current is '1000'"},
			{"PUT /queues/q", quorum(m{"x-message-ttl": int64(1000), "x-delivery-limit": int64(3)}), 409, "inequivalent arg 'x-delivery-limit' for queue 'q' in vhost '/': received the value '3' of type 'long' but current is none"},
			{"PUT /queues/q", quorum(m{}), 409, "inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received none but current is the value '1000' of type 'long'"},
			{"PUT /queues/q", property("quorum", "durable", false), 409, "inequivalent arg 'durable' for queue 'q' in vhost '/': received 'false' but current is 'true'"},
			{"PUT /queues/new", quorum(m{"x-message-ttl": "1000"}), 409, `invalid arg 'x-message-ttl' for queue 'new' in vhost '/': "expected integer, got longstr"`},
			{"PUT /queues/new", quorum(m{"x-expires": int64(0)}), 409, "invalid arg 'x-expires' for queue 'new' in vhost '/': {value_zero,0}"},
			{"PUT /queues/new", quorum(m{"x-max-length": int64(-1)}), 409, "invalid arg 'x-max-length' for queue 'new' in vhost '/': {value_negative,-1}"},
			{"PUT /queues/new", quorum(m{"x-overflow": "bogus"}), 409, "invalid arg 'x-overflow' for queue 'new' in vhost '/': invalid_overflow"},
			{"PUT /queues/new", quorum(m{"x-dead-letter-routing-key": "k"}), 409, "invalid arg 'x-dead-letter-routing-key' for queue 'new' in vhost '/': routing_key_but_no_dlx_defined"},
			{"PUT /queues/new", quorum(m{"x-dead-letter-exchange": true}), 400, "invalid type 'bool' for arg 'x-dead-letter-exchange'"},
			{"PUT /queues/new", quorum(m{"x-max-priority": int64(5)}), 409, "invalid arg 'x-max-priority' for queue 'new' in vhost '/' of queue type rabbit_quorum_queue"},
			{"PUT /queues/new", declared(m{"x-queue-type": "bogus"}), 409, `invalid arg 'x-queue-type' for queue 'new' in vhost '/': "unsupported queue type 'bogus'"`},
			{"PUT /queues/new", property("quorum", "durable", false), 400, "invalid property 'non-durable' for queue 'new' in vhost '/'"},
			{"PUT /queues/new", property("quorum", "exclusive", true), 400, "invalid property 'exclusive-owner' for queue 'new' in vhost '/'"},
			{"PUT /queues/new", property("quorum", "auto_delete", true), 400, "invalid property 'auto-delete' for queue 'new' in vhost '/'"},
			{"PUT /queues/new", property("quorum", "bogus", true), 400, "bad queue property"},
			{"PUT /queues/", declared(nil), 400, "declare queue with empty name not allowed"},
			{"PUT /queues/.", declared(nil), 400, "declare queue with empty name not allowed"},
			{"PUT /queues/amq.x", declared(nil), 403, "queue 'amq.x' in vhost '/' starts with reserved prefix 'amq.'"},
			{"PUT /queues/a%0Ab", declared(nil), 400, "line feed and carriage return characters not allowed"},
			{"DELETE /queues/missing/messages", nil, purge, "no queue 'missing' in vhost '/'"},
			{"PUT /exchanges/x", m{"type": "topic", "arguments": m{}.strings()}.strings(), 409, "inequivalent arg 'type' for exchange 'x' in vhost '/': received 'topic' but current is 'headers'"},
			{"PUT /exchanges/new", m{"type": "bogus"}.strings(), 400, "unknown exchange type 'bogus'"},
			{"PUT /exchanges/", m{"type": "topic"}.strings(), 403, "operation not permitted on the default exchange"},
			{"PUT /exchanges/amq.new", m{"type": "topic"}.strings(), 403, "exchange 'amq.new' in vhost '/' starts with reserved prefix 'amq.'"},
			{"PUT /exchanges/amq.topic", m{"type": "topic"}.strings(), 204, ""},
			{"DELETE /exchanges/amq.topic", nil, 403, "reserved prefix"},
			{"DELETE /exchanges/missing", nil, 204, ""},
			{"POST /bindings", bind("missing", "q", nil), 400, "no exchange 'missing' in vhost '/'"},
			{"POST /bindings", bind("x", "missing", nil), 400, "no queue 'missing' in vhost '/'"},
			{"POST /bindings", bind("", "q", nil), 403, "operation not permitted on the default exchange"},
			{"POST /bindings", bind("x", "q", m{"x-match": "bogus"}), 400, "Invalid x-match field value"},
			{"DELETE /bindings/nonsense", nil, 400, "bad binding path segment 'nonsense'"},
			{"GET /bindings?src=x&dstq=missing&key=k", nil, 200, ""},
		} {
			method, path, _ := strings.Cut(c.request, " ")
			status, body := l.request(method, path, c.body)
			assert.Equal(t, c.status, status, "%s: %v", c.request, body)
			if c.text != "" {
				assert.Contains(t, body, c.text, c.request)
			}
		}
		// What RabbitMQ doesn't answer ends the session.
		for _, request := range []string{"GET /exchanges/x", "GET /queues/%FF", "PATCH /queues/q", "GET /"} {
			method, path, _ := strings.Cut(request, " ")
			l.s = l.conn.Begin()
			_, fault := l.request(method, path, nil)
			require.IsType(t, &Fault{}, fault, request)
			assert.Equal(t, ScopeSession, fault.(*Fault).Ends)
			assert.Equal(t, frames.Symbol("amqp:internal-error"), fault.(*Fault).Err.Condition)
		}
	})
}

func TestBindingsByManagement(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("a b", nil)
		l.exchange("x+y", "headers", nil)
		l.bind("x+y", "a b", "the key", nil)
		l.bind("x+y", "a b", "the key", m{"x-match": "any", "n": int64(1)})
		l.bind("x+y", "a b", "the key", m{"n": int64(1), "x-match": "any"}) // the same
		_, body := l.request("GET", "/bindings?src=x%2By&dstq=a%20b&key=the%20key", nil)
		all := body.(frames.List)
		require.Len(t, all, 2)
		for i, b := range all {
			source, _ := b.(frames.Map).Get("source")
			queue, _ := b.(frames.Map).Get("destination_queue")
			location, _ := b.(frames.Map).Get("location")
			assert.Equal(t, []any{"x+y", "a b"}, []any{source, queue})
			status, _ := l.request("DELETE", location.(string), nil)
			require.Equal(t, 204, status)
			_, body = l.request("GET", "/bindings?src=x%2By&dstq=a%20b&key=the%20key", nil)
			assert.Len(t, body, 1-i)
		}
	})
}

func TestPermissions(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("theirs", nil)
		l.quorum("mine", nil)
		l.exchange("theirs-x", "fanout", nil)
		l.b.PutUser("u", "secret")
		u, err := l.b.Authenticate("PLAIN", "u", "secret")
		require.NoError(t, err)
		_, err = l.b.Authenticate("PLAIN", "u", "wrong")
		require.ErrorIs(t, err, ErrRefused)
		_, refused := l.b.Connect(u, "/", Peer{})
		require.NotNil(t, refused)
		assert.Equal(t, "access to vhost '/' refused for user 'u'", refused.Description)
		_, refused = l.b.Connect(u, "missing", Peer{})
		assert.Equal(t, "AMQP 1.0 connection failed: virtual host 'missing' does not exist", refused.Description)
		require.NoError(t, l.b.SetPermissions("u", "/", Permissions{Configure: "^mine", Write: "^mine|^amq.default", Read: "^mine"}))
		l.conn, refused = l.b.Connect(u, "/", Peer{})
		require.Nil(t, refused)
		get := ""
		if l.newer() {
			get = "configure access to queue 'theirs' in vhost '/' refused for user 'u'"
		}
		for request, want := range map[string]string{
			"PUT /queues/theirs": "configure access to queue 'theirs' in vhost '/' refused for user 'u'", "PUT /queues/mine": "",
			"DELETE /queues/theirs": "configure access", "DELETE /queues/theirs/messages": "read access", "GET /queues/theirs": get,
			"PUT /exchanges/theirs": "configure access to exchange 'theirs'", "GET /queues/mine": "",
		} {
			method, path, _ := strings.Cut(request, " ")
			l.s = l.conn.Begin()
			var body any
			if method == "PUT" {
				body = declared(m{"x-queue-type": "quorum"})
				if strings.Contains(path, "exchanges") {
					body = m{"type": "topic"}.strings()
				}
			}
			status, reply := l.request(method, path, body)
			if want == "" {
				assert.Equal(t, 200, status, "%s %v", request, reply)
				continue
			}
			require.IsType(t, &Fault{}, reply, request)
			fault := reply.(*Fault)
			assert.Equal(t, ScopeSession, fault.Ends)
			assert.Equal(t, frames.Symbol("amqp:unauthorized-access"), fault.Err.Condition)
			assert.Contains(t, fault.Err.Description, want)
		}
		_, fault := l.conn.Begin().OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/theirs"}})
		require.NotNil(t, fault)
		assert.Equal(t, ScopeSession, fault.Ends)
		assert.Contains(t, fault.Error(), "read access to queue 'theirs'")
		_, fault = l.conn.Begin().OpenPublisher(&frames.Attach{Target: &frames.Target{Address: "/exchanges/theirs-x"}})
		require.NotNil(t, fault)
		assert.Contains(t, fault.Error(), "write access to exchange 'theirs-x'")
		l.s = l.conn.Begin()
		p := l.publisher("/queues/mine")
		fault = p.Publish(1, false, encoded(t, func(m *frames.Message) { m.Properties = &frames.Properties{UserID: []byte("guest")} }, "m"))
		require.NotNil(t, fault)
		assert.Contains(t, fault.Error(), "user_id property set to 'guest' but authenticated user was 'u'")
	})
}

func TestDefaultQueueType(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.b.PutVHost("v", VHostConfig{DefaultQueueType: "quorum"})
		u, _ := l.b.Authenticate("PLAIN", "guest", "guest")
		c, refused := l.b.Connect(u, "v", Peer{})
		require.Nil(t, refused)
		l.s = c.Begin()
		status, body := l.request("PUT", "/queues/q", declared(nil))
		require.Equal(t, 201, status)
		kind, _ := body.(frames.Map).Get("type")
		assert.Equal(t, "quorum", kind)
		status, body = l.request("PUT", "/queues/own", m{"exclusive": true, "arguments": m{}.strings()}.strings())
		require.Equal(t, 201, status)
		kind, _ = body.(frames.Map).Get("type")
		assert.Equal(t, "classic", kind)
		assert.True(t, l.b.DeleteVHost("v"))
		events := c.Take(nil)
		require.Len(t, events, 1)
		assert.Equal(t, EventClosed, events[0].Kind)
		assert.Equal(t, `amqp:internal-error: Connection forced: "vhost 'v' is deleted"`, events[0].Err.Error())
		_, open := <-c.Ready()
		for open {
			_, open = <-c.Ready()
		}
	})
}

func TestPolicies(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("work", m{"x-max-length": int64(5)})
		l.quorum("dead", nil)
		set := func(name string, p Policy) { require.NoError(t, l.b.SetPolicy("/", name, p)) }
		set("low", Policy{Pattern: "^w", Definition: map[string]any{"max-length": 1, "delivery-limit": 0}})
		set("high", Policy{Pattern: "^w", Priority: 5, ApplyTo: "quorum_queues", Definition: map[string]any{
			"max-length": 3, "dead-letter-exchange": "", "dead-letter-routing-key": "dead",
		}})
		set("other", Policy{Pattern: "^w", Priority: 9, ApplyTo: "classic_queues", Definition: map[string]any{"max-length": 0}})
		l.put("work", "a", "b", "c", "d", "e")
		assert.Equal(t, []string{"a", "b"}, l.bodies("dead"), "of argument and policy the smaller one counts")
		q, _ := l.b.Queue("/", "work")
		assert.Equal(t, "high", q.Policy)
		set("most", Policy{Operator: true, Pattern: ".*", ApplyTo: "queues", Definition: map[string]any{"max-length": 2}})
		assert.Equal(t, []string{"c"}, l.bodies("dead"), "a new limit is enforced at once")
		assert.True(t, l.b.DeletePolicy("/", "most", true))
		assert.True(t, l.b.DeletePolicy("/", "high", false))
		assert.False(t, l.b.DeletePolicy("/", "high", false))
		q, _ = l.b.Queue("/", "work")
		assert.Equal(t, 1, q.Ready)
		assert.Empty(t, l.bodies("dead"), "nothing says where to")
		assert.ErrorContains(t, l.b.SetPolicy("/", "p", Policy{Pattern: "x", Definition: map[string]any{"bogus": 1}}), "not recognised policy settings")
		err := l.b.SetPolicy("/", "p", Policy{Pattern: "x", Definition: map[string]any{"delayed-retry-type": "all"}})
		assert.ErrorContains(t, err, map[bool]string{true: "delayed-retry-min is required", false: "not recognised policy settings"}[l.newer()])
		err = l.b.SetPolicy("/", "p", Policy{Pattern: "x", Definition: map[string]any{"delayed-retry-type": "all", "delayed-retry-min": 1000}})
		assert.Equal(t, l.newer(), err == nil)
	})
}

// A policy makes an exchange's alternate exchange, and is seen by links that are open.
func TestPolicyOfAnExchange(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.exchange("x", "direct", nil)
		l.bind("amq.fanout", "q", "", nil)
		p := l.publisher("/exchanges/x/k")
		send := func() any {
			require.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
			return l.events()[0].State
		}
		assert.IsType(t, &frames.Released{}, send())
		require.NoError(t, l.b.SetPolicy("/", "p", Policy{Pattern: "^x$", ApplyTo: "exchanges", Definition: map[string]any{"alternate-exchange": "amq.fanout"}}))
		assert.IsType(t, &frames.Accepted{}, send())
		require.True(t, l.b.DeletePolicy("/", "p", false))
		assert.IsType(t, &frames.Released{}, send())
	})
}

func TestVersionsThatThereAreNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, err := New(Config{Version: "3.13"})
		assert.ErrorContains(t, err, "use 4.4.0, 4.3.6, or 4.0.5")
	})
}
