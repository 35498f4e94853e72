package desk

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
)

// smallDisk is a file on a disk with limited space.
type smallDisk struct {
	*os.File
	room int
}

func (d *smallDisk) Write(b []byte) (int, error) {
	if len(b) <= d.room {
		d.room -= len(b)
		return d.File.Write(b)
	}
	n, err := d.File.Write(b[:d.room])
	d.room = 0
	if err == nil {
		err = syscall.ENOSPC
	}
	return n, err
}

func newSmallDisk(t *testing.T, room int) *smallDisk {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "dead.jsonl"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return &smallDisk{f, room}
}

// newDesk starts a broker with a queue "dead".
func newDesk(t *testing.T, cfg hopbacktest.Config) *Desk {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, cfg)
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	d, err := New(conn, Config{Logger: quiet})
	require.NoError(t, err)
	return d
}

// Lines that an exporter counts as written are complete in the file, wherever the disk gets full.
func TestExporterCountsWhatTheFileHolds(t *testing.T) {
	if explore.UnderRace {
		t.Skip("there is one goroutine")
	}
	t.Parallel()
	l := open(sampleDeadLetter(t, time.Now()))
	line, err := l.line("dead")
	require.NoError(t, err)
	for _, room := range []int{0, 1, len(line) - 1, len(line), 10*len(line) + 7, 3<<20 + 11} {
		f := newSmallDisk(t, room)
		e, err := openExport(f, false)
		require.NoError(t, err)
		for err == nil {
			err = e.add(l, "dead")
		}
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.ErrorIs(t, e.sync(), syscall.ENOSPC)
		text, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		assert.EqualValues(t, strings.Count(string(text), "\n"), e.synced, "room %d", room)
		assert.Len(t, text, room)

		// With more space the rest is written, and nothing twice.
		f.room = 1 << 30
		e, err = openExport(f, true)
		require.NoError(t, err)
		assert.EqualValues(t, room/len(line), e.lines)
		e.remember()
		for range 5 {
			_, err := e.write(l, "dead")
			require.NoError(t, err)
		}
		require.NoError(t, e.sync())
		assert.EqualValues(t, max(5-room/len(line), 0), e.synced)
	}
}

// If the disk gets full, a discard has removed and counted exactly what the file has, and it gets on
// however little room there was.
func TestDiscardToAFullDisk(t *testing.T) {
	t.Parallel()
	const n = 5000 // more than two batches
	d := newDesk(t, hopbacktest.Config{})
	p, err := client.NewPublisher[int](t.Context(), d.conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	require.NoError(t, p.PublishAll(t.Context(), all, func(i int, m *client.Message) { m.Properties.MessageID = fmt.Sprint("m-", i) }))

	f := newSmallDisk(t, 0)
	discard := func() DiscardReport {
		g := &discarding{d: d, cfg: DiscardConfig{Queue: "dead", All: true}, match: Filter{}.matcher(), groups: newTally(maxGroups)}
		g.out, err = openExport(f, true)
		require.NoError(t, err)
		g.out.remember()
		err = g.pass(t.Context())
		return g.report
	}
	var done uint64
	for _, room := range []int{1200 << 10, 100, 10_000, 200 << 10} { // one batch has about 850 KiB
		f.room = room
		r := discard()
		require.ErrorIs(t, err, syscall.ENOSPC)
		text, readErr := os.ReadFile(f.Name())
		require.NoError(t, readErr)
		assert.True(t, len(text) == 0 || text[len(text)-1] == '\n', "the last line is complete")
		assert.EqualValues(t, strings.Count(string(text), "\n"), done+r.Exported)
		assert.Equal(t, r.Exported, r.Discarded)
		if room > 1000 {
			assert.Greater(t, int(r.Discarded), room/1000)
		}
		done += r.Discarded
		info, err := declare.Inspect(t.Context(), d.conn.Management(), "dead")
		require.NoError(t, err)
		assert.EqualValues(t, n-done, info.Messages)
		assert.Zero(t, r.Twice)
	}

	f.room = 1 << 30
	r := discard()
	require.NoError(t, err)
	assert.EqualValues(t, n-done, r.Discarded)
	assert.Zero(t, r.Twice)
	text, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	assert.Equal(t, n, strings.Count(string(text), "\n"))
}

// A line that is too large for the broker stops an import before it is sent, and the error has
// its number.
func TestImportOfALineThatIsTooLarge(t *testing.T) {
	t.Parallel()
	d := newDesk(t, hopbacktest.Config{MaxMessageSize: 10_000})
	line := func(body string) string {
		return fmt.Sprintf("{\"hopback\":1,\"queue\":\"dead\",\"id\":\"%024x\",\"body\":[{\"text\":%q}]}\n", 1, body)
	}
	r, err := d.Import(t.Context(), strings.NewReader(line("a")+line(strings.Repeat("x", 10_001))+line("b")), ImportConfig{})
	var bad *LineError
	require.ErrorAs(t, err, &bad)
	assert.Equal(t, 2, bad.Line)
	require.ErrorContains(t, err, "at most 10000 bytes")
	assert.Equal(t, 1, r.Lines)
	assert.EqualValues(t, 1, r.Imported)
}
