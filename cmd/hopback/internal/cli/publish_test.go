package cli_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// Messages are published to queues and exchanges, and one that no queue gets is no success.
func TestPublish(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	definitions := file(t, "topology.yaml", "exchanges:\n  shop: {type: topic}\nqueues:\n  orders: {dead-letter: drop}\nbindings:\n  - {source: shop, key: order.*, queue: orders}\n")
	here := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	r := here.run("topology", "apply", definitions)
	require.Equal(t, cli.Done, r.code, r.stderr)

	in := here
	in.stdin = `{"id": "o-2"}`
	lines := here
	lines.stdin = "one\ntwo\n\nthree\n"
	for _, c := range []struct {
		world world
		args  string
		code  int
		out   string
	}{
		{here, `orders --body {"id":"o-1"} --id o-1 --property tenant=a --subject paid`, cli.Done, "1 message stored.\n"},
		{in, "--exchange shop --routing-key order.paid", cli.Done, "1 message stored.\n"},
		{lines, "orders --lines", cli.Done, "3 messages stored.\n"},
		{in, "--exchange shop --routing-key nobody", cli.No, "unroutable"},
		{in, "missing", cli.No, "missing"},
		{in, "--exchange missing --routing-key k", cli.No, "missing"},
		{here, "", cli.Usage, "neither a queue nor --exchange"},
		{here, "orders --exchange shop", cli.Usage, "leave one out"},
		{here, "orders --routing-key k", cli.Usage, "--exchange"},
		{here, "orders --property tenant", cli.Usage, "name=value"},
		{here, "orders --lines --body a", cli.Usage, "leave --body out"},
		{here, "orders --lines --id a", cli.Usage, "leave it out"},
	} {
		r := c.world.run(append([]string{"publish"}, strings.Fields(c.args)...)...)
		assert.Equal(t, c.code, r.code, "%s: %s", c.args, r.stderr)
		assert.Contains(t, r.stdout+r.stderr, c.out, c.args)
	}
	r = here.run("topology", "delete", definitions)
	assert.Equal(t, cli.No, r.code)
	assert.Contains(t, r.stdout+r.stderr, "5 ready messages", "what was stored, and nothing else")
}

// delete --dry-run shows what would be deleted and lost, and deletes nothing.
func TestDeleteDryRun(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	w := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	mine := file(t, "mine.yaml", "exchanges:\n  shop: {type: topic}\n  gone: {type: topic}\nqueues:\n  orders: {dead-letter: drop}\nbindings:\n  - {source: shop, key: order.*, queue: orders}\n")
	theirs := file(t, "theirs.yaml", "exchanges:\n  shop: {type: topic}\nqueues:\n  audit: {dead-letter: drop}\nbindings:\n  - {source: shop, key: '#', queue: audit}\n")
	for _, f := range []string{mine, theirs} {
		require.Zero(t, w.run("topology", "apply", f).code)
	}
	require.Zero(t, w.run("topology", "delete", file(t, "gone.yaml", "exchanges:\n  gone: {type: topic}\n")).code)
	require.Zero(t, w.run("publish", "orders", "--body", "1").code)
	before := w.run("topology", "export").stdout

	const planned = "- queue \"orders\": 1 message, 0 consumers\n- exchange \"shop\"\n"
	r := w.run("topology", "delete", "--dry-run", mine)
	assert.Equal(t, cli.No, r.code, r.stderr)
	assert.True(t, strings.HasPrefix(r.stdout, planned), r.stdout)
	assert.Contains(t, r.stdout, `! queue "orders": in use: it contains 1 ready message`)
	assert.Contains(t, r.stdout, `! exchange "shop": in use: it routes to a resource outside the topology`)
	assert.Contains(t, r.stdout, "2 would be deleted, with 1 message; 0 unknown, 1 absent. Nothing was deleted.\ndelete would refuse")

	r = w.run("topology", "delete", "--dry-run", "--force", mine)
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "! exchange \"shop\"")
	assert.NotContains(t, r.stdout, "delete would refuse")

	r = w.run("topology", "delete", "--dry-run", "--json", mine)
	assert.Equal(t, cli.No, r.code)
	var d struct {
		Steps []struct {
			Resource struct{ Kind, Name string }
			Result   string
			Messages uint64
		}
		InUse []string `json:"in_use"`
	}
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &d))
	require.Len(t, d.Steps, 3)
	assert.Equal(t, "would delete", d.Steps[0].Result)
	assert.EqualValues(t, 1, d.Steps[0].Messages)
	assert.Len(t, d.InUse, 2)

	blind := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": "none"}}
	assert.Equal(t, cli.Usage, blind.run("topology", "delete", "--dry-run", mine).code)
	r = blind.run("topology", "delete", "--dry-run", "--force", mine)
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, `? exchange "shop": only the HTTP API shows whether it exists`)
	assert.Contains(t, r.stdout, `- queue "orders": 1 message`)
	assert.Equal(t, before, w.run("topology", "export").stdout)
}

// The help of a command that doesn't exist fails, at each level; that of one that exists doesn't.
func TestHelpOfUnknownCommands(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"nosuch --help", "topology nosuch --help", "topology nosuch -h", "--help nosuch"} {
		r := world{}.run(strings.Fields(args)...)
		assert.Equal(t, cli.Usage, r.code, args)
		assert.Contains(t, r.stderr, `has no command "nosuch"`, args)
		assert.Empty(t, r.stdout, args)
	}
	for _, args := range []string{"--help", "topology --help", "topology plan --help", "topology plan file.yaml --help", "version", "--version"} {
		r := world{}.run(strings.Fields(args)...)
		assert.Zero(t, r.code, args)
		assert.NotEmpty(t, r.stdout, args)
	}
}
