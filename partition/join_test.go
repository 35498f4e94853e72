package partition

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// A worker whose host's clock is set back notices as soon as others that it hears nobody.
func TestAWorkerNoticesThatItIsDeafAfterTheClockWasSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close(context.Background())) }()
		g := Group{Name: "orders", Partitions: 1, Generation: 1}
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		l := &listener{group: g, conn: conn, hear: func(beat) {}}
		box := g.mailbox()
		require.NoError(t, l.apply(t.Context(), box))
		began := time.Now()
		time.AfterFunc(time.Second, func() { l.last.Store(time.Now().Add(time.Hour).UnixNano()) }) // by the clock before
		_, err = l.from(t.Context(), box, deaf)
		assert.NoError(t, err)
		assert.Less(t, time.Since(began), 3*deaf)
	})
}
