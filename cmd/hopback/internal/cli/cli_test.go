package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// result is what a run did.
type result struct {
	code           int
	stdout, stderr string
}

// world is a run's surroundings.
type world struct {
	env      map[string]string
	stdin    string
	terminal bool
	patience time.Duration // of completion
}

func (w world) run(args ...string) result { return w.runIn(context.Background(), args...) }

func (w world) runIn(ctx context.Context, args ...string) result {
	var stdout, stderr bytes.Buffer
	code := cli.Run(ctx, cli.IO{
		Args: args, Env: func(k string) string { return w.env[k] }, Stdin: strings.NewReader(w.stdin), Stdout: &stdout, Stderr: &stderr,
		StdoutIsTerminal: w.terminal, StderrIsTerminal: w.terminal, CompletionPatience: w.patience,
	})
	return result{code, stdout.String(), stderr.String()}
}

// file writes a file of the test, and returns its name.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

const small = "work-queues:\n  orders:\n"

func TestHelp(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{}, {"--help"}, {"topology"}, {"topology", "--help"}, {"help", "topology", "plan"}} {
		r := world{}.run(args...)
		assert.Zero(t, r.code, args)
		assert.NotEmpty(t, r.stdout)
		assert.Empty(t, r.stderr)
	}
	for _, sub := range []string{"plan", "apply", "verify", "export", "import", "graph", "migrate", "delete", "schema"} {
		r := world{env: map[string]string{"HOPBACK_URL": "amqp://me:secret@h"}}.run("topology", sub, "--help")
		assert.Zero(t, r.code)
		assert.Contains(t, r.stdout, "Examples:", sub)
		assert.Contains(t, r.stdout, "HOPBACK_URL", sub)
		assert.NotContains(t, r.stdout, "secret", sub)
		for line := range strings.Lines(r.stdout) {
			assert.LessOrEqual(t, len(line), 161, "%s: %s", sub, line)
		}
	}
	r := world{}.run("--version")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "hopback ")
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		r := world{}.run("completion", shell)
		assert.Zero(t, r.code)
		assert.Contains(t, r.stdout, "hopback")
	}
	r = world{}.run("__complete", "topology", "verify", "--waive", "")
	assert.Contains(t, r.stdout, "at-most-once")
	r = world{}.run("__complete", "topology", "plan", "")
	assert.Contains(t, r.stdout, "yaml")
}

// The YAML in the help is read as what it says.
func TestExampleInHelpIsRead(t *testing.T) {
	t.Parallel()
	help := world{}.run("topology", "--help").stdout
	_, text, ok := strings.Cut(help, "A larger one:\n\n")
	require.True(t, ok)
	text, _, ok = strings.Cut(text, "\n\n\"hopback")
	require.True(t, ok)
	var body strings.Builder
	for line := range strings.Lines(text) {
		body.WriteString(strings.TrimPrefix(line, "  "))
	}
	f, err := topologyfile.Parse("help", []byte(body.String()))
	require.NoError(t, err, body.String())
	assert.Len(t, f.Work, 1)
	assert.Len(t, f.Other.Queues, 1)
	assert.Len(t, f.Other.Bindings, 1)
	assert.Equal(t, "team-a.", f.Policy.Names.Prefix)
}

