package desk_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
)

// unlimited is a queue as a dead-letter queue is: nothing counts there.
func unlimited(name string) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}
}

// bodies are those of messages.
func bodies(ms []*amqp.Message) []string {
	all := make([]string, len(ms))
	for i, m := range ms {
		all[i] = string(m.GetData())
	}
	return all
}

// upTo are those from 0 to n-1.
func upTo(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	return all
}

// inOrder compares lists, and shows the runs of numbers where they differ.
func inOrder(t *testing.T, want, got []string) {
	t.Helper()
	if slices.Equal(want, got) {
		return
	}
	var runs []string
	for i := 0; i < len(got) && len(runs) < 40; {
		j := i + 1
		for j < len(got) {
			a, _ := strconv.Atoi(got[j-1])
			b, _ := strconv.Atoi(got[j])
			if b-a != 1 {
				break
			}
			j++
		}
		runs = append(runs, got[i]+"-"+got[j-1])
		i = j
	}
	assert.Fail(t, "not in order", "%d wanted, %d there: %s", len(want), len(got), strings.Join(runs, " "))
}

// What a scan returns comes in the same order as before, whether the scan read to the
// queue's end or stopped before it, and whether others had read it before. The scan must
// read on to the end of the messages returned before: a queue delivers them first, and puts
// newly returned ones behind them.
func TestLookingKeepsOrderAndContent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 5000
		conn, _ := s.Connect(t)
		d := suite.NewDesk(t, s, conn)
		full, part := desk.ListConfig{Count: true}, desk.ListConfig{Limit: 2500}
		for name, peeks := range map[string][]desk.ListConfig{"whole": {full}, "part": {part}, "whole, part": {full, part}, "part, whole, part": {part, full, part}} {
			suite.Apply(t, conn, suite.QueueOf(unlimited(name)))
			suite.Load(t, conn, name, n)
			for _, cfg := range peeks {
				cfg.Queue = name
				list, err := d.List(t.Context(), cfg)
				require.NoError(t, err)
				assert.Len(t, list.Messages, max(cfg.Limit, 50))
				if cfg.Count {
					assert.EqualValues(t, n, list.Matched)
				}
			}
			ms := s.Peer(t).Take(name, n)
			inOrder(t, upTo(n), bodies(ms))
			assert.Zero(t, ms[0].Header.DeliveryCount)
			suite.Report(t, s, "%s: header %+v, annotations %v", name, *ms[0].Header, ms[0].Annotations)
		}
	})
}

// A queue delivers by priority. Messages that were read keep their place among themselves; they
// go before later messages of any priority.
func TestLookingAndPriorities(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 60
		conn, _ := s.Connect(t)
		d := suite.NewDesk(t, s, conn)
		priority := func(i int, m *client.Message) { m.Header.Priority = uint8([]int{1, 4, 9}[i%3]) }
		orders := map[string][]string{}
		for _, name := range []string{"not looked at", "looked at"} {
			suite.Apply(t, conn, suite.QueueOf(unlimited(name)))
			suite.Load(t, conn, name, n, priority)
			if name == "looked at" {
				_, err := d.List(t.Context(), desk.ListConfig{Queue: name, Count: true})
				require.NoError(t, err)
			}
			ms := s.Peer(t).Take(name, n)
			orders[name] = bodies(ms)
			for _, m := range ms {
				i, _ := strconv.Atoi(string(m.GetData()))
				assert.EqualValues(t, []int{1, 4, 9}[i%3], m.Header.Priority)
			}
		}
		assert.Equal(t, orders["not looked at"], orders["looked at"])

		suite.Apply(t, conn, suite.QueueOf(unlimited("later")))
		suite.Load(t, conn, "later", 3, func(_ int, m *client.Message) { m.Header.Priority = 1 })
		_, err := d.List(t.Context(), desk.ListConfig{Queue: "later"})
		require.NoError(t, err)
		suite.Publish(t, suite.Publisher[*client.Message](t, conn, address.Queue("later")), client.NewMessage([]byte("urgent")), func(m *client.Message) { m.Header.Priority = 9 })
		suite.Report(t, s, "published with a high priority after a look: %v", bodies(s.Peer(t).Take("later", 4)))
	})
}

// When a connection ends, what it held comes back in order, and counts as a failed delivery.
// Where some of it had been returned before, and some wasn't held, the latter comes first.
func TestHeldMessagesComeBackWhenTheConnectionEnds(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for name, held := range map[string]struct {
			first, second int
			order         []string
		}{
			"all":           {10, 10, upTo(10)},
			"some":          {4, 4, upTo(10)},
			"more":          {4, 6, upTo(10)},
			"less, rotated": {6, 4, strings.Fields("4 5 0 1 2 3 6 7 8 9")},
			// A scan notices that, and restores the order.
			"less, then looked at": {6, 4, upTo(10)},
		} {
			suite.Apply(t, conn, suite.QueueOf(unlimited(name)))
			suite.Load(t, conn, name, 10, func(i int, m *client.Message) { m.Properties.MessageID = fmt.Sprintf("m%d", i) })
			for _, n := range []int{held.first, held.second} {
				p := s.Peer(t)
				r := p.Receiver(name, uint32(n))
				for range n {
					p.Next(r)
				}
				require.NoError(t, p.Conn.Close())
				suite.Poll(t, "they are back", func() bool { return suite.Ready(t, conn, name) == 10 })
			}
			if strings.HasSuffix(name, "then looked at") {
				d := suite.NewDesk(t, s, conn)
				list, err := d.List(t.Context(), desk.ListConfig{Queue: name, Count: true})
				require.NoError(t, err)
				require.Len(t, list.Messages, 10)
				assert.Equal(t, "m0", list.Messages[0].MessageID)
			}
			ms := s.Peer(t).Take(name, 10)
			inOrder(t, held.order, bodies(ms))
			if name == "all" {
				assert.EqualValues(t, 2, ms[0].Header.DeliveryCount)
			}
		}
	})
}

