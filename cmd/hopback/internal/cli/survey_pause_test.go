package cli_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/partition"
)

// dlq survey names the queues and groups that are paused, a group once, and who paused them, why, and until when. JSON has
// that for each queue.
func TestASurveyNamesPauses(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	w := world{env: map[string]string{"HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	require.Zero(t, w.run("topology", "apply", file(t, "orders.yaml", small)).code)
	conn, err := client.Connect(t.Context(), b.amqp, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	topology, err := partition.Group{Name: "changes", Partitions: 2}.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("orders.dead")})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
	assert.NotContains(t, w.run("dlq", "survey", "--counts").stdout, "paused")
	require.Zero(t, w.run("queue", "pause", "orders", "--by", "ada\x1b[31m", "--why", "the bank is down", "--for", "1h").code)
	require.Zero(t, w.run("partition", "pause", "changes", "--by", "bob").code)
	r := w.run("dlq", "survey", "--counts")
	require.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^orders: paused since \S+Z until \S+Z by "ada\\x1b\[31m": "the bank is down"$`, r.stdout)
	assert.Regexp(t, `(?m)^changes: paused since \S+Z by "bob"$`, r.stdout)
	assert.Equal(t, 2, strings.Count(r.stdout, "paused"))
	var s desk.Survey
	require.NoError(t, json.Unmarshal([]byte(w.run("dlq", "survey", "--counts", "-o", "json").stdout), &s))
	paused := map[string]string{}
	for _, q := range s.Queues {
		if q.Paused != nil {
			paused[q.Name] = q.Paused.Queue + q.Paused.Group
		}
	}
	assert.Equal(t, map[string]string{"orders": "orders", "changes.1.000": "changes", "changes.1.001": "changes"}, paused)
}
