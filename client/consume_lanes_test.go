package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// startOrdered is startConsumer with lanes by the first letter of the message-id; "-"
// is of no lane.
func startOrdered(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc) *testConsumer {
	return startOrderedBy(b, cfg, h, func(d *Delivery) (string, bool) {
		id := linktest.IDOf(d.Message())
		if strings.HasPrefix(id, "!") {
			panic("a key that can't be told")
		}
		return id[:1], id[0] != '-'
	})
}

// startOrderedBy is startConsumer with lanes by key.
func startOrderedBy(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc, key func(*Delivery) (string, bool)) *testConsumer {
	cfg, err := cfg.withDefaults()
	require.NoError(b.T, err)
	k := newConsumer("q", "/queues/q", h, cfg, asked{order: key}, nil, consumerDeps{Sessions: b, Backoff: testBackoff, Log: quiet, Queues: fakeQueue{b: b}})
	ctx, stop := context.WithCancel(context.Background())
	b.T.Cleanup(stop)
	return &testConsumer{k, stop, async(func() error { return k.run(ctx) })}
}

func TestDeliveriesOfOneKeyAreHandedOverInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var want = map[string][]string{}
		for i := range 300 {
			id := fmt.Sprintf("%c%03d", "abc"[i%3], i)
			want[id[:1]] = append(want[id[:1]], id)
			b.Publish(id)
		}
		var mu sync.Mutex
		got, now := map[string][]string{}, map[string]bool{}
		k := startOrdered(b, ConsumerConfig{Concurrency: 8}, func(_ context.Context, d *Delivery) error {
			id := linktest.IDOf(d.Message())
			mu.Lock()
			assert.False(t, now[id[:1]], "two of a key at once")
			now[id[:1]] = true
			got[id[:1]] = append(got[id[:1]], id)
			mu.Unlock()
			time.Sleep(time.Millisecond)
			mu.Lock()
			now[id[:1]] = false
			mu.Unlock()
			return nil
		})
		time.Sleep(time.Minute)
		require.NoError(t, k.end())
		assert.Equal(t, want, got)
	})
}

func TestABusyKeyTakesOneSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		for i := range 10 {
			b.Publish(fmt.Sprintf("a%d", i))
		}
		b.Publish("b0", "-1", "-2", "!3")
		k := startOrdered(b, ConsumerConfig{Concurrency: 2}, func(_ context.Context, d *Delivery) error {
			if linktest.IDOf(d.Message())[0] == 'a' {
				time.Sleep(time.Hour)
			}
			return nil
		})
		time.Sleep(time.Minute)
		assert.ElementsMatch(t, []string{"accept b0", "accept -1", "accept -2"}, b.History("accept"))
		assert.Len(t, b.History("dead-letter"), 1, "the one whose key isn't known isn't handled next to others")
		time.Sleep(10 * time.Hour)
		assert.Len(t, b.History("accept a"), 10)
		require.NoError(t, k.end())
	})
}

func TestWhatWaitsInALaneGoesBackInItsOrder(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		for _, how := range []string{"drain", "pause"} {
			t.Run(version+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := linktest.NewFakeBroker(t)
					b.Version = version
					ids := []string{"a0", "a1", "b0", "a2", "b1"}
					b.Publish(ids...)
					control := &Control{}
					k := startOrdered(b, ConsumerConfig{Concurrency: 1, Control: control, Grace: 30 * time.Second}, func(context.Context, *Delivery) error {
						time.Sleep(4 * time.Second)
						return nil
					})
					time.Sleep(time.Second)
					if how == "pause" {
						resume := control.Pause()
						synctest.Wait()
						if version == "4.3.0" {
							assert.Equal(t, []string{"release a1", "release b0", "release a2", "release b1"}, b.History("release"))
						}
						resume()
						time.Sleep(10 * time.Minute)
					}
					require.NoError(t, k.end())
					gone := b.History("release", "accept", "requeue")
					assert.Len(t, gone, len(ids), "all that is unsettled is settled")
					a1, a2 := slices.Index(gone, "release a1"), slices.Index(gone, "release a2")
					if a1 >= 0 && a2 >= 0 {
						assert.Less(t, a1, a2)
					}
				})
			})
		}
	}
}

func TestALaneContinuesWithAnyHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("a0", "a1", "a2", "a3")
		k := startOrdered(b, ConsumerConfig{Concurrency: 2}, func(_ context.Context, d *Delivery) error {
			switch linktest.IDOf(d.Message()) {
			case "a0":
				panic("boom")
			case "a1":
				return DeadLetter{Reason: "bad"}
			case "a2":
				return Modify{DeadLetter: true}
			}
			return nil
		})
		synctest.Wait()
		assert.Len(t, b.History("dead-letter"), 3)
		assert.Equal(t, []string{"accept a3"}, b.History("accept"))
		require.NoError(t, k.end())
	})
}
