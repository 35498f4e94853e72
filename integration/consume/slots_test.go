package consume_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// What the slots of middleware/ratelimit need of exclusive queues over AMQP 1.0: one connection has the queue, and may
// declare it again. Others are refused, also when they come at once, and that ends no session. It goes with its connection.
func TestAnExclusiveQueueBelongsToAConnection(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		owner, _ := suite.ConnectTo(t, through, func(c *client.Config) { c.Reconnect = client.ReconnectBackoff{Min: 1e9, Max: 1e9} })
		other, _ := s.Connect(t)
		lock := declare.RawQueue{Name: "lock", Exclusive: true, Arguments: map[string]any{"x-queue-type": "classic"}}
		put := func(conn *client.Conn) (string, error) {
			r, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{lock}})
			return r.Steps[0].Result, err
		}
		result, err := put(owner)
		require.NoError(t, err)
		assert.Equal(t, "created", result)
		result, err = put(owner)
		require.NoError(t, err)
		assert.Equal(t, "existed", result, "the owner's again")
		request, done := owner.Management().Parallel(4)
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				status, _, err := request(t.Context(), "PUT", "/queues/lock", map[string]any{
					"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"},
				})
				assert.NoError(t, err)
				assert.Equal(t, 200, status, "the owner's, on another session")
			})
		}
		all.Wait()
		done()

		for range 8 {
			all.Go(func() {
				_, err := put(other)
				assert.ErrorIs(t, err, declare.ErrConflict)
				status, reply, err := other.Management().Request(t.Context(), "GET", "/queues/lock", nil)
				assert.NoError(t, err)
				assert.Equal(t, 200, status, "%v", reply)
			})
		}
		all.Wait()
		_, err = declare.DeleteQueue(t.Context(), other.Management(), "lock")
		require.ErrorIs(t, err, declare.ErrConflict)
		_, err = declare.DeleteQueue(t.Context(), owner.Management(), "lock")
		require.NoError(t, err)
		result, err = put(owner)
		require.NoError(t, err)
		assert.Equal(t, "created", result)

		wire.Cut()
		suite.Poll(t, "the lock is free", func() bool { _, err := put(other); return err == nil })
		_, err = put(owner)
		require.ErrorIs(t, err, declare.ErrConflict)

		// Many that come at once for the same new queue.
		lock.Name = "race"
		conns := make([]*client.Conn, 8)
		for i := range conns {
			conns[i], _ = s.Connect(t)
		}
		var mu sync.Mutex
		won := 0
		for _, conn := range conns {
			all.Go(func() {
				status, reply, err := conn.Management().Request(t.Context(), "PUT", "/queues/race", map[string]any{
					"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"},
				})
				assert.NoError(t, err)
				assert.Contains(t, []int{201, 400}, status, "%v", reply)
				mu.Lock()
				defer mu.Unlock()
				if status == 201 {
					won++
				}
			})
		}
		all.Wait()
		assert.Equal(t, 1, won)

		forbidden, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^orders$"))
		for range 3 {
			result, err = put(forbidden)
			t.Log("FORB", result, err)
			status, reply, err := forbidden.Management().Request(t.Context(), "PUT", "/queues/race", map[string]any{
				"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"},
			})
			t.Log("FORB", status, reply, err)
			lock.Name = "new"
		}
	})
}
