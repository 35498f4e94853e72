package declare_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

// declared is the body that is sent for q.
func declared(t *testing.T, q declare.QuorumQueue) map[string]any {
	t.Helper()
	f := &fakeBroker{}
	_, err := declare.Apply(context.Background(), f, declare.Topology{Queues: []declare.Queue{q}})
	require.NoError(t, err)
	require.Len(t, f.requests, 1)
	return f.requests[0].body.(map[string]any)
}

func TestQuorumQueueArguments(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		queue declare.QuorumQueue
		want  map[string]any
	}{
		"dropped dead": {declare.QuorumQueue{DeadLetter: declare.Drop()}, map[string]any{}},
		"every field": {
			declare.QuorumQueue{
				DeliveryLimit:        5,
				DeadLetter:           declare.DeadLetterTarget{Exchange: "dlx", RoutingKey: "orders"},
				MessageTTL:           10 * time.Second,
				Expires:              time.Hour,
				MaxLength:            10,
				MaxLengthBytes:       1 << 40,
				SingleActiveConsumer: true,
				InitialGroupSize:     3,
				PlacementTag:         "zone",
				LeaderLocator:        declare.LeaderBalanced,
				ConsumerTimeout:      time.Minute,
				DelayedRetry:         declare.DelayedRetry{Kind: declare.RetryFailed, Min: time.Second, Max: time.Minute},
				Arguments:            map[string]any{"x-list": []string{"a"}, "x-int": uint8(7), "x-null": nil},
			},
			map[string]any{
				"x-delivery-limit":            int64(5),
				"x-dead-letter-exchange":      "dlx",
				"x-dead-letter-routing-key":   "orders",
				"x-dead-letter-strategy":      "at-least-once",
				"x-overflow":                  "reject-publish",
				"x-message-ttl":               int64(10000),
				"x-expires":                   int64(3600000),
				"x-max-length":                int64(10),
				"x-max-length-bytes":          int64(1 << 40),
				"x-single-active-consumer":    true,
				"x-quorum-initial-group-size": int64(3),
				"x-member-placement-tag":      "zone",
				"x-queue-leader-locator":      "balanced",
				"x-consumer-timeout":          int64(60000),
				"x-delayed-retry-type":        "failed",
				"x-delayed-retry-min":         int64(1000),
				"x-delayed-retry-max":         int64(60000),
				"x-list":                      []any{"a"},
				"x-int":                       int64(7),
				"x-null":                      nil,
			},
		},
		"unlimited":     {declare.QuorumQueue{DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}, map[string]any{"x-delivery-limit": int64(-1)}},
		"no redelivery": {declare.QuorumQueue{DeliveryLimit: declare.NoRedelivery, DeadLetter: declare.Drop()}, map[string]any{"x-delivery-limit": int64(0)}},
		"default exchange": {declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")}, map[string]any{
			"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead",
			"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		}},
		"at most once sends no strategy": {
			declare.QuorumQueue{DeadLetter: declare.DeadLetterTarget{Exchange: "dlx", AtMostOnce: true}, Overflow: declare.OverflowDropHead},
			map[string]any{"x-dead-letter-exchange": "dlx", "x-overflow": "drop-head"},
		},
		"at least once said in full": {
			declare.QuorumQueue{DeadLetter: declare.DeadLetterTarget{Exchange: "dlx"}, Overflow: declare.OverflowRejectPublish},
			map[string]any{"x-dead-letter-exchange": "dlx", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
		},
		"one delay": {
			declare.QuorumQueue{DeadLetter: declare.Drop(), DelayedRetry: declare.DelayedRetry{Kind: declare.RetryAll, Min: time.Second}},
			map[string]any{"x-delayed-retry-type": "all", "x-delayed-retry-min": int64(1000)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.queue.Name = "orders"
			tt.want["x-queue-type"] = "quorum"
			assert.Equal(t, map[string]any{"durable": true, "exclusive": false, "auto_delete": false, "arguments": tt.want}, declared(t, tt.queue))
		})
	}
}

func TestQuorumQueueRefuses(t *testing.T) {
	t.Parallel()
	type queue = declare.QuorumQueue
	cyclic := []any{nil}
	cyclic[0] = cyclic
	type word string
	for name, tt := range map[string]struct {
		change func(*queue)
		field  string
	}{
		"no dead letter":          {func(q *queue) { q.DeadLetter = declare.DeadLetterTarget{} }, "DeadLetter"},
		"drop and exchange":       {func(q *queue) { q.DeadLetter = declare.Drop(); q.DeadLetter.Exchange = "x" }, "DeadLetter"},
		"drop and strategy":       {func(q *queue) { q.DeadLetter = declare.Drop(); q.DeadLetter.AtMostOnce = true }, "DeadLetter"},
		"strategy alone":          {func(q *queue) { q.DeadLetter = declare.DeadLetterTarget{AtMostOnce: true} }, "DeadLetter.RoutingKey"},
		"dead-letter exchange":    {func(q *queue) { q.DeadLetter.Exchange = "a\n" }, "DeadLetter.Exchange"},
		"dead-letter key":         {func(q *queue) { q.DeadLetter.RoutingKey = "\xff" }, "DeadLetter.RoutingKey"},
		"dead-letter queue":       {func(q *queue) { q.DeadLetter = declare.ToQueue(strings.Repeat("q", 256)) }, "DeadLetter.RoutingKey"},
		"at least once drop-head": {func(q *queue) { q.Overflow = declare.OverflowDropHead }, "Overflow"},
		"unknown overflow":        {func(q *queue) { q.DeadLetter = declare.Drop(); q.Overflow = "reject-publish-dlx" }, "Overflow"},
		"limit":                   {func(q *queue) { q.DeliveryLimit = -3 }, "DeliveryLimit"},
		"ttl of microseconds":     {func(q *queue) { q.MessageTTL = 1500 * time.Microsecond }, "MessageTTL"},
		"ttl below a millisecond": {func(q *queue) { q.MessageTTL = 1 }, "MessageTTL"},
		"negative ttl":            {func(q *queue) { q.MessageTTL = -time.Second }, "MessageTTL"},
		"ttl over ten years":      {func(q *queue) { q.MessageTTL = 315_360_000_001 * time.Millisecond }, "MessageTTL"},
		"largest duration":        {func(q *queue) { q.Expires = math.MaxInt64 / 1e6 * 1e6 }, "Expires"},
		"negative expires":        {func(q *queue) { q.Expires = -1 }, "Expires"},
		"consumer timeout":        {func(q *queue) { q.ConsumerTimeout = -1 }, "ConsumerTimeout"},
		"max length":              {func(q *queue) { q.MaxLength = -1 }, "MaxLength"},
		"max length bytes":        {func(q *queue) { q.MaxLengthBytes = -1 }, "MaxLengthBytes"},
		"group size":              {func(q *queue) { q.InitialGroupSize = -1 }, "InitialGroupSize"},
		"leader locator":          {func(q *queue) { q.LeaderLocator = "min-masters" }, "LeaderLocator"},
		"retry kind":              {func(q *queue) { q.DelayedRetry = declare.DelayedRetry{Kind: "some", Min: 1e9} }, "DelayedRetry.Kind"},
		"retry without kind":      {func(q *queue) { q.DelayedRetry.Min = 1e9 }, "DelayedRetry.Kind"},
		"retry without min":       {func(q *queue) { q.DelayedRetry.Kind = declare.RetryAll }, "DelayedRetry.Min"},
		"retry max below min":     {func(q *queue) { q.DelayedRetry = declare.DelayedRetry{Kind: "all", Min: 2e9, Max: 1e9} }, "DelayedRetry.Max"},
		"typed argument":          {func(q *queue) { q.Arguments = map[string]any{"x-message-ttl": 5} }, `Arguments["x-message-ttl"]`},
		"queue type":              {func(q *queue) { q.Arguments = map[string]any{"x-queue-type": "classic"} }, `Arguments["x-queue-type"]`},
		"no prefix":               {func(q *queue) { q.Arguments = map[string]any{"delivery-limit": 5} }, `Arguments["delivery-limit"]`},
		"empty key":               {func(q *queue) { q.Arguments = map[string]any{"": 5} }, `Arguments[""]`},
		"long key":                {func(q *queue) { q.Arguments = map[string]any{"x-" + strings.Repeat("k", 254): 5} }, "Arguments"},
		"key not UTF-8":           {func(q *queue) { q.Arguments = map[string]any{"x-\xff": 5} }, `Arguments["x-\xff"]`},
		"value not UTF-8":         {func(q *queue) { q.Arguments = map[string]any{"x-a": "\xff"} }, `Arguments["x-a"]`},
		"struct":                  {func(q *queue) { q.Arguments = map[string]any{"x-a": struct{}{}} }, `Arguments["x-a"]`},
		"func":                    {func(q *queue) { q.Arguments = map[string]any{"x-a": func() {}} }, `Arguments["x-a"]`},
		"pointer":                 {func(q *queue) { q.Arguments = map[string]any{"x-a": new(int)} }, `Arguments["x-a"]`},
		"map":                     {func(q *queue) { q.Arguments = map[string]any{"x-a": map[string]any{}} }, `Arguments["x-a"]`},
		"bytes":                   {func(q *queue) { q.Arguments = map[string]any{"x-a": []byte("b")} }, `Arguments["x-a"]`},
		"duration":                {func(q *queue) { q.Arguments = map[string]any{"x-a": time.Second} }, `Arguments["x-a"]`},
		"named string":            {func(q *queue) { q.Arguments = map[string]any{"x-a": word("b")} }, `Arguments["x-a"]`},
		"time":                    {func(q *queue) { q.Arguments = map[string]any{"x-a": time.Now()} }, `Arguments["x-a"]`},
		"large unsigned":          {func(q *queue) { q.Arguments = map[string]any{"x-a": uint64(math.MaxUint64)} }, `Arguments["x-a"]`},
		"NaN":                     {func(q *queue) { q.Arguments = map[string]any{"x-a": math.NaN()} }, `Arguments["x-a"]`},
		"infinite":                {func(q *queue) { q.Arguments = map[string]any{"x-a": float32(math.Inf(1))} }, `Arguments["x-a"]`},
		"list that holds itself":  {func(q *queue) { q.Arguments = map[string]any{"x-a": cyclic} }, `Arguments["x-a"][0]`},
		"map in list":             {func(q *queue) { q.Arguments = map[string]any{"x-a": []any{1, map[string]any{}}} }, `Arguments["x-a"][1]`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := queue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "dlx"}}
			require.NoError(t, q.Validate())
			tt.change(&q)
			err := q.Validate()
			var e *argument.Error
			require.ErrorAs(t, err, &e)
			assert.True(t, strings.HasPrefix(e.Path.String(), `QuorumQueue("orders").`+tt.field), e.Path.String())
			assert.NotEmpty(t, e.Problem)
			assert.NotEmpty(t, e.Remedy)

			f := &fakeBroker{}
			report, err2 := declare.Apply(context.Background(), f, declare.Topology{Queues: []declare.Queue{q}})
			assert.EqualError(t, err2, err.Error())
			assert.Empty(t, report.Steps)
			assert.Empty(t, f.requests, "nothing is sent")
		})
	}
}

