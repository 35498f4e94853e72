package declare_test

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
)

func TestInspect(t *testing.T) {
	t.Parallel()
	reply := map[string]any{
		"name": "orders", "vhost": "/", "type": "quorum", "durable": true, "auto_delete": false, "exclusive": false,
		"leader": "rabbit@a", "replicas": []string{"rabbit@a", "rabbit@b"}, "message_count": uint64(7), "consumer_count": uint32(2),
		"arguments": map[string]any{"x-queue-type": "quorum", "x-delivery-limit": int64(5), "x-f": float32(1.5), "x-l": []any{int8(1), "a"}, "x-n": nil},
	}
	f := replies(200, reply)
	info, err := declare.Inspect(context.Background(), f, "orders")
	require.NoError(t, err)
	assert.Equal(t, declare.QueueInfo{
		Name: "orders", VHost: "/", Type: "quorum", Durable: true, Leader: "rabbit@a", Replicas: []string{"rabbit@a", "rabbit@b"}, Messages: 7, Consumers: 2,
		Arguments: map[string]any{"x-queue-type": "quorum", "x-delivery-limit": int64(5), "x-f": 1.5, "x-l": []any{int64(1), "a"}, "x-n": nil},
	}, info)
	assert.Equal(t, []string{"GET /queues/orders"}, f.sentPaths())

	_, err = declare.Inspect(context.Background(), &fakeBroker{}, "none")
	require.ErrorIs(t, err, declare.ErrNotFound)
	require.ErrorContains(t, err, "declare it first, or correct its name")

	delete(reply, "leader")
	delete(reply, "replicas")
	_, err = declare.Inspect(context.Background(), f, "orders")
	require.NoError(t, err, "a queue may be without a leader")
}

// Any reply of a broker, or of an impostor, causes an error at most.
func TestHostileReplies(t *testing.T) {
	t.Parallel()
	cyclic := map[string]any{}
	cyclic["arguments"] = cyclic
	loop := []any{nil}
	loop[0] = loop
	type symbol string
	for _, reply := range []any{
		nil, true, 7, "text", []byte{0xff}, []any{nil}, loop, cyclic, map[any]any{nil: nil}, map[symbol]any{"name": 7},
		[]any{map[string]any{"arguments": loop}}, []any{cyclic}, []string{"a"}, map[string]any{"name": nil}, (*int)(nil), func() {},
		map[string]any{"name": "q", "type": "t", "message_count": int64(-1), "consumer_count": uint64(math.MaxUint64)},
		map[string]any{"name": "q", "type": "t", "message_count": 1, "consumer_count": 1, "replicas": 7, "leader": 7, "durable": "yes", "arguments": 7},
		map[string]any{"name": "q", "type": "t", "message_count": 1, "consumer_count": 1, "replicas": []any{7, nil, "n"}, "arguments": map[any]any{1: 2, "k": math.NaN()}},
	} {
		ctx := context.Background()
		for _, status := range []int{200, 400, 409} {
			f := replies(status, reply)
			assert.NotPanics(t, func() {
				_, _ = declare.Inspect(ctx, f, "q")
				_, _ = declare.Bindings(ctx, f, declare.Binding{Source: "x", Queue: "q"})
				_, _ = declare.Purge(ctx, f, "q")
				_, _ = declare.Apply(ctx, f, shop())
				_, _ = declare.Delete(ctx, f, shop())
				_ = declare.DeleteBinding(ctx, f, declare.Binding{Source: "x", Queue: "q", Match: declare.MatchAll})
			}, "%T", reply)
		}
	}
}

func TestBindings(t *testing.T) {
	t.Parallel()
	of := declare.Binding{Source: "a b", Exchange: "c&d", Key: "k=1"}
	f := replies(200, []any{
		map[string]any{"arguments": map[string]any{}, "location": "/bindings/1"},
		map[string]any{"arguments": map[string]any{"x-match": "any", "h": int32(1), "x-own": true}, "location": "/bindings/2"},
		map[string]any{"arguments": map[string]any{"x-match": "all-with-x", "x-opt-a": "b"}, "location": "/bindings/3"},
		map[string]any{"arguments": map[string]any{"x-own": int8(1)}},
	})
	got, err := declare.Bindings(context.Background(), f, of)
	require.NoError(t, err)
	with := func(m declare.Match, headers, args map[string]any) declare.Binding {
		b := of
		b.Match, b.Headers, b.Arguments = m, headers, args
		return b
	}
	assert.Equal(t, []declare.Binding{
		of,
		with(declare.MatchAny, map[string]any{"h": int64(1)}, map[string]any{"x-own": true}),
		with(declare.MatchAllWithX, map[string]any{"x-opt-a": "b"}, nil),
		with("", nil, map[string]any{"x-own": int64(1)}),
	}, got)
	assert.Equal(t, []string{"GET /bindings?src=a%20b&dste=c%26d&key=k%3D1"}, f.sentPaths())
	for _, b := range got {
		assert.NoError(t, b.Validate(), "what is read can be declared again")
	}

	for _, reply := range []any{"text", map[string]any{}, []any{7}, []any{nil}} {
		_, err = declare.Bindings(context.Background(), replies(200, reply), of)
		require.ErrorIs(t, err, declare.ErrBadReply, "%v", reply)
	}
	got, err = declare.Bindings(context.Background(), replies(200, nil), of)
	require.NoError(t, err)
	assert.Empty(t, got)
}
