package broker_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// Dead letters go to two queues. One of them is full, as another team's may be, and its binding is deleted. RabbitMQ keeps the
// dead letters that the other queue has confirmed: it has nowhere to send them, and forgets them only if they are confirmed
// once more. 32 of them stop the queue. Any queue that is bound in place of the full one releases them.
func TestDeadLettersOfAQueueThatWasUnboundAreKept(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		setting := s.EvalOK(t, "application:get_env(rabbit, dead_letter_worker_publisher_confirm_timeout).")
		require.Equal(t, "{ok,10000}", strings.TrimSpace(setting), "when the broker tries again")
		conn, _ := s.Connect(t)
		to := func(queue string) declare.Binding { return declare.Binding{Source: "dead", Queue: queue, Key: "k"} }
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "dead", Type: declare.ExchangeDirect}},
			Queues: []declare.Queue{
				declare.QuorumQueue{Name: "delay", MessageTTL: 100 * time.Millisecond, DeadLetter: declare.DeadLetterTarget{Exchange: "dead", RoutingKey: "k"}, DeliveryLimit: declare.Unlimited},
				declare.QuorumQueue{Name: "clock", MessageTTL: 100 * time.Millisecond, DeadLetter: declare.DeadLetterTarget{Exchange: "dead", RoutingKey: "late"}, DeliveryLimit: declare.Unlimited},
				declare.QuorumQueue{Name: "ticks", DeadLetter: declare.Drop()},
				declare.QuorumQueue{Name: "work", DeadLetter: declare.Drop()},
				declare.QuorumQueue{Name: "full", DeadLetter: declare.Drop(), MaxLength: 1, Overflow: declare.OverflowRejectPublish},
			},
			Bindings: []declare.Binding{to("work"), to("full")},
		})
		full, clock := suite.Publisher[int](t, conn, address.Queue("full")), suite.Publisher[int](t, conn, address.Queue("clock"))
		suite.Poll(t, "the queue is full", func() bool { return full.Publish(t.Context(), 0) != nil })
		counts := func(queue string) (ready, dead int) {
			t.Helper()
			var q struct {
				Ready int `json:"messages_ready"`
				Dead  int `json:"messages_dlx"`
			}
			s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/"+queue, nil, &q)
			return q.Ready, q.Dead
		}
		const messages, inFlight = 40, 32
		p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("delay"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.PublishAll(t.Context(), make([]int, messages)))
		suite.Poll(t, "the messages in flight have arrived in the other queue", func() bool {
			ready, _ := counts("work")
			_, dead := counts("delay")
			return ready == inFlight && dead == messages
		})
		require.NoError(t, declare.DeleteBinding(t.Context(), conn.Management(), to("full")))
		// The broker tries again every 10 s. When another queue's dead letter, which had no route at first, has come twice, it
		// has done so here, too.
		late := declare.Binding{Source: "dead", Queue: "ticks", Key: "late"}
		for n := range 2 {
			require.NoError(t, clock.Publish(t.Context(), n))
			suite.Poll(t, "it has no route", func() bool { _, dead := counts("clock"); return dead == 1 })
			suite.Apply(t, conn, declare.Topology{Bindings: []declare.Binding{late}})
			suite.Poll(t, "the broker has tried again", func() bool { ready, _ := counts("ticks"); return ready == n+1 })
			require.NoError(t, declare.DeleteBinding(t.Context(), conn.Management(), late))
		}
		ready, _ := counts("work")
		_, dead := counts("delay")
		assert.Equal(t, inFlight, ready, "the others wait behind them")
		assert.Equal(t, messages, dead)

		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "any", DeadLetter: declare.Drop()}}, Bindings: []declare.Binding{to("any")}})
		suite.Poll(t, "all have arrived", func() bool {
			ready, _ := counts("work")
			_, dead := counts("delay")
			return ready == messages && dead == 0
		})
	})
}
