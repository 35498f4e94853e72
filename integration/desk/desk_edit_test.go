package desk_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// An edit that can't be sent fails with the reason and an exit code other than 0. The message
// stays unchanged, and the connection isn't lost.
func TestEditThatCannotBeSent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, 4)
		d := suite.NewDesk(t, s, conn)
		before, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		hopback := s.Shell(t)
		file := func(name string, size int) string {
			path := filepath.Join(t.TempDir(), name)
			require.NoError(t, os.WriteFile(path, make([]byte, size), 0o600))
			return path
		}
		logged := hopback.Dead(suite.ExitNo, "edit", "orders.dead", "order-1", "--body", file("large", 17<<20)).Stdout
		assert.Contains(t, logged, "not sent: ")
		assert.Contains(t, logged, "16777216 bytes")
		assert.Contains(t, logged, "0 messages replayed")
		r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", Filter: desk.Filter{IDs: []string{"order-1"}}, Edit: func(e *desk.Edit) error {
			e.SetContentType("a\xff")
			return nil
		}})
		require.NoError(t, err)
		assert.EqualValues(t, 1, r.Failed)
		assert.Contains(t, r.Failures[0].Err, "content-type")
		assert.Equal(t, 1, r.Scans)
		after, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		ids := func(l desk.List) (all []string) {
			for _, m := range l.Messages {
				all = append(all, m.ID)
			}
			return all
		}
		assert.Equal(t, ids(before), ids(after))

		// A message that is dead again after the replay of this ID isn't sent once more.
		hopback.Dead(suite.ExitDone, "edit", "orders.dead", "order-1", "--set", "a=b", "--replay-id", "r1", "--to", "parking_queue")
		again := hopback.Dead(suite.ExitNo, "edit", "parking_queue", "order-1", "--set", "a=b", "--replay-id", "r1", "--to", "orders")
		assert.Contains(t, again.Stderr, "nothing was sent")
		assert.Contains(t, again.Stderr, "r1")
	})
}