// Looking into a work queue uses up its delivery limit on 4.0, and so is refused before
// anybody looks. On 4.3 it doesn't.
func TestLookingIntoAQueueWithADeliveryLimit(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "work", DeliveryLimit: 3, DeadLetter: declare.Drop()}}})
		suite.Load(t, conn, "work", 10)
		d := suite.NewDesk(t, s, conn)
		sideEffects, err := d.SideEffects(t.Context(), "work")
		require.NoError(t, err)
		require.Len(t, sideEffects.Warnings, 1)
		if !s.Newer() {
			assert.Equal(t, desk.WarningLimit, sideEffects.Warnings[0].Code)
			assert.True(t, sideEffects.Warnings[0].Refuses)
			_, err := d.List(t.Context(), desk.ListConfig{Queue: "work"})
			var refused *desk.SideEffectsError
			require.ErrorAs(t, err, &refused)
			assert.ErrorContains(t, err, "limit is 3")
			_, err = d.Show(t.Context(), desk.ShowConfig{Queue: "work", ID: "x"})
			require.ErrorAs(t, err, &refused)
			for range 4 { // that many are too many
				_, err = d.List(t.Context(), desk.ListConfig{Queue: "work", Accept: []desk.WarningCode{desk.WarningLimit}})
				require.NoError(t, err)
			}
			suite.Poll(t, "all are gone", func() bool { return suite.Ready(t, conn, "work") == 0 })
			return
		}
		assert.Equal(t, desk.WarningLoss, sideEffects.Warnings[0].Code)
		for range 10 {
			list, err := d.List(t.Context(), desk.ListConfig{Queue: "work"})
			require.NoError(t, err)
			require.Len(t, list.Messages, 10)
		}
		ms := s.Peer(t).Take("work", 10)
		inOrder(t, upTo(10), bodies(ms))
		assert.Zero(t, ms[0].Header.DeliveryCount)
	})
}

// What can't be guaranteed is reported before anything is read: other consumers, a single active
// consumer, a limit that a policy sets, another type of queue.
func TestTermsOfLooking(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		single := unlimited("single")
		single.SingleActiveConsumer = true
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			unlimited("alone"), unlimited("shared"), single, unlimited("limited"), declare.ClassicQueue{Name: "classic", DeadLetter: declare.Drop()}, declare.Stream{Name: "stream"},
		}})
		s.HTTP(t, "PUT", "/policies/"+s.VHost+"/limit", map[string]any{"pattern": "^limited$", "apply-to": "queues", "definition": map[string]any{"delivery-limit": 7}}, nil)
		for _, q := range []string{"shared", "single"} {
			suite.Consume(t, conn, q, client.JSON(func(context.Context, int) error { return nil }), client.ConsumerConfig{})
			suite.AwaitConsumers(t, conn, q, 1)
		}
		d := suite.NewDesk(t, s, conn)
		codes := func(d *desk.Desk, queue string) []desk.WarningCode {
			sideEffects, err := d.SideEffects(t.Context(), queue)
			require.NoError(t, err)
			var all []desk.WarningCode
			for _, c := range sideEffects.Warnings {
				all = append(all, c.Code)
			}
			return all
		}
		assert.Empty(t, codes(d, "alone"))
		assert.Equal(t, []desk.WarningCode{desk.WarningConsumers}, codes(d, "shared"))
		assert.Equal(t, []desk.WarningCode{desk.WarningSingleActive}, codes(d, "single"))
		assert.Equal(t, []desk.WarningCode{desk.WarningClassic}, codes(d, "classic"))
		limit := desk.WarningLoss
		if !s.Newer() {
			limit = desk.WarningLimit
		}
		suite.Poll(t, "the policy applies", func() bool { return slices.Equal(codes(d, "limited"), []desk.WarningCode{limit}) })
		_, err := d.SideEffects(t.Context(), "stream")
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = d.SideEffects(t.Context(), "none")
		require.ErrorIs(t, err, declare.ErrNotFound)

		blind, err := desk.New(conn, desk.Config{})
		require.NoError(t, err)
		unknown := []desk.WarningCode{desk.WarningPolicies}
		if s.HoldsPublished() {
			unknown = append(unknown, desk.WarningWaiting)
		}
		assert.Equal(t, unknown, codes(blind, "alone"))
	})
}
