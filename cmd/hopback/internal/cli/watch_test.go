package cli_test

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// watching runs a command with --watch until its output satisfies enough, and returns the output.
func watching(t *testing.T, w world, args []string, edit func(*cli.IO), enough func(stdout string) bool) (code int, stdout, stderr string) {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	r, pipe := io.Pipe()
	var errors safe
	in := cli.IO{Args: args, Env: func(k string) string { return w.env[k] }, Stdin: strings.NewReader(""), Stdout: pipe, Stderr: &errors}
	if edit != nil {
		edit(&in)
	}
	codes := make(chan int, 1)
	go func() {
		codes <- cli.Run(ctx, in)
		_ = pipe.Close()
	}()
	var all strings.Builder
	buffer := make([]byte, 64<<10)
	for {
		n, err := r.Read(buffer)
		all.Write(buffer[:n])
		if err != nil {
			return <-codes, all.String(), errors.String()
		}
		if enough(all.String()) {
			interrupt()
		}
	}
}

// --watch repeats a survey and the partitions: as blocks with a time, as documents, or on a terminal
// that it redraws, where what is at the top stays visible. ^C ends it without an error.
func TestWatch(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	w := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	require.Zero(t, w.run("topology", "apply", file(t, "orders.yaml", small)).code)
	survey := []string{"dlq", "survey", "--counts", "--watch=100ms"}
	times := func(part string) func(string) bool {
		return func(s string) bool { return strings.Count(s, part) >= 3 }
	}

	code, stdout, stderr := watching(t, w, survey, nil, times("parking_queue"))
	assert.Zero(t, code, stderr)
	assert.Regexp(t, `(?s)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\nQUEUE .*\n\n\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\nQUEUE `, stdout)
	assert.NotContains(t, stdout, "\x1b")
	assert.Empty(t, stderr)

	code, stdout, _ = watching(t, w, append(survey, "-o", "json"), nil, times("parking_queue"))
	assert.Zero(t, code)
	documents := 0
	for d := json.NewDecoder(strings.NewReader(stdout)); d.More(); documents++ {
		var v struct{ Queues []any }
		require.NoError(t, d.Decode(&v))
		assert.NotEmpty(t, v.Queues)
	}
	assert.GreaterOrEqual(t, documents, 3)
	_, stdout, _ = watching(t, w, append(survey, "-o", "yaml"), nil, times("parking_queue"))
	assert.GreaterOrEqual(t, strings.Count(stdout, "\n---\n"), 2)

	terminal := func(io *cli.IO) {
		io.StdoutIsTerminal = true
		io.StdoutSize = func() (int, int) { return 44, 6 }
	}
	code, stdout, _ = watching(t, w, survey, terminal, times("\x1b[H\x1b[2J"))
	assert.Zero(t, code)
	screen := strings.Split(stdout, "\x1b[H\x1b[2J")[1]
	lines := strings.SplitAfter(screen, "\n")
	assert.Len(t, lines, 6, "it fits, with a row for the cursor")
	assert.Contains(t, lines[0], "every 100ms until ^C")
	assert.Contains(t, lines[4], "more; use a larger terminal")
	for _, line := range lines {
		assert.LessOrEqual(t, len([]rune(strings.TrimSuffix(line, "\n"))), 44)
	}

	for args, says := range map[string]string{
		"dlq survey --watch=1ms":                     "at least 100ms",
		"dlq survey --watch 5s":                      "write it as --watch=5s",
		"partition show orders --watch=-1s":          "at least 100ms",
		"partition show orders --watch=soon":         "2w",
		"dlq survey --watch --management-url none":   "name the queues",
		"dlq survey nosuch --watch --counts":         "not found",
		"partition show nosuch --watch":              "nosuch",
		"dlq survey --watch=1s --accept nosuch-risk": "isn't a side effect",
	} {
		r := w.run(strings.Fields(args)...)
		assert.NotZero(t, r.code, args)
		assert.Contains(t, r.stderr, says, args)
		assert.Empty(t, r.stdout, args)
	}
}

// A watch continues when the broker is away, and shows that.
func TestWatchContinuesWithoutTheBroker(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	w := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	require.Zero(t, w.run("topology", "apply", file(t, "orders.yaml", small)).code)
	stopped := false
	code, stdout, stderr := watching(t, w, []string{"dlq", "survey", "--counts", "--watch=100ms", "--timeout", "1m"}, nil, func(s string) bool {
		if !stopped && strings.Contains(s, "parking_queue") {
			stopped = true
			b.interrupt()
		}
		return strings.Contains(s, "\nhopback: ")
	})
	assert.Zero(t, code, stderr)
	assert.Contains(t, stdout, "Z\nhopback: ")
}
