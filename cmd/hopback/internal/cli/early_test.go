package cli_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// dlq list and dlq show print at once what they have found. Then they report that they restore
// the order of the queue, also after ^C.
func TestDeadPrintsBeforeTheQueueIsInOrder(t *testing.T) {
	t.Parallel()
	const n = 10_000
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(t.Context(), make([]int, n), func(_ int, m *client.Message) { m.Properties.MessageID = "m" }))
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	w := world{env: map[string]string{"HOPBACK_URL": target, "HOPBACK_MANAGEMENT_URL": "none"}}
	all := w.run("dlq", "list", "dead", "--count") // from now on, all were returned before
	require.Zero(t, all.code, all.stderr)
	require.Contains(t, all.stdout, fmt.Sprintf("%d of %d selected", n, n))

	broker.SetLatency(60 * time.Millisecond)
	for text, args := range map[string][]string{
		"3 messages shown, and there are more": {"dead", "list", "dead", "--limit", "3"},
		`"message_id": "m"`:                    {"dead", "show", "dead", "m", "--json"},
	} {
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		var stdout, stderr safe
		code := make(chan int, 1)
		go func() {
			code <- cli.Run(ctx, cli.IO{Args: args, Env: func(k string) string { return w.env[k] }, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, StderrIsTerminal: true})
		}()
		require.Eventually(t, func() bool { return strings.Contains(stdout.String(), text) }, patience, time.Millisecond, text)
		assert.Less(t, broker.Queue("dead").Counts().Ready, n, text)
		assert.Empty(t, code)
		require.Eventually(t, func() bool { return strings.Contains(stderr.String(), "restoring the order of dead") }, patience, time.Millisecond, text)
		interrupt()
		assert.Zero(t, <-code, "%s: %s", text, &stderr)
		assert.Contains(t, stderr.String(), "the output is complete, and hopback is still restoring the order of dead")
		assert.Equal(t, 1, strings.Count(stdout.String(), text), "it is printed once")
		require.NoError(t, broker.Queue("dead").Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Ready == n }))
	}
	// A scan that has found nothing yet says what it does, too.
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var stdout, stderr safe
	code := make(chan int, 1)
	go func() {
		code <- cli.Run(ctx, cli.IO{Args: []string{"dlq", "replay", "dead", "--all", "--dry-run"}, Env: func(k string) string { return w.env[k] }, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr})
	}()
	require.Eventually(t, func() bool { return len(code) > 0 || broker.Queue("dead").Counts().Ready < n }, patience, time.Millisecond)
	require.Empty(t, code, &stderr)
	interrupt()
	assert.Equal(t, 130, <-code, &stderr)
	assert.Contains(t, stderr.String(), "stopping: returning the held messages in order")
	require.NoError(t, broker.Queue("dead").Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Ready == n }))
}
