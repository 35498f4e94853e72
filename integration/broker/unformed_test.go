package broker_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// unformed keeps quorum queues from electing a leader for 7 seconds. What an election is written down
// with stands still, as it does on a disk that is busy.
const unformed = `
	Held = whereis(ra_log_meta),
	spawn(fun() -> erlang:suspend_process(Held), timer:sleep(7000), erlang:resume_process(Held) end).`

// A busy broker gives up on a quorum queue that has no leader after 5 seconds: with a 400,
// cluster_not_formed. It keeps nothing of the queue, so Apply declares it again.
func TestApplyRepeatsAQueueThatHadNoLeaderInTime(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		s.EvalOK(t, unformed)
		var answers []int
		report, err := declare.Apply(t.Context(), noting{conn.Management(), &answers}, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		require.NoError(t, err)
		assert.Equal(t, 1, report.Count("created"))
		require.NotEmpty(t, answers)
		assert.Equal(t, 400, answers[0], "the broker was in time: the test shows nothing")
		assert.Equal(t, 201, answers[len(answers)-1])
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{})
	})
}

// noting notes the status of each answer to a PUT.
type noting struct {
	declare.Requester
	answers *[]int
}

func (n noting) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	status, reply, err := n.Requester.Request(ctx, method, path, body)
	if method == http.MethodPut {
		*n.answers = append(*n.answers, status)
	}
	return status, reply, err
}

// An import of definitions continues without such a queue, and fails at its bindings. Repeated, it succeeds.
func TestAnImportContinuesWithoutAQueueThatHadNoLeaderInTime(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		definitions := map[string]any{
			"queues":   []any{map[string]any{"name": "orders", "durable": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "quorum"}}},
			"bindings": []any{map[string]any{"source": "amq.direct", "destination": "orders", "destination_type": "queue", "routing_key": "order", "arguments": map[string]any{}}},
		}
		s.EvalOK(t, unformed)
		status, text, err := s.HTTPStatus(http.MethodPost, "/definitions/"+s.VHost, definitions)
		require.NoError(t, err)
		assert.Equal(t, 400, status, "the broker was in time: the test shows nothing")
		assert.Contains(t, string(text), "resources_missing")
		s.EvalOK(t, unformed)
		s.HTTP(t, http.MethodPost, "/definitions/"+s.VHost, definitions, nil)
		s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/orders", nil, nil)
	})
}
