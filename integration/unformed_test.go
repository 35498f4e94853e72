package integration

import (
	"context"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
)

// A busy broker gives up on a quorum queue that has no leader after 5 seconds: with a 400,
// cluster_not_formed. It keeps nothing of the queue, so Apply declares it again. What an
// election is written down with stands still here, as it does on a disk that is busy.
func TestApplyRepeatsAQueueThatHadNoLeaderInTime(t *testing.T) {
	forEachOfOursAlone(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		s.eval(t, `
			Held = whereis(ra_log_meta),
			spawn(fun() -> erlang:suspend_process(Held), timer:sleep(7000), erlang:resume_process(Held) end).`)
		var answers []int
		report, err := declare.Apply(t.Context(), noting{conn.Management(), &answers}, queueOf(declare.QuorumQueue{Name: "orders"}))
		require.NoError(t, err)
		assert.Equal(t, 1, report.Count("created"))
		require.NotEmpty(t, answers)
		assert.Equal(t, 400, answers[0], "the broker was in time: the test shows nothing")
		assert.Equal(t, 201, answers[len(answers)-1])
		publish(t, publisher[order](t, conn, address.Queue("orders")), order{})
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
