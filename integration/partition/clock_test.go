package partition_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// The clock of a message's first worker is ten minutes off. Its successor neither gives the message up
// for that, nor tries it before its delay is over.
func TestAWorkersClockIsOff(t *testing.T) {
	for name, off := range map[string]time.Duration{"behind": -600 * time.Second, "ahead": 600 * time.Second} {
		t.Run(name, func(t *testing.T) {
			suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
				if !s.Newer() {
					return
				}
				const delay = 8 * time.Second
				conn, _ := s.Connect(t)
				g := partition.Group{Name: "clocks", Partitions: 1}
				suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
				publishing(t, conn, g.Address("a"), nil, "a1")
				var mu sync.Mutex
				var failed time.Time
				failing := make(chan struct{})
				cfg := partition.Config{Retry: retry.Policy{MaxRetries: 5, GiveUpAfter: 5 * time.Minute, Backoff: retry.Exponential(delay, 1)}}
				ctx, stop := context.WithCancel(brokerclock.WithOwnClock(t.Context(), func() time.Time { return time.Now().Add(off) }))
				defer stop()
				ended := make(chan error, 1)
				go func() {
					ended <- partition.Consume(ctx, conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error {
						mu.Lock()
						defer mu.Unlock()
						if failed.IsZero() {
							failed = time.Now()
							close(failing)
						}
						return errors.New("busy")
					}), cfg)
				}()
				suite.Await(t, failing, "the first attempt")
				stop()
				require.NoError(t, <-ended)
				waited, attempt := make(chan time.Duration, 10), 0
				next := consuming(t, s, g, client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
					attempt = retry.Attempt(ctx)
					waited <- time.Since(failed)
					return errors.New("busy")
				}), cfg)
				got := suite.Await(t, waited, "the second attempt")
				next()
				assert.Equal(t, 2, attempt)
				assert.GreaterOrEqual(t, got, delay)
				assert.Zero(t, suite.Ready(t, conn, "dead"), "dead letters")
			})
		})
	}
}
