package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// Forwards share a session, and all their links leave it when it is worn out.
func TestForwardsReplaceTheirSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		k := startConsumer(b, ConsumerConfig{Concurrency: 4}, func(ctx context.Context, d *Delivery) error {
			return forwards(fmt.Sprintf("q%d", len(linktest.IDOf(d.Message()))%2))(ctx, d)
		})
		b.Mu.Lock()
		b.RenewAfter = 7
		b.Mu.Unlock()
		b.Publish(linktest.Numbered("m", 60)...)
		time.Sleep(time.Minute)
		assert.Greater(t, len(b.History("open session")), 9)
		require.NoError(t, k.end())
		b.Mu.Lock()
		defer b.Mu.Unlock()
		assert.Len(t, b.Stored, 60)
		for id, n := range b.Stored {
			assert.Equal(t, 1, n, id)
		}
		assert.Empty(t, b.Sessions)
	})
}

// A consumer's session is replaced when all that came over it is settled, so that
// nothing is requeued, and each message is delivered once.
func TestConsumerReplacesItsSessionWithNothingUnsettled(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version, b.RenewAfter, b.Requeues = version, 20, true
				ids := linktest.Numbered("m", 100)
				b.Publish(ids...)
				var order []string
				k := startConsumer(b, ConsumerConfig{Prefetch: 7}, func(_ context.Context, d *Delivery) error {
					order = append(order, linktest.IDOf(d.Message()))
					assert.Zero(t, d.DeliveryCount())
					time.Sleep(time.Second)
					return nil
				})
				time.Sleep(3 * time.Minute)
				require.NoError(t, k.end())
				assert.Equal(t, ids, order)
				assert.Empty(t, b.History("release", "requeue"))
				assert.GreaterOrEqual(t, len(b.History("open session")), 4)
				var last string
				for _, e := range b.History("close") {
					assert.NotEqual(t, last, e)
					assert.Equal(t, e == "close session", last == "close receiver", "the link is closed before its session")
					last = e
				}
				b.Mu.Lock()
				defer b.Mu.Unlock()
				assert.Equal(t, 1, b.MostSessions)
			})
		})
	}
}

// A handler that runs for long holds the replacement up, and not the other handlers,
// until there are no delivery-ids left to go on with.
func TestLongHandlerDelaysTheReplacementOfASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.RenewAfter = 40
		var ids []string
		for i := range 300 {
			ids = append(ids, fmt.Sprintf("m%d", i))
		}
		b.Publish(append([]string{"long"}, ids...)...)
		freed := make(chan struct{})
		k := startConsumer(b, ConsumerConfig{Concurrency: 2, Prefetch: 4, Grace: 5 * time.Second}, func(ctx context.Context, d *Delivery) error {
			if linktest.IDOf(d.Message()) == "long" && !slices.Contains(b.History(), "freed") {
				<-freed
				b.Note("freed")
				return nil
			}
			time.Sleep(4 * time.Second)
			return nil
		})
		time.Sleep(40*4*time.Second + 15*time.Second)
		before := len(b.History("accept"))
		assert.Len(t, b.History("open session"), 1, "it continues with the session that it has")
		time.Sleep(40 * time.Second)
		assert.Greater(t, len(b.History("accept")), before, "and with the others' messages")
		time.Sleep(4 * time.Minute)
		assert.Greater(t, len(b.History("open session")), 1, "in the end it must go")
		close(freed)
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		accepted := b.History("accept")
		assert.Len(t, accepted, 301)
		assert.Equal(t, 1, strings.Count(strings.Join(accepted, "\n"), "accept long"), "not settled on a link that is gone")
	})
}
