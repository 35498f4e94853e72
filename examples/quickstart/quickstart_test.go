package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestQuickstartTwice(t *testing.T) {
	t.Parallel()
	OnBrokers(t, func(t *testing.T, amqpURL string, queues func() []string) {
		for _, nth := range []string{"first", "second"} {
			var out bytes.Buffer
			require.NoError(t, run(t.Context(), amqpURL, &out), "%s run:\n%s", nth, &out)
			checkOutput(t, out.String())
			assert.Empty(t, queues(), "all is deleted at the end")
		}
	})
}

// Without a URL it needs nothing but Go, and says so first.
func TestQuickstartWithoutAURL(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, runAnywhere(t.Context(), "", &out), "%s", &out)
	assert.True(t, strings.HasPrefix(out.String(), "This runs on hopback's RabbitMQ in memory."), "%s", &out)
	checkOutput(t, out.String())
}

// checkOutput checks what a reader is to learn.
func checkOutput(t *testing.T, out string) {
	t.Helper()
	assert.NotContains(t, out, "\x1b", "colours are for terminals")
	for line := range strings.Lines(out) {
		assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), columns, line)
	}
	for _, want := range []string{
		// The timeline.
		`o-1 +1 +charged +✓ accepted`,
		`o-2 +1 +bank timed out +↻ retry in 300 ms`,
		`o-2 +2 +300 ms → [0-9.]+ m?s +charged +✓ accepted`,
		`o-3 +4 +2 s → [0-9.]+ s +charged +✓ accepted`,
		`o-4 +4 +2 s → [0-9.]+ s +bank timed out +✗ dead letter: exhausted`,
		`o-5 +1 +card declined +✗ dead letter: permanent`,
		`o-6 +1 +unexpected end of JSON input +✗ dead letter: undecodable`,
		`o-7 +1 +handler panicked: no bank +✗ dead letter: panicked`,
		`o-8 +1 +bank is busy for 2 s +↻ retry in 2 s`,
		`o-8 +2 +2 s → [0-9.]+ s +charged +✓ accepted`,
		// Where all of them ended.
		`o-1 +paid at once +1 +accepted`,
		`o-2 +the bank fails once +2 +300→\d+ +accepted`,
		`o-3 +the bank fails three times +4 +300→\d+, 1000→\d+, 2000→\d+ +accepted`,
		`o-4 +the bank never answers +4 +300→\d+, 1000→\d+, 2000→\d+ +dead letter: exhausted`,
		`o-5 +the card is declined +1 +dead letter: permanent`,
		`o-6 +the body is broken JSON +1 +dead letter: undecodable`,
		`o-7 +the handler panics +1 +dead letter: panicked`,
		`o-8 +the bank asks for time +2 +2000→\d+ +accepted`,
		// The dead-letter queue.
		`o-4 +exhausted +3 +bank timed out`,
		`o-5 +permanent +0 +card declined`,
		`o-6 +undecodable +0 +unexpected end of JSON input`,
		`o-7 +panicked +0 +handler panicked: no bank`,
		`8 of 8 orders accounted for in [0-9.]+ s: 4 accepted, 4 dead-lettered, 0 left in queues`,
	} {
		assert.Regexp(t, regexp.MustCompile(`(?m)`+want+`$`), out)
	}
	for _, m := range regexp.MustCompile(`(\d+)→(\d+)`).FindAllStringSubmatch(out, -1) {
		asked, had := json.Number(m[1]), json.Number(m[2])
		a, err := asked.Int64()
		require.NoError(t, err)
		h, err := had.Int64()
		require.NoError(t, err)
		// The delay begins after the handler has failed, when the broker has the
		// copy; but the broker counts whole milliseconds, and so do we here.
		assert.GreaterOrEqual(t, h, a-1, "a message came back too early")
	}
}

