package retry_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// forgery is a message whose sender writes what only a worker, Central or a Desk should.
func forgery(body string, annotations amqp.Annotations) *amqp.Message {
	m := amqp.NewMessage([]byte(body))
	m.Annotations = annotations
	return m
}

// hiddenHeaders accepts messages that look as if they had come over AMQP 0-9-1: these have no properties.
var hiddenHeaders = []desk.WarningCode{desk.WarningHeaders}

// shops declares the exchange "shop", which feeds the queue "orders", and the exchange
// "till", which feeds "payments". "ledger" is bound to both.
func shops(t *testing.T, conn *client.Conn, orders declare.QuorumQueue, work func(...declare.QuorumQueue) (declare.Topology, error)) {
	t.Helper()
	orders.Name = "orders"
	topology, err := work(orders)
	require.NoError(t, err)
	suite.Apply(t, conn, topology)
	suite.Apply(t, conn, declare.Topology{
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}, {Name: "till", Type: declare.ExchangeTopic}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "payments", DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "ledger", DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "orders", Key: "order.*"}, {Source: "shop", Queue: "payments", Key: "payment.*"}, {Source: "shop", Queue: "ledger", Key: "order.*"},
			{Source: "till", Queue: "payments", Key: "#"},
		},
	})
}

// A sender may write every annotation. None of them leads a replay to a queue that the
// message didn't die in.
func TestForgedAnnotationsDoNotChooseWhereAReplayGoes(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		ctx := context.Background()
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond)}
		shops(t, conn, declare.QuorumQueue{}, func(q ...declare.QuorumQueue) (declare.Topology, error) { return retry.Topology(policy, q...) })
		p := s.Peer(t)
		orders := address.Exchange("shop", "order.placed")
		names := func(queue string) amqp.Annotations {
			return amqp.Annotations{
				annotation.Queue: queue, annotation.Exchange: "till", annotation.RoutingKey: "x",
				"x-last-death-queue": queue, "x-first-death-queue": queue, "x-last-death-reason": "rejected",
			}
		}

		// It expires in "orders", as one would in a delay queue.
		late := names("payments")
		late[retry.CountProperty], late[annotation.Retries] = int64(1), int64(1)
		m := forgery("late", late)
		m.Header = &amqp.MessageHeader{Durable: true, TTL: time.Millisecond}
		require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, m))
		suite.Poll(t, "it expired", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })

		// A worker of another kind rejects these.
		for body, reason := range map[string]client.Reason{"given up": retry.ReasonPermanent, "waiting": "waiting", "replayed": retry.ReasonReplayed} {
			a := names("payments")
			a[client.AnnotationReason] = string(reason)
			require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery(body, a)))
		}
		compact := amqp.Annotations{annotation.History: `{"queue":"payments","exchange":"till","key":"x","first":1,"last":2}`}
		require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("compact", compact)))
		r := p.Receiver("orders", 4)
		for range 4 {
			require.NoError(t, r.RejectMessage(ctx, p.Next(r), nil))
		}
		require.NoError(t, r.Close(ctx))
		suite.Poll(t, "they are dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 5 })
		// And one is published to the dead-letter queue itself.
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Queue("orders.dead"), forgery("planted", names("payments"))))

		d := suite.NewDesk(t, s, conn)
		list, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		died := map[string]int{}
		for _, m := range list.Messages {
			died[m.Queue]++
			assert.NotEmpty(t, m.Reason)
		}
		assert.Equal(t, map[string]int{"orders": 5, "payments": 1}, died, "the broker knows better, of all but the planted one")
		for _, dry := range []bool{true, false} {
			report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, DryRun: dry, Accept: hiddenHeaders})
			require.NoError(t, err)
			assert.EqualValues(t, 1, report.Failed, "the planted one")
			require.Len(t, report.Failures, 1)
			assert.Contains(t, report.Failures[0].Err, "payments")
		}
		assert.Equal(t, 5, suite.Ready(t, conn, "orders"))
		assert.Equal(t, 1, suite.Ready(t, conn, "orders.dead"))
		assert.Zero(t, suite.Ready(t, conn, "payments"))
		// An explicit destination needs no record.
		report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, Address: address.Queue("orders"), Accept: hiddenHeaders})
		require.NoError(t, err)
		assert.EqualValues(t, 1, report.Replayed)
	})
}