// Errors of the command line or the file are reported in one place, with what to
// do, before anything is connected to.
func TestMisuse(t *testing.T) {
	t.Parallel()
	good := file(t, "good.yaml", small)
	dir := filepath.Dir(good)
	huge := file(t, "huge.yaml", "work-queues:\n"+strings.Repeat("  orders:\n", 200_000))
	binary := file(t, "image.png", "\x89PNG\r\n\x1a\n\x00\x00")
	empty := file(t, "empty.yaml", "")
	named := file(t, "hopback", strings.Repeat("\x00", 1<<20+1))
	brace := file(t, "brace.json", "{")
	two := file(t, "two.json", `{"queues":[{"name":"a","vhost":"one"},{"name":"a","vhost":"two"}]}`)
	one := file(t, "one.json", `{"queues":[{"name":"a","vhost":"one","durable":true,"arguments":{"x-queue-type":"quorum"}}]}`)
	none := file(t, "none.json", `{"users":[]}`)
	transient := file(t, "transient.json", `{"exchanges":[{"name":"x","vhost":"/","type":"topic","durable":false}]}`)
	for _, c := range []struct {
		args string
		says []string
	}{
		{"topologie", []string{`hopback has no command "topologie"; did you mean "topology"?`}},
		{"frobnicate", []string{"its commands are", "topology"}},
		{"plan " + good, []string{`hopback has no command "plan"; did you mean "topology plan"?`}},
		{"topology plan " + named, []string{"hopback: the file isn't text in UTF-8"}},
		{"topology aply", []string{`hopback topology has no command "aply"; did you mean "apply"?`}},
		{"topology plan", []string{"hopback topology plan needs a file: hopback topology plan topology.yaml"}},
		{"topology plan a b", []string{"takes 1 file, not 2"}},
		{"topology plan --urll x " + good, []string{"unknown flag: --urll; did you mean --url?; see hopback topology plan --help"}},
		{"topology plan --timeout soon " + good, []string{"invalid argument", "timeout"}},
		{"topology plan --timeout -1s " + good, []string{"--timeout is negative"}},
		{"topology plan " + filepath.Join(dir, "god.yaml"), []string{"there is no file", "; the folder has " + good}},
		{"topology plan " + dir, []string{"is a folder"}},
		{"topology plan " + empty, []string{"empty.yaml: the file is empty", "work-queues:"}},
		{"topology plan " + huge, []string{"has more than 1048576 bytes"}},
		{"topology plan " + binary, []string{"isn't text in UTF-8"}},
		{"topology plan " + brace, []string{"brace.json: definitions isn't a JSON object"}},
		{"topology plan " + two, []string{`has several virtual hosts, "one", "two"; choose one with --vhost`}},
		{"topology plan --vhost three " + two, []string{`has no virtual host "three"; --vhost can be "one", "two"`}},
		{"topology plan " + one, []string{`is for the virtual host "one", but --url names "/"; correct the URL, or use the file there anyway with --vhost one`}},
		{"topology plan " + none, []string{"has no queues, exchanges, bindings, or policies"}},
		{"topology plan " + transient, []string{"make it durable"}},
		{"topology import " + good, []string{"isn't a definitions file in JSON", "use it with plan, apply, and verify"}},
		{"topology import " + transient, []string{"make it durable"}},
		{"topology graph --format svg " + good, []string{`--format is "svg"; it can be mermaid or dot`}},
		{"topology graph --management-url none", []string{"needs the HTTP API"}},
		{"topology graph --url amqp://h:5673", []string{"the broker listens on port 5673, so the URL of its HTTP API can't be guessed; set --management-url"}},
		{"topology schema x", []string{"takes no file"}},
		{"topology verify --offline", []string{"needs a file"}},
		{"topology verify --waive max-lenght", []string{`there is no rule "max-lenght"; did you mean "max-length"?`}},
		{"topology verify --waive zzz", []string{"lists the rules"}},
		{"topology migrate " + good, []string{"--from OLD --to NEW"}},
		{"topology migrate --from a --to a " + good, []string{"are the same queue"}},
		{"topology migrate --from a --to order " + good, []string{`has no queue "order"; did you mean "orders"?`}},
		{"topology migrate --from a --to zzzzzz " + good, []string{`add the new queue to it`}},
		{"topology migrate --from orders --to orders.dead " + good, []string{`still has the queue "orders"`}},
		{"topology migrate --prefetch -1 --from a --to orders " + good, []string{"can't be negative"}},
		{"topology migrate --management-url none --from a --to orders " + good, []string{"migrate needs the HTTP API"}},
		{"topology delete --management-url none " + good, []string{"delete needs the HTTP API", "or --force", "turned off by --management-url"}},
		{"topology plan --url http://h:1 " + good, []string{"--url isn't an AMQP URL: its scheme is http; write it as amqp://user:password@host:5672/vhost"}},
		{"topology plan --url amqp://u:sec/ret@h " + good, []string{"isn't an AMQP URL"}},
		{"topology plan --url amqp://u:sec%ret@h " + good, []string{"isn't an AMQP URL"}},
		{"topology plan --url amqp://u:sec@ret@h " + good, []string{"isn't an AMQP URL"}},
		{"topology plan --url u:secret@h " + good, []string{"isn't an AMQP URL"}},
		{"topology plan --url amqp://u:secret@h/a/b " + good, []string{"has more than one path segment"}},
		{"topology plan --url amqp://u:secret@127.0.0.1:1/v?heartbeat=1 --management-url none " + good, []string{"has a query"}},
		{"topology plan --management-url amqp://u:secret@h " + good, []string{"--management-url isn't the URL of an HTTP API"}},
	} {
		r := world{}.run(strings.Fields(c.args)...)
		assert.Equal(t, cli.Usage, r.code, "%s: %s", c.args, r.stderr)
		assert.Empty(t, r.stdout, c.args)
		assert.True(t, strings.HasPrefix(r.stderr, "hopback: "), "%s: %s", c.args, r.stderr)
		assert.NotContains(t, r.stderr, "hopback: hopback:", c.args)
		for _, says := range c.says {
			assert.Contains(t, r.stderr, says, c.args)
		}
		for _, secret := range []string{"secret", "sec/ret", "sec%ret", "sec@ret", "u:sec"} {
			assert.NotContains(t, r.stderr, secret, c.args)
		}
	}
	r := world{env: map[string]string{"HOPBACK_URL": "ampq://u:secret@h"}}.run("topology", "plan", good)
	assert.Equal(t, cli.Usage, r.code)
	assert.Contains(t, r.stderr, "HOPBACK_URL isn't an AMQP URL")
	assert.NotContains(t, r.stderr, "secret")
	r = world{env: map[string]string{"HOPBACK_MANAGEMENT_URL": "u:secret@h"}}.run("topology", "plan", good)
	assert.Contains(t, r.stderr, "HOPBACK_MANAGEMENT_URL isn't")
	assert.NotContains(t, r.stderr, "secret")
}

