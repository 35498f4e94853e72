package retry_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// obstacle is something that keeps a failed message from being held for its
// delay of 3 s.
type obstacle struct {
	name string
	// says is what the log has besides the address.
	says string
	set  func(t *testing.T, s *suite.Site, conn *client.Conn)
}

var obstacles = []obstacle{
	{"delay queue missing", client.ErrUnroutable.Error(), func(t *testing.T, _ *suite.Site, conn *client.Conn) {
		_, err := declare.DeleteQueue(t.Context(), conn.Management(), "delay_3s")
		require.NoError(t, err)
	}},
	{"retry exchange missing", client.ErrNotFound.Error(), func(t *testing.T, _ *suite.Site, conn *client.Conn) {
		require.NoError(t, declare.DeleteExchange(t.Context(), conn.Management(), "retry_exchange"))
	}},
	{"delay queue full", client.ErrRefused.Error(), func(t *testing.T, s *suite.Site, _ *client.Conn) {
		s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/full", map[string]any{
			"pattern": "^delay_3s$", "apply-to": "queues", "definition": map[string]any{"max-length": 1},
		}, nil)
		// The limit isn't exact: fill it up to the first refusal.
		p := s.Peer(t)
		suite.Poll(t, "the delay queue is full", func() bool {
			_, full := p.Send(address.Queue("delay_3s"), held()).(*amqp.StateRejected)
			return full
		})
	}},
}

// held is a message that stays in a delay queue for as long as it may.
func held() *amqp.Message { return amqp.NewMessage([]byte("{}")) }

const obstructedAddress = "/exchanges/retry_exchange/delay.3000.orders"

// A copy that the broker doesn't take leaves the original where it is, says which
// address is at fault, and goes out as soon as the obstacle is removed.
func TestForwardThatIsNotTakenWaitsAndThenFlowsOn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, o := range obstacles {
			t.Run(o.name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(3 * time.Second)}
				work := declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.NoRedelivery}
				conn, log := s.Connect(t, suite.Soon)
				suite.ApplyRetry(t, conn, policy, work)

				attempts := make(chan int, 8)
				suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
					d, _ := client.DeliveryFrom(ctx)
					n := retry.Count(d.Message())
					attempts <- n
					if n == 0 {
						return errors.New("not yet")
					}
					return nil
				})), client.ConsumerConfig{})
				suite.AwaitConsumers(t, conn, "orders", 1) // it checks the topology at its start
				o.set(t, s, conn)
				suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 1})
				require.Equal(t, 0, suite.Await(t, attempts, "the first attempt"))
				suite.Poll(t, "the log names the address", func() bool {
					return len(log.With("not accepted; the original is kept", "to="+obstructedAddress, o.says)) > 0
				})
				// With this delivery limit the queue would dead-letter it if it came back.
				assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
				if o.name == "delay queue full" {
					s.HTTP(t, http.MethodDelete, "/policies/"+s.VHost+"/full", nil, nil)
				}
				suite.ApplyRetry(t, conn, policy, work)

				assert.Equal(t, 1, suite.Await(t, attempts, "the second attempt"))
				suite.Poll(t, "all is done", func() bool { return suite.Ready(t, conn, "orders") == 0 && suite.Ready(t, conn, "delay_3s") == 0 })
				assert.Empty(t, attempts, "it was handled twice, no more")
				assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
			})
		}
	})
}

