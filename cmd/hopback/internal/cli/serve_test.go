package cli_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
)

// patience is how long a test waits for what is to come at once.
const patience = time.Minute

// served is a running "hopback broker".
type served struct {
	lines      []string // of stdout, up to "^C stops it."
	amqp, http string   // URLs
	interrupt  func()
	code       chan int
	stdout     chan string // what came behind lines
	stderr     *bytes.Buffer
}

// serveBroker runs "hopback broker" until the end of the test, on ports that the system
// chooses unless args say otherwise.
func serveBroker(t *testing.T, args ...string) *served {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &served{interrupt: cancel, code: make(chan int, 1), stdout: make(chan string, 1), stderr: &bytes.Buffer{}}
	r, w := io.Pipe()
	go func() {
		s.code <- cli.Run(ctx, cli.IO{
			Args: append([]string{"broker", "--amqp", "127.0.0.1:0", "--http", "127.0.0.1:0"}, args...),
			Env:  func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: w, Stderr: s.stderr,
		})
		_ = w.Close()
	}()
	t.Cleanup(func() {
		s.interrupt()
		_, _ = io.Copy(io.Discard, r)
	})
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := lines.Text()
		s.lines = append(s.lines, line)
		if u, ok := strings.CutPrefix(line, "AMQP "); ok {
			s.amqp = strings.TrimSpace(u)
		}
		if u, ok := strings.CutPrefix(line, "HTTP API "); ok {
			s.http = strings.TrimSpace(u)
		}
		if line == "^C stops it." {
			go func() {
				rest, _ := io.ReadAll(r)
				s.stdout <- string(rest)
			}()
			return s
		}
	}
	require.Fail(t, "it ended", "code %d: %s", <-s.code, s.stderr)
	return s
}

// end is what ^C does. It returns the exit code.
func (s *served) end(t *testing.T) int {
	t.Helper()
	s.interrupt()
	select {
	case code := <-s.code:
		assert.Empty(t, <-s.stdout)
		assert.Empty(t, s.stderr.String())
		return code
	case <-time.After(patience):
		require.Fail(t, "^C doesn't end it")
		return -1
	}
}

// getJSON reads what the HTTP API says at a path.
func (s *served) getJSON(t *testing.T, path string, into any) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport, Timeout: patience}).Get(s.http + path)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.NoError(t, json.NewDecoder(response.Body).Decode(into))
}

func connected(t *testing.T, url string) *client.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := client.Connect(ctx, url, client.Config{})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// eventsThrough publishes a message to a queue, and has it from there.
func eventsThrough(t *testing.T, conn *client.Conn, queue string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	publisher, err := client.NewPublisher[string](ctx, conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, publisher.Publish(ctx, "hello"))
	got := make(chan string, 1)
	working, stop := context.WithCancel(ctx)
	defer stop()
	handler := client.JSON(func(_ context.Context, s string) error {
		got <- s
		stop()
		return nil
	})
	_ = conn.Consume(working, queue, handler, client.ConsumerConfig{})
	require.Len(t, got, 1)
	assert.Equal(t, "hello", <-got)
}

func TestBrokerIsServedUntilInterrupted(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			s := serveBroker(t, "--rabbitmq-version", version)
			assert.Equal(t, "A RabbitMQ "+version+" in memory, for tests and development. It stores nothing.", s.lines[0])
			assert.Regexp(t, `^amqp://guest:guest@127\.0\.0\.1:\d+/$`, s.amqp)
			assert.Regexp(t, `^http://guest:guest@127\.0\.0\.1:\d+/$`, s.http)

			conn := connected(t, s.amqp)
			_, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
				declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()},
			}})
			require.NoError(t, err)
			eventsThrough(t, conn, "orders")

			var overview struct {
				Version string `json:"rabbitmq_version"`
			}
			s.getJSON(t, "api/overview", &overview)
			assert.Equal(t, version, overview.Version)
			var queues []struct{ Name string }
			s.getJSON(t, "api/queues", &queues)
			require.Len(t, queues, 1)
			assert.Equal(t, "orders", queues[0].Name)

			assert.Equal(t, cli.Done, s.end(t))
		})
	}
}

// What --topology names is there for the first client, as the other commands see it.
func TestBrokerHasTheTopology(t *testing.T) {
	t.Parallel()
	yaml := file(t, "topology.yaml", "retry: {delays: [1s]}\nwork-queues: {orders: {delivery-limit: 5}}\n")
	s := serveBroker(t, "--topology", yaml)
	assert.Contains(t, strings.Join(s.lines, "\n"), "applied   "+yaml+": ")
	w := world{env: map[string]string{"HOPBACK_URL": s.amqp, "HOPBACK_MANAGEMENT_URL": s.http}}
	r := w.run("topology", "plan", "--exit-code", yaml)
	assert.Equal(t, cli.Done, r.code, r.stdout+r.stderr)
	r = w.run("topology", "verify", yaml)
	assert.Equal(t, cli.Done, r.code, r.stdout+r.stderr)
	eventsThrough(t, connected(t, s.amqp), "orders")
	assert.Equal(t, cli.Done, s.end(t))

	// Definitions have a virtual host, which is made.
	definitions := world{}.run("topology", "export", "--vhost", "a/b", yaml)
	require.Zero(t, definitions.code, definitions.stderr)
	s = serveBroker(t, "--topology", file(t, "definitions.json", definitions.stdout))
	assert.True(t, strings.HasSuffix(s.amqp, "/a%2Fb"), s.amqp)
	eventsThrough(t, connected(t, s.amqp), "orders")
	assert.Equal(t, cli.Done, s.end(t))
}