func TestOffline(t *testing.T) {
	t.Parallel()
	good := file(t, "good.yaml", small)
	r := world{}.run("topology", "verify", "--offline", good)
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "0 errors, 0 warnings; 30 rules checked, 7 skipped.")

	bad := file(t, "bad.yaml", "queues: {a: {dead-letter: drop}}")
	r = world{}.run("topology", "verify", "--offline", bad)
	assert.Equal(t, cli.No, r.code)
	assert.Contains(t, r.stdout, `error   queue "a": it has no dead-letter exchange`)
	assert.Empty(t, r.stderr)
	r = world{}.run("topology", "verify", "--offline", "--waive", "dead-letter", bad)
	assert.Zero(t, r.code, r.stdout)
	r = world{}.run("topology", "verify", "--offline", "--waive", `dead-letter queue "a"`, bad)
	assert.Zero(t, r.code, r.stdout)

	r = world{}.run("topology", "verify", "--offline", "--json", bad)
	assert.Equal(t, cli.No, r.code)
	var v check.Verification
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &v))
	require.Len(t, v.Findings, 1)
	assert.Equal(t, "dead-letter", v.Findings[0].Rule)

	// The published recipe, unchanged, from stdin: it has findings.
	text, err := os.ReadFile("../../../../operate/audit/testdata/cookbook.json")
	require.NoError(t, err)
	r = world{stdin: string(text)}.run("topology", "verify", "--offline", "-")
	assert.Equal(t, cli.No, r.code)
	assert.Contains(t, r.stdout, "at-most-once")

	r = world{}.run("topology", "verify", "--rules")
	assert.Zero(t, r.code)
	assert.Equal(t, len(audit.Rules()), strings.Count(r.stdout, "\n"))
	r = world{}.run("topology", "verify", "--rules", "--json")
	var rules []audit.Rule
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &rules))
	assert.Len(t, rules, len(audit.Rules()))
}

