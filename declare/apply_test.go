package declare_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

var errDied = errors.New("the session died")

func shop() declare.Topology {
	return declare.Topology{
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic, AlternateExchange: "lost"}, {Name: "lost", Type: declare.ExchangeFanout}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("dead")},
			&declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{{Source: "shop", Queue: "orders", Key: "order.*"}, {Source: "shop", Exchange: "lost", Key: "#"}},
	}
}

func outcomes(r declare.Report) []string {
	var list []string
	for _, s := range r.Steps {
		list = append(list, s.Result)
	}
	return list
}

func TestApply(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{}
	report, err := declare.Apply(context.Background(), f, shop())
	require.NoError(t, err)
	assert.Equal(t, `declared  exchange "shop"
declared  exchange "lost"
created   queue "orders"
created   queue "dead"
declared  binding "shop" to queue "orders", key "order.*"
declared  binding "shop" to exchange "lost", key "#"
`, report.String())

	got := f.sentPaths()
	for i := 0; i < len(got); i += 2 {
		slices.Sort(got[i : i+2]) // those of one kind come in any order
	}
	assert.Equal(t, []string{
		"GET /queues/dead", "GET /queues/orders",
		"PUT /exchanges/lost", "PUT /exchanges/shop",
		"PUT /queues/dead", "PUT /queues/orders",
		"POST /bindings shop><nil>#", "POST /bindings shop>orders" + "order.*",
	}, got)

	report, err = declare.Apply(context.Background(), f, shop())
	require.NoError(t, err)
	assert.Equal(t, 2, report.Count("existed"))
	assert.Equal(t, 4, report.Count("declared"))
}

func TestApplySendsBodies(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		topology declare.Topology
		path     string
		body     map[string]any
	}{
		"exchange, all defaults": {
			declare.Topology{Exchanges: []declare.Exchange{{Name: "a/b"}}}, "/exchanges/a%2Fb",
			map[string]any{"type": "direct", "durable": true, "auto_delete": false, "internal": false, "arguments": map[string]any{}},
		},
		"exchange, every field": {
			declare.Topology{Exchanges: []declare.Exchange{{Name: "x", Type: "x-consistent-hash", AlternateExchange: "y", AutoDelete: true, Internal: true, Arguments: map[string]any{"hash-header": "h"}}}}, "/exchanges/x",
			map[string]any{"type": "x-consistent-hash", "durable": true, "auto_delete": true, "internal": true, "arguments": map[string]any{"alternate-exchange": "y", "hash-header": "h"}},
		},
		"binding to a queue": {
			declare.Topology{Bindings: []declare.Binding{{Source: "x", Queue: "q"}}}, "/bindings",
			map[string]any{"source": "x", "destination_queue": "q", "binding_key": "", "arguments": map[string]any{}},
		},
		"binding to an exchange": {
			declare.Topology{Bindings: []declare.Binding{{Source: "amq.topic", Exchange: "e", Key: "#", Arguments: map[string]any{"x-a": 1}}}}, "/bindings",
			map[string]any{"source": "amq.topic", "destination_exchange": "e", "binding_key": "#", "arguments": map[string]any{"x-a": int64(1)}},
		},
		"headers": {
			declare.Topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Headers: map[string]any{"a": int8(1), "b": nil}}}}, "/bindings",
			map[string]any{"source": "x", "destination_queue": "q", "binding_key": "", "arguments": map[string]any{"x-match": "all", "a": int64(1), "b": nil}},
		},
		"annotations": {
			declare.Topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Match: declare.MatchAnyWithX, Headers: map[string]any{"x-opt-retry-delay": 10000}}}}, "/bindings",
			map[string]any{"source": "x", "destination_queue": "q", "binding_key": "", "arguments": map[string]any{"x-match": "any-with-x", "x-opt-retry-delay": int64(10000)}},
		},
		"every message": {
			declare.Topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Match: declare.MatchAll}}}, "/bindings",
			map[string]any{"source": "x", "destination_queue": "q", "binding_key": "", "arguments": map[string]any{"x-match": "all"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fakeBroker{}
			_, err := declare.Apply(context.Background(), f, tt.topology)
			require.NoError(t, err)
			require.Len(t, f.requests, 1)
			assert.Equal(t, tt.path, f.requests[0].path)
			assert.Equal(t, tt.body, f.requests[0].body)
		})
	}
}

