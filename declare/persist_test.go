package declare_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

func TestPersistDeclaresAQueueAndDeletesIt(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{}
	require.NoError(t, declare.Persist(context.Background(), f, "team-a."))
	got := f.sentPaths()
	require.Len(t, got, 2)
	assert.True(t, strings.HasPrefix(got[0], "PUT /queues/team-a."), got[0])
	assert.Equal(t, strings.TrimPrefix(got[0], "PUT"), strings.TrimPrefix(got[1], "DELETE"))
	assert.Empty(t, f.things)

	// Without an answer it takes another name: the first queue may be there.
	lost := &fakeBroker{}
	lost.intercept = func(_ context.Context, n int, s sent) (int, any, error, bool) {
		if n == 1 {
			_, _, _ = lost.answer(s)
			return 0, nil, errDied, true
		}
		return 0, nil, nil, false
	}
	require.NoError(t, declare.Persist(context.Background(), lost, "team-a."))
	got = lost.sentPaths()
	require.Len(t, got, 3)
	assert.NotEqual(t, got[0], got[1])

	refusal := errors.New("configure access to queue refused for user 'u'")
	forbidden := &fakeBroker{intercept: func(context.Context, int, sent) (int, any, error, bool) { return 0, nil, refusal, true }}
	require.ErrorIs(t, declare.Persist(context.Background(), forbidden, "team-a."), refusal)
	assert.Len(t, forbidden.requests, 1)

	for _, prefix := range []string{"", "\xff", strings.Repeat("x", 250)} {
		var bad *argument.Error
		require.ErrorAs(t, declare.Persist(context.Background(), f, prefix), &bad, "%q", prefix)
	}
	assert.Len(t, f.requests, 2)
	var bad *argument.Error
	require.ErrorAs(t, declare.Persist(context.Background(), nil, "x"), &bad)
}
