package integration

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
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
	forEachBroker(t, func(t *testing.T, s *site) {
		cfg := health.Config{StuckAfter: 300 * time.Millisecond, DownAfter: time.Second}
		admin, _ := s.connect(t)
		apply(t, admin, queueOf(declare.QuorumQueue{Name: "orders"}))
		wire, through := s.through(t)
		conn, _ := connectTo(t, through, soon)
		finish := make(chan struct{})
		stop := consume(t, conn, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			<-finish
			return nil
		}), client.ConsumerConfig{})
		well := healthAnswers{live: true, ready: true, progress: true}
		awaitHealth(t, conn, cfg, well)

		publish(t, publisher[order](t, admin, address.Queue("orders")), order{ID: 1})
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
		r = awaitHealth(t, conn, cfg, healthAnswers{live: true, kinds: []string{"queue-missing"}})
		assert.Equal(t, "orders", r.Problems[0].Queue)
		assert.Contains(t, r.Problems[0].Error, "no queue 'orders'")
		apply(t, admin, queueOf(declare.QuorumQueue{Name: "orders"}))
		awaitHealth(t, conn, cfg, well)
		require.NoError(t, stop())
	})
}

func TestHealthKeepsConsumersReadyInAnAlarm(t *testing.T) {
	forEachOfOursAlone(t, func(t *testing.T, s *site) {
		apply(t, func() *client.Conn { c, _ := s.connect(t); return c }(), queueOf(declare.QuorumQueue{Name: "orders"}))
		consuming, _ := s.connect(t)
		stop := consume(t, consuming, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
		publishing, _ := s.connect(t)
		p := publisher[order](t, publishing, address.Queue("orders"))
		well := healthAnswers{live: true, ready: true, progress: true}
		awaitHealth(t, consuming, health.Config{}, well)
		awaitHealth(t, publishing, health.Config{}, well)

		s.eval(t, alarms[0].set)
		defer s.eval(t, alarms[0].clear)
		// RabbitMQ tells a connection of the alarm once it has published.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_ = p.Publish(ctx, order{ID: 1})
		awaitHealth(t, publishing, health.Config{}, healthAnswers{live: true, kinds: []string{"blocked"}})
		r, err := health.Check(health.Config{}, consuming)
		require.NoError(t, err)
		assert.True(t, r.Live && r.Ready, "%+v", r.Problems)
		s.eval(t, alarms[0].clear)
		awaitHealth(t, publishing, health.Config{}, well)
		require.NoError(t, stop())
	})
}