func TestTopologyRefuses(t *testing.T) {
	t.Parallel()
	type topology = declare.Topology
	drop := declare.Drop()
	for name, tt := range map[string]struct {
		topology topology
		says     string
	}{
		"nil queue":             {topology{Queues: []declare.Queue{nil}}, "Topology.Queues[0] is nil"},
		"nil pointer":           {topology{Queues: []declare.Queue{(*declare.QuorumQueue)(nil)}}, "Topology.Queues[0] is nil"},
		"two queues":            {topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: drop, MaxLength: 1}, declare.QuorumQueue{Name: "q", DeadLetter: drop, MaxLength: 2}}}, `x-max-length is "1", then "2"`},
		"set and not set":       {topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: drop}, declare.QuorumQueue{Name: "q", DeadLetter: drop, MaxLength: 2}}}, `x-max-length is not set, then "2"`},
		"two exchanges":         {topology{Exchanges: []declare.Exchange{{Name: "x"}, {Name: "x", Type: declare.ExchangeTopic}}}, `type is "direct", then "topic"`},
		"own alternate":         {topology{Exchanges: []declare.Exchange{{Name: "x", Arguments: map[string]any{"alternate-exchange": "y"}}}}, "it belongs in AlternateExchange"},
		"alternate name":        {topology{Exchanges: []declare.Exchange{{Name: "x", AlternateExchange: ".."}}}, "AlternateExchange"},
		"exchange type":         {topology{Exchanges: []declare.Exchange{{Name: "x", Type: "\n"}}}, "Type"},
		"exchange argument":     {topology{Exchanges: []declare.Exchange{{Name: "x", Arguments: map[string]any{"a": struct{}{}}}}}, `Arguments["a"]`},
		"no source":             {topology{Bindings: []declare.Binding{{Queue: "q"}}}, "default exchange"},
		"no destination":        {topology{Bindings: []declare.Binding{{Source: "x"}}}, "Queue is empty"},
		"two destinations":      {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Exchange: "y"}}}, "so is Exchange"},
		"binding key":           {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Key: "\xff"}}}, "Key"},
		"long key":              {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Key: strings.Repeat("k", 5000)}}}, "5000 bytes"},
		"destination exchange":  {topology{Bindings: []declare.Binding{{Source: "x", Exchange: ".."}}}, "Exchange"},
		"unknown match":         {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Match: "some"}}}, "Match"},
		"any of nothing":        {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Match: declare.MatchAny}}}, "matches no message"},
		"x- without with-x":     {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Match: declare.MatchAll, Headers: map[string]any{"x-a": 1}}}}, "MatchAllWithX"},
		"x-match header":        {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Headers: map[string]any{"x-match": "all"}}}}, "it belongs in Match"},
		"x-match argument":      {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Arguments: map[string]any{"x-match": "all"}}}}, "it belongs in Match"},
		"header twice":          {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Headers: map[string]any{"a": 1}, Arguments: map[string]any{"a": 1}}}}, "it is also Headers"},
		"map, two bindings out": {topology{Bindings: []declare.Binding{{Source: "x", Queue: "q", Headers: map[string]any{"a": map[string]any{"b": 1, "c": 2}}}}}, "list of these"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fakeBroker{}
			report, err := declare.Apply(context.Background(), f, tt.topology)
			var e *argument.Error
			require.ErrorAs(t, err, &e)
			assert.ErrorContains(t, err, tt.says)
			assert.EqualError(t, tt.topology.Validate(), err.Error())
			assert.Empty(t, report.Steps)
			assert.Empty(t, f.requests)
		})
	}
}