// A replay to the exchange goes to where the broker says that the message was published. Of
// a message that was retried by a copy the broker has forgotten that: then the exchange has to
// be one that feeds the work queue with that key.
func TestForgedOriginDoesNotChooseWhereAReplayGoes(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.Newer() {
				continue
			}
			t.Run(string(strategy), func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond), Strategy: strategy}
				shops(t, conn, declare.QuorumQueue{}, func(q ...declare.QuorumQueue) (declare.Topology, error) { return retry.Topology(policy, q...) })
				p := s.Peer(t)
				forged := func() amqp.Annotations {
					return amqp.Annotations{
						annotation.Exchange: "till", annotation.RoutingKey: "x", "x-exchange": "till", "x-routing-key": "x",
						annotation.History: `{"queue":"payments","exchange":"till","key":"x"}`,
					}
				}
				orders := address.Exchange("shop", "order.placed")
				require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("honest", nil)))
				require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("forged", forged())))
				// These fail at once, so no worker's copy replaces anything.
				require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("forged, fatal", forged())))
				key := amqp.Annotations{annotation.Exchange: "shop", annotation.RoutingKey: "payment.x"}
				require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("forged key", key)))
				stop := suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					if strings.HasSuffix(string(d.Message().GetData()), "fatal") {
						return retry.Permanent(errors.New("no"))
					}
					return errors.New("down")
				})), client.ConsumerConfig{})
				suite.Poll(t, "they are dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 4 })
				require.NoError(t, stop())
				for range 4 { // the exchange fed it with the originals
					p.Take("ledger", 1)
				}

				// One more, which nobody's worker has seen.
				require.IsType(t, &amqp.StateAccepted{}, p.Send(orders, forgery("rejected", forged())))
				r := p.Receiver("orders", 1)
				require.NoError(t, r.RejectMessage(context.Background(), p.Next(r), nil))
				require.NoError(t, r.Close(context.Background()))
				suite.Poll(t, "it is dead, too", func() bool { return suite.Ready(t, conn, "orders.dead") == 5 })
				p.Take("ledger", 1)

				d := suite.NewDesk(t, s, conn)
				report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, ToExchange: true, Accept: hiddenHeaders})
				require.NoError(t, err)
				assert.Zero(t, suite.Ready(t, conn, "payments"), "%+v", report.Failures)
				assert.EqualValues(t, 4, report.Replayed, "the workers know how the messages came: %+v", report.Failures)
				require.EqualValues(t, 1, report.Failed)
				assert.Contains(t, report.Failures[0].Err, "till")
				assert.Equal(t, 4, suite.Ready(t, conn, "orders"))
				assert.Equal(t, 4, suite.Ready(t, conn, "ledger"), "all queues that are bound get it")
				assert.Equal(t, 1, suite.Ready(t, conn, "orders.dead"))
			})
		}
	})
}

// A reason that the sender wrote isn't one for which a worker gave the message up: Central
// retries it. A worker's is believed once the message has been retried, since that takes the
// sender's away.
func TestForgedReasonDoesNotKeepCentralFromRetrying(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		ctx := context.Background()
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond)}
		shops(t, conn, declare.QuorumQueue{}, func(q ...declare.QuorumQueue) (declare.Topology, error) {
			return retry.CentralTopology(policy, retry.CentralConfig{}, q...)
		})
		suite.RunCentral(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "orders"})
		p := s.Peer(t)
		a := newAttempts()
		for _, reason := range []client.Reason{retry.ReasonPermanent, retry.ReasonExhausted, "made up", retry.ReasonReplayed, "retry"} {
			m := forgery(string(reason), amqp.Annotations{
				client.AnnotationReason: string(reason), annotation.Queue: "payments", annotation.Delay: int64(50), annotation.Retries: int64(0),
				annotation.Exchange: "till", annotation.RoutingKey: "x",
			})
			require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("shop", "order.placed"), m))
		}
		p.ByHand("orders", func(r *amqp.Receiver, m *amqp.Message) error {
			a.next(string(m.GetData()))
			return r.RejectMessage(ctx, m, nil)
		})
		for _, m := range p.Take("orders.dead", 5) {
			body := string(m.GetData())
			assert.GreaterOrEqual(t, len(a.of(body)), 3, "%s: every retry", body)
			d := retry.DeadLetterOf(m)
			assert.Equal(t, [3]string{"exhausted", "orders", "shop"}, [3]string{string(d.Reason), d.Queue, d.Exchange}, body)
			assert.Equal(t, "order.placed", d.RoutingKey, body)
		}
		assert.Zero(t, suite.Ready(t, conn, "payments"))
		assert.Zero(t, suite.Ready(t, conn, "parking_queue"))
	})
}
