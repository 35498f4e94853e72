package chaos

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
)

func TestTheSeedReproducesTheSchedule(t *testing.T) {
	p := Plan{Seed: 42, Faults: 200, Kinds: ClusterKinds, Nodes: 3, Lanes: 3, Workers: 2}
	assert.Equal(t, p.Schedule(), p.Schedule())
	q := p
	q.Seed++
	assert.NotEqual(t, p.Schedule(), q.Schedule())

	// Of the same seed, more faults begin with the same ones.
	q = p
	q.Faults = 50
	assert.Equal(t, p.Schedule()[:50], q.Schedule())

	// Pinned, so that a seed of yesterday's means the same tomorrow.
	p.Faults = 3
	var got []string
	for _, f := range p.Schedule() {
		got = append(got, f.String())
	}
	assert.Equal(t, []string{"slow-link (workers, 1.269s)", "worker-killed (worker 0 of lane 1, 165ms)", "leader-moved (lane 0, to node 1)"}, got)
}

func TestScheduleHasEveryKindAndStaysInBounds(t *testing.T) {
	p := Plan{Seed: 1, Faults: 10 * len(ClusterKinds), Kinds: ClusterKinds, Nodes: 3, Lanes: 3, Workers: 2}
	count := map[Kind]int{}
	nodes, lanes, workers, sides := map[int]bool{}, map[int]bool{}, map[int]bool{}, map[Side]bool{}
	for _, f := range p.Schedule() {
		count[f.Kind]++
		nodes[f.Node], lanes[f.Lane], workers[f.Worker], sides[f.Side] = true, true, true, true
		assert.True(t, f.At >= 0 && f.At < 1, "%v", f.At)
		assert.True(t, f.For >= 0 && f.For <= 15*time.Second, "%v", f)
	}
	for _, k := range ClusterKinds {
		assert.Equal(t, 10, count[k], k)
	}
	assert.Equal(t, map[int]bool{0: true, 1: true, 2: true}, nodes)
	assert.Equal(t, map[int]bool{0: true, 1: true, 2: true}, lanes)
	assert.Equal(t, map[int]bool{-1: true, 0: true, 1: true}, workers)
	assert.Len(t, sides, 3)
}

func TestTheSeedReproducesTheFates(t *testing.T) {
	a, b := Script{Seed: 1}, Script{Seed: 2}
	same, ends := 0, map[End]int{}
	for id := range uint32(10_000) {
		f := a.Fate(0, id)
		require.Equal(t, f, a.Fate(0, id))
		ends[f.End]++
		if f == b.Fate(0, id) {
			same++
		}
		require.LessOrEqual(t, f.Failures, maxRetries)
		require.Less(t, a.Takes(0, id, 1), 21*time.Millisecond)
		require.GreaterOrEqual(t, a.Size(0, id), 64)
	}
	assert.Less(t, same, 7000)
	for end, share := range map[End]float64{EndHandled: .86, EndExhausted: .04, EndPermanent: .05, EndPanicked: .03, EndDeclined: .02} {
		assert.InDelta(t, share*10_000, ends[end], 100, end.String())
	}
}

func TestParseKinds(t *testing.T) {
	got, err := ParseKinds("reset, half-open", 1)
	require.NoError(t, err)
	assert.Equal(t, []Kind{Reset, HalfOpen}, got)
	got, err = ParseKinds("all", 3)
	require.NoError(t, err)
	assert.Equal(t, ClusterKinds, got)
	_, err = ParseKinds("node-killed", 1)
	assert.ErrorAs(t, err, new(*argument.Error), "there is only one node")
}

func TestBodiesTellWhoseTheyAre(t *testing.T) {
	s := Script{Seed: 3}
	m := s.makeMessage(99, 1, 7)
	id, err := readMessage(m, 99, 1)
	require.NoError(t, err)
	assert.EqualValues(t, 7, id)

	_, err = readMessage(m, 98, 1)
	assert.Error(t, err, "another run")
	_, err = readMessage(m, 99, 2)
	assert.Error(t, err, "another lane")
	m.Properties.MessageID = "1-8"
	_, err = readMessage(m, 99, 1)
	assert.Error(t, err, "another message-id")
	m = s.makeMessage(99, 1, 7)
	m.Data[0][20] ^= 1
	_, err = readMessage(m, 99, 1)
	assert.Error(t, err, "changed")
	m.Data = nil
	_, err = readMessage(m, 99, 1)
	assert.Error(t, err, "none")
}

// Records are read while they are written; one that a dying process has left
// unfinished is not taken for one.
func TestRecordsAreReadAsTheyCome(t *testing.T) {
	require.Zero(t, 4096%recordSize, "else a record could cross a page, and be torn")
	path := filepath.Join(t.TempDir(), "records")
	w, err := os.Create(path)
	require.NoError(t, err)
	defer func() { _ = w.Close() }()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	tail := &tail{r: f}
	read := func() (got []record) {
		require.NoError(t, tail.read(func(r record) { got = append(got, r) }))
		return got
	}
	assert.Empty(t, read())
	one := record{id: 1, at: 2, lane: 3, attempt: 4, what: whatHandled, count: 5}
	put := func(b []byte) {
		_, err := w.Write(b)
		require.NoError(t, err)
	}
	b := one.encode()
	put(b[:])
	put(b[:7])
	assert.Equal(t, []record{one}, read())
	put(b[7:])
	assert.Equal(t, []record{one}, read(), "the rest has come")
	var junk [recordSize]byte
	_, _ = rand.Read(junk[:])
	put(junk[:])
	assert.Empty(t, read())
	assert.Equal(t, 1, tail.torn)
}

func TestConfigIsChecked(t *testing.T) {
	for name, c := range map[string]Config{
		"nodes":          {Nodes: 2},
		"strategy":       {Strategies: []string{"hope"}},
		"native on 4.0":  {Version: "4.0", Strategies: []string{"native"}},
		"negative":       {Messages: -1},
		"too many fault": {Faults: 1 << 30},
	} {
		_, err := c.withDefaults()
		assert.ErrorAs(t, err, new(*argument.Error), name)
	}
	c, err := Config{Version: "4.0"}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, []string{"republish", "dead-letter"}, c.Strategies)
}

func TestRowsAddUp(t *testing.T) {
	row := func(k Kind, strategy string, n int, stall time.Duration) Row {
		return Row{Fault: k, Strategy: strategy, Broker: "4.3", Nodes: 1, Faults: n, Tally: Tally{Messages: 10, Accepted: 9, Handled: 8, Dead: 1, Lost: n}, Stall: stall}
	}
	got := Sum([]*Report{
		{Rows: []Row{row(Reset, "republish", 2, time.Second), row(Reset, "native", 2, 0)}},
		{Rows: []Row{row(Reset, "republish", 3, 2*time.Second)}},
	})
	require.Len(t, got, 2)
	assert.Equal(t, Row{Fault: Reset, Strategy: "republish", Broker: "4.3", Nodes: 1, Faults: 5, Tally: Tally{Messages: 20, Accepted: 18, Handled: 16, Dead: 2, Lost: 5}, Stall: 2 * time.Second}, got[1])
	var b bytes.Buffer
	require.NoError(t, WriteTable(&b, got))
	assert.Contains(t, b.String(), "longest stall")
	assert.Regexp(t, `all +5 +30 +27 +24 +3 +0 +0 +0 +0 +7 +2.00 s`, b.String())
}
