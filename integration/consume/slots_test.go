package consume_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/retry"
)

// What the slots of middleware/ratelimit need of exclusive queues over AMQP 1.0: one connection has the queue, and may
// declare it again, on any session. Others are refused, also when many come at once, but see that it exists. It is gone
// with its connection.
func TestAnExclusiveQueueBelongsToAConnection(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		owner, _ := suite.ConnectTo(t, through, func(c *client.Config) {
			c.Reconnect = client.ReconnectBackoff{Min: time.Hour, Max: time.Hour}
		})
		conns := make([]*client.Conn, 8)
		for i := range conns {
			conns[i], _ = s.Connect(t)
		}
		put := func(request func(context.Context, string, string, any) (int, any, error), name string) int {
			status, reply, err := request(t.Context(), "PUT", "/queues/"+name, map[string]any{
				"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"},
			})
			assert.NoError(t, err)
			if text, _ := reply.(string); status == 400 {
				assert.Contains(t, text, "cannot obtain exclusive access to locked queue")
			}
			return status
		}
		assert.Equal(t, 201, put(owner.Management().Request, "lock"))
		request, done := owner.Management().Parallel(4)
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() { assert.Equal(t, 200, put(request, "lock"), "the owner's") })
		}
		all.Wait()
		done()
		for _, conn := range conns {
			all.Go(func() {
				assert.Equal(t, 400, put(conn.Management().Request, "lock"))
				_, err := declare.Inspect(t.Context(), conn.Management(), "lock")
				assert.NoError(t, err)
			})
		}
		all.Wait()
		_, err := declare.DeleteQueue(t.Context(), conns[0].Management(), "lock")
		require.ErrorIs(t, err, declare.ErrConflict)
		_, err = declare.DeleteQueue(t.Context(), owner.Management(), "lock")
		require.NoError(t, err)
		_, err = declare.DeleteQueue(t.Context(), owner.Management(), "lock")
		require.NoError(t, err, "again")
		_, err = declare.Inspect(t.Context(), owner.Management(), "lock")
		require.ErrorIs(t, err, declare.ErrNotFound)

		var won atomic.Int32
		for _, conn := range conns {
			all.Go(func() {
				if put(conn.Management().Request, "race") == 201 {
					won.Add(1)
				}
			})
		}
		all.Wait()
		assert.EqualValues(t, 1, won.Load())

		assert.Equal(t, 201, put(owner.Management().Request, "lock"))
		wire.Cut()
		suite.Poll(t, "the end of the queue", func() bool { return put(conns[0].Management().Request, "lock") == 201 })
		forbidden, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^$"))
		_, _, err = forbidden.Management().Request(t.Context(), "PUT", "/queues/other", map[string]any{
			"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{},
		})
		require.ErrorIs(t, err, client.ErrUnauthorized)
		for _, conn := range conns {
			_, _ = declare.DeleteQueue(t.Context(), conn.Management(), "race")
			_, _ = declare.DeleteQueue(t.Context(), conn.Management(), "lock")
		}
	})
}

// Several connections never run more calls than the limit, of all messages or of a key, and handle all messages. One of
// them is cut again and again. Their users need the permission for the slots. doctor and verify have nothing to say
// about them.
func TestCallsAtOnceAreLimitedOverConnections(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, key := range map[string]func(*client.Delivery) (string, bool){
			"all": nil, "by key": func(d *client.Delivery) (string, bool) { return d.Message().Properties.MessageID.(string), true },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				operator, _ := s.Connect(t)
				topology, err := retry.Topology(retry.Policy{Strategy: retry.StrategyDeadLetter, MaxRetries: 1}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 100})
				require.NoError(t, err)
				suite.Apply(t, operator, topology)
				const limit, keys, messages = 3, 2, 600
				p := suite.Publisher[int](t, operator, address.Queue("orders"))
				for i := range messages {
					suite.Publish(t, p, i, func(m *client.Message) {
						m.Properties = &client.Properties{MessageID: string(rune('a' + i%keys))}
					})
				}
				var mu sync.Mutex
				running, handled := [4]map[string]int{{}, {}, {}, {}}, map[int]bool{}
				cuts := 0
				wire, _ := s.Through(t)
				user := s.User(t, `^hopback\.slots\.orders\.`, "^$", "^orders$")
				for i := range 4 {
					url := user
					if i == 0 {
						url = strings.Replace(user, s.Host(), wire.Addr(), 1)
					}
					conn, _ := suite.ConnectTo(t, url, suite.Soon)
					h := client.JSON(func(ctx context.Context, n int) error {
						d, _ := client.DeliveryFrom(ctx)
						of := ""
						if key != nil {
							of, _ = key(d)
						}
						mu.Lock()
						if running[i][of]++; cuts == 0 || i > 0 { // a connection that is cut learns of it when others may have its slots
							sum := 0
							for i := range running {
								if cuts == 0 || i > 0 {
									sum += running[i][of]
								}
							}
							assert.LessOrEqual(t, sum, limit)
						}
						mu.Unlock()
						time.Sleep(5 * time.Millisecond) // what a call takes
						mu.Lock()
						defer mu.Unlock()
						running[i][of]--
						if handled[n] = true; len(handled) == messages/8*(cuts+1) && cuts < 6 {
							cuts++
							wire.Cut()
						}
						return nil
					})
					suite.Consume(t, conn, "orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Key: key})(h), client.ConsumerConfig{Concurrency: 4})
				}
				suite.Poll(t, "all are handled", func() bool {
					mu.Lock()
					defer mu.Unlock()
					return len(handled) == messages
				})
				v, err := suite.Verified(t.Context(), s.Sources(t, operator), topology)
				require.NoError(t, err)
				assert.Empty(t, v.Findings)
				r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
				require.NoError(t, err)
				text, err := json.Marshal(r)
				require.NoError(t, err)
				assert.NotZero(t, r.Queues)
				assert.NotContains(t, string(text), "hopback.slots.")
				blind, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^orders$"))
				none := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
				err = blind.Consume(t.Context(), "orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Key: key})(none), client.ConsumerConfig{})
				require.ErrorIs(t, err, client.ErrUnauthorized)
			})
		}
	})
}
