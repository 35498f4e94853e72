package desk_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
)

// twins publishes 60 messages with the same body: three equal ones of each of 20 kinds,
// which differ only in an annotation, the priority or the time to live.
func twins(t *testing.T, conn *client.Conn, queue string, from, to int) {
	t.Helper()
	suite.Load(t, conn, queue, to-from, func(i int, m *client.Message) {
		id, at := any("beat"), time.UnixMilli(1_700_000_000_000)
		m.Data, m.Properties = [][]byte{[]byte("beat")}, &client.Properties{MessageID: id, CreationTime: &at}
		switch kind := (from + i) % 20; {
		case kind < 10:
			m.Annotations = map[any]any{"x-opt-kind": int64(kind)}
		case kind < 15:
			m.Header.Priority = uint8(kind - 10)
		default:
			m.Header.TTL = time.Duration(kind) * time.Hour
		}
	})
}

// A discard never removes a message that it hasn't written, with any content in the file, and
// messages that differ anywhere have IDs that differ.
func TestDiscardWritesWhatItRemoves(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		twins(t, conn, "dead", 0, 60)
		d := suite.NewDesk(t, s, conn)
		ids := map[string]int{}
		for range 2 { // the IDs are the same in each walk
			list, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Limit: 100})
			require.NoError(t, err)
			for _, m := range list.Messages {
				ids[m.ID]++
			}
		}
		assert.Len(t, ids, 20)
		assert.NotContains(t, slices.Collect(maps.Values(ids)), 2)
		f := tempFile(t, "dead.jsonl")
		var removed, written uint64
		for _, most := range []uint64{3, 20, 7, 0} {
			r, err := d.Discard(t.Context(), desk.DiscardConfig{Queue: "dead", All: true, To: f, Max: most})
			require.NoError(t, err)
			assert.Equal(t, r.Discarded, r.Exported)
			removed, written = removed+r.Discarded, written+r.Exported
		}
		assert.EqualValues(t, 60, removed)
		assert.EqualValues(t, 60, written)
		assert.Zero(t, suite.Ready(t, conn, "dead"))
		in, err := d.Import(t.Context(), strings.NewReader(content(t, f)), desk.ImportConfig{})
		require.NoError(t, err)
		assert.EqualValues(t, 60, in.Imported)
		suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "dead") == 60 })
		again, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Limit: 100})
		require.NoError(t, err)
		kinds := map[string]int{}
		for _, m := range again.Messages {
			kinds[m.ID]++
		}
		assert.Len(t, kinds, 20)
	})
}

// An export that is resumed leaves out what the file has, and nothing else: messages that
// differ only in an annotation, the priority or the time to live are all written, and so is
// each of several that are equal.
func TestResumedExportLeavesNothingOut(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		d := suite.NewDesk(t, s, conn)
		f := tempFile(t, "dead.jsonl")
		for i, to := range []int{5, 25, 60} {
			from := []int{0, 5, 25}[i]
			twins(t, conn, "dead", from, to)
			suite.Poll(t, "they are there", func() bool { return suite.Ready(t, conn, "dead") == to })
			r, err := d.Export(t.Context(), f, desk.ExportConfig{Queue: "dead", Resume: true})
			require.NoError(t, err)
			assert.EqualValues(t, to-from, r.Exported, "up to %d", to)
			assert.EqualValues(t, from, r.Skipped)
		}
		text := content(t, f)
		assert.Equal(t, 60, strings.Count(text, "\n"))
		for kind := range 10 {
			assert.Equal(t, 3, strings.Count(text, fmt.Sprintf(`[{"symbol":"x-opt-kind"},{"long":"%d"}]`, kind)), kind)
		}
		assert.Equal(t, 60, suite.Ready(t, conn, "dead"))
	})
}
