package audit_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

func TestDiffPrintsLikeADiff(t *testing.T) {
	t.Parallel()
	s := check.FromTopology(cycle())
	s.Queues = s.Queues[:3] // without parking
	args := queueNamed(&s, "orders").Arguments
	args["x-delivery-limit"] = "5"
	args["x-max-length"] = int64(7)
	delete(args, "x-overflow")
	wanted := declare.Topology{Exchanges: cycle().Exchanges[1:3], Queues: cycle().Queues[:4], Bindings: cycle().Bindings[3:]}
	wanted.Exchanges[1].AlternateExchange = ""
	d := audit.Compare(s, wanted)
	assert.Equal(t, `  exchange "requeue"
! exchange "dlx"
-     alternate-exchange: "parking" (string)
+     alternate-exchange: none
      remedy: declare an exchange under another name, bind it, and move the publishers
      remedy: delete it while nobody publishes to it, and run this again; its bindings are deleted with it
! queue "orders"
-     x-delivery-limit: "5" (string)
+     x-delivery-limit: "5" (integer)
-     x-max-length: "7" (integer)
+     x-max-length: none
-     x-overflow: none
+     x-overflow: "reject-publish" (string)
      remedy: set overflow with a policy, which can change a live queue, and remove it from the declaration
      remedy: declare it as it exists
      remedy: declare it under a new name and move the messages, as package operate/migrate does
      remedy: delete it once it is empty and unused, and run this again
  queue "orders.dead"
  queue "delay_10s"
+ queue "parking"
+     x-delivery-limit: "-1"
+     x-queue-type: "quorum"
  binding "parking" to queue "parking", key ""
1 to create, 4 exist, 2 refused, 0 unknown.
`, d.String())
	assert.False(t, d.Nothing())
	assert.True(t, d.Conflicts())

	text, err := json.Marshal(d.Changes[4:6])
	require.NoError(t, err)
	assert.JSONEq(t, `[{"kind":"keep","resource":{"kind":"queue","name":"delay_10s"}},
		{"kind":"create","resource":{"kind":"queue","name":"parking"},"settings":[
			{"name":"x-delivery-limit","setting":{"value":"-1","type":"integer","set":true}},
			{"name":"x-queue-type","setting":{"value":"quorum","type":"string","set":true}}]}]`, string(text))

	d = audit.Compare(check.FromTopology(cycle()), cycle())
	assert.True(t, d.Nothing())
	assert.Contains(t, d.String(), "Nothing to do: everything exists as declared (12 resources).")
}

func TestReadRefusesBeforeItAsks(t *testing.T) {
	t.Parallel()
	f := &fakeBroker{}
	_, err := check.Read(context.Background(), check.Sources{AMQP: f}, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{}}})
	var e *argument.Error
	require.ErrorAs(t, err, &e)
	assert.Empty(t, f.requests)
	_, err = check.Read(context.Background(), check.Sources{}, declare.Topology{})
	require.ErrorContains(t, err, "neither AMQP nor HTTP")
}

// A binding whose end neither is there nor will be would be refused half way: so it is
// refused before.
func TestPlanRefusesBindingsWithAMissingEnd(t *testing.T) {
	t.Parallel()
	topology := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "x"}},
		Queues:    []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{
			{Source: "x", Queue: "q"}, {Source: "amq.topic", Queue: "there"}, {Source: "x", Exchange: "amq.fanout"},
			{Source: "x", Queue: "gone"}, {Source: "gone", Queue: "q"}, {Source: "x", Exchange: "gone"},
		},
	}
	s := check.FromTopology(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "there"}}})
	d := audit.Compare(s, topology)
	assert.Equal(t, 5, d.Count("create"), "%s", d)
	assert.Equal(t, 3, d.Count("refuse"), "%s", d)
	assert.True(t, d.Conflicts())
	assert.Contains(t, d.String(), "! binding \"x\" to queue \"gone\", key \"\"\n      queue \"gone\" doesn't exist and isn't in the topology\n      remedy: fix the name, or declare it too\n")
	assert.Contains(t, d.String(), `exchange "gone" doesn't exist`)
	assert.Equal(t, 3, strings.Count(check.Verify(s, topology).String(), "it doesn't exist: "))

	// AMQP alone can't find out.
	s.Unread = []check.UnreadPart{{Part: "exchanges", Why: "w"}, {Part: "other queues", Why: "w"}}
	assert.Zero(t, audit.Compare(s, topology).Count("refuse"))
}