func TestAllProblemsAtOnce(t *testing.T) {
	t.Parallel()
	err := declare.QuorumQueue{Name: "amq.q", MessageTTL: -1, MaxLength: -1}.Validate()
	joined, ok := err.(interface{ Unwrap() []error })
	require.True(t, ok)
	assert.Len(t, joined.Unwrap(), 4, "name, dead letter, TTL, length")
	for _, e := range joined.Unwrap() {
		assert.IsType(t, (*argument.Error)(nil), e)
	}
}

func TestRefusedNames(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, name := range []string{"", ".", "..", "a\rb", "a\nb", "\xff", "a\xc3", strings.Repeat("n", 256)} {
		f := &fakeBroker{}
		dead := declare.Drop()
		_, inspectErr := declare.Inspect(ctx, f, name)
		_, purgeErr := declare.Purge(ctx, f, name)
		_, deleteErr := declare.DeleteQueue(ctx, f, name)
		_, bindingsErr := declare.Bindings(ctx, f, declare.Binding{Source: name, Queue: "q"})
		_, topologyErr := declare.Delete(ctx, f, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: name}}})
		for what, err := range map[string]error{
			"queue":       declare.QuorumQueue{Name: name, DeadLetter: dead}.Validate(),
			"exchange":    declare.Exchange{Name: name}.Validate(),
			"source":      declare.Binding{Source: name, Queue: "q"}.Validate(),
			"destination": declare.Binding{Source: "x", Queue: name}.Validate(),
			"inspect":     inspectErr,
			"purge":       purgeErr,
			"delete":      deleteErr,
			"exchange d":  declare.DeleteExchange(ctx, f, name),
			"binding d":   declare.DeleteBinding(ctx, f, declare.Binding{Source: name, Queue: "q"}),
			"bindings":    bindingsErr,
			"topology d":  topologyErr,
		} {
			var e *argument.Error
			assert.True(t, errors.As(err, &e), "%s %q: %v", what, name, err)
		}
		assert.Empty(t, f.requests)
	}
	for _, name := range []string{"a b", "a/b", "%", "+", "a%2Fb", "ü", "...", "a;b=c", "\x00\t", strings.Repeat("n", 255)} {
		assert.NoError(t, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()}.Validate(), "%q", name)
	}
	assert.Error(t, declare.QuorumQueue{Name: "amq.gen", DeadLetter: declare.Drop()}.Validate())
	assert.Error(t, declare.Exchange{Name: "amq.topic"}.Validate())
	assert.Error(t, declare.DeleteExchange(ctx, &fakeBroker{}, "amq.topic"))
	assert.NoError(t, declare.Binding{Source: "amq.topic", Queue: "q"}.Validate())
	_, err := declare.Purge(ctx, &fakeBroker{}, "amq.gen-abc")
	assert.NoError(t, err, "a queue that the broker named may be purged")
}

