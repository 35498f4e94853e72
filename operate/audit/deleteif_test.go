package audit_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

// Anything in use prevents a deletion, and what only the topology itself
// uses isn't.
func TestUses(t *testing.T) {
	t.Parallel()
	topology := cycle()
	require.NoError(t, audit.CheckUnused(check.FromTopology(topology), topology))
	for what, change := range map[string]func(*check.Snapshot){
		`queue "orders": in use: it contains 3 ready messages;`: func(s *check.Snapshot) { queueIn(s, "orders").Messages = 3 },
		`queue "orders": in use: it has 1 consumer;`:            func(s *check.Snapshot) { queueIn(s, "orders").Consumers = 1 },
		`it contains 1 unacknowledged message, 2 delayed, and 3 waiting for dead-lettering;`: func(s *check.Snapshot) {
			q := queueIn(s, "delay_10s")
			q.MessagesUnacknowledged, q.MessagesDelayed, q.MessagesDeadLettering = 1, 2, 3
		},
		`exchange "requeue": in use: it routes to a resource outside the topology: "requeue" to queue "other"`: func(s *check.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "requeue", Queue: "other", Key: "*.*.other"})
		},
		`queue "orders": in use: a resource outside the topology routes to it: "amq.topic" to queue "orders"`: func(s *check.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "amq.topic", Queue: "orders"})
		},
		`exchange "retry": in use: a resource outside the topology routes to it: "amq.topic" to exchange "retry"`: func(s *check.Snapshot) {
			s.Bindings = append(s.Bindings, declare.Binding{Source: "amq.topic", Exchange: "retry"})
		},
		`exchange "dlx": in use: queue "other" outside the topology dead-letters to it`: func(s *check.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "other", Type: "quorum", Arguments: map[string]any{"x-dead-letter-exchange": "dlx"}})
		},
		`queue "orders.dead": in use: queue "other" outside the topology dead-letters to it`: func(s *check.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "other", Type: "quorum", Arguments: map[string]any{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}})
		},
		`exchange "dlx": in use: queue "by policy" outside`: func(s *check.Snapshot) {
			s.Queues = append(s.Queues, declare.QueueInfo{Name: "by policy", Type: "quorum"})
			s.Policies = []declare.Policy{{Name: "p", Pattern: "^by policy$", ApplyTo: "queues", Definition: map[string]any{"dead-letter-exchange": "dlx"}}}
		},
		`exchange "parking": in use: it is the alternate exchange of "other"`: func(s *check.Snapshot) {
			s.Exchanges = append(s.Exchanges, check.ExchangeInfo{Name: "other", Type: declare.ExchangeTopic, Arguments: map[string]any{"alternate-exchange": "parking"}})
		},
	} {
		s := check.FromTopology(topology)
		change(&s)
		err := audit.CheckUnused(s, topology)
		require.ErrorIs(t, err, declare.ErrInUse, what)
		assert.ErrorContains(t, err, what)
		assert.NotContains(t, err.Error(), "\n", "one reason: %s", what)
	}

	f := &fakeBroker{}
	_, err := audit.DeleteUnused(context.Background(), check.Sources{AMQP: f}, topology)
	var e *argument.Error
	require.ErrorAs(t, err, &e)
	assert.Empty(t, f.requests)
}

func queueIn(s *check.Snapshot, name string) *declare.QueueInfo {
	for i := range s.Queues {
		if s.Queues[i].Name == name {
			return &s.Queues[i]
		}
	}
	panic(name)
}
