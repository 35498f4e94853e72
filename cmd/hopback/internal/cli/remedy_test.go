package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
)

// run runs a command without any environment but its broker.
func run(t *testing.T, url string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	env := map[string]string{urlVariable: url, managementVariable: noManagement}
	var out, err bytes.Buffer
	code = Run(t.Context(), IO{Args: args, Env: func(k string) string { return env[k] }, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &err})
	return code, out.String(), err.String()
}

// The file of a token is read again for each request to the HTTP API: tokens are short-lived.
func TestTokenFileIsReadForEachRequest(t *testing.T) {
	t.Parallel()
	var got []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, password, _ := r.BasicAuth()
		got = append(got, password)
		_, _ = w.Write([]byte("[]"))
	}))
	defer server.Close()
	file := filepath.Join(t.TempDir(), "token")
	c := &command{ctx: t.Context(), io: IO{Env: func(string) string { return "" }}, managementURL: server.URL, login: login{tokenFile: file}}
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	b, err := c.broker()
	require.NoError(t, err)
	for _, token := range []string{"first", "second"} {
		require.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
		_, err := b.api.Get(t.Context(), "/queues")
		require.NoError(t, err)
	}
	assert.Equal(t, []string{"first", "second"}, got)
	require.NoError(t, os.Remove(file))
	_, err = b.api.Get(t.Context(), "/queues")
	require.ErrorContains(t, err, "no token")
	require.ErrorIs(t, err, os.ErrNotExist)
	assert.Len(t, got, 2)
}

// An error that people run into often says what to do.
func TestRemedies(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	code, _, stderr := run(t, strings.Replace(target, "amqp://", "amqps://", 1), "dlq", "list", "orders.dead", "--timeout", "20s")
	assert.Equal(t, Unknown, code)
	assert.Contains(t, stderr, "use amqp://, or the port for amqps://, which is 5671 by default")

	code, _, stderr = run(t, target, "dlq", "list", "orders.dead")
	assert.Equal(t, No, code)
	assert.Contains(t, stderr, `"hopback dlq survey" lists the queues of virtual host "/"`)
	for _, args := range [][]string{{"list", "q"}, {"replay", "q"}, {"discard", "q", "--dry-run"}, {"export", "q", filepath.Join(t.TempDir(), "f")}} {
		code, _, stderr = run(t, target, append(append([]string{"dlq"}, args...), "--group", "nope")...)
		assert.Equal(t, Usage, code, args)
		assert.Contains(t, stderr, "--group", args)
		assert.Contains(t, stderr, "12 hexadecimal digits", args)
	}
}

// A check of retry run names commands and flags, not Go's API.
func TestRemediesOfRetryRun(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "topology.yaml")
	for _, text := range []string{"queues: {invoices: {dead-letter: drop}}", "central: {queues: [invoices]}"} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		code, _, stderr := run(t, target, "topology", "apply", file)
		require.Equal(t, Done, code, stderr)
	}
	code, _, stderr := run(t, target, "retry", "run", file)
	assert.Equal(t, No, code)
	assert.Contains(t, stderr, "set the RabbitMQ policy that hopback retry policies prints; --waive dead-letter disables this check")
	assert.NotContains(t, stderr, "Policy.Waive")
}

// Who replays has a name without $USER, too.
func TestWhoWithoutUSER(t *testing.T) {
	t.Parallel()
	c := &command{io: IO{Env: func(string) string { return "" }}}
	host, err := os.Hostname()
	require.NoError(t, err)
	who, ok := strings.CutSuffix(c.who(), "@"+host)
	assert.True(t, ok, c.who())
	assert.NotEmpty(t, who)
}