// What a run that was interrupted leaves in the queues doesn't disturb the next.
func TestQuickstartAfterAnInterruptedOne(t *testing.T) {
	t.Parallel()
	OnBrokers(t, func(t *testing.T, amqpURL string, _ func() []string) {
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		var out bytes.Buffer
		err := run(ctx, amqpURL, writerFunc(func(b []byte) (int, error) {
			if bytes.Contains(b, []byte("↻ retry")) {
				interrupt()
			}
			return out.Write(b)
		}))
		require.ErrorContains(t, err, "unaccounted for")
		assert.Contains(t, out.String(), "UNACCOUNTED FOR")

		leaveBehind(t, amqpURL)
		out.Reset()
		require.NoError(t, run(t.Context(), amqpURL, &out))
		checkOutput(t, out.String())
	})
}

// leaveBehind does what a run does that is killed: its queues stay, with messages in
// them. The work queue is declared in another way, too, as by another version.
func leaveBehind(t *testing.T, amqpURL string) {
	t.Helper()
	conn, err := client.Connect(t.Context(), amqpURL, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	work := work
	work.DeliveryLimit = 7
	topology, err := retry.Topology(policy, work)
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
	for _, q := range topology.Queues {
		p, err := client.NewPublisher[Order](t.Context(), conn, q.Address(), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), orders[0], func(m *client.Message) { m.Properties.MessageID = orders[0].ID }))
	}
}

func TestWithoutABroker(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := run(t.Context(), "amqp://127.0.0.1:1", &out)
	require.ErrorIs(t, err, client.ErrUnreachable)
	assert.NotContains(t, err.Error(), "\n")
	assert.Empty(t, out.String())
}

// It deletes what it declares, so nothing of it may have a name that others use.
func TestAllNamesAreItsOwn(t *testing.T) {
	t.Parallel()
	topology, err := retry.Topology(policy, work)
	require.NoError(t, err)
	for _, q := range topology.Queues {
		assert.Regexp(t, `^quickstart\.`, q.Address().QueueName())
	}
	for _, x := range topology.Exchanges {
		assert.Regexp(t, `^quickstart\.`, x.Name)
	}
	for _, b := range topology.Bindings {
		assert.Regexp(t, `^quickstart\.`, b.Source)
	}
}

func TestNoColoursInAFile(t *testing.T) {
	t.Parallel()
	f, err := os.Create(t.TempDir() + "/out")
	require.NoError(t, err)
	defer f.Close()
	assert.False(t, coloured(f))
	assert.False(t, coloured(io.Discard))
}

func TestHostileTextStaysInItsColumn(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "a?[2Jb…", clip("a\x1b[2Jb\nccc", 7))
	assert.Equal(t, "äö ", cell("äö", 3))
	assert.Equal(t, "", clip("abc", 0))
}

// OnBrokers runs test on every supported broker, in a separate virtual host.
func OnBrokers(t *testing.T, test func(t *testing.T, amqpURL string, queues func() []string)) {
	t.Helper()
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			b := brokers[0]
			t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })

			vhost := "hopback-quickstart-" + strings.ToLower(rand.Text())
			manage(t, b, http.MethodPut, "/api/vhosts/"+url.PathEscape(vhost), nil)
			t.Cleanup(func() { manage(t, b, http.MethodDelete, "/api/vhosts/"+url.PathEscape(vhost), nil) })
			u, err := url.Parse(b.URL)
			require.NoError(t, err)
			u.Path = "/" + vhost
			test(t, u.String(), func() []string {
				var list []struct{ Name string }
				manage(t, b, http.MethodGet, "/api/queues/"+url.PathEscape(vhost), &list)
				var names []string
				for _, q := range list {
					names = append(names, q.Name)
				}
				return names
			})
		})
	}
}

// manage sends a request to the broker's HTTP API.
func manage(t *testing.T, b *rabbitmq.Broker, method, path string, reply any) {
	t.Helper()
	// Not the test's own ctx, which has ended when cleaning up.
	req, err := http.NewRequestWithContext(context.Background(), method, b.ManagementURL+path, nil)
	require.NoError(t, err)
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Less(t, resp.StatusCode, 300, "%s %s: %s", method, path, body)
	if reply != nil {
		require.NoError(t, json.Unmarshal(body, reply))
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