// A copy that isn't taken for as long as ForwardPatience sends the original back
// to its queue as a failed delivery, so that the queue's delivery limit ends what
// can't be forwarded: in the dead-letter queue, not nowhere.
func TestForwardThatIsNeverTakenEndsInTheDeadLetterQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, o := range obstacles {
			t.Run(o.name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				const limit = 2
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(3 * time.Second)}
				conn, log := s.Connect(t, suite.Soon)
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: limit})
				attempts := make(chan uint32, 16)
				suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
					d, _ := client.DeliveryFrom(ctx)
					attempts <- d.DeliveryCount()
					return errors.New("not yet")
				})), client.ConsumerConfig{ForwardPatience: 300 * time.Millisecond})
				suite.AwaitConsumers(t, conn, "orders", 1)
				o.set(t, s, conn)
				if o.name == "delay queue full" {
					// The messages that fill it expire: keep it full.
					keepFull(t, s)
				}
				var m *amqp.Message
				for try := 1; ; try++ {
					s.Peer(t).SendPlain(address.Queue("orders"), `{"id": 7}`)
					m = s.Peer(t).Take("orders.dead", 1)[0]
					if retry.DeadLetterOf(m).Retries == 0 || try == 5 {
						break
					}
					// What filled the delay queue had just expired, and a copy got in.
					for len(attempts) > 0 {
						<-attempts
					}
				}
				assert.JSONEq(t, `{"id": 7}`, string(m.GetData()))
				assertPlainProperties(t, m, o.name)
				assert.Equal(t, "delivery_limit", m.Annotations["x-last-death-reason"])
				death := retry.DeadLetterOf(m)
				assert.Equal(t, retry.ReasonDeliveryLimit, death.Reason)
				assert.Contains(t, death.Error, "not yet", "the handler's error")
				assert.Contains(t, death.Error, o.says, "and what kept it from waiting")
				assert.Zero(t, death.Retries)
				assert.Equal(t, "orders", death.Queue)
				assert.False(t, death.FirstFailure.IsZero())
				for n := range uint32(limit + 1) {
					assert.Equal(t, n, suite.Await(t, attempts, "an attempt"))
				}
				assert.Empty(t, attempts)
				assert.NotEmpty(t, log.With("a forward failed; the original returns to its queue", "to="+obstructedAddress, o.says))
			})
		}
	})
}

// A foreign work queue without a dead-letter exchange, whose checks are disabled, and
// which no delay queue is bound for: the consumer says so when it starts, and a
// message that fails is kept, however low the queue's delivery limit.
func TestForwardThatIsNeverTakenIsKeptWhereTheQueueWouldDropIt(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(300 * time.Millisecond), Waive: retry.AllGuards()}
		conn, log := s.Connect(t, suite.Soon)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: 1}))
		suite.Apply(t, conn, declare.Topology{Exchanges: []declare.Exchange{{Name: "retry_exchange", Type: declare.ExchangeTopic}}})
		attempts := make(chan int, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
			attempts <- retry.Attempt(ctx)
			if retry.Attempt(ctx) == 1 {
				return errors.New("not yet")
			}
			return nil
		})), client.ConsumerConfig{ForwardPatience: 300 * time.Millisecond})
		suite.AwaitConsumers(t, conn, "orders", 1)
		for _, problem := range []string{
			`check=delay-queue at=orders problem=binding "retry_exchange" to queue "delay_300ms"`, "check=delay-queue at=delay_300ms", "check=dead-letter at=orders",
		} {
			assert.Len(t, log.With("WARN hopback: topology check: a disabled check found a fault", problem), 1, problem)
		}
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 1})
		assert.Equal(t, 1, suite.Await(t, attempts, "the first attempt"))
		// More rounds of patience than the delivery limit has room for. The first is logged, and after 10 s
		// how many there were.
		suite.Poll(t, "the message is kept", func() bool {
			return len(log.With("a forward failed; the original is kept", "to=/exchanges/retry_exchange/delay.300.orders", "more=")) > 0
		})
		assert.Empty(t, attempts, "it isn't handled again in between")
		assert.Empty(t, log.With("the original goes back"))
		suite.ApplyRetry(t, conn, policy)
		suite.Apply(t, conn, declare.Topology{Bindings: []declare.Binding{{Source: "requeue_exchange", Queue: "orders", Key: "*.*.orders"}}})
		assert.Equal(t, 2, suite.Await(t, attempts, "the second attempt"))
	})
}

// keepFull sends to the delay queue until the test ends.
func keepFull(t *testing.T, s *suite.Site) {
	p := s.Peer(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	l, err := p.Site.NewSender(t.Context(), "/queues/delay_3s", nil)
	require.NoError(t, err)
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if r, err := l.SendWithReceipt(ctx, held(), nil); err == nil {
				_, _ = r.Wait(ctx)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
}
