package cli_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/robfig/cron/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/schedule"
)

var _ schedule.Times = cron.Schedule(nil) // each schedule of robfig/cron

func scheduled(t *testing.T, conn *client.Conn) {
	t.Helper()
	topology, err := schedule.GroupTopology(schedule.Names{}, "billing")
	require.NoError(t, err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "reports", DeadLetter: declare.Drop()})
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
}

// Cron expressions keep to their time zone when clocks change. In the gap of spring a time is left out; in autumn's
// repeated hour nothing comes twice for one time, and what is due each hour comes in each hour.
func TestCronExpressionsOverChangesOfTheClock(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	for name, change := range map[string]struct {
		from  time.Time
		daily []string // at 2:30 in Berlin, in UTC
		hours int
	}{
		"spring": {time.Date(2000, 3, 24, 12, 0, 0, 0, berlin), []string{"2000-03-25T01:30:00Z", "2000-03-27T00:30:00Z"}, 71},
		"autumn": {time.Date(2000, 10, 27, 12, 0, 0, 0, berlin), []string{"2000-10-28T00:30:00Z", "2000-10-29T00:30:00Z", "2000-10-29T01:30:00Z", "2000-10-30T01:30:00Z"}, 73},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(time.Until(change.from))
				b := hopbacktest.Start(t, hopbacktest.Config{})
				conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, IdleTimeout: 12 * time.Hour})
				require.NoError(t, err)
				scheduled(t, conn)
				of := func(name, text string) schedule.Recurring {
					at, err := cron.ParseStandard(text)
					require.NoError(t, err)
					return schedule.Recurring{Name: name, Times: at, Spec: text, To: address.Queue("reports"), Location: berlin}
				}
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() {
					done <- schedule.Group{Conn: conn, Name: "billing"}.Run(ctx, schedule.RunConfig{Recurring: []schedule.Recurring{
						of("zone", "CRON_TZ=Europe/Berlin 30 2 * * *"), of("location", "30 2 * * *"), of("hourly", "@hourly"), of("relative", "@every 90m"),
					}})
				}()
				time.Sleep(time.Until(time.Date(change.from.Year(), change.from.Month(), change.from.Day()+3, 12, 0, 1, 0, berlin)))
				stop()
				require.NoError(t, <-done)
				per := map[string][]string{}
				for _, m := range b.Queue("reports").Messages() {
					name, at, ok := schedule.ParseMessageID(m.ID())
					require.True(t, ok)
					per[name] = append(per[name], at.Format(time.RFC3339))
				}
				assert.Equal(t, change.daily, per["zone"])
				assert.Equal(t, change.daily, per["location"])
				assert.Len(t, per["hourly"], change.hours)
				assert.Len(t, slices.Compact(slices.Clone(per["hourly"])), change.hours)
				assert.Len(t, per["relative"], change.hours*60/90)
				require.NoError(t, conn.Close(context.Background()))
			})
		})
	}
}

const messages = `group: billing
version: 2
messages:
  report:
    cron: "0 6 * * 1-5"
    time-zone: Europe/Berlin
    to: /queues/reports
    body: '{"kind": "daily"}'
    content-type: application/json
    missed: skip
  tick:
    every: 1s
    to: /queues/reports
`

// The command publishes a file's messages, and lists, pauses, resumes, runs, and removes them.
func TestScheduleOnTheCommandLine(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	file := filepath.Join(t.TempDir(), "messages.yaml")
	require.NoError(t, os.WriteFile(file, []byte(messages), 0o600))
	run := func(args ...string) result {
		return world{env: map[string]string{"HOPBACK_URL": url}}.run(append([]string{"schedule"}, args...)...)
	}
	r := run("list", "billing")
	assert.Equal(t, cli.No, r.code, r.stderr)
	r = run("serve", file)
	assert.Equal(t, cli.No, r.code, r.stderr)
	assert.Contains(t, r.stderr, "--declare")
	scheduled(t, conn)

	ctx, stop := context.WithCancel(t.Context())
	got := make(chan string, 1000)
	consumed := make(chan error, 1)
	go func() {
		consumed <- conn.Consume(ctx, "reports", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message().Properties.MessageID.(string)
			return nil
		}), client.ConsumerConfig{})
	}()
	w := world{env: map[string]string{"HOPBACK_URL": url}}
	serving, interrupt := context.WithCancel(t.Context())
	served := make(chan result, 1)
	go func() { served <- w.runIn(serving, "schedule", "serve", file, "--declare") }()
	await := func(name string) {
		t.Helper()
		for id := range got {
			if of, _, _ := schedule.ParseMessageID(id); of == name {
				return
			}
		}
	}
	await("tick")
	r = run("run-now", "billing", "report")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	await("report")
	r = run("pause", "billing", "report", "--why", "the printer is broken")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	r = run("list", "billing")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Regexp(t, `(?m)^report +CRON_TZ=Europe/Berlin 0 6 \* \* 1-5 +/queues/reports +skip +- +\S+Z +since \S+Z by \S+: the printer is broken$`, strings.ReplaceAll(r.stdout, `"`, ""))
	r = run("list", "billing", "-o", "json")
	var state schedule.GroupState
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &state), r.stdout)
	assert.Equal(t, int64(2), state.Version)
	require.Len(t, state.Recurring, 2)
	r = run("resume", "billing", "report")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	r = run("remove", "billing", "tick")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Contains(t, run("list", "billing").stdout, "removed")
	r = run("pause", "billing", "unknown")
	assert.Equal(t, cli.Usage, r.code, r.stderr)
	r = run("pause", "billing", "--for", "1h")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Contains(t, run("list", "billing").stdout, "The group is paused: since")
	interrupt()
	r = <-served
	assert.Equal(t, cli.Done, r.code, r.stderr)
	stop()
	require.NoError(t, <-consumed)
}

// What is wrong in a file is named before anything is sent.
func TestMistakesInAFileOfRecurringMessages(t *testing.T) {
	t.Parallel()
	for change, says := range map[[2]string]string{
		{"0 6 * * 1-5", "0 6 * *"}:       "messages.report: cron: ",
		{"Europe/Berlin", "Europe/Nope"}: "messages.report: time-zone: ",
		{"1s", "x"}:                      "messages.tick: every: ",
		{"every: 1s", "body: x"}:         "messages.tick: it needs either cron or every",
		{"0 6 * * 1-5", "@every 1h"}:     "messages.report: cron: use the key every",
		{"/queues/reports", "reports"}:   "messages.",
		{"group: billing", "grup: b"}:    "grup",
	} {
		file := filepath.Join(t.TempDir(), "messages.yaml")
		require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(messages, change[0], change[1])), 0o600))
		r := world{env: map[string]string{"HOPBACK_URL": "amqp://127.0.0.1:1"}}.run("schedule", "serve", file)
		assert.Equal(t, cli.Usage, r.code, r.stderr)
		assert.Contains(t, r.stderr, says)
	}
}
