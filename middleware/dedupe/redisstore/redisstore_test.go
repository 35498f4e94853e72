package redisstore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/dedupe/redisstore"
)

var server *service.Service

func TestMain(m *testing.M) {
	var err error
	if server, err = service.Redis(context.Background(), os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = server.Close()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func redisClient(t *testing.T) *redis.Client {
	t.Helper()
	options, err := redis.ParseURL(server.URL)
	require.NoError(t, err)
	rdb := redis.NewClient(options)
	t.Cleanup(func() { assert.NoError(t, rdb.Close()) })
	return rdb
}

// For any sequence of calls, the store returns what the one in memory returns.
func TestStoreDoesWhatTheOneInMemoryDoes(t *testing.T) {
	t.Parallel()
	store, memory := redisstore.New(redisClient(t), redisstore.Config{Prefix: t.Name()}), dedupe.NewMemory(0)
	r := rand.New(rand.NewPCG(1, 2))
	ctx := t.Context()
	for i := range 3000 {
		key, owner := fmt.Sprint("k", r.IntN(20)), fmt.Sprint("o", r.IntN(3))
		switch r.IntN(4) {
		case 0, 1:
			want, err := memory.Claim(ctx, key, owner, time.Hour)
			require.NoError(t, err)
			got, err := store.Claim(ctx, key, owner, time.Hour)
			require.NoError(t, err)
			require.Equal(t, want, got, i)
			kept, err := memory.Renew(ctx, key, owner, time.Hour)
			require.NoError(t, err)
			renewed, err := store.Renew(ctx, key, owner, time.Hour)
			require.NoError(t, err)
			require.Equal(t, kept, renewed, i)
		case 2:
			require.NoError(t, memory.Release(ctx, key, owner))
			require.NoError(t, store.Release(ctx, key, owner))
		case 3:
			if r.IntN(10) == 0 {
				require.NoError(t, memory.Done(ctx, key, owner, time.Hour))
				require.NoError(t, store.Done(ctx, key, owner, time.Hour))
			}
		}
	}
}

func TestClaimsAndMarksExpire(t *testing.T) {
	t.Parallel()
	rdb := redisClient(t)
	store := redisstore.New(rdb, redisstore.Config{Prefix: "expiry:"})
	ctx := t.Context()
	state, err := store.Claim(ctx, "a", "one", time.Minute)
	require.NoError(t, err)
	require.Equal(t, dedupe.StateClaimed, state)
	ttl, err := rdb.PTTL(ctx, "expiry:a").Result()
	require.NoError(t, err)
	assert.InDelta(t, time.Minute.Seconds(), ttl.Seconds(), 30)
	_, err = store.Renew(ctx, "a", "one", time.Hour)
	require.NoError(t, err)
	ttl, err = rdb.PTTL(ctx, "expiry:a").Result()
	require.NoError(t, err)
	assert.InDelta(t, time.Hour.Seconds(), ttl.Seconds(), 60)
	require.NoError(t, store.Done(ctx, "a", "one", 24*time.Hour))
	ttl, err = rdb.PTTL(ctx, "expiry:a").Result()
	require.NoError(t, err)
	assert.InDelta(t, 24*time.Hour.Seconds(), ttl.Seconds(), 60)

	_, err = store.Claim(ctx, "b", "one", time.Millisecond)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		state, err := store.Claim(ctx, "b", "two", time.Nanosecond)
		return err == nil && state == dedupe.StateClaimed
	}, 10*time.Second, time.Millisecond)
}

// Two workers, each with its own client, share what they have handled.
func TestTwoWorkersHandleEachMessageOnce(t *testing.T) {
	t.Parallel()
	b := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	var mu sync.Mutex
	handled := map[string]int{}
	var duplicates atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	var workers sync.WaitGroup
	for range 2 {
		once := dedupe.With(dedupe.Config{Store: redisstore.New(redisClient(t), redisstore.Config{Prefix: t.Name()}), OnDuplicate: func(*client.Delivery) { duplicates.Add(1) }})
		workers.Go(func() {
			assert.NoError(t, conn.Consume(ctx, "orders", once(client.JSON(func(_ context.Context, id string) error {
				mu.Lock()
				defer mu.Unlock()
				handled[id]++
				return nil
			})), client.ConsumerConfig{Concurrency: 4}))
		})
	}
	p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	const n = 200
	for i := range 2 * n {
		id := fmt.Sprint(i / 2)
		require.NoError(t, p.Publish(t.Context(), id, func(m *client.Message) { m.Properties.MessageID = id }))
	}
	require.Eventually(t, func() bool { return duplicates.Load() == n }, 3*time.Minute, 5*time.Millisecond)
	cancel()
	workers.Wait()
	assert.Len(t, handled, n)
	for id, times := range handled {
		assert.Equal(t, 1, times, id)
	}
}

// What was marked is still marked after Redis was killed.
func TestMarksSurviveAKill(t *testing.T) {
	t.Parallel()
	own, err := service.Redis(t.Context(), os.Stderr)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, own.Close()) })
	options, err := redis.ParseURL(own.URL)
	require.NoError(t, err)
	rdb := redis.NewClient(options)
	t.Cleanup(func() { assert.NoError(t, rdb.Close()) })
	store := redisstore.New(rdb, redisstore.Config{})
	require.NoError(t, store.Done(t.Context(), "a", "one", time.Hour))
	require.NoError(t, own.Kill())
	_, err = store.Claim(t.Context(), "a", "two", time.Minute)
	require.Error(t, err, "it isn't there: the message is not handled, unless Config.FailOpen")
	require.NoError(t, own.Start(t.Context()))
	state, err := store.Claim(t.Context(), "a", "two", time.Minute)
	require.NoError(t, err)
	assert.Equal(t, dedupe.StateDone, state)
}

func TestBadConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	var bad *argument.Error
	_, err := redisstore.New(nil, redisstore.Config{}).Claim(t.Context(), "a", "b", time.Second)
	assert.ErrorAs(t, err, &bad)
	_, err = redisstore.New((*redis.Client)(nil), redisstore.Config{}).Renew(t.Context(), "a", "b", time.Second)
	assert.ErrorAs(t, err, &bad)
	err = redisstore.New(redisClient(t), redisstore.Config{Prefix: strings.Repeat("x", 201)}).Done(t.Context(), "a", "b", time.Second)
	assert.ErrorAs(t, err, &bad)
}