func TestMerge(t *testing.T) {
	t.Parallel()
	twice, err := declare.Merge(shop(), shop(), declare.Topology{
		Bindings: []declare.Binding{{Source: "shop", Queue: "orders", Key: "order.*", Arguments: map[string]any{"x-a": 1}}},
	})
	require.NoError(t, err)
	assert.Equal(t, shop().Exchanges, twice.Exchanges)
	assert.Equal(t, shop().Queues, twice.Queues)
	assert.Len(t, twice.Bindings, 3, "other arguments make another binding")

	// The same number in another type is the same declaration.
	a := declare.Topology{Exchanges: []declare.Exchange{{Name: "x", Arguments: map[string]any{"n": 1}}}}
	b := declare.Topology{Exchanges: []declare.Exchange{{Name: "x", Type: declare.ExchangeDirect, Arguments: map[string]any{"n": int64(1)}}}}
	merged, err := declare.Merge(a, b)
	require.NoError(t, err)
	assert.Len(t, merged.Exchanges, 1)

	// A value that isn't finished yet may be merged; Validate says what is missing.
	unfinished := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q"}}}
	merged, err = declare.Merge(unfinished, unfinished)
	require.NoError(t, err)
	assert.Len(t, merged.Queues, 1)
	assert.Error(t, merged.Validate())

	_, err = declare.Merge(shop(), declare.Topology{Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}}})
	var e *argument.Error
	require.ErrorAs(t, err, &e)
	assert.ErrorContains(t, err, `alternate-exchange is "lost", then not set`)
}

func TestApplyConflictLetsItsKindFinish(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		return 409, "inequivalent arg 'x-message-ttl' for queue 'orders' in vhost '/': received '2000' but current is '1000'", nil, s.path == "/queues/orders"
	}}
	report, err := declare.Apply(context.Background(), f, shop())
	require.ErrorIs(t, err, declare.ErrConflict)
	var e *declare.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, declare.Resource{Kind: "queue", Name: "orders"}, e.Resource)
	assert.Equal(t, 409, e.Status)
	assert.Equal(t, &declare.Conflict{Argument: "x-message-ttl", Wanted: declare.Setting{Value: "2000", Set: true}, Found: declare.Setting{Value: "1000", Set: true}}, e.Conflict)
	assert.EqualError(t, e, `hopback: declare queue "orders": it exists with different settings: x-message-ttl: the broker has "1000", declared is "2000" (status 409); remedies: declare it as it exists; or declare it under a new name and move the messages, as package operate/migrate does; or delete it once it is empty and unused, and run this again`)
	assert.Equal(t, []string{"declared", "declared", "refused", "created", "not tried", "not tried"}, outcomes(report))
	assert.Contains(t, report.String(), "refused   queue \"orders\": hopback: declare")
	assert.Contains(t, report.String(), "not tried binding")
}

// A refusal that can be seen beforehand leaves nothing behind.
func TestARefusedApplyDeclaresNothing(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{things: map[string]any{}, intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		switch s.String() {
		case "GET /queues/orders":
			return 200, map[string]any{"name": "orders", "type": "quorum", "durable": true, "message_count": 0, "consumer_count": 0, "arguments": map[string]any{"x-queue-type": "quorum", "x-message-ttl": 1000}}, nil, true
		case "PUT /queues/orders":
			return 409, "inequivalent arg 'x-message-ttl' for queue 'orders' in vhost '/': received none but current is the value '1000' of type 'long'", nil, true
		}
		return 0, nil, nil, false
	}}
	top := shop()
	top.Bindings = append(top.Bindings, declare.Binding{Source: "shop", Queue: "nowhere", Key: "#"})
	report, err := declare.Apply(context.Background(), f, top)
	require.ErrorIs(t, err, declare.ErrConflict)
	require.ErrorIs(t, err, declare.ErrNotFound)
	assert.ErrorContains(t, err, `queue "nowhere" doesn't exist and isn't in the topology`)
	assert.Empty(t, f.things, "nothing was declared")
	assert.Equal(t, 2, report.Count("refused"))
	assert.Equal(t, 5, report.Count("not tried"))
	assert.Len(t, report.Steps, 7)
}

