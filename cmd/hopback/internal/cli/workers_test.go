package cli_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/live"
)

func TestWorkersOnTheCommandLine(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	defer api.Close()
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	run := func(args ...string) result {
		return world{env: map[string]string{"HOPBACK_URL": url}}.run(append([]string{"workers"}, args...)...)
	}
	r := run()
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Equal(t, "0 workers, 0 handlers running, 0 stuck\n", r.stdout)
	r = run("-o", "json")
	assert.JSONEq(t, `{"workers": []}`, r.stdout)

	running, release := make(chan struct{}), make(chan struct{})
	finish := sync.OnceFunc(func() { close(release) })
	h := live.With(conn, live.Config{Host: "host \x1b[31m1", StuckAfter: time.Nanosecond})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
		close(running)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return client.Requeue{}
		}
	}))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- conn.Consume(ctx, "orders", h, client.ConsumerConfig{Grace: time.Millisecond}) }()
	defer func() { stop(); assert.NoError(t, <-ended) }()
	p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), "the body", func(m *client.Message) {
		m.Properties.MessageID, m.Properties.Subject, m.Properties.GroupID = "order-1\x1b[0m", new("order.placed"), new("tenant-7")
	}))
	<-running
	var shown live.Fleet
	for end := time.Now().Add(time.Minute); len(shown.Workers) == 0; { // the broker may not have bound its queue yet
		require.True(t, time.Now().Before(end))
		r = run("-o", "json")
		require.Equal(t, cli.Done, r.code, r.stderr)
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &shown))
	}
	require.Len(t, shown.Workers[0].Running, 1)
	assert.Equal(t, "order-1\x1b[0m", shown.Workers[0].Running[0].ID)
	assert.NotContains(t, r.stdout, "the body")
	for r = run(); strings.HasPrefix(r.stdout, "0 workers"); r = run() {
		require.Equal(t, cli.Done, r.code, r.stderr)
	}
	assert.Regexp(t, `(?m)^host +version +up +queue +running +stuck +handled/h +failed/h$`, r.stdout)
	assert.Regexp(t, `(?m)^"host \\x1b\[31m1" .* orders +1 +1 +0 +0$`, r.stdout)
	assert.Regexp(t, `(?m)^\S+ \(stuck\) +orders +"order-1\\x1b\[0m" +order.placed +tenant-7 +1 +"host \\x1b\[31m1"$`, r.stdout)
	assert.Contains(t, r.stdout, "\n1 worker, 1 handler running, 1 stuck\n")
	assert.NotContains(t, r.stdout, "\x1b")
	assert.NotContains(t, r.stdout, "the body")
	x := world{env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}}.run("doctor")
	assert.NotContains(t, x.stdout, "hopback.workers", "doctor has nothing to say about the worker's queue")
	assert.Contains(t, x.stdout, "orders")
	r = run("-o", "yaml")
	assert.Contains(t, r.stdout, "workers:\n  - id: ")
	w := world{env: map[string]string{"HOPBACK_URL": url}}
	code, stdout, stderr := watching(t, w, []string{"workers", "--watch=100ms", "-o", "json"}, nil, func(s string) bool {
		if strings.Contains(s, `"running": 1,`) {
			finish()
		}
		return strings.Contains(s, `"handled": 1,`)
	})
	assert.Equal(t, cli.Done, code, stderr)
	assert.Contains(t, stdout, `"handled": 1,`, "it notices that the handler has returned")
	code, stdout, stderr = watching(t, w, []string{"workers", "--watch"}, nil, func(s string) bool { return strings.Contains(s, "1 worker, ") })
	assert.Equal(t, cli.Done, code, stderr)
	assert.Contains(t, stdout, "host")
	assert.Equal(t, cli.Usage, run("orders").code)
	assert.Equal(t, cli.Usage, run("--watch=1ms").code)
}
