package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// Many callers at once each get their own reply (the official client mixes them up).
func TestConcurrentManagementRequestsGetTheirOwnReplies(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const queues, callers, rounds = 10, 50, 10
		conn, log := s.Connect(t)
		var topology declare.Topology
		for i := range queues {
			topology.Queues = append(topology.Queues, declare.QuorumQueue{
				Name: fmt.Sprintf("q-%d", i), DeadLetter: declare.Drop(), MaxLength: int64(100 + i),
			})
		}
		suite.Apply(t, conn, topology)
		ctx, cancel := context.WithTimeout(t.Context(), 2*suite.Patience)
		defer cancel()
		began := time.Now()
		var callersDone sync.WaitGroup
		for c := range callers {
			callersDone.Go(func() {
				for r := range rounds {
					i := (c + r) % (queues + 1)
					info, err := declare.Inspect(ctx, conn.Management(), fmt.Sprintf("q-%d", i))
					if i == queues { // there is no such queue
						assert.ErrorIs(t, err, declare.ErrNotFound)
						continue
					}
					if assert.NoError(t, err) {
						assert.Equal(t, fmt.Sprintf("q-%d", i), info.Name)
						assert.Equal(t, int64(100+i), info.Arguments["x-max-length"])
					}
				}
			})
		}
		callersDone.Wait()
		suite.Report(t, s, "%d requests of %d callers in %v", callers*rounds, callers, time.Since(began).Round(time.Millisecond))
		assert.Empty(t, log.All())
	})
}

// A request whose caller has given up leaves the ones after it alone, whether its
// reply comes late or never (the official client is out of step from then on).
func TestTimedOutManagementRequestDoesNotHarmTheNext(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "one", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "two", DeadLetter: declare.Drop()},
		}})
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through)
		ask := func(ctx context.Context, queue string) (string, error) {
			info, err := declare.Inspect(ctx, conn.Management(), queue)
			return info.Name, err
		}
		name, err := ask(t.Context(), "one")
		require.NoError(t, err)
		require.Equal(t, "one", name)

		for range 5 {
			wire.Stall()
			sent := wire.Sent()
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, err := ask(ctx, "one")
			cancel()
			require.ErrorIs(t, err, declare.ErrNoReply)
			assert.True(t, errors.Is(err, client.ErrOutcomeUnknown) || errors.Is(err, client.ErrNotSent), "%v", err)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, sent, wire.Sent(), "the proxy lets nothing through")
			wire.Resume() // the reply comes after all, to nobody

			name, err := ask(t.Context(), "two")
			require.NoError(t, err)
			require.Equal(t, "two", name)
		}
		assert.Empty(t, log.With("connection lost"))
	})
}

// RabbitMQ ends the session over a request whose reply has no credit. Here none of what is
// granted later arrives, and there is enough for many requests.
func TestManagementRequestsOvertakeTheCreditForTheirReplies(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		var late atomic.Bool
		var ends atomic.Int64
		const flow, end = 0x13, 0x17
		addr := suite.Between(t, s.Host(), func(code byte, _ []byte) bool { return code != flow || !late.Load() }, func(code byte, _ []byte) bool {
			if code == end {
				ends.Add(1)
			}
			return true
		})
		conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = addr }))
		ask := func() {
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			defer cancel()
			status, _, err := conn.Management().Request(ctx, "GET", "/queues/missing", nil)
			require.NoError(t, err)
			require.Equal(t, 404, status)
		}
		ask()
		late.Store(true)
		for range 150 {
			ask()
		}
		assert.Zero(t, ends.Load(), "sessions that the broker ended")
		late.Store(false)
	})
}

func TestManagementComesBackAfterItsSessionEnded(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through, suite.Soon)
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		for range 3 {
			// RabbitMQ ends the session for an operation that it doesn't know.
			_, _, err := conn.Management().Request(ctx, "GET", "/exchanges/amq.topic", nil)
			require.ErrorIs(t, err, client.ErrOutcomeUnknown)
			_, err = declare.Inspect(ctx, conn.Management(), "orders")
			require.NoError(t, err)
		}
		for range 3 {
			require.Equal(t, 1, wire.Cut())
			suite.Poll(t, "the management answers again", func() bool {
				_, err := declare.Inspect(ctx, conn.Management(), "orders")
				return err == nil
			})
		}
	})
}

func TestApplyIsIdempotentAndSafeToRunConcurrently(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const appliers = 20
		topology, err := retry.Topology(retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, 2*time.Second)},
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}, declare.QuorumQueue{Name: "invoices", DeliveryLimit: 5})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 4*suite.Patience)
		defer cancel()
		conns := make([]*client.Conn, 4)
		for i := range conns {
			conns[i], _ = s.Connect(t)
		}
		began := time.Now()
		reports := make([]declare.Report, appliers)
		var wg sync.WaitGroup
		for i := range appliers {
			wg.Go(func() {
				var err error
				reports[i], err = declare.Apply(ctx, conns[i%len(conns)].Management(), topology)
				assert.NoError(t, err)
			})
		}
		wg.Wait()
		suite.Report(t, s, "%d concurrent runs of %d steps in %v", appliers, len(reports[0].Steps), time.Since(began).Round(time.Millisecond))
		again, err := declare.Apply(ctx, conns[0].Management(), topology)
		require.NoError(t, err)
		assert.Zero(t, again.Count("created"))
		assert.Equal(t, len(topology.Queues), again.Count("existed"))
		var queues []struct{ Name string }
		s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
		assert.Len(t, queues, len(topology.Queues))
	})
}

