package client_test

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// A broker that accepts each connection and ends it, as one that is overloaded can do, gets
// pauses. A connection that has worked is rebuilt without one.
func TestAConnectionThatIsLostAtOnceIsNotRebuiltInABusyLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cut := func() {
			for _, c := range broker.Connections() {
				c.Cut()
			}
		}
		var healthy atomic.Bool
		down := make(chan time.Duration, 1000)
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{
			Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler), Reconnect: client.ReconnectBackoff{Min: 100 * time.Millisecond, Max: 10 * time.Second},
			OnEvent: func(e client.Event) {
				if e.Kind == client.EventUp && e.Op == "connection" {
					down <- e.Down
					if !healthy.Load() {
						cut()
					}
				}
			},
		})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Greater(t, len(down), 50)
		assert.Less(t, len(down), 300, "the pauses are 5 s in the mean")
		healthy.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		for len(down) > 0 {
			<-down
		}
		for range 5 {
			cut()
			assert.Zero(t, <-down)
			time.Sleep(2 * time.Second)
		}
	})
}
