package broker_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/retry"
)

// Messages that wait for their retry survive a restart of the broker, and the
// client comes back by itself.
func TestDelayedMessagesSurviveARestartOfTheBroker(t *testing.T) {
	suite.NeedPrivate(t)
	t.Parallel()
	for _, version := range suite.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			own, err := rabbitmq.Own(ctx, os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			s := &suite.Site{Broker: own}
			deleted := transientQueue(t, suite.NewSite(t, own))

			const delay = 5 * time.Second
			type work struct {
				conn   *client.Conn
				failed chan time.Time
				back   chan time.Time
			}
			all := map[string]work{}
			for name, edit := range suite.Strategies(s) {
				if name == "ladder" {
					// A ladder hands from queue to queue. One that hands on before the next
					// is up again tries once more after the 180 s of the broker's dead-letter
					// worker: late, not lost, and too long for here.
					continue
				}
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(delay), Names: retry.Names{Prefix: name + "."}}
				edit(&policy)
				conn, _ := suite.ConnectTo(t, own.URL, suite.Soon)
				queue := "work-" + name
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue, DeliveryLimit: 3})
				w := work{conn, make(chan time.Time, 10), make(chan time.Time, 10)}
				suite.Consume(t, conn, queue, retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
					if retry.Attempt(ctx) == 1 {
						w.failed <- time.Now()
						return errors.New("not yet")
					}
					w.back <- time.Now()
					return nil
				})), client.ConsumerConfig{})
				suite.Publish(t, suite.PublisherOf(t, conn, address.Queue(queue)), "m")
				all[name] = w
			}
			failed := map[string]time.Time{}
			for name, w := range all {
				failed[name] = suite.Await(t, w.failed, name+": the first attempt")
			}
			// Settled, and stored where it waits, before the broker goes down.
			for name, w := range all {
				suite.Poll(t, name+": the work queue is empty", func() bool { return suite.Ready(t, w.conn, "work-"+name) == 0 })
			}
			require.NoError(t, own.Restart(ctx))
			deleted()
			up := time.Now()
			for name, w := range all {
				var back time.Time
				select {
				case back = <-w.back:
				case <-ctx.Done(): // more than the 180 s of above, should it come to that
					require.FailNow(t, "the message doesn't come back", name)
				}
				assert.GreaterOrEqual(t, back.Sub(failed[name]), delay-10*time.Millisecond, name)
				t.Logf("REPORT %s/%s: asked %v, had %v across a restart, %v after the broker was up", t.Name(), name, delay, back.Sub(failed[name]).Round(time.Millisecond), max(0, back.Sub(up)).Round(time.Millisecond))
			}
		})
	}
}

// transientQueue declares a queue that isn't durable, with a message, which doctor names. The function
// that is returned shows what a restart makes of it. RabbitMQ 4.4 refuses such queues.
func transientQueue(t *testing.T, s *suite.Site) (deleted func()) {
	t.Helper()
	if s.HoldsPublished() {
		return func() {}
	}
	const path = "/transient"
	s.HTTP(t, http.MethodPut, "/queues/"+s.VHost+path, map[string]any{"durable": false, "arguments": map[string]any{"x-queue-type": "classic"}}, nil)
	conn, _ := s.Connect(t)
	suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("transient")), "m")
	doctorNames(t, s, s.API(t), `warning transient-queue queue "transient"`, `warning deprecated-feature broker "transient_nonexcl_queues"`)
	return func() {
		t.Helper()
		status, _, err := s.HTTPStatus(http.MethodGet, "/queues/"+s.VHost+path, nil)
		require.NoError(t, err)
		assert.Equal(t, http.StatusNotFound, status, "it is gone, with a message that was confirmed")
	}
}
