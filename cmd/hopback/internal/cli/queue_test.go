package cli_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/pause"
)

func TestQueuesArePausedOnTheCommandLine(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	run := func(args ...string) result {
		return world{env: map[string]string{"HOPBACK_URL": url, "USER": "ada"}}.run(append([]string{"queue"}, args...)...)
	}
	r := run("show", "orders")
	assert.Equal(t, cli.No, r.code)
	assert.Equal(t, "orders: not paused\n", r.stdout)
	assert.Empty(t, r.stderr)

	r = run("pause", "orders", "--for", "1h", "--why", "the bank is \x1b[31mdown")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Regexp(t, `^orders: paused since \S+Z until \S+Z by "ada@.*": "the bank is \\x1b\[31mdown"\n$`, r.stdout)
	s, is, err := pause.Of(t.Context(), conn, "orders")
	require.NoError(t, err)
	assert.True(t, is)
	assert.Equal(t, time.Hour, s.Until.Sub(s.Since))

	r = run("show", "orders", "-o", "json")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	var shown struct {
		Queue  string
		Paused pause.State
	}
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &shown))
	assert.Equal(t, "orders", shown.Queue)
	assert.Equal(t, s, shown.Paused)

	r = run("pause", "orders", "--by", "bob")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Regexp(t, `^orders: paused since \S+Z by "bob"\n$`, r.stdout)
	r = run("resume", "orders")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Equal(t, "orders: not paused\n", r.stdout)
	assert.Equal(t, cli.No, run("show", "orders").code)

	for _, verb := range []string{"pause", "resume", "show"} {
		r = run(verb, "none")
		assert.Equal(t, cli.No, r.code)
		assert.Contains(t, r.stderr, "not found")
		assert.Equal(t, cli.Usage, run(verb).code)
	}
	assert.Equal(t, cli.Usage, run("pause", "orders", "--for", "-1h").code)
}
