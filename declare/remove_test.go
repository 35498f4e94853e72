package declare_test

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

// replies answers every request with the same.
func replies(status int, reply any) *fakeBroker {
	return &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) { return status, reply, nil, true }}
}

func TestDeleteTopology(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{}
	top := shop()
	top.Queues = append(top.Queues, declare.QuorumQueue{Name: "orders"}, nil)
	top.Exchanges = append(top.Exchanges, declare.Exchange{Name: "shop", Type: declare.Direct})
	top.Bindings = append(top.Bindings, declare.Binding{Source: "amq.topic", Queue: "elsewhere", Key: "a;b=c&d /é"})
	report, err := declare.Delete(context.Background(), f, top)
	require.NoError(t, err, "only names count")
	assert.Equal(t, 5, report.Count(declare.Deleted))
	got := f.sentPaths()
	slices.Sort(got[1:3])
	slices.Sort(got[3:5])
	assert.Equal(t, []string{
		"DELETE /bindings/src=amq.topic;dstq=elsewhere;key=a%3Bb%3Dc%26d%20%2F%C3%A9;args=",
		"DELETE /queues/dead", "DELETE /queues/orders",
		"DELETE /exchanges/lost", "DELETE /exchanges/shop",
	}, got)
}

func TestDeleteReports(t *testing.T) {
	t.Parallel()
	f := replies(403, "not permitted")
	report, err := declare.Delete(context.Background(), f, shop())
	require.ErrorIs(t, err, declare.ErrForbidden)
	assert.Equal(t, 2, report.Count(declare.Refused))
	assert.Equal(t, 2, report.Count(declare.NotTried))
}

func TestCounts(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := &fakeBroker{}
	n, err := declare.Purge(ctx, f, "a/b")
	require.NoError(t, err)
	assert.Equal(t, uint64(3), n)
	n, err = declare.DeleteQueue(ctx, f, "a/b")
	require.NoError(t, err)
	assert.Equal(t, uint64(3), n)
	assert.Equal(t, []string{"DELETE /queues/a%2Fb/messages", "DELETE /queues/a%2Fb"}, f.sentPaths())

	_, err = declare.Purge(ctx, replies(400, "no queue 'q' in vhost '/'"), "q")
	require.ErrorIs(t, err, declare.ErrNotFound, "RabbitMQ 4.0")

	for _, reply := range []any{nil, "ok", 3, []any{}, map[string]any{}, map[string]any{"message_count": -1}, map[string]any{"message_count": "3"}, map[any]any{3: 3}} {
		_, err = declare.Purge(ctx, replies(200, reply), "q")
		require.ErrorIs(t, err, declare.ErrBadReply, "%v", reply)
		var e *declare.Error
		require.ErrorAs(t, err, &e)
		assert.False(t, e.SafeToRetry(), "what has arrived since would be purged, too")
	}
}

func TestDeleteBinding(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := &fakeBroker{}
	require.NoError(t, declare.DeleteBinding(ctx, f, declare.Binding{Source: "x", Exchange: "y"}))
	assert.Equal(t, []string{"DELETE /bindings/src=x;dste=y;key=;args="}, f.sentPaths(), "without arguments the path is known")

	// With arguments, it is the broker that knows the path.
	type symbol string
	list := []any{
		map[string]any{"arguments": map[string]any{}, "location": "/bindings/none"},
		map[string]any{"arguments": map[string]any{"x-match": "all-with-x", "x-opt-retry-delay": int64(60000)}, "location": "/bindings/other"},
		map[any]any{"arguments": map[any]any{symbol("x-match"): symbol("all-with-x"), "x-opt-retry-delay": int32(10000)}, "location": "/bindings/this"},
	}
	b := declare.Binding{Source: "x", Queue: "q", Match: declare.AllWithX, Headers: map[string]any{"x-opt-retry-delay": 10000}}
	f = &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		return 200, list, nil, s.method == "GET"
	}}
	require.NoError(t, declare.DeleteBinding(ctx, f, b))
	assert.Equal(t, []string{"GET /bindings?src=x&dstq=q&key=", "DELETE /bindings/this"}, f.sentPaths())

	b.Headers = map[string]any{"x-opt-retry-delay": 1}
	f.requests = nil
	require.NoError(t, declare.DeleteBinding(ctx, f, b), "what isn't there is no error")
	assert.Len(t, f.requests, 1)

	for _, location := range []any{nil, "", 7, "/queues/q"} {
		list = []any{map[string]any{"arguments": map[string]any{"x-match": "all-with-x", "x-opt-retry-delay": 1}, "location": location}}
		f.requests = nil
		require.ErrorIs(t, declare.DeleteBinding(ctx, f, b), declare.ErrBadReply)
		assert.Len(t, f.requests, 1, "nothing is deleted at a strange location")
	}
}