func TestBrokerWithoutHTTP(t *testing.T) {
	t.Parallel()
	s := serveBroker(t, "--http", "none", "--amqp", "localhost:0", "--vhost", "shop")
	assert.Empty(t, s.http)
	assert.Regexp(t, `:\d+/shop$`, s.amqp)
	connected(t, s.amqp)
	assert.Equal(t, cli.Done, s.end(t), "with a client connected")
}

// An address that isn't loopback is for those who ask for it by name.
func TestBrokerIsForThisMachineAlone(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"0.0.0.0:0", "[::]:0", "192.0.2.1:0"} {
		for _, flag := range []string{"--amqp", "--http"} {
			r := world{}.run("broker", "--amqp", "127.0.0.1:0", flag, address)
			assert.Equal(t, cli.Usage, r.code, address)
			assert.Empty(t, r.stdout, address)
			assert.Contains(t, r.stderr, flag+` is "`+address+`", which other machines can reach`)
			assert.Contains(t, r.stderr, "--allow-remote")
		}
	}
	s := serveBroker(t, "--allow-remote", "--amqp", "0.0.0.0:0")
	assert.Regexp(t, `^amqp://guest:guest@127\.0\.0\.1:\d+/$`, s.amqp, "a URL that works here")
	connected(t, s.amqp)
	assert.Equal(t, cli.Done, s.end(t))
}

func TestMisuseOfBroker(t *testing.T) {
	t.Parallel()
	bad := file(t, "bad.yaml", "work-queues:\n  orders: {delivery-limt: 5}\n")
	unbound := file(t, "unbound.yaml", small+"bindings:\n  - {source: missing, queue: orders, key: a}\n")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	taken := l.Addr().String()
	for _, c := range []struct {
		args string
		code int
		says []string
	}{
		{"--rabbitmq-version 3.13", cli.Usage, []string{`--rabbitmq-version is "3.13"; it can be 4.3.6 or 4.0.5`}},
		{"--amqp 5672", cli.Usage, []string{`--amqp is "5672", which isn't an address; write it as 127.0.0.1:5672`}},
		{"--amqp none", cli.Usage, []string{"isn't an address"}},
		{"--amqp 127.0.0.1:", cli.Usage, []string{"a port is a number"}},
		{"--amqp 127.0.0.1:99999", cli.Usage, []string{`--amqp has the port "99999"; a port is a number from 0 to 65535`}},
		{"--http :x", cli.Usage, []string{`--http has the port "x"`}},
		{"--http host.invalid:0", cli.Usage, []string{`--http has the unknown host "host.invalid"`}},
		{"--topology /nowhere", cli.Usage, []string{`there is no file "/nowhere"`}},
		{"--topology " + bad, cli.Usage, []string{"bad.yaml:2", "delivery-limit"}},
		{"topology.yaml", cli.Usage, []string{"takes no argument", "--topology"}},
		{"--toplogy x", cli.Usage, []string{"did you mean --topology?"}},
		{"--amqp " + taken, cli.Unknown, []string{"--amqp: " + taken + " is in use", "choose another address"}},
		{"--http " + taken, cli.Unknown, []string{"--http: " + taken + " is in use"}},
		{"--rabbitmq-version 4.0.5 --topology " + unbound, cli.No, []string{"RabbitMQ 4.0.5 refused the topology of", "unbound.yaml", "missing"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience) // should it be served after all
		r := world{}.runIn(ctx, append([]string{"broker", "--amqp", "127.0.0.1:0", "--http", "127.0.0.1:0"}, strings.Fields(c.args)...)...)
		cancel()
		assert.Equal(t, c.code, r.code, "%s: %s", c.args, r.stderr)
		assert.Empty(t, r.stdout, c.args)
		assert.True(t, strings.HasPrefix(r.stderr, "hopback: "), "%s: %s", c.args, r.stderr)
		for _, says := range c.says {
			assert.Contains(t, r.stderr, says, c.args)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.Equal(t, cli.Interrupted, world{}.runIn(ctx, "broker", "--amqp", "127.0.0.1:0", "--http", "none").code)

	r := world{}.run("broker", "--help")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "It stores nothing")
	assert.Contains(t, r.stdout, "Examples:")
	r = world{}.run("__complete", "broker", "--rabbitmq-version", "")
	assert.Contains(t, r.stdout, "4.0.5")
}