func TestApplyTypesRefusals(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		status int
		text   any
		want   error
	}{
		{409, "inequivalent arg 'durable' for queue 'q' in vhost '/': received 'true' but current is 'false'", declare.ErrConflict},
		{409, "something new", declare.ErrConflict},
		{409, "invalid arg 'x-expires' for queue 'q' in vhost '/': {value_zero,0}", declare.ErrInvalid},
		{400, "cannot obtain exclusive access to locked queue 'q' in vhost '/'. It could be originally declared on another connection", declare.ErrConflict},
		{400, "no queue 'q' in vhost '/'", declare.ErrNotFound},
		{400, "no exchange 'x' in vhost '/'", declare.ErrNotFound},
		{404, "queue 'q' in vhost '/' not found", declare.ErrNotFound},
		{403, "queue 'amq.q' in vhost '/' starts with reserved prefix 'amq.'", declare.ErrForbidden},
		{400, "unknown exchange type 'x-nope'", declare.ErrInvalid},
		{400, nil, declare.ErrInvalid},
		{400, 7, declare.ErrInvalid},
		{503, "timed out", declare.ErrUnavailable},
		{400, notFormed, declare.ErrUnavailable},
		{400, "no such thing: 'cluster_not_formed'", declare.ErrInvalid},
		{0, nil, declare.ErrBadReply},
		{-1, "?", declare.ErrBadReply},
		{100, "?", declare.ErrBadReply},
		{302, "?", declare.ErrBadReply},
		{999, "?", declare.ErrBadReply},
	} {
		f := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) { return tt.status, tt.text, nil, true }}
		_, err := declare.Apply(context.Background(), f, declare.Topology{Exchanges: []declare.Exchange{{Name: "x"}}})
		assert.ErrorIs(t, err, tt.want, "%d %v", tt.status, tt.text)
		var e *declare.Error
		require.ErrorAs(t, err, &e)
		assert.True(t, e.SafeToRetry())
		if text, ok := tt.text.(string); ok {
			assert.Equal(t, text, e.Text)
		}
	}
}

func TestErrorTextIsBounded(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) {
		return 400, strings.Repeat("\xff\n", 1<<20), nil, true
	}}
	_, err := declare.Apply(context.Background(), f, declare.Topology{Exchanges: []declare.Exchange{{Name: "x"}}})
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 3000)
	assert.NotContains(t, err.Error(), "\n")
}

// A request that isn't permitted ends the session for all requests in flight.
func TestApplyFindsTheOneThatKillsTheSession(t *testing.T) {
	t.Parallel()
	var top declare.Topology
	for i := range 50 {
		top.Queues = append(top.Queues, declare.QuorumQueue{Name: fmt.Sprintf("q%d", i), DeadLetter: declare.Drop()})
	}
	full := make(chan struct{})
	var puts atomic.Int64
	f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		if s.method == "GET" && puts.Load() == 0 {
			return 404, "queue not found", nil, true
		}
		// The first sixteen are in flight at once, and fail together.
		n := puts.Add(1)
		if n == 16 {
			close(full)
		}
		<-full
		return 0, nil, errDied, n <= 16 || s.path == "/queues/q30"
	}}
	report, err := declare.Apply(context.Background(), f, top)
	require.ErrorIs(t, err, declare.ErrNoReply)
	require.ErrorIs(t, err, errDied)
	assert.EqualError(t, err, `hopback: declare queue "q30": no reply: the session died`)
	assert.Equal(t, 30, report.Count("created"))
	assert.Equal(t, "unknown", report.Steps[30].Result)
	assert.Equal(t, "not tried", report.Steps[49].Result)
}

func TestApplyRepeatsWhatALostSessionLeft(t *testing.T) {
	t.Parallel()
	for lost := 1; lost <= 2; lost++ {
		var mu sync.Mutex
		seen := map[string]int{}
		f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
			mu.Lock()
			defer mu.Unlock()
			seen[s.String()]++
			return 0, nil, errDied, s.path != "/bindings" && seen[s.String()] <= lost
		}}
		report, err := declare.Apply(context.Background(), f, shop())
		require.NoError(t, err)
		assert.Equal(t, 4, report.Count("declared"))
		assert.Equal(t, 2, report.Count("created"))
		for _, s := range report.Steps {
			assert.NoError(t, s.Err)
		}
	}
}