func TestConflictTellsArgumentWantedAndFound(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", MessageTTL: time.Second}))
		_, err := declare.Apply(t.Context(), conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: "orders", MessageTTL: 2 * time.Second}))
		var e *declare.Error
		require.ErrorAs(t, err, &e)
		assert.ErrorIs(t, err, declare.ErrConflict)
		assert.Equal(t, 409, e.Status)
		assert.Contains(t, e.Text, "inequivalent arg 'x-message-ttl' for queue 'orders'")
		require.NotNil(t, e.Conflict)
		assert.Equal(t, declare.Conflict{
			Argument: "x-message-ttl", Wanted: declare.Setting{Value: "2000", Set: true}, Found: declare.Setting{Value: "1000", Set: true},
		}, *e.Conflict)

		_, err = declare.Apply(t.Context(), conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: "orders", MessageTTL: time.Second, DeliveryLimit: 3}))
		require.ErrorAs(t, err, &e)
		require.NotNil(t, e.Conflict, "%v", err)
		assert.Equal(t, "x-delivery-limit", e.Conflict.Argument)
		assert.True(t, e.Conflict.Wanted.Set)
		assert.Equal(t, "3", e.Conflict.Wanted.Value)
		assert.False(t, e.Conflict.Found.Set)
	})
}

// What the broker keeps is what was asked for, with the types that it reads: a
// delivery limit as text would mean another one.
func TestQueueArgumentsReachTheBrokerWithTheirTypes(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{
				Name: "full", DeliveryLimit: 7, DeadLetter: declare.DeadLetterTarget{Exchange: "amq.direct", RoutingKey: "key"},
				MessageTTL: 3 * time.Second, Expires: time.Hour, MaxLength: 1000, MaxLengthBytes: 1 << 33,
				SingleActiveConsumer: true, InitialGroupSize: 1, LeaderLocator: declare.LeaderBalanced,
				DelayedRetry:    declare.DelayedRetry{Kind: declare.RetryFailed, Min: time.Second, Max: time.Minute},
				ConsumerTimeout: 10 * time.Minute,
			},
			declare.QuorumQueue{Name: "none", DeliveryLimit: declare.NoRedelivery, DeadLetter: declare.ToQueue("full")},
			declare.QuorumQueue{Name: "unlimited", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		}})
		for name, want := range map[string]map[string]any{
			"full": {
				"x-queue-type": "quorum", "x-delivery-limit": json.Number("7"), "x-dead-letter-exchange": "amq.direct",
				"x-dead-letter-routing-key": "key", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
				"x-message-ttl": json.Number("3000"), "x-expires": json.Number("3600000"), "x-max-length": json.Number("1000"),
				"x-max-length-bytes": json.Number("8589934592"), "x-single-active-consumer": true,
				"x-quorum-initial-group-size": json.Number("1"), "x-queue-leader-locator": "balanced",
				"x-delayed-retry-type": "failed", "x-delayed-retry-min": json.Number("1000"), "x-delayed-retry-max": json.Number("60000"),
				"x-consumer-timeout": json.Number("600000"),
			},
			"none": {
				"x-queue-type": "quorum", "x-delivery-limit": json.Number("0"), "x-dead-letter-exchange": "",
				"x-dead-letter-routing-key": "full", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
			},
			"unlimited": {"x-queue-type": "quorum", "x-delivery-limit": json.Number("-1")},
		} {
			var text json.RawMessage
			s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/"+name+"?disable_stats=true", nil, &text)
			assert.Equal(t, want, numbers(t, text), name)
		}
	})
}

// numbers reads a queue's arguments with its numbers as they are written: 7 and
// not "7" or 7.0.
func numbers(t *testing.T, text json.RawMessage) map[string]any {
	t.Helper()
	var queue struct {
		Arguments map[string]json.RawMessage `json:"arguments"`
	}
	require.NoError(t, json.Unmarshal(text, &queue))
	args := map[string]any{}
	for k, raw := range queue.Arguments {
		var n json.Number
		if raw[0] != '"' && json.Unmarshal(raw, &n) == nil {
			args[k] = n
			continue
		}
		var v any
		require.NoError(t, json.Unmarshal(raw, &v))
		args[k] = v
	}
	return args
}

// RabbitMQ ends the whole session over one request for which the user lacks the
// permission. The requests of others that are in flight then still succeed.
func TestManagementRefusalDoesNotFailOtherRequests(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const each, rounds = 4, 2
		conn, log := suite.ConnectTo(t, s.User(t, "^mine", ".*", ".*"))
		ctx, cancel := context.WithTimeout(t.Context(), 2*suite.Patience)
		defer cancel()
		for round := range rounds {
			var wg sync.WaitGroup
			for i := range each {
				wg.Go(func() {
					q := fmt.Sprintf("mine-%d-%d", round, i)
					_, err := declare.Apply(ctx, conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: q}))
					assert.NoError(t, err, q)
				})
				wg.Go(func() {
					q := fmt.Sprintf("theirs-%d-%d", round, i)
					_, err := declare.Apply(ctx, conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: q}))
					assert.ErrorIs(t, err, client.ErrUnauthorized, q)
					assert.ErrorContains(t, err, q)
				})
			}
			wg.Wait()
		}
		assert.Empty(t, log.With("connection lost"))
		var queues []struct{ Name string }
		s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
		assert.Len(t, queues, each*rounds)
	})
}
