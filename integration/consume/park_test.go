package consume_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
)

// A parked message is handled, canceled, run now, rescheduled, or it comes by itself.
func TestParkedMessagesAreClaimed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("orders", declare.Drop())))
		type seen struct {
			body   string
			parked bool
			early  bool
		}
		came := make(chan seen, 10)
		until := time.Now().Add(time.Hour)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			body := string(d.Message().GetData())
			p, parked := d.Parked()
			came <- seen{body, parked, parked && time.Now().Before(p.Until)}
			if parked {
				return nil
			}
			if body == "soon" {
				return client.Park{Token: body, Until: time.Now().Add(2 * time.Second)}
			}
			return client.Park{Token: body, Until: until}
		}), client.ConsumerConfig{})
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		park := func(bodies ...string) {
			for _, body := range bodies {
				suite.Publish(t, p, body)
				assert.Equal(t, seen{body, false, false}, suite.Await(t, came, body))
			}
		}
		park("handle", "cancel", "run", "reschedule")
		ctx := suite.Within(t)
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		one := func(n int, err error) {
			t.Helper()
			require.NoError(t, err)
			assert.Equal(t, 1, n)
		}
		none := func(n int, err error) {
			t.Helper()
			require.NoError(t, err)
			assert.Equal(t, 0, n)
		}
		none(c.Cancel(ctx, "unknown"))
		handled := ""
		one(c.Claim(ctx, "handle", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			handled = string(d.Message().GetData())
			return nil
		})))
		assert.Equal(t, "handle", handled)
		none(c.Cancel(ctx, "handle"))
		one(c.Cancel(ctx, "cancel"))
		none(c.RunNow(ctx, "cancel"))
		one(c.RunNow(ctx, "run"))
		assert.Equal(t, seen{"run", true, true}, suite.Await(t, came, "run"))
		park("soon")
		assert.Equal(t, seen{"soon", true, false}, suite.Await(t, came, "soon"))
		one(c.Reschedule(ctx, "reschedule", time.Now().Add(2*time.Second)))
		none(c.Cancel(ctx, "soon"))
		assert.Equal(t, seen{"reschedule", true, false}, suite.Await(t, came, "reschedule"))
		require.NoError(t, c.Close(ctx))
		_, err = c.Cancel(ctx, "x")
		require.ErrorIs(t, err, client.ErrClosed)
		suite.AssertEmpty(t, s, "orders")
	})
}

// Before RabbitMQ 4.4, a message that a handler parks is dead-lettered. Its reason names the broker's version, and it isn't
// delivered again.
func TestParkingIsRefusedByOlderBrokers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{suite.Quorum("orders", declare.ToQueue("dead")), suite.Quorum("dead", declare.Drop())}})
		came := make(chan string, 10)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			came <- string(d.Message().GetData())
			if string(d.Message().GetData()) == "last" {
				return nil
			}
			return client.Park{Token: "payment", Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{Concurrency: 1})
		dead := make(chan *client.Message, 10)
		suite.Consume(t, conn, "dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		suite.Publish(t, p, "order")
		assert.Equal(t, "order", suite.Await(t, came, "the order"))
		m := suite.Await(t, dead, "the order that can't wait")
		assert.Equal(t, string(client.ReasonUnparkable), m.Annotations[client.AnnotationReason])
		assert.Contains(t, m.Annotations[client.AnnotationError], conn.Broker().Version)
		suite.Publish(t, p, "last")
		assert.Equal(t, "last", suite.Await(t, came, "the next message, and not the order again"))
		_, err := client.NewClaimer(suite.Within(t), conn, "orders")
		var refused *argument.Error
		require.ErrorAs(t, err, &refused)
		assert.Contains(t, err.Error(), conn.Broker().Version)
		suite.AssertEmpty(t, s, "orders")
	})
}

// A sender who writes the annotations of a parked message has parked nothing: its messages aren't claimed, and they come at
// their times.
func TestForgedTokensMisleadNobody(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("orders", declare.Drop())))
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		later := time.Now().Add(4 * time.Second)
		for body, at := range map[string]any{
			"zero": int64(0), "past": time.Now().UnixMilli(), "later": later.UnixMilli(),
			"negative": int64(-1 << 63), "text": "tomorrow", "none": nil,
		} {
			suite.Publish(t, p, body, func(m *client.Message) {
				m.Annotations = map[any]any{annotation.DeferralToken: "payment"}
				if at != nil {
					m.Annotations[annotation.DeliveryTime] = at
				}
			})
		}
		ctx := suite.Within(t)
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		for range 3 { // each brings another message of the backlog
			n, err := c.Cancel(ctx, "payment")
			require.NoError(t, err)
			assert.Zero(t, n)
			n, err = c.Claim(ctx, "payment", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				t.Errorf("%s was never parked", d.Message().GetData())
				return nil
			}))
			require.NoError(t, err)
			assert.Zero(t, n)
		}
		require.NoError(t, c.Close(ctx))
		came := make(chan string, 10)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			came <- string(d.Message().GetData())
			return nil
		}), client.ConsumerConfig{})
		var all []string
		for range 6 {
			all = append(all, suite.Await(t, came, "every message"))
		}
		slices.Sort(all)
		assert.Equal(t, []string{"later", "negative", "none", "past", "text", "zero"}, all)
		suite.AssertEmpty(t, s, "orders")
	})
}

// A backlog of ready messages delays no claim: it reports how long claims take without one, and past 10,000 messages.
func TestAClaimComesBeforeABacklog(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("orders", declare.Drop())))
		claims := suite.Sized(100, 2_000) // both ways
		suite.Load(t, conn, "orders", 2*claims)
		parked := make(chan string, 2*claims)
		stop := suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			token := string(d.Message().GetData())
			parked <- token
			return client.Park{Token: token, Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{})
		var tokens []string
		for range 2 * claims {
			tokens = append(tokens, suite.Await(t, parked, "a message to park"))
		}
		require.NoError(t, stop())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		claim := func(tokens []string) (took []time.Duration) {
			for _, token := range tokens {
				began := time.Now()
				n, err := c.Claim(ctx, token, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					assert.Equal(t, token, string(d.Message().GetData()))
					took = append(took, time.Since(began))
					return nil
				}))
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			slices.Sort(took)
			return took
		}
		spread := func(took []time.Duration) string {
			return fmt.Sprintf("p50 %v, p99 %v, max %v", took[claims/2], took[claims*99/100], took[claims-1])
		}
		without := claim(tokens[:claims])
		const backlog = 10_000
		suite.Load(t, conn, "orders", backlog)
		with := claim(tokens[claims:])
		suite.Report(t, s, "%d claims: %s without a backlog, %s past %d ready messages", claims, spread(without), spread(with), backlog)
		assert.Less(t, with[claims/2], 3*without[claims/2]+100*time.Millisecond)
		require.NoError(t, c.Close(ctx))
		suite.Poll(t, "the backlog is whole", func() bool { return suite.Ready(t, conn, "orders") == backlog })
	})
}
