package desk_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// Every attempt and every death of a message is shown, in the order in which they happened:
// within a second, too, since RabbitMQ may count deaths in whole seconds.
func TestHopsAreInOrder(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		published, end := []string{"published"}, "dead-lettered orders rejected"
		failed := func(n int, kind string) string { return fmt.Sprintf("%s orders attempt %d", kind, n) }
		for name, want := range map[string][]string{
			"republish":   {failed(1, "first failure"), failed(2, "failure"), "dead-lettered delay_80ms expired", failed(3, "last failure"), end},
			"dead-letter": {failed(1, "first failure"), "dead-lettered hold_50ms expired", failed(2, "failure"), "dead-lettered hold_80ms expired", failed(3, "last failure"), end},
			"native":      {failed(1, "first failure"), failed(2, "failure"), failed(3, "last failure"), end},
			"central": {failed(1, "first failure"), "dead-lettered hold_50ms expired", failed(2, "failure"), "dead-lettered hold_80ms expired", failed(3, "last failure"),
				end, "dead-lettered failed_queue rejected"},
		} {
			if name == "native" && !s.Newer() {
				continue
			}
			// The names of queues begin with the prefix, which is taken away below.
			prefix := name + "."
			policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50*time.Millisecond, 80*time.Millisecond), Strategy: retry.Strategy(name), Names: retry.Names{Prefix: prefix}}
			work := prefix + "orders"
			attempt := 0
			if name == "central" {
				policy.Strategy = ""
				suite.Central(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: work})
				s.Peer(t).ByHand(work, func(r *amqp.Receiver, m *amqp.Message) error {
					attempt++
					return r.ModifyMessage(context.Background(), m, &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-error": fmt.Sprintf("attempt %d", attempt)}})
				})
			} else {
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: work})
				suite.Consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					attempt++
					return fmt.Errorf("attempt %d", attempt)
				})), client.ConsumerConfig{})
			}
			suite.Load(t, conn, work, 1, func(int, *client.Message) {})
			dead := policy.Names.DeadLetterQueue(work)
			suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, dead) == 1 })
			d, err := desk.New(conn, desk.Config{HTTP: s.API(t), Names: policy.Names})
			require.NoError(t, err)
			list, err := d.List(t.Context(), desk.ListConfig{Queue: dead})
			require.NoError(t, err)
			m, err := d.Show(t.Context(), desk.ShowConfig{Queue: dead, ID: list.Messages[0].ID})
			require.NoError(t, err)
			var got []string
			for _, h := range m.History {
				line := string(h.Kind)
				if h.Queue != "" {
					line += " " + h.Queue[len(prefix):]
				}
				switch h.Kind {
				case "dead-lettered":
					line += " " + h.Reason
				case "published", "created":
				default:
					line += " " + h.Text
				}
				got = append(got, line)
			}
			if len(got) > 0 && got[0] == "created" {
				got = got[1:]
			}
			assert.Equal(t, append(published, want...), got, "%s: %+v", name, m.History)
		}
	})
}
