package broker_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/integration/internal/suite"
)

// healthAnswers are those of a health check, with the kinds of its problems.
type healthAnswers struct {
	live, ready, progress bool
	kinds                 []string
}

// awaitHealth waits until a health check gives these answers.
func awaitHealth(t *testing.T, conn *client.Conn, cfg health.Config, want healthAnswers) health.Report {
	t.Helper()
	var r health.Report
	var got healthAnswers
	ok := assert.Eventually(t, func() bool {
		var err error
		r, err = health.Check(cfg, conn)
		require.NoError(t, err)
		got = healthAnswers{r.Live, r.Ready, r.Progress, nil}
		for _, p := range r.Problems {
			got.kinds = append(got.kinds, p.Kind)
		}
		return assert.ObjectsAreEqual(want, got)
	}, 60*time.Second, 20*time.Millisecond)
	if !ok {
		require.Equal(t, want, got, "%+v", r.Problems)
	}
	return r
}

// The table of a health check's answers, but for those in an alarm. Package health checks
// the times in it.
func TestHealthNamesWhatIsWrong(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		cfg := health.Config{StuckAfter: 300 * time.Millisecond, DownAfter: time.Second}
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through, suite.Soon)
		finish := make(chan struct{})
		stop := suite.Consume(t, conn, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			<-finish
			return nil
		}), client.ConsumerConfig{})
		well := healthAnswers{live: true, ready: true, progress: true}
		awaitHealth(t, conn, cfg, well)

		suite.Publish(t, suite.Publisher[suite.Order](t, admin, address.Queue("orders")), suite.Order{ID: 1})
		r := awaitHealth(t, conn, cfg, healthAnswers{live: true, ready: true, kinds: []string{"stuck"}})
		assert.Equal(t, "orders", r.Problems[0].Queue)
		assert.Equal(t, 1, r.Problems[0].Handlers)
		close(finish)
		awaitHealth(t, conn, cfg, well)

		wire.Refuse()
		wire.Cut()
		awaitHealth(t, conn, cfg, healthAnswers{live: true, ready: true, kinds: []string{"disconnected"}})
		r = awaitHealth(t, conn, cfg, healthAnswers{live: true, kinds: []string{"disconnected"}})
		assert.NotEmpty(t, r.Problems[0].Error)
		require.NoError(t, wire.Admit())
		awaitHealth(t, conn, cfg, well)

		_, err := declare.DeleteQueue(t.Context(), admin.Management(), "orders")
		require.NoError(t, err)
		suite.Poll(t, "the broker has refused the next link", func() bool { // first the error is that of the lost link
			r = awaitHealth(t, conn, cfg, healthAnswers{live: true, kinds: []string{"queue-missing"}})
			return strings.Contains(r.Problems[0].Error, "no queue 'orders'")
		})
		assert.Equal(t, "orders", r.Problems[0].Queue)
		suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		awaitHealth(t, conn, cfg, well)
		require.NoError(t, stop())
	})
}

func TestHealthKeepsConsumersReadyInAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		suite.Apply(t, func() *client.Conn { c, _ := s.Connect(t); return c }(), suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		consuming, _ := s.Connect(t)
		stop := suite.Consume(t, consuming, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
		publishing, _ := s.Connect(t)
		p := suite.Publisher[suite.Order](t, publishing, address.Queue("orders"))
		well := healthAnswers{live: true, ready: true, progress: true}
		awaitHealth(t, consuming, health.Config{}, well)
		awaitHealth(t, publishing, health.Config{}, well)

		s.EvalOK(t, alarms[0].set)
		defer s.EvalOK(t, alarms[0].clear)
		// RabbitMQ tells a connection of the alarm once it has published.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_ = p.Publish(ctx, suite.Order{ID: 1})
		awaitHealth(t, publishing, health.Config{}, healthAnswers{live: true, kinds: []string{"blocked"}})
		r, err := health.Check(health.Config{}, consuming)
		require.NoError(t, err)
		assert.True(t, r.Live && r.Ready, "%+v", r.Problems)
		s.EvalOK(t, alarms[0].clear)
		awaitHealth(t, publishing, health.Config{}, well)
		require.NoError(t, stop())
	})
}
