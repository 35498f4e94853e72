package declare_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
)

// parallelBroker is a Requester that can use several sessions, as client.Management can.
type parallelBroker struct {
	fakeBroker
	asked, done, spread atomic.Int64
}

func (p *parallelBroker) Parallel(n int) (request func(ctx context.Context, method, path string, body any) (int, any, error), done func()) {
	p.asked.Store(int64(n))
	return func(ctx context.Context, method, path string, body any) (int, any, error) {
		p.spread.Add(1)
		return p.Request(ctx, method, path, body)
	}, func() { p.done.Add(1) }
}

// Many declarations and deletions use several sessions, kind after kind, and the sessions are closed. A few don't.
func TestApplyOfManyUsesSeveralSessions(t *testing.T) {
	t.Parallel()
	few := &parallelBroker{}
	_, err := declare.Apply(context.Background(), few, shop())
	require.NoError(t, err)
	assert.Zero(t, few.asked.Load())

	const n = 50
	all := shop()
	for i := range n {
		name := fmt.Sprintf("queue-%d", i)
		all.Queues = append(all.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.ToQueue("dead")})
		all.Bindings = append(all.Bindings, declare.Binding{Source: "shop", Queue: name, Key: name})
	}
	many := &parallelBroker{}
	report, err := declare.Apply(context.Background(), many, all)
	require.NoError(t, err)
	assert.EqualValues(t, 8, many.asked.Load())
	assert.EqualValues(t, 1, many.done.Load())
	assert.EqualValues(t, len(many.requests), many.spread.Load(), "all requests")
	assert.Len(t, report.Steps, 2+2+n+2+n)
	phases := []string{"GET /queues/", "PUT /exchanges/", "PUT /queues/", "POST /bindings"}
	at := 0
	for _, s := range many.sentPaths() {
		phase := slices.IndexFunc(phases, func(p string) bool { return strings.HasPrefix(s, p) })
		if strings.HasPrefix(s, "GET /bindings") {
			continue
		}
		require.GreaterOrEqual(t, phase, at, s)
		at = phase
	}
	assert.Equal(t, len(phases)-1, at)

	gone := &parallelBroker{}
	_, err = declare.Delete(context.Background(), gone, all)
	require.NoError(t, err)
	assert.EqualValues(t, 8, gone.asked.Load())
	assert.EqualValues(t, 1, gone.done.Load())
	assert.EqualValues(t, len(gone.requests), gone.spread.Load(), "all requests")
}

// In any order of the requests, the errors are in the order of the topology, and a
// refused queue keeps bindings from being declared.
func TestErrorsOfManyAreInOrder(t *testing.T) {
	t.Parallel()
	all := shop()
	for i := range 50 {
		all.Queues = append(all.Queues, declare.QuorumQueue{Name: fmt.Sprintf("queue-%02d", i), DeadLetter: declare.ToQueue("dead")})
	}
	var texts []string
	for range 20 {
		b := &parallelBroker{}
		b.intercept = func(_ context.Context, _ int, s sent) (int, any, error, bool) {
			return 409, "no", nil, s.method == "PUT" && (strings.HasSuffix(s.path, "7"))
		}
		report, err := declare.Apply(context.Background(), b, all)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.Equal(t, 2, report.Count("not tried"), "the bindings")
		texts = append(texts, err.Error())
	}
	assert.Len(t, slices.Compact(texts), 1)
	assert.Less(t, strings.Index(texts[0], "queue-07"), strings.Index(texts[0], "queue-47"))
}
