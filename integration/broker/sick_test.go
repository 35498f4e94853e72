package broker_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// A queue that doesn't answer, such as one without a leader, blocks its
// consumers and nobody else: the connection stays, and other consumers come
// and go on it. RabbitMQ itself gives up on such a queue after 30 s or more.
func TestAQueueThatDoesNotAnswerHurtsNobodyElse(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		for _, name := range []string{"sick", "healthy", "later"} {
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited}))
		}
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("sick")), suite.Order{ID: 7})
		got := make(chan int, 100)
		handler := client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil })
		suite.Consume(t, conn, "healthy", handler, client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("healthy"))

		// The queue's process answers nothing any more.
		notify := func(what string) {
			s.EvalOK(t, fmt.Sprintf("sys:%s(whereis('%s_sick')).", what, s.VHost))
		}
		notify("suspend")
		began := time.Now()
		sick := make(chan int, 1)
		stop := suite.Consume(t, conn, "sick", client.JSON(func(_ context.Context, o suite.Order) error { sick <- o.ID; return nil }), client.ConsumerConfig{})
		another := suite.Consume(t, conn, "sick", handler, client.ConsumerConfig{})

		for id, opened := 1, false; time.Since(began) < 20*time.Second; id++ {
			suite.Publish(t, p, suite.Order{ID: id})
			require.Equal(t, id, suite.Await(t, got, "a message of the healthy queue"))
			if !opened && time.Since(began) > time.Second {
				opened = true
				suite.Consume(t, conn, "later", handler, client.ConsumerConfig{})
				suite.AwaitConsumers(t, conn, "later", 1)
				assert.Less(t, time.Since(began), 25*time.Second, "a consumer of another queue attaches at the same time")
				// Who gives up waiting ends at once, and hurts nobody either.
				require.NoError(t, another())
				assert.Less(t, time.Since(began), 25*time.Second)
			}
			time.Sleep(50 * time.Millisecond) // twenty messages a second will do
		}
		assert.Empty(t, log.With("connection lost; reconnecting"))
		notify("resume")
		assert.Equal(t, 7, suite.Await(t, sick, "the sick queue's message, once that is well again"))
		require.NoError(t, stop())
		assert.Empty(t, log.With("connection lost; reconnecting"))
	})
}
