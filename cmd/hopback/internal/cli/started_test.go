package cli_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbacktest"
)

// varies are the parts of the commands' output that differ from run to run.
var varies = regexp.MustCompile(`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|(?m:^id +[0-9a-f]{24}$)|(?m:^worker +\S+$)|(?m:^size +\d+ bytes$)|\bin \d+m?s|\breplay-\d{8}-\d{6}-\w+`)

// The commands of docs/getting-started.md print what the page shows, from the state in which the
// page's program has left the broker.
func TestGettingStartedShowsWhatCommandsPrint(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../../docs/getting-started.md")
	require.NoError(t, err)
	steps := regexp.MustCompile("(?s)```sh\nhopback (dlq [^\n]*)\n```\n\n```\n(.*?)```\n").FindAllStringSubmatch(string(text), -1)
	require.Len(t, steps, 3)
	id := regexp.MustCompile(`(?m)^message-id +(\S+)$`).FindStringSubmatch(string(text))[1]

	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	ctx, stop := context.WithCancel(t.Context())
	conn, err := hopback.Connect(ctx, url, hopback.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	type order struct {
		ID string `json:"id"`
	}
	orders := hopback.Queue[order]{Conn: conn, Name: "orders", Retry: hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(time.Second, 10*time.Second, time.Minute)}}
	require.NoError(t, orders.Declare(ctx))
	require.NoError(t, orders.Publish(ctx, order{"gift"}, func(m *hopback.Message) { m.Properties.MessageID = id }))
	require.NoError(t, orders.Consume(ctx, func(context.Context, order) error {
		stop()
		return hopback.Permanent(errors.New("a gift has no price"))
	}, hopback.ConsumerConfig{}))
	require.NoError(t, conn.Close(t.Context()))

	w := world{env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}}
	for _, step := range steps {
		r := w.run(strings.Fields(step[1])...)
		assert.Zero(t, r.code, "%s: %s", step[1], r.stderr)
		assert.Equal(t, varies.ReplaceAllString(step[2], "…"), varies.ReplaceAllString(r.stdout+r.stderr, "…"), step[1])
	}
	assert.Equal(t, 1, b.Queue("orders").Counts().Ready)
}

// The commands of docs/changing-a-policy.md print what the page shows.
func TestChangingAPolicyShowsWhatCommandsPrint(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../../docs/changing-a-policy.md")
	require.NoError(t, err)
	files := regexp.MustCompile("(?s)```yaml\n(.*?)```\n").FindAllStringSubmatch(string(text), -1)
	require.Len(t, files, 2)
	before := file(t, "before.yaml", "retry: {delays: [10s, 1m], max-retries: 5}\nwork-queues:\n  orders: {delivery-limit: 5}\n")
	after, moved := file(t, "topology.yaml", files[0][1]), file(t, "topology.yaml", files[1][1])

	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	w := world{env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}}
	shows := func(printed string) {
		t.Helper()
		assert.True(t, strings.Contains(string(text), strings.TrimSpace(printed)), "the page doesn't show:\n%s", printed)
	}
	run := func(args ...string) string {
		t.Helper()
		r := w.run(args...)
		require.Zero(t, r.code, "%v: %s", args, r.stderr)
		return r.stdout
	}
	run("topology", "apply", before)
	plan := strings.Split(strings.TrimSpace(run("topology", "plan", after)), "\n")
	shows(plan[len(plan)-1])
	run("topology", "apply", after)
	shows(run("topology", "verify", after))
	run("topology", "apply", before)
	shows(run("topology", "migrate", moved, "--from", "orders", "--to", "orders.v2", "--quiet", "100ms"))
}