func TestColours(t *testing.T) {
	t.Parallel()
	bad := file(t, "bad.yaml", "queues: {a: {dead-letter: drop}}")
	args := []string{"topology", "verify", "--offline", bad}
	assert.NotContains(t, world{}.run(args...).stdout, "\x1b")
	assert.Contains(t, world{terminal: true}.run(args...).stdout, "\x1b[31merror")
	for k, v := range map[string]string{"NO_COLOR": "1", "TERM": "dumb"} {
		assert.NotContains(t, world{terminal: true, env: map[string]string{k: v}}.run(args...).stdout, "\x1b", k)
	}
	assert.NotContains(t, world{terminal: true}.run(append(args, "--json")...).stdout, "\x1b")
	assert.Contains(t, world{terminal: true}.run("topology", "aply").stderr, "\x1b[31mhopback:\x1b[0m")
}

// What is converted says the same on the other side, to the byte where it was
// written here.
func TestExportAndImport(t *testing.T) {
	t.Parallel()
	good := file(t, "good.yaml", "retry: {delays: [1s]}\nwork-queues: {orders: {delivery-limit: 5}}\nbindings: [{source: amq.topic, queue: orders, key: order.*}]\n")
	definitions := world{}.run("topology", "export", "--vhost", "shop", good)
	require.Zero(t, definitions.code, definitions.stderr)
	d, err := audit.ParseDefinitions([]byte(definitions.stdout))
	require.NoError(t, err)
	assert.Equal(t, []string{"shop"}, d.VHosts())

	again := world{stdin: definitions.stdout}.run("topology", "export", "-")
	assert.Equal(t, definitions.stdout, again.stdout, "the same bytes")

	imported := world{stdin: definitions.stdout}.run("topology", "import", "-")
	require.Zero(t, imported.code, imported.stderr)
	assert.Empty(t, imported.stderr)
	back := world{stdin: imported.stdout}.run("topology", "export", "--vhost", "shop", "-")
	assert.Equal(t, definitions.stdout, back.stdout)
	assert.Equal(t, world{}.run("topology", "graph", good).stdout, world{stdin: imported.stdout}.run("topology", "graph", "-").stdout)
	assert.Contains(t, world{}.run("topology", "graph", "--format", "dot", good).stdout, "digraph topology {")

	text, err := os.ReadFile("../../../../operate/audit/testdata/cookbook.json")
	require.NoError(t, err)
	r := world{stdin: "\ufeff" + string(text)}.run("topology", "import", "-")
	require.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "my_work_queue:")
	withPolicy := `{"policies":[{"vhost":"/","name":"p","pattern":"^a","definition":{}}],"users":[{"name":"u"}],"queues":[{"vhost":"/","name":"a","durable":true,"arguments":{"x-queue-type":"quorum"}}]}`
	r = world{stdin: withPolicy}.run("topology", "import", "-")
	require.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stderr, `left out: policy "p", users`)
}

func TestSchemaIsPrinted(t *testing.T) {
	t.Parallel()
	r := world{}.run("topology", "schema")
	assert.Zero(t, r.code)
	assert.Equal(t, string(topologyfile.Schema()), r.stdout)
}