// Whatever is in use is in the way of a deletion, and what only the topology itself
// uses isn't.
func TestUses(t *testing.T) {
	t.Parallel()
	topology := cycle()
	require.NoError(t, declare.Uses(topology.Snapshot(), topology))
	for what, change := range map[string]func(*declare.Snapshot){
		`queue "orders": in use: 3 messages are ready in it`: func(s *declare.Snapshot) { queueIn(s, "orders").Messages = 3 },
		`queue "orders": in use: it has 1 consumers`:         func(s *declare.Snapshot) { queueIn(s, "orders").Consumers = 1 },
		`1 messages are held by consumers, 2 delayed, 3 wait for dead-lettering`: func(s *declare.Snapshot) {
			q := queueIn(s, "delay_10s")
			q.MessagesUnacknowledged, q.MessagesDelayed, q.MessagesDeadLettering = 1, 2, 3
		},
		`exchange "requeue": in use: it leads to what isn't to be deleted: "requeue" to queue "other"`: func(s *declare.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "requeue", Queue: "other", Key: "*.*.other"})
		},
		`queue "orders": in use: what isn't to be deleted leads to it: "amq.topic" to queue "orders"`: func(s *declare.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "amq.topic", Queue: "orders"})
		},
		`exchange "retry": in use: what isn't to be deleted leads to it: "amq.topic" to exchange "retry"`: func(s *declare.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "amq.topic", Exchange: "retry"})
		},
		`exchange "dlx": in use: queue "other", which isn't to be deleted, dead-letters to it`: func(s *declare.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "other", Type: "quorum", Arguments: map[string]any{"x-dead-letter-exchange": "dlx"}})
		},
		`queue "orders.dead": in use: queue "other", which isn't to be deleted, dead-letters to it`: func(s *declare.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "other", Type: "quorum", Arguments: map[string]any{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}})
		},
		`exchange "dlx": in use: queue "by policy", which`: func(s *declare.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "by policy", Type: "quorum"})
			s.Policies = []declare.Policy{{Name: "p", Pattern: "^by policy$", ApplyTo: "queues", Definition: map[string]any{"dead-letter-exchange": "dlx"}}}
		},
		`exchange "parking": in use: it is the alternate exchange of "other"`: func(s *declare.Snapshot) {
			s.Exchanges = append(s.Exchanges, declare.ExchangeInfo{Name: "other", Type: declare.Topic, Arguments: map[string]any{"alternate-exchange": "parking"}})
		},
	} {
		s := topology.Snapshot()
		change(&s)
		err := declare.Uses(s, topology)
		require.ErrorIs(t, err, declare.ErrInUse, what)
		assert.ErrorContains(t, err, what)
		assert.NotContains(t, err.Error(), "\n", "one reason: %s", what)
	}

	f := &fakeBroker{}
	_, err := declare.DeleteIf(context.Background(), declare.Sources{AMQP: f}, topology)
	var e *argument.Error
	require.ErrorAs(t, err, &e)
	assert.Empty(t, f.requests)
}

func queueIn(s *declare.Snapshot, name string) *declare.QueueInfo {
	for i := range s.Queues {
		if s.Queues[i].Name == name {
			return &s.Queues[i]
		}
	}
	panic(name)
}
