package cli

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/live"
)

// A watched worker sends less than one that is asked each time, also if the screen is redrawn more often than it answers. A
// broker that is away is an error, and shown again when it is back.
func TestFollowingTheWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, err := hopbacktest.New(hopbacktest.Config{MaxEvents: -1})
		require.NoError(t, err)
		defer b.Close()
		connect := func(name string) *client.Conn {
			conn, err := client.Connect(t.Context(), b.URL(), client.Config{Name: name, Dial: b.Dial})
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
			return conn
		}
		worker, conn := connect("worker"), connect("cli")
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			h := live.With(worker, live.Config{Host: "host-1"})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
			ended <- worker.Consume(ctx, "orders", h, client.ConsumerConfig{})
		}()
		sent := func() (frames int) {
			for _, c := range b.Connections() {
				if strings.HasPrefix(c.Info().Container, "worker") {
					frames += c.Frames(hopbacktest.DirectionFromClient)
				}
			}
			return frames
		}
		time.Sleep(5 * time.Second)
		before := sent()
		for range 30 {
			_, err := live.Ask(t.Context(), conn)
			require.NoError(t, err)
		}
		asked := sent() - before

		take, end := follow(t.Context(), conn)
		s := take(t.Context())
		require.NoError(t, s.err)
		require.Len(t, s.value.(live.Fleet).Workers, 1)
		time.Sleep(time.Minute) // nobody takes what is shown then
		before = sent()
		for began := time.Now(); time.Since(began) < time.Minute; {
			s = take(t.Context())
			require.NoError(t, s.err)
			require.Len(t, s.value.(live.Fleet).Workers, 1)
		}
		assert.Less(t, (sent()-before)*3, asked*2, "in a minute, next to 30 questions")

		b.Stop()
		for s = take(t.Context()); s.err == nil; s = take(t.Context()) {
		}
		b.Restart()
		for began := time.Now(); s.err != nil || len(s.value.(live.Fleet).Workers) == 0; s = take(t.Context()) {
			require.Less(t, time.Since(began), 5*time.Minute)
		}
		late, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		take(t.Context())
		require.ErrorIs(t, take(late).err, context.DeadlineExceeded)
		end()
		stop()
		require.NoError(t, <-ended)
	})
}
