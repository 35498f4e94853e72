package declare_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	top.Exchanges = append(top.Exchanges, declare.Exchange{Name: "shop", Type: declare.ExchangeDirect})
	top.Bindings = append(top.Bindings, declare.Binding{Source: "amq.topic", Queue: "elsewhere", Key: "a;b=c&d /é"})
	report, err := declare.Delete(context.Background(), f, top)
	require.NoError(t, err, "only names count")
	assert.Equal(t, 5, report.Count("deleted"))
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
	assert.Equal(t, 2, report.Count("refused"))
	assert.Equal(t, 2, report.Count("not tried"))
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
	b := declare.Binding{Source: "x", Queue: "q", Match: declare.MatchAllWithX, Headers: map[string]any{"x-opt-retry-delay": 10000}}
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

// A queue that is in use stays, and so do the exchanges after it.
func TestDeleteIdle(t *testing.T) {
	t.Parallel()
	for says, counts := range map[string][2]uint64{"it contains 1 ready message;": {1, 0}, "it has 2 consumers;": {0, 2}} {
		f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
			return 200, map[string]any{"name": "orders", "type": "quorum", "message_count": counts[0], "consumer_count": counts[1]}, nil, s.method+s.path == "GET/queues/orders"
		}}
		report, err := declare.DeleteIdle(context.Background(), f, shop())
		require.ErrorIs(t, err, declare.ErrInUse)
		require.ErrorContains(t, err, says)
		assert.Equal(t, `not tried exchange "shop"
not tried exchange "lost"
`, report.String()[strings.Index(report.String(), "not tried"):])
		assert.Equal(t, 1, report.Count("deleted"), "the queue that doesn't exist")
		assert.NotContains(t, f.sentPaths(), "DELETE /queues/orders")
	}
	f := &fakeBroker{}
	report, err := declare.DeleteIdle(context.Background(), f, shop())
	require.NoError(t, err)
	assert.Equal(t, 4, report.Count("deleted"))
}

func TestDeclarations(t *testing.T) {
	t.Parallel()
	top := shop()
	top.Queues = append(top.Queues, nil, top.Queues[0])
	list := top.Declarations()
	require.Len(t, list, 6, "each thing once")
	assert.Equal(t, "PUT", list[2].Method)
	assert.Equal(t, "/queues/orders", list[2].Path)
	assert.Nil(t, list[2].Differs(list[2].Body))
	list[2].Body["durable"] = false
	e := list[2].Differs(top.Declarations()[2].Body)
	require.ErrorIs(t, e, declare.ErrConflict)
	assert.Equal(t, "durable", e.Differences[0].Argument)
	assert.NotEmpty(t, e.Remedies)
}
