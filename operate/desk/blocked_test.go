package desk_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/httpapi"
)

// During an alarm, what only reads and settles works, if the HTTP API can be read. Everything else
// returns an error that names the alarm. Nothing waits for its end.
func TestTheDeskDuringAnAlarm(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6", "4.4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			quiet := slog.New(slog.DiscardHandler)
			broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
			conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
			require.NoError(t, err)
			t.Cleanup(func() { _ = conn.Close(context.Background()) })
			_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}}})
			require.NoError(t, err)
			p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, p.PublishAll(t.Context(), []int{0, 1, 2, 3, 4}))
			server := httptest.NewServer(broker.HTTPHandler())
			t.Cleanup(server.Close)
			api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
			require.NoError(t, err)
			with, err := desk.New(conn, desk.Config{HTTP: api, Logger: quiet})
			require.NoError(t, err)
			without, err := desk.New(conn, desk.Config{Logger: quiet})
			require.NoError(t, err)
			file := func() *os.File {
				f, err := os.Create(filepath.Join(t.TempDir(), "messages.jsonl"))
				require.NoError(t, err)
				t.Cleanup(func() { _ = f.Close() })
				return f
			}
			backup := file()
			exported, err := without.Export(t.Context(), backup, desk.ExportConfig{Queue: "dead"})
			require.NoError(t, err)
			require.EqualValues(t, 5, exported.Exported)

			broker.SetDiskAlarm(true)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for name, op := range map[string]func(d *desk.Desk) error{
				"side effects": func(d *desk.Desk) error { _, err := d.SideEffects(ctx, "dead"); return err },
				"list": func(d *desk.Desk) error {
					l, err := d.List(ctx, desk.ListConfig{Queue: "dead"})
					if err == nil {
						assert.Len(t, l.Messages, 5)
						assert.Empty(t, l.Unread)
					}
					return err
				},
				"survey": func(d *desk.Desk) error {
					s, err := d.Survey(ctx, desk.SurveyConfig{Queues: []string{"dead"}})
					if err == nil && assert.Len(t, s.Queues, 1) {
						assert.Empty(t, s.Queues[0].Unread)
					}
					return err
				},
				"export": func(d *desk.Desk) error {
					r, err := d.Export(ctx, file(), desk.ExportConfig{Queue: "dead"})
					if err == nil {
						assert.EqualValues(t, 5, r.Exported)
					}
					return err
				},
				"dry discard": func(d *desk.Desk) error {
					_, err := d.Discard(ctx, desk.DiscardConfig{Queue: "dead", All: true, DryRun: true})
					return err
				},
			} {
				assert.NoError(t, op(with), name)
				named(t, op(without), name)
			}
			_, err = with.List(ctx, desk.ListConfig{Queue: "no/such queue"})
			assert.ErrorIs(t, err, declare.ErrNotFound)
			_, err = with.Replay(ctx, desk.ReplayConfig{Queue: "dead", All: true, Address: address.Queue("work")})
			named(t, err, "replay")
			_, err = backup.Seek(0, 0)
			require.NoError(t, err)
			_, err = with.Import(ctx, backup, desk.ImportConfig{Queue: "dead"})
			named(t, err, "import")
			assert.Equal(t, 5, broker.Queue("dead").Counts().Ready)
			discarded, err := with.Discard(ctx, desk.DiscardConfig{Queue: "dead", All: true, Destroy: true})
			require.NoError(t, err)
			assert.EqualValues(t, 5, discarded.Discarded)
			assert.Zero(t, broker.Queue("dead").Counts().Messages)
			assert.NoError(t, ctx.Err(), "nothing waits")
		})
	}
}

// named is an error that names the alarm.
func named(t *testing.T, err error, op string) {
	t.Helper()
	assert.ErrorIs(t, err, client.ErrNotSent, op)
	assert.ErrorContains(t, err, "alarm", op)
	assert.False(t, errors.Is(err, context.DeadlineExceeded), op)
}

// A scan that ends during an alarm can't delete the queue that keeps other scans away. It does so after
// the alarm.
func TestAScanThatEndsDuringAnAlarmUnlocksLater(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), 1))
	server := httptest.NewServer(broker.HTTPHandler())
	t.Cleanup(server.Close)
	api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	require.NoError(t, err)
	d, err := desk.New(conn, desk.Config{HTTP: api, Logger: quiet})
	require.NoError(t, err)
	locked := func() bool {
		_, err := api.Get(t.Context(), "/queues/%2F/dead.hopback-scan")
		return !errors.Is(err, declare.ErrNotFound)
	}
	_, err = d.Discard(t.Context(), desk.DiscardConfig{Queue: "dead", All: true, DryRun: true, OnProgress: func(p desk.Progress) {
		assert.True(t, locked())
		broker.SetMemoryAlarm(true)
	}})
	require.NoError(t, err)
	assert.True(t, locked())
	broker.SetMemoryAlarm(false)
	require.Eventually(t, func() bool { return !locked() }, time.Minute, 10*time.Millisecond)
}
