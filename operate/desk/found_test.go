package desk_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
)

// batchOfScan is how many messages a scan requests at a time.
const batchOfScan = 2000

// peekedAt starts a broker with n messages that a scan has returned before.
func peekedAt(t *testing.T, n int) (*hopbacktest.Broker, *desk.Desk) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	require.NoError(t, p.PublishAll(t.Context(), all, func(i int, m *client.Message) { m.Properties.MessageID = fmt.Sprint("m-", i) }))
	d, err := desk.New(conn, desk.Config{Logger: quiet})
	require.NoError(t, err)
	inOrder(t, d, n)
	return broker, d
}

// inOrder reads all messages, which returns them once more.
func inOrder(t *testing.T, d *desk.Desk, n int) {
	t.Helper()
	l, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Limit: 10_000, Count: true})
	require.NoError(t, err)
	require.EqualValues(t, n, l.Matched)
	for i, m := range l.Messages {
		if want := fmt.Sprint("m-", i); m.MessageID != want { // there are thousands
			require.Equal(t, want, m.MessageID)
		}
	}
}

// OnFound gets its result while the messages are held, before the scan reads on to the end of
// the returned messages. Order and result are the same as without OnFound.
func TestFoundBeforeTheOrderIsRestored(t *testing.T) {
	t.Parallel()
	const n = 4 * batchOfScan
	broker, d := peekedAt(t, n)
	broker.SetLatency(20 * time.Millisecond)
	ready := func() int { return broker.Queue("dead").Counts().Ready }
	check := func(name string, peek func(found func(), progress func(desk.Progress)) error) {
		calls, after := 0, uint64(0)
		require.NoError(t, peek(func() {
			calls++
			assert.Equal(t, n-batchOfScan, ready(), name)
		}, func(p desk.Progress) {
			assert.EqualValues(t, n, p.Of, name)
			if calls > 0 {
				after = p.Seen
			}
		}), name)
		assert.Equal(t, 1, calls, name)
		assert.Greater(t, after, uint64(batchOfScan), "%s: the progress continues", name)
		waiting, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, broker.Queue("dead").Await(waiting, func(c hopbacktest.Counts) bool { return c.Ready == n }), name)
	}
	var early, list desk.List
	check("List", func(found func(), progress func(desk.Progress)) (err error) {
		list, err = d.List(t.Context(), desk.ListConfig{Queue: "dead", Skip: 100, OnFound: func(l desk.List) { early = l; found() }, OnProgress: progress})
		return err
	})
	assert.Equal(t, list, early)
	require.Len(t, list.Messages, 50)
	assert.Equal(t, "m-100", list.Messages[0].MessageID)
	assert.EqualValues(t, 151, list.Seen)
	assert.True(t, list.More)
	early.Messages[0].MessageID = "changed"
	assert.Equal(t, "m-100", list.Messages[0].MessageID, "the page is the caller's")
	var shownEarly, shown desk.DeadLetter
	check("Show", func(found func(), progress func(desk.Progress)) (err error) {
		shown, err = d.Show(t.Context(), desk.ShowConfig{Queue: "dead", ID: "m-7", OnFound: func(l desk.DeadLetter) { shownEarly = l; found() }, OnProgress: progress})
		return err
	})
	assert.Equal(t, shown, shownEarly)
	assert.Equal(t, "m-7", shown.MessageID)
	// A ctx that ends after OnFound doesn't stop the scan, which would change the order.
	ctx, cancel := context.WithCancel(t.Context())
	check("stopped", func(found func(), progress func(desk.Progress)) error {
		_, err := d.List(ctx, desk.ListConfig{Queue: "dead", OnFound: func(desk.List) { found(); cancel() }, OnProgress: progress})
		return err
	})
	broker.SetLatency(0)
	inOrder(t, d, n)
}

// On a page that ends with the queue, OnFound is called before the messages are returned. It
// isn't called if nothing is found or requested.
func TestFoundAtTheEnd(t *testing.T) {
	t.Parallel()
	const n = 30
	broker, d := peekedAt(t, n)
	var calls int
	_, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Count: true, OnFound: func(l desk.List) {
		calls++
		assert.Len(t, l.Messages, n)
		assert.Zero(t, broker.Queue("dead").Counts().Ready)
	}})
	require.NoError(t, err)
	assert.Equal(t, 1, calls)
	none := func(desk.DeadLetter) { assert.Fail(t, "nothing is found") }
	_, err = d.Show(t.Context(), desk.ShowConfig{Queue: "dead", ID: "none", OnFound: none})
	require.ErrorAs(t, err, new(*desk.NoMessageError))
	_, err = d.Show(t.Context(), desk.ShowConfig{Queue: "dead", OnFound: none})
	require.ErrorContains(t, err, "ShowConfig.ID")
	_, err = d.Show(t.Context(), desk.ShowConfig{ID: "m-1", OnFound: none})
	require.Error(t, err)
	inOrder(t, d, n)
}

// If the connection is lost while the order is restored, the scan starts over, and OnFound
// isn't called again.
func TestFoundOnceAlthoughTheConnectionIsLost(t *testing.T) {
	t.Parallel()
	const n = 3 * batchOfScan
	broker, d := peekedAt(t, n)
	for name, cut := range map[string]func(*hopbacktest.Connection){
		"at once":                 func(c *hopbacktest.Connection) { c.Cut() },
		"during the second batch": func(c *hopbacktest.Connection) { c.CutAfter(hopbacktest.DirectionToClient, batchOfScan/2) },
		"before the second flow":  func(c *hopbacktest.Connection) { c.CutBefore(hopbacktest.DirectionFromClient, 1) },
	} {
		var calls atomic.Int32
		lost := 0
		_, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", OnFound: func(l desk.List) {
			calls.Add(1)
			assert.Equal(t, "m-0", l.Messages[0].MessageID, name)
			all := broker.Connections()
			lost = int(all[len(all)-1].Info().ID)
			cut(all[len(all)-1])
		}})
		require.NoError(t, err, name)
		assert.EqualValues(t, 1, calls.Load(), name)
		assert.Greater(t, lost, 1, "%s: it is the walk's connection", name)
		inOrder(t, d, n)
	}
}

// Max bounds the messages that a replay tries: those that can't be sent count, too, as in a dry run.
func TestMaxCountsWhatCanNotBeSent(t *testing.T) {
	t.Parallel()
	const n, bad = 20, 12
	broker, d := peekedAt(t, n)
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "work", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	for _, c := range []struct{ limit, failed, replayed uint64 }{{10, 10, 0}, {12, 12, 0}, {15, 12, 3}} {
		cfg := desk.ReplayConfig{Queue: "dead", All: true, Max: c.limit, Address: address.Queue("work"), DryRun: true, Edit: func(e *desk.Edit) error {
			if e.Summary.Position < bad {
				return fmt.Errorf("%s can't be sent", e.Summary.MessageID)
			}
			return nil
		}}
		dry, err := d.Replay(t.Context(), cfg)
		require.NoError(t, err)
		assert.Equal(t, c.limit, dry.Matched)
		cfg.DryRun = false
		report, err := d.Replay(t.Context(), cfg)
		require.NoError(t, err)
		assert.Equal(t, c, struct{ limit, failed, replayed uint64 }{report.Matched, report.Failed, report.Replayed})
	}
}