func TestArgumentsAreNeitherChangedNorKept(t *testing.T) {
	t.Parallel()
	list := []any{1, 2}
	args := map[string]any{"x-list": list}
	q := declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop(), Arguments: args}
	body := declared(t, q)
	assert.Equal(t, map[string]any{"x-list": []any{1, 2}}, args)
	body["arguments"].(map[string]any)["x-list"].([]any)[0] = "changed"
	assert.Equal(t, []any{1, 2}, list)
}

func TestQueueAddress(t *testing.T) {
	t.Parallel()
	assert.Equal(t, address.Queue("orders"), declare.QuorumQueue{Name: "orders"}.Address())
}

func TestDeadLetterQuestions(t *testing.T) {
	t.Parallel()
	assert.True(t, declare.DeadLetterTarget{}.IsZero())
	assert.False(t, declare.Drop().IsZero())
	assert.True(t, declare.Drop().IsDrop())
	assert.False(t, declare.ToQueue("q").IsDrop())
}

func TestDeadLetteringIsAtLeastOnceByDefault(t *testing.T) {
	t.Parallel()
	target := func(atMostOnce bool) declare.Topology {
		return declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.DeadLetterTarget{Exchange: "dlx", AtMostOnce: atMostOnce}}}}
	}
	assert.NotEqual(t, target(false).Declarations(), target(true).Declarations())
	classic := declare.ClassicQueue{Name: "q", DeadLetter: declare.DeadLetterTarget{Exchange: "dlx"}}
	assert.ErrorContains(t, classic.Validate(), "a classic queue can't dead-letter at least once")
	classic.DeadLetter.AtMostOnce = true
	assert.NoError(t, classic.Validate())
}
