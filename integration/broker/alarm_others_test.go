package broker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/stream"
)

// duringEachAlarm raises an alarm after before, calls during, and clears the alarm before after.
func duringEachAlarm[T any](t *testing.T, s *suite.Site, before func(t *testing.T, s *suite.Site) T, during func(t *testing.T, s *suite.Site, state T) (after func())) {
	for _, alarm := range alarms {
		t.Run(alarm.name, func(t *testing.T) {
			s := suite.NewSite(t, s.Broker)
			state := before(t, s)
			s.EvalOK(t, alarm.set)
			end := sync.OnceFunc(func() {
				s.EvalOK(t, alarm.clear)
				suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
			})
			defer end()
			suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })
			after := during(t, s, state)
			assert.True(t, alarmed(t, s), "all that was while the alarm lasted")
			end()
			after()
		})
	}
}

// Workers of a group start during an alarm, handle what waits in its order, and share the partitions
// when the alarm is over.
func TestWorkersOfAGroupStartDuringAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // partitions need RabbitMQ 4.3
		}
		const keys, each = 12, 10
		g := partition.Group{Name: "orders", Partitions: 6, Window: 20}
		before := func(t *testing.T, s *suite.Site) *client.Conn {
			admin, _ := s.Connect(t)
			topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
			require.NoError(t, err)
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()})
			suite.Apply(t, admin, topology)
			publishEach(t, admin, g, keys, 0, each)
			return admin
		}
		duringEachAlarm(t, s, before, func(t *testing.T, s *suite.Site, admin *client.Conn) func() {
			handled := make(chan [2]int, 10*keys*each)
			var mu sync.Mutex
			failed, owns := map[int]bool{}, map[int]map[int]bool{}
			for i := range 3 {
				conn, _ := s.Connect(t)
				owns[i] = map[int]bool{}
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() {
					ended <- partition.Consume(ctx, conn, g, client.JSON(func(_ context.Context, m [2]int) error {
						mu.Lock()
						defer mu.Unlock()
						if m[1] == 1 && !failed[m[0]] { // one of each key fails once
							failed[m[0]] = true
							return errors.New("not yet")
						}
						handled <- m
						return nil
					}), partition.Config{
						Worker: fmt.Sprint("w", i), Retry: retry.Policy{Backoff: retry.Delays(100 * time.Millisecond)},
						OnAssigned: func(p int, owned bool) {
							mu.Lock()
							defer mu.Unlock()
							if delete(owns[i], p); owned {
								owns[i][p] = true
							}
						},
					})
				}()
				t.Cleanup(func() {
					stop()
					assert.NoError(t, <-ended)
				})
			}
			next := map[int]int{}
			all := func(n int) {
				for range n {
					m := suite.Await(t, handled, "a message of a partition")
					assert.Equal(t, next[m[0]], m[1], "the order of key %d", m[0])
					next[m[0]]++
				}
			}
			all(keys * each)
			assert.Len(t, failed, keys)
			return func() {
				suite.Poll(t, "each worker has two partitions", func() bool {
					mu.Lock()
					defer mu.Unlock()
					return len(owns[0]) == 2 && len(owns[1]) == 2 && len(owns[2]) == 2
				})
				publishEach(t, admin, g, keys, each, each)
				all(keys * each)
				suite.AssertEmpty(t, s, "dead")
				suite.Report(t, s, "3 workers handled %d of %d messages in order during the alarm", keys*each, keys*each)
			}
		})
	})
}

// publishEach publishes messages of each key, which are numbered.
func publishEach(t *testing.T, conn *client.Conn, g partition.Group, keys, from, n int) {
	t.Helper()
	p := suite.Publisher[[2]int](t, conn, address.Address{})
	for i := range n {
		for key := range keys {
			require.NoError(t, p.Publish(t.Context(), [2]int{key, from + i}, client.PublishTo(g.Address(fmt.Sprint("key ", key)))))
		}
	}
}

// Stream consumers start during an alarm, also from a saved position. One whose queue isn't a stream takes
// nothing from it, even if a publisher has written offsets into its messages.
func TestAStreamConsumerStartsDuringAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		before := func(t *testing.T, s *suite.Site) *client.Conn {
			admin, _ := s.Connect(t)
			suite.StreamOf(t, admin, "log", 20)
			suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "queue"}))
			p := suite.Publisher[int](t, admin, address.Queue("queue"))
			for i := range 5 {
				require.NoError(t, p.Publish(t.Context(), i, func(m *client.Message) { m.Annotations = map[any]any{"x-stream-offset": int64(i)} }))
			}
			return admin
		}
		duringEachAlarm(t, s, before, func(t *testing.T, s *suite.Site, _ *client.Conn) func() {
			conn, _ := s.Connect(t)
			store := &stream.MemoryStore{}
			require.NoError(t, store.Save(t.Context(), "second", "log", 5))
			log := suite.NewLogbook(t)
			start := func(queue, name string, from stream.Offset) (got chan int, stop func(), ended chan error) {
				got, ended = make(chan int, 100), make(chan error, 1)
				ctx, stop := context.WithCancel(t.Context())
				go func() {
					ended <- stream.Consume(ctx, conn, queue, client.JSON(func(_ context.Context, n int) error { got <- n; return nil }), stream.Config{
						Consumer: name, Offsets: store, From: from, Logger: slog.New(log),
					})
				}()
				return got, stop, ended
			}
			for name, from := range map[string]int{"first": 0, "second": 5} {
				got, stop, ended := start("log", name, stream.Offset{})
				for n := from; n < 20; n++ {
					assert.Equal(t, n, suite.Await(t, got, "a message of the stream"))
				}
				stop()
				require.NoError(t, <-ended)
				next, _, err := store.Load(t.Context(), name, "log")
				require.NoError(t, err)
				assert.Equal(t, uint64(20), next)
			}
			assert.Len(t, log.With("The stream consumer starts without the check"), 2)
			got, stop, ended := start("queue", "wrong", stream.Offset{})
			t.Cleanup(stop)
			return func() {
				_, wrong := errors.AsType[*argument.Error](suite.Await(t, ended, "the end of the consumer of a queue"))
				assert.True(t, wrong)
				assert.Empty(t, got)
				info, err := declare.Inspect(t.Context(), conn.Management(), "queue")
				require.NoError(t, err)
				assert.EqualValues(t, 5, info.Messages)
				suite.Report(t, s, "2 stream consumers handled 35 of 35 messages during the alarm")
			}
		})
	})
}
