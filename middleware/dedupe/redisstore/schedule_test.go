package redisstore_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/middleware/dedupe/redisstore"
	"github.com/hopback/hopback/schedule"
)

// What one process cancels, another sees, up to a year ahead. Asking leaves nothing behind.
func TestMessagesAreCancelledInRedis(t *testing.T) {
	t.Parallel()
	rdb := redisClient(t)
	one := schedule.OnDedupe(redisstore.New(rdb, redisstore.Config{Prefix: t.Name()}))
	other := schedule.OnDedupe(redisstore.New(redisClient(t), redisstore.Config{Prefix: t.Name()}))
	is, err := schedule.Cancel(t.Context(), one, schedule.Scheduled{ID: "a", Due: time.Now().Add(365 * 24 * time.Hour)})
	require.NoError(t, err)
	assert.True(t, is)
	for id, want := range map[string]bool{"a": true, "b": false} {
		canceled, err := other.Canceled(t.Context(), id)
		require.NoError(t, err)
		assert.Equal(t, want, canceled, id)
	}
	keys, err := rdb.Keys(t.Context(), t.Name()+"*").Result()
	require.NoError(t, err)
	require.Len(t, keys, 1)
	left, err := rdb.PTTL(t.Context(), keys[0]).Result()
	require.NoError(t, err)
	assert.Greater(t, left, 365*24*time.Hour)
}
