// Package examples runs the programs p1 to p8, night-shift, central-retrier and orders, against real brokers of both versions, and
// partitions and payment-webhook on ones in memory, or a RabbitMQ 4.4.
package examples

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestExamples wants every example to prove what it claims, and to leave nothing
// behind.
func TestExamples(t *testing.T) {
	names, err := filepath.Glob("p[1-8]-*")
	require.NoError(t, err)
	require.Len(t, names, 8)
	names = append(names, "night-shift", "central-retrier")
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin+string(filepath.Separator))
	for _, name := range names {
		build.Args = append(build.Args, "./"+name)
	}
	text, err := build.CombinedOutput()
	require.NoError(t, err, "%s", text)

	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, brokers[0].Release(context.Background())) })
			for _, name := range names {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					v := newVHost(t, brokers[0])
					killed := command(t, bin, name, v)
					kill(t, killed)

					// The next run finds what that one has left behind.
					run := command(t, bin, name, v)
					var out, errs bytes.Buffer
					run.Stdout, run.Stderr = &out, &errs
					require.NoError(t, run.Run(), "%s%s", &out, &errs)
					lines := strings.Split(strings.TrimSpace(out.String()), "\n")
					assert.Regexp(t, `^PROVEN: .*\d`, lines[len(lines)-1])
					t.Log(lines[len(lines)-1])
					assert.JSONEq(t, "[]", v.queues(t), "all queues are deleted at the end")
				})
			}
		})
	}
}

// TestOrders kills the parts of the order service, which needs PostgreSQL, and checks that its
// books balance.
func TestOrders(t *testing.T) {
	bin := t.TempDir()
	text, err := exec.CommandContext(t.Context(), "go", "-C", "orders", "build", "-o", bin+string(filepath.Separator), ".").CombinedOutput()
	require.NoError(t, err, "%s", text)
	postgres, err := service.Postgres(t.Context(), os.Stderr)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, postgres.Close()) })
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, brokers[0].Release(context.Background())) })
			v := newVHost(t, brokers[0])
			run := command(t, bin, "orders", v)
			run.Args = append(run.Args, "-torture", "-orders=150", "-kills=5")
			run.Env = append(run.Env, "HOPBACK_POSTGRES_URL="+postgres.URL)
			out, err := run.CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), "PROVEN: 5 kills")
			assert.JSONEq(t, "[]", v.queues(t), "all queues are deleted at the end")
		})
	}
}

// TestPaymentWebhook runs with RabbitMQ 4.4 in memory, and with a real one where HOPBACK_URL_4_4
// names it.
func TestPaymentWebhook(t *testing.T) {
	bin := t.TempDir()
	text, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "./payment-webhook").CombinedOutput()
	require.NoError(t, err, "%s", text)
	shows := func(t *testing.T, amqpURL string) {
		out, err := commandAt(t, bin, "payment-webhook", amqpURL).CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.Contains(t, string(out), "PROVEN: 40 orders waited in their queue: 25 were shipped")
	}
	t.Run("memory", func(t *testing.T) {
		b, err := hopbacktest.New(hopbacktest.Config{Version: "4.4.0"})
		require.NoError(t, err)
		t.Cleanup(b.Close)
		amqpURL, err := b.Listen("127.0.0.1:0")
		require.NoError(t, err)
		shows(t, amqpURL)
	})
	if rabbitmq.Given("4.4") {
		t.Run("4.4", func(t *testing.T) {
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, "4.4")
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, brokers[0].Release(context.Background())) })
			v := newVHost(t, brokers[0])
			shows(t, v.amqpURL)
			assert.JSONEq(t, "[]", v.queues(t), "all queues are deleted at the end")
		})
	}
}

// command runs an example, within two minutes.
func command(t *testing.T, bin, name string, v *vhost) *exec.Cmd {
	t.Helper()
	return commandAt(t, bin, name, v.amqpURL)
}

func commandAt(t *testing.T, bin, name, amqpURL string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, filepath.Join(bin, name))
	c.Env = append(os.Environ(), "HOPBACK_URL="+amqpURL)
	return c
}

// kill starts an example and kills it once it has declared its queues, and not before:
// RabbitMQ 4.0 doesn't bear that a queue is deleted, as the next run does, while it is
// still being declared. Its dead-lettering at least once may end for good, for all queues.
func kill(t *testing.T, c *exec.Cmd) {
	t.Helper()
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	declared := false
	for lines := bufio.NewScanner(out); !declared && lines.Scan(); {
		declared = strings.Contains(lines.Text(), "declared: ")
	}
	require.NoError(t, c.Process.Kill())
	require.Error(t, c.Wait())
	require.True(t, declared)
}

// vhost is a separate virtual host, so that examples can run next to others.
type vhost struct {
	name, amqpURL string
	broker        *rabbitmq.Broker
}

func newVHost(t *testing.T, b *rabbitmq.Broker) *vhost {
	t.Helper()
	u, err := url.Parse(b.URL)
	require.NoError(t, err)
	v := &vhost{name: "hopback-example-" + strings.ToLower(rand.Text()), broker: b}
	u.Path = "/" + v.name
	v.amqpURL = u.String()
	v.http(t, http.MethodPut, "/api/vhosts/"+v.name)
	t.Cleanup(func() { v.http(t, http.MethodDelete, "/api/vhosts/"+v.name) })
	return v
}

// queues lists the queues, as JSON.
func (v *vhost) queues(t *testing.T) string {
	t.Helper()
	return v.http(t, http.MethodGet, "/api/queues/"+v.name+"?columns=name")
}

func (v *vhost) http(t *testing.T, method, path string) string {
	t.Helper()
	// Not the test's own ctx, which has ended when cleaning up.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, v.broker.ManagementURL+path, nil)
	require.NoError(t, err)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Less(t, resp.StatusCode, 300, "%s %s: %s", method, path, body)
	return string(body)
}

// TestPartitions runs the example of partitions on a broker in memory: it needs RabbitMQ 4.3.
func TestPartitions(t *testing.T) {
	bin := t.TempDir()
	text, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin+string(filepath.Separator), "./partitions").CombinedOutput()
	require.NoError(t, err, "%s", text)
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	out, err := command(t, bin, "partitions", &vhost{amqpURL: url}).CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Regexp(t, `(?m)^PROVEN: \d+ changes of 200 customers in their order, with \d+ retries`, string(out))
	assert.Regexp(t, `ann took partition 0`, string(out))
	assert.Contains(t, string(out), "the shares are map[ann:3 bob:3 cid:3 dee:3]")
	assert.Contains(t, string(out), "the shares are map[ann:4 cid:4 dee:4]")
}
