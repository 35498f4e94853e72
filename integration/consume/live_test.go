package consume_test

import (
	"context"
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
	"github.com/hopback/hopback/middleware/live"
)

// Workers and those who ask need permissions for names that begin with hopback.workers, and workers the default exchange.
// A worker without them handles its messages, and isn't shown. Nothing is left behind.
func TestWorkersShowWhatTheyDo(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		operator, _ := s.Connect(t)
		suite.Apply(t, operator, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		ask := func(conn *client.Conn) (f live.Fleet, ok bool) {
			f, err := live.Ask(t.Context(), conn)
			if err != nil { // a busy broker may need longer than Ask waits
				require.NotErrorIs(t, err, client.ErrUnauthorized)
				t.Log(err)
			}
			return f, err == nil
		}
		suite.Poll(t, "nobody answers", func() bool {
			f, ok := ask(operator)
			assert.Empty(t, f.Workers)
			return ok
		})

		started := make(chan string, 10)
		work := func(host string, conn *client.Conn) {
			h := live.With(conn, live.Config{Host: host, Version: "v7", StuckAfter: time.Nanosecond})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				started <- host
				<-ctx.Done()
				return client.Requeue{}
			}))
			suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 1, Prefetch: 1, Grace: time.Millisecond})
		}
		blind, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^orders$"))
		shown, _ := suite.ConnectTo(t, s.User(t, `^hopback\.workers`, `^(hopback\.workers.*|amq\.default)$`, `^(orders$|hopback\.workers)`))
		work("blind", blind)
		work("shown", shown)
		p, err := client.NewPublisher[string](t.Context(), operator, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		for range 2 {
			require.NoError(t, p.Publish(t.Context(), "an order", func(m *client.Message) { m.Properties.MessageID = "order-1" }))
		}
		hosts := []string{suite.Await(t, started, "a handler"), suite.Await(t, started, "the other handler")}
		assert.ElementsMatch(t, []string{"blind", "shown"}, hosts)

		asker, _ := suite.ConnectTo(t, s.User(t, `^hopback\.workers`, `^hopback\.workers`, `^hopback\.workers`))
		var f live.Fleet
		suite.Poll(t, "the worker answers", func() bool {
			f, _ = ask(asker)
			return len(f.Workers) > 0
		})
		require.Len(t, f.Workers, 1)
		w := f.Workers[0]
		assert.Equal(t, []string{"shown", "v7"}, []string{w.Host, w.Version})
		assert.Equal(t, []live.Queue{{Name: "orders", Running: 1, Stuck: 1}}, w.Queues)
		require.Len(t, w.Running, 1)
		assert.Equal(t, "order-1", w.Running[0].ID)
		_, err = live.Ask(t.Context(), blind)
		require.ErrorIs(t, err, client.ErrUnauthorized)
		assert.Zero(t, f.Dropped)
		watching, stop := context.WithCancel(t.Context())
		shows, ended := make(chan live.Fleet, 100), make(chan error, 1)
		go func() {
			ended <- live.Watch(watching, asker, func(f live.Fleet) { shows <- f })
		}()
		watched := 0
		suite.Poll(t, "the worker is watched, and answers by itself", func() bool {
			f := suite.Await(t, shows, "a show")
			if len(f.Workers) == 1 && len(f.Workers[0].Running) == 1 {
				watched++
			}
			return watched == 3
		})
		stop()
		require.NoError(t, <-ended)
		suite.Poll(t, "only the worker's queue is left", func() bool {
			var queues []struct{ Name string }
			s.HTTP(t, http.MethodGet, "/queues/"+s.VHost, nil, &queues)
			left := 0
			for _, q := range queues {
				if strings.HasPrefix(q.Name, "hopback.workers") {
					left++
				}
			}
			return left == 1
		})
	})
}