// A broker that isn't there, and an API that answers nonsense: said in words, with
// an exit code of their own, and as JSON where that is asked for.
func TestNobodyThere(t *testing.T) {
	t.Parallel()
	good := file(t, "good.yaml", small)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := l.Addr().String()
	require.NoError(t, l.Close())
	w := world{env: map[string]string{"HOPBACK_URL": "amqp://me:secret@" + closed + "/shop", "HOPBACK_MANAGEMENT_URL": "http://me:secret@" + closed}}
	for _, sub := range []string{"plan", "apply", "verify", "delete"} {
		r := w.run("topology", sub, good, "--json")
		assert.Equal(t, cli.Unknown, r.code, sub)
		assert.Contains(t, r.stderr, "broker unreachable", sub)
		assert.NotContains(t, r.stderr, "secret")
		var says struct {
			Error string `json:"error"`
		}
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &says), "%s: %s", sub, r.stdout)
		assert.Contains(t, says.Error, "broker unreachable")
	}
	for _, sub := range []string{"export", "import", "graph"} { // which need the HTTP API alone
		r := w.run("topology", sub)
		assert.Equal(t, cli.Unknown, r.code, sub)
		assert.Contains(t, r.stderr, "check that the management plugin is enabled", sub)
		assert.NotContains(t, r.stderr, "secret")
	}
	for status, says := range map[int]string{
		http.StatusUnauthorized: "the password is wrong, or user \"me\" lacks the required tag", http.StatusNotFound: `the virtual host "shop" doesn't exist, or this isn't the management API`,
		http.StatusBadGateway: "status 502", http.StatusOK: "can't be parsed",
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte("<html>"))
		}))
		w.env["HOPBACK_MANAGEMENT_URL"] = s.URL // with the user of the other URL
		r := w.run("topology", "export")
		s.Close()
		assert.Equal(t, cli.Unknown, r.code)
		assert.Contains(t, r.stderr, says)
		assert.NotContains(t, r.stderr, "secret")
	}

	// An HTTP API that answers doesn't make up for a broker that doesn't.
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/overview") {
			_, _ = w.Write([]byte(`{"rabbitmq_version":"4.3.6"}`))
			return
		}
		_, _ = w.Write([]byte("[]"))
	}))
	defer api.Close()
	w.env["HOPBACK_MANAGEMENT_URL"] = api.URL
	assert.Zero(t, w.run("topology", "export").code, "the API is good enough to be believed")
	for _, args := range [][]string{{"plan", good}, {"plan", "--exit-code", good}, {"verify", good}, {"verify"}} {
		r := w.run(append([]string{"topology"}, args...)...)
		assert.Equal(t, cli.Unknown, r.code, args)
		assert.Contains(t, r.stderr, "broker unreachable", args)
		assert.Empty(t, r.stdout, args)
	}
}

// A broker that takes the connection and says nothing is waited for no longer than
// allowed. Progress is shown on a terminal; elsewhere, a short command writes none. A signal
// stops it at once.
func TestSilence(t *testing.T) {
	t.Parallel()
	good := file(t, "good.yaml", small)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	w := world{env: map[string]string{"HOPBACK_URL": "amqp://me:secret@" + l.Addr().String(), "HOPBACK_MANAGEMENT_URL": "none"}}
	r := w.run("topology", "plan", "--timeout", "1300ms", good)
	assert.Equal(t, cli.Unknown, r.code)
	assert.Contains(t, r.stderr, "not done within 1.3s; --timeout sets the limit")
	assert.NotContains(t, r.stderr, "reading")
	assert.NotContains(t, r.stderr, "secret")

	w.terminal = true
	r = w.run("topology", "plan", "--timeout", "1500ms", good)
	assert.Contains(t, r.stderr, "\r\x1b[Kreading amqp://"+l.Addr().String()+`, virtual host "/" (1s)`)
	assert.NotContains(t, r.stderr, "secret")
	assert.NotContains(t, r.stdout, "reading")
	w.env["TERM"] = "dumb" // can't overwrite a line
	assert.NotContains(t, w.run("topology", "plan", "--timeout", "1300ms", good).stderr, "\r")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.Equal(t, cli.Interrupted, w.runIn(ctx, "topology", "plan", good).code)
}
