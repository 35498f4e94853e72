package cli

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// The requests of apply are counted for the progress line, and declare.Apply still finds what it looks for in a
// Management: several sessions for many declarations, and the broker's version.
func TestApplyOnTheCommandLineUsesSeveralSessions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, MaxConnections: 1, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close(context.Background())) }()
		b.SetLatency(5 * time.Millisecond)

		var all declare.Topology
		const queues = 400
		for i := range queues {
			all.Queues = append(all.Queues, declare.QuorumQueue{Name: fmt.Sprint("queue-", i), DeadLetter: declare.Drop()})
		}
		r := &counting{Management: conn.Management()}
		done := make(chan error, 1)
		go func() {
			_, err := declare.Apply(t.Context(), r, all)
			done <- err
		}()
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, 8, conn.Stats().Sessions)
		require.NoError(t, <-done)
		assert.EqualValues(t, 2*queues, r.replies.Load(), "each queue is inspected, then declared")

		placed := declare.QuorumQueue{Name: "placed", DeadLetter: declare.Drop(), PlacementTag: "zone"}
		_, err = declare.Apply(t.Context(), r, declare.Topology{Queues: []declare.Queue{placed}})
		var refused *argument.Error
		require.ErrorAs(t, err, &refused, "RabbitMQ 4.3 would ignore it")
	})
}
