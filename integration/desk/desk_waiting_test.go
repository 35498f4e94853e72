package desk_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
)

// hiddenDeadLetter dead-letters two messages at least once. One has a delivery time in an hour.
// A queue of RabbitMQ 4.4 hides that one until then. Before, both are visible.
func hiddenDeadLetter(t *testing.T, s *suite.Site, conn *client.Conn) {
	t.Helper()
	suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.NoRedelivery, DeadLetter: declare.ToQueue("orders.dead")},
		unlimited("orders.dead"),
	}})
	suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		if string(d.Message().GetData()) == "plain" {
			return client.DeadLetter{Reason: "bad"}
		}
		// The broker dead-letters it at its delivery limit, as it does when a process that has claimed
		// a parked message crashes.
		return client.Modify{Failed: true, Annotations: map[string]any{annotation.DeliveryTime: time.Now().Add(time.Hour).UnixMilli()}}
	}), client.ConsumerConfig{})
	p := suite.PublisherOf(t, conn, address.Queue("orders"))
	suite.Publish(t, p, "plain", func(m *client.Message) { m.Properties.MessageID = "plain" })
	suite.Publish(t, p, "hidden", func(m *client.Message) { m.Properties.MessageID = "hidden" })
	ready, hidden := uint64(2), uint64(0)
	if s.HoldsPublished() {
		ready, hidden = 1, 1
	}
	d := suite.NewDesk(t, s, conn)
	suite.Poll(t, "both are dead-lettered, and counted", func() bool {
		survey, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}, CountsOnly: true})
		require.NoError(t, err)
		q := survey.Queues[0]
		return q.Messages == ready && q.Delayed == hidden
	})
}

// While RabbitMQ 4.4 hides a dead letter, no operation says that it has read all of them.
func TestDeadLettersThatWaitAreReported(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		hiddenDeadLetter(t, s, conn)
		d := suite.NewDesk(t, s, conn)
		blind, err := desk.New(conn, desk.Config{})
		require.NoError(t, err)
		seen, says, unknown := uint64(1), "1 message waits in it for its delivery time", "it is unknown whether messages wait"
		if !s.HoldsPublished() {
			seen, says, unknown = 2, "", ""
		}
		reports := func(what, unread, says string) {
			t.Helper()
			if says == "" {
				assert.Empty(t, unread, what)
				return
			}
			assert.Contains(t, unread, says, what)
		}
		accepted := []desk.WarningCode{desk.WarningWaiting}
		for _, at := range []struct {
			what, says string
			d          *desk.Desk
			accept     []desk.WarningCode
		}{{"with the HTTP API", says, d, nil}, {"without it", unknown, blind, nil}, {"accepted", "", d, accepted}, {"accepted, without the HTTP API", "", blind, accepted}} {
			survey, err := at.d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}, Accept: at.accept})
			require.NoError(t, err)
			assert.Equal(t, seen, survey.Queues[0].Seen)
			reports(at.what, survey.Queues[0].Unread, at.says)
			list, err := at.d.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Accept: at.accept})
			require.NoError(t, err)
			assert.Equal(t, seen, list.Matched)
			reports(at.what, list.Unread, at.says)
			_, err = at.d.Show(t.Context(), desk.ShowConfig{Queue: "orders.dead", ID: "neither", Accept: at.accept})
			var none *desk.NoMessageError
			require.ErrorAs(t, err, &none)
			reports(at.what, none.Unread, at.says)
			export, err := at.d.Export(t.Context(), tempFile(t, "dead.jsonl"), desk.ExportConfig{Queue: "orders.dead", Accept: at.accept})
			require.NoError(t, err)
			reports(at.what, export.Unread, at.says)
			discard, err := at.d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", All: true, DryRun: true, Accept: at.accept})
			require.NoError(t, err)
			reports(at.what, discard.Unread, at.says)
			replay, err := at.d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, DryRun: true, Accept: at.accept})
			require.NoError(t, err)
			reports(at.what, replay.Unread, at.says)
			assert.Equal(t, at.says == "", replay.Complete, at.what)
		}

		effects, err := d.SideEffects(t.Context(), "orders.dead")
		require.NoError(t, err)
		warned := ""
		for _, w := range effects.Warnings {
			assert.False(t, w.Refuses)
			if w.Code == desk.WarningWaiting {
				warned = w.Text
			}
		}
		reports("warning", warned, says)

		hopback := s.Shell(t)
		for _, args := range [][]string{{"list", "orders.dead"}, {"survey", "orders.dead"}, {"export", "orders.dead", filepath.Join(t.TempDir(), "a")}, {"replay", "orders.dead", "--all", "--dry-run"}} {
			code := suite.ExitDone
			if s.HoldsPublished() {
				code = suite.ExitUnknown
			}
			out := hopback.Dead(code, args...)
			if says == "" { // it may show the progress
				assert.NotContains(t, out.Stderr, "delivery time", args[0])
			} else {
				assert.Contains(t, out.Stderr, says, args[0])
			}
			if args[0] == "export" {
				args[2] += "b"
			}
			hopback.Dead(suite.ExitDone, append(args, "--accept", "waiting-messages")...)
		}
	})
}

// A message that was claimed, and whose handler fails more often than the queue's delivery limit allows, is visible in the
// dead-letter queue at once, although its time is still to come.
func TestDeadLettersOfClaimedMessagesAreVisible(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.NoRedelivery, DeadLetter: declare.ToQueue("orders.dead")},
			unlimited("orders.dead"),
		}})
		parked := make(chan struct{}, 1)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			parked <- struct{}{}
			return client.Park{Token: "payment", Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "order")
		suite.Await(t, parked, "the message")
		ctx := suite.Within(t)
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		suite.Poll(t, "it is claimed", func() bool {
			n, err := c.Claim(ctx, "payment", client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New("failed") }))
			require.NoError(t, err)
			return n == 1
		})
		require.NoError(t, c.Close(ctx))
		suite.Poll(t, "the dead letter is visible", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
		list, err := suite.NewDesk(t, s, conn).List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		require.Len(t, list.Messages, 1)
		assert.Equal(t, client.Reason("delivery-limit"), list.Messages[0].Reason)
	})
}
