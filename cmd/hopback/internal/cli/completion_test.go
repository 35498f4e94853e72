package cli_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/partition"
)

// completed are the candidates for the last of args, without their descriptions.
func (w world) completed(t *testing.T, args ...string) []string {
	t.Helper()
	r := w.run(append([]string{"__complete"}, args...)...)
	assert.Zero(t, r.code, args)
	assert.Regexp(t, `^Completion ended with directive: [A-Za-z, ]+\n$`, r.stderr, "%v: a shell has no place for errors", args)
	var names []string
	for line := range strings.Lines(r.stdout) {
		if name, _, _ := strings.Cut(strings.TrimSpace(line), "\t"); name != "" && !strings.HasPrefix(line, ":") {
			names = append(names, name)
		}
	}
	return names
}

// A tab completes the names that the broker has, and groups, reasons, and IDs of dead letters, which stay
// in their queue.
func TestCompletionFromTheBroker(t *testing.T) {
	t.Parallel()
	b := hopbacktest.Start(t, hopbacktest.Config{})
	b.AddVHost("shop")
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	ctx, stop := context.WithCancel(t.Context())
	conn, err := hopback.Connect(ctx, url, hopback.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	orders := hopback.Queue[int]{Conn: conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(time.Second)}}
	require.NoError(t, orders.Declare(ctx))
	require.NoError(t, orders.Publish(ctx, 1, func(m *hopback.Message) { m.Properties.MessageID = "m-1" }))
	require.NoError(t, orders.Consume(ctx, func(context.Context, int) error {
		stop()
		return client.DeadLetter{Reason: "no-stock", Err: errors.New("sold out")}
	}, hopback.ConsumerConfig{}))
	group := partition.Group{Name: "lines", Partitions: 2}
	topology, err := group.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("orders.dead")})
	require.NoError(t, err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "orders\tand tabs", DeadLetter: declare.Drop()})
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)

	w := world{patience: patience, env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}}
	queues := []string{"delay_1s", "lines.1.000", "lines.1.001", "orders", "orders.dead", "parking_queue"}
	assert.Equal(t, queues, w.completed(t, "dlq", "survey", ""), "without the name that a shell can't read")
	assert.Equal(t, []string{"orders"}, w.completed(t, "dlq", "survey", "orders.dead", "ord"), "not what is there already")
	for _, args := range []string{"dlq list", "dlq replay", "dlq discard", "dlq export", "dlq show", "dlq edit", "publish", "retry cancel", "dlq replay q --to", "dlq list q --from",
		"topology migrate f --from", "desk --queue", "dlq import f --queue"} {
		assert.Equal(t, []string{"orders", "orders.dead"}, w.completed(t, append(strings.Fields(args), "ord")...), args)
	}
	assert.Empty(t, w.completed(t, "dlq", "list", "orders", ""), "it has one argument")
	assert.Equal(t, []string{"requeue_exchange", "retry_exchange"}, w.completed(t, "publish", "--exchange", "re"))
	assert.Equal(t, []string{"lines"}, w.completed(t, "partition", "show", ""))
	assert.Equal(t, []string{"lines"}, w.completed(t, "partition", "reshard", "li"))
	for _, args := range []string{"topology plan --vhost", "doctor --vhost", "retry policies --vhost"} {
		assert.Equal(t, []string{"/", "shop"}, w.completed(t, append(strings.Fields(args), "")...), args)
	}

	found := w.run("dlq", "list", "orders.dead")
	id := strings.Fields(strings.Split(found.stdout, "\n")[1])[0]
	assert.Equal(t, []string{id}, w.completed(t, "dlq", "show", "orders.dead", ""))
	assert.Equal(t, []string{id}, w.completed(t, "dlq", "list", "orders.dead", "--id", ""))
	groups := w.completed(t, "dlq", "replay", "orders.dead", "--group", "")
	require.Len(t, groups, 1)
	assert.Contains(t, w.run("dlq", "survey", "orders.dead").stdout, groups[0])
	assert.Contains(t, w.run("__complete", "dlq", "replay", "orders.dead", "--group", "").stdout, groups[0]+"\tno-stock ")
	assert.Contains(t, w.completed(t, "dlq", "list", "orders.dead", "--reason", ""), "no-stock")
	assert.Equal(t, []string{"no-delay-queue", "no-stock"}, w.completed(t, "dlq", "list", "orders.dead", "--reason", "no"))
	assert.NotContains(t, w.completed(t, "dlq", "list", "orders", "--reason", ""), "no-stock", "no message of that queue has it")
	assert.Equal(t, 1, b.Queue("orders.dead").Counts().Ready)

	// What isn't from the broker.
	assert.Contains(t, w.completed(t, "dlq", "list", "q", "--accept", ""), "other-consumers")
	assert.Equal(t, []string{"json", "sarif", "text", "yaml"}, sorted(w.completed(t, "doctor", "-o", "")))
	assert.Empty(t, w.completed(t, "dlq", "list", "q", "--newer-than", ""))
}

func sorted(names []string) []string {
	slices.Sort(names)
	return names
}

// Without the broker, nothing is completed, and soon.
func TestCompletionWithoutTheBroker(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	release := make(chan struct{})
	hanging := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(hanging.Close)
	t.Cleanup(func() { close(release) })
	refusing := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(refusing.Close)
	amqp := "amqp://guest:guest@" + l.Addr().String()
	for name, env := range map[string]map[string]string{
		"bad URL": {"HOPBACK_URL": "nonsense"}, "no API": {"HOPBACK_URL": amqp}, "refused": {"HOPBACK_URL": amqp, "HOPBACK_MANAGEMENT_URL": refusing.URL},
		"hanging": {"HOPBACK_URL": amqp, "HOPBACK_MANAGEMENT_URL": hanging.URL}, "closed": {"HOPBACK_URL": amqp, "HOPBACK_MANAGEMENT_URL": "http://127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			w := world{env: env}
			assert.Empty(t, w.completed(t, "dlq", "list", ""))
			assert.Contains(t, w.completed(t, "dlq", "list", "q", "--reason", "ex"), "exhausted")
			assert.Less(t, time.Since(began), patience)
		})
	}
}
