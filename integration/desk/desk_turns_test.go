package desk_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// Scans of one queue over several connections, and over one, take turns. So each sees all
// messages, and their order stays.
func TestScansTakeTurns(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 5000
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("orders.dead")))
		suite.Load(t, conn, "orders.dead", n)
		desks := []*desk.Desk{suite.NewDesk(t, s, conn), suite.NewDesk(t, s, conn)}
		for range 2 {
			other, _ := s.Connect(t)
			desks = append(desks, suite.NewDesk(t, s, other))
		}
		var all sync.WaitGroup
		for i, d := range desks {
			all.Go(func() {
				for range 2 {
					r, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}})
					if assert.NoError(t, err) && assert.Len(t, r.Queues, 1) {
						assert.EqualValues(t, n, r.Queues[0].Seen, "survey %d", i)
						assert.Empty(t, r.Queues[0].Unread)
					}
				}
			})
		}
		all.Wait()
		list, err := desks[0].List(t.Context(), desk.ListConfig{Queue: "orders.dead", Limit: 1, Count: true})
		require.NoError(t, err)
		assert.EqualValues(t, n, list.Matched)
		inOrder(t, upTo(n), bodies(s.Peer(t).Take("orders.dead", n)))
	})
}

// A replay waits for a scan that holds its messages, and says so. It starts at once if that
// is accepted, and says that it may have missed messages.
func TestReplayWaitsForAScan(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 40
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, n)
		other, _ := s.Connect(t)
		peeking, replaying := suite.NewDesk(t, s, conn), suite.NewDesk(t, s, other)
		held, release, peeked := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		var running sync.WaitGroup
		running.Go(func() {
			_, err := peeking.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Count: true, OnFound: func(desk.List) {
				close(held)
				<-release
			}})
			peeked <- err
		})
		t.Cleanup(running.Wait)
		suite.Await(t, held, "the list holds the messages")

		r, err := replaying.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, DryRun: true, Accept: []desk.WarningCode{desk.WarningScan}})
		require.NoError(t, err)
		assert.Zero(t, r.Matched)
		assert.False(t, r.Complete)
		assert.Contains(t, r.Unread, "1 other consumer")

		ctx, stop := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		_, err = replaying.Replay(ctx, desk.ReplayConfig{Queue: "orders.dead", All: true, OnProgress: func(p desk.Progress) {
			if p.Waiting {
				stop(enough)
			}
		}})
		require.ErrorIs(t, err, enough)

		var once sync.Once
		r, err = replaying.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, OnProgress: func(p desk.Progress) {
			if p.Waiting {
				once.Do(func() { close(release) })
			}
		}})
		require.NoError(t, err)
		require.NoError(t, suite.Await(t, peeked, "the list has ended"))
		assert.EqualValues(t, n, r.Replayed)
		assert.True(t, r.Complete)
		assert.Empty(t, r.Unread)
		suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "orders") == n })
		s2, err := peeking.Survey(t.Context(), desk.SurveyConfig{})
		require.NoError(t, err)
		for _, q := range s2.Queues {
			assert.NotContains(t, q.Name, "scan", "no queue is left")
		}
	})
}

// What another consumer holds can't be read. Every operation says so, and so does every
// command, with an exit code that isn't 0 unless that is accepted.
func TestWhatOthersHoldIsReported(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n, taken = 30, 10
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, n)
		d := suite.NewDesk(t, s, conn)
		list, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		p := s.Peer(t)
		first := p.Receiver("orders.dead", taken)
		for range taken {
			p.Next(first)
		}
		gone := list.Messages[0].ID

		list, err = d.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Count: true})
		require.NoError(t, err)
		assert.EqualValues(t, n-taken, list.Matched)
		assert.Contains(t, list.Unread, "1 other consumer")
		survey, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}})
		require.NoError(t, err)
		assert.Contains(t, survey.Queues[0].Unread, "1 other consumer")
		_, err = d.Show(t.Context(), desk.ShowConfig{Queue: "orders.dead", ID: gone})
		require.ErrorContains(t, err, "1 other consumer")
		out, err := d.Export(t.Context(), tempFile(t, "dead.jsonl"), desk.ExportConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		assert.Contains(t, out.Unread, "1 other consumer")
		assert.Equal(t, desk.WarningConsumers, out.Warnings[0].Code)
		discard, err := d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", All: true, DryRun: true})
		require.NoError(t, err)
		assert.Contains(t, discard.Unread, "1 other consumer")
		assert.Equal(t, desk.WarningConsumers, discard.Warnings[0].Code)
		replay, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, Max: 3})
		require.NoError(t, err)
		assert.Equal(t, desk.WarningConsumers, replay.Warnings[0].Code)

		hopback := s.Shell(t)
		body := filepath.Join(t.TempDir(), "body")
		require.NoError(t, os.WriteFile(body, []byte("{}"), 0o600))
		for i, args := range [][]string{
			{"list", "orders.dead", "--count"}, {"survey", "orders.dead"}, {"export", "orders.dead", ""}, {"discard", "orders.dead", "--all", "--dry-run"},
			{"replay", "orders.dead", "--all", "--dry-run"}, {"show", "orders.dead", gone}, {"edit", "orders.dead", gone, "--body", body},
		} {
			named := func(name string) []string {
				out := append([]string{}, args...)
				if args[0] == "export" {
					out[2] = filepath.Join(t.TempDir(), name)
				}
				return out
			}
			logged := hopback.Dead(suite.ExitUnknown, named("a")...)
			assert.Contains(t, logged.Stderr, "1 other consumer", args[0])
			assert.Contains(t, logged.Stderr, "--accept other-consumers", args[0])
			accepted := suite.ExitDone
			if args[0] == "show" || args[0] == "edit" {
				accepted = suite.ExitNo
			}
			hopback.Dead(accepted, append(named(fmt.Sprint("b", i)), "--accept", "other-consumers")...)
		}
	})
}

// A user who may not declare the queue that marks a scan scans nevertheless. Without it two
// scans aren't kept apart, and the one that sees a part reports that.
func TestScanWithoutThePermissionToDeclare(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 30
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		suite.Load(t, conn, "dead", n)
		reader, _ := suite.ConnectTo(t, s.User(t, "^$", ".*", ".*"))
		d, err := desk.New(reader, desk.Config{})
		require.NoError(t, err)
		own, err := desk.New(conn, desk.Config{})
		require.NoError(t, err)
		for range 2 {
			list, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", Count: true, Accept: []desk.WarningCode{desk.WarningWaiting}, OnFound: func(l desk.List) {
				assert.EqualValues(t, n, l.Matched)
				assert.Empty(t, l.Unread)
				part, err := own.List(t.Context(), desk.ListConfig{Queue: "dead", Count: true})
				require.NoError(t, err)
				assert.Zero(t, part.Matched)
				assert.Contains(t, part.Unread, "1 other consumer")
			}})
			require.NoError(t, err)
			assert.EqualValues(t, n, list.Matched)
		}
	})
}