// A queue that is exclusive to another connection looks as if it had been declared, and is refused.
func TestApplyRepeatsAnExclusiveQueueWithoutAsking(t *testing.T) {
	t.Parallel()
	q := declare.RawQueue{Name: "mine", Exclusive: true, Arguments: map[string]any{"x-queue-type": "classic"}}
	f := &fakeBroker{intercept: func(_ context.Context, n int, s sent) (int, any, error, bool) {
		switch {
		case s.method == "GET":
			return 200, map[string]any{"name": "mine", "type": "classic", "exclusive": true, "durable": false, "auto_delete": false, "arguments": q.Arguments, "message_count": uint64(0), "consumer_count": uint64(0)}, nil, true
		case n == 1:
			return 0, nil, errDied, true
		}
		return 400, "cannot obtain exclusive access to locked queue 'mine' in vhost '/'. It could be originally declared on another connection", nil, true
	}}
	_, err := declare.Apply(context.Background(), f, declare.Topology{Queues: []declare.Queue{q}})
	require.ErrorIs(t, err, declare.ErrConflict)
}

const notFormed = "Cannot declare quorum queue 'orders' in vhost '/' on node 'rabbit@localhost' with leader on node 'rabbit@localhost': cluster_not_formed"

// A busy broker gives up on quorum queues that have no leader in time. They are declared
// again, and nothing else is.
func TestApplyRepeatsQueuesThatABusyBrokerGaveUp(t *testing.T) {
	t.Parallel()
	for _, failures := range []int{0, 1, 5, 6} {
		var mu sync.Mutex
		seen := map[string]int{}
		f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
			mu.Lock()
			defer mu.Unlock()
			seen[s.String()]++
			return 400, notFormed, nil, s.method == "PUT" && s.path == "/queues/orders" && seen[s.String()] <= failures
		}}
		report, err := declare.Apply(context.Background(), f, shop())
		for request, n := range seen {
			if strings.HasPrefix(request, "PUT") && !strings.Contains(request, "/queues/orders") {
				assert.Equal(t, 1, n, request)
			}
		}
		if failures <= 5 {
			require.NoError(t, err, failures)
			assert.Equal(t, 2, report.Count("created"))
			assert.Equal(t, 4, report.Count("declared"))
			continue
		}
		require.ErrorIs(t, err, declare.ErrUnavailable)
		assert.Equal(t, 1, report.Count("refused"))
		assert.Positive(t, report.Count("not tried"), "the bindings wait for their queues")
	}
}

func TestApplyGivesUpOnADeadRequester(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) { return 0, nil, errDied, true }}
	report, err := declare.Apply(context.Background(), f, shop())
	require.ErrorIs(t, err, errDied)
	// At most a look at each queue, each exchange at the same time, and the first alone.
	assert.LessOrEqual(t, len(f.requests), 2+2+5, "%v", f.requests)
	assert.GreaterOrEqual(t, report.Count("not tried"), 4, report)
}

func TestApplyStopsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("shutting down")
	f := &fakeBroker{}
	f.intercept = func(ctx context.Context, _ int, s sent) (int, any, error, bool) {
		if s.path != "/queues/orders" || s.method == "GET" {
			return 0, nil, nil, false
		}
		cancel(why)
		<-ctx.Done()
		return 0, nil, ctx.Err(), true
	}
	report, err := declare.Apply(ctx, f, shop())
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, 2, report.Count("declared"))
	assert.Equal(t, "unknown", report.Steps[2].Result)
	assert.Equal(t, "not tried", report.Steps[5].Result)

	f.intercept = nil
	report, err = declare.Apply(context.Background(), f, shop())
	require.NoError(t, err, "it can be run again")
	assert.Zero(t, report.Count("not tried"))
}

func TestApplyBetweenRequests(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("shutting down")
	f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		if s.method != "PUT" {
			return 0, nil, nil, false
		}
		if strings.HasPrefix(s.path, "/queues/") {
			cancel(why)
		}
		return 201, nil, nil, true
	}}
	report, err := declare.Apply(ctx, f, shop())
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, why)
	assert.Positive(t, report.Count("created"))
	assert.Positive(t, report.Count("not tried"))

	ended := &fakeBroker{}
	report, err = declare.Apply(ctx, ended, shop())
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, 6, report.Count("not tried"))
	assert.Empty(t, ended.requests)

	_, err = declare.Apply(ctx, ended, declare.Topology{})
	assert.NoError(t, err, "nothing to do is done")
}

func TestApplyBoundsWhatIsInFlight(t *testing.T) {
	t.Parallel()
	var top declare.Topology
	for i := range 200 {
		top.Queues = append(top.Queues, declare.QuorumQueue{Name: fmt.Sprintf("q%d", i), DeadLetter: declare.Drop()})
	}
	full := make(chan struct{})
	var mu sync.Mutex
	waiting := 0
	f := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) {
		mu.Lock()
		if waiting++; waiting == 16 {
			close(full) // sixteen are in flight at once: only then continue
		}
		mu.Unlock()
		<-full
		return 0, nil, nil, false
	}}
	report, err := declare.Apply(context.Background(), f, top)
	require.NoError(t, err)
	assert.Equal(t, 200, report.Count("created"))
	assert.Equal(t, 16, f.most)
}

func TestApplyFromManyProcesses(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{}
	top := shop()
	var wg sync.WaitGroup
	reports := make([]declare.Report, 20)
	for i := range reports {
		wg.Go(func() {
			var err error
			reports[i], err = declare.Apply(context.Background(), f, top)
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	created := 0
	for _, r := range reports {
		created += r.Count("created")
	}
	assert.Equal(t, 2, created, "one of them creates each queue")
}

func TestNoRequester(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	_, apply := declare.Apply(ctx, nil, declare.Topology{})
	_, del := declare.Delete(ctx, nil, declare.Topology{})
	_, inspect := declare.Inspect(ctx, nil, "q")
	for _, err := range []error{apply, del, inspect, declare.DeleteExchange(ctx, nil, "x")} {
		var e *argument.Error
		assert.ErrorAs(t, err, &e)
	}
}

func TestAnEmptyReportIsEmpty(t *testing.T) {
	t.Parallel()
	assert.Empty(t, declare.Report{}.String())
}

// The session ends in place of a reply, which must not be the first thing to read.
func TestAMissingPermissionIsSaidFirst(t *testing.T) {
	t.Parallel()
	refusal := errors.New("hopback: manage PUT /queues/q: permission refused: configure access to queue 'q' in vhost '/' refused for user 'u'")
	f := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) { return 0, nil, refusal, true }}
	_, err := declare.Apply(context.Background(), f, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
	require.ErrorIs(t, err, declare.ErrNoReply)
	assert.EqualError(t, err, `hopback: declare queue "q": a permission is missing: `+refusal.Error())
}

// A missing permission ends the session for all requests in flight. Those are repeated, and
// the one is reported as refused, once.
func TestAMissingPermissionIsRefusedOnce(t *testing.T) {
	t.Parallel()
	refusal := errors.New("hopback: manage PUT /queues/q3: permission refused: configure access to queue 'q3' in vhost '/' refused for user 'u'")
	var top declare.Topology
	for i := range 8 {
		top.Queues = append(top.Queues, declare.QuorumQueue{Name: fmt.Sprintf("q%d", i), DeadLetter: declare.Drop()})
	}
	var puts atomic.Int64
	full := make(chan struct{})
	f := &fakeBroker{intercept: func(_ context.Context, _ int, s sent) (int, any, error, bool) {
		if s.method != "PUT" {
			return 0, nil, nil, false
		}
		n := puts.Add(1)
		if n == 8 {
			close(full)
		}
		<-full
		return 0, nil, refusal, n <= 8 || s.path == "/queues/q3"
	}}
	report, err := declare.Apply(context.Background(), f, top)
	assert.EqualError(t, err, `hopback: declare queue "q3": a permission is missing: `+refusal.Error())
	assert.Equal(t, "refused", report.Steps[3].Result)
	assert.Equal(t, 7, report.Count("created"))
	assert.Equal(t, 1, strings.Count(report.String(), "a permission is missing"))
}

func TestReportMarshals(t *testing.T) {
	t.Parallel()
	f := replies(403, "not permitted")
	report, err := declare.Apply(context.Background(), f, shop())
	require.Error(t, err)
	text, err := json.Marshal(report)
	require.NoError(t, err)
	assert.Contains(t, string(text), `{"resource":{"kind":"exchange","name":"shop"},"result":"refused","error":"hopback: declare exchange \"shop\": forbidden`)
}
