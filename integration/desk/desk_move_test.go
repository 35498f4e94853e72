package desk_test

import (
	"context"
	"errors"
	"fmt"
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

// A queue that dead-letters to a headers exchange moves a message that is settled as
// undeliverable-here by the annotations of the settlement, at least once. What was in them
// can be overwritten. The number of failed deliveries goes along: 4.3 counts it toward the
// next queue's limit, 4.0 doesn't. That of looks doesn't go along.
func TestUndeliverableHereMovesByItsAnnotationsAndKeepsTheDeliveryCount(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		dead := suite.Quorum("dead", declare.DeadLetterTarget{Exchange: "replay"})
		work := suite.Quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = 1
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "replay", Type: declare.ExchangeHeaders, AlternateExchange: "parking"}, {Name: "parking", Type: declare.ExchangeFanout}},
			Queues:    []declare.Queue{dead, work, suite.Quorum("parking", declare.Drop())},
			Bindings: []declare.Binding{
				{Source: "parking", Queue: "parking"},
				{Source: "replay", Queue: "work", Match: declare.MatchAllWithX, Headers: map[string]any{"x-opt-r": "yes", "x-last-death-reason": "rejected"}},
			},
		})
		p := s.Peer(t)
		at := func(queue string) (*amqp.Message, func(*amqp.ModifyMessageOptions)) {
			r := p.Receiver(queue, 1)
			m := p.Next(r)
			return m, func(o *amqp.ModifyMessageOptions) {
				require.NoError(t, r.ModifyMessage(t.Context(), m, o))
				require.NoError(t, r.Close(t.Context()))
			}
		}
		move := &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-opt-r": "yes", "x-opt-n": int64(0), "x-opt-s": ""}}
		fail := &amqp.ModifyMessageOptions{DeliveryFailed: true}
		m := amqp.NewMessage([]byte("m"))
		m.Header = &amqp.MessageHeader{Durable: true, Priority: 4}
		m.Annotations = amqp.Annotations{"x-opt-n": int64(7), "x-opt-s": "old"}
		p.Put("dead", m)
		for range 3 { // looks
			_, settle := at("dead")
			settle(nil)
		}
		_, settle := at("dead")
		settle(move)
		m, settle = at("work")
		assert.Zero(t, m.Header.DeliveryCount)
		assert.Equal(t, int64(0), m.Annotations["x-opt-n"])
		assert.Equal(t, "", m.Annotations["x-opt-s"])
		for range 2 { // of the limit of 1
			settle(fail)
			if m.Header.DeliveryCount == 0 {
				m, settle = at("work")
			}
		}
		m, settle = at("dead")
		assert.EqualValues(t, 2, m.Header.DeliveryCount)
		settle(move)
		m, settle = at("work")
		assert.EqualValues(t, 2, m.Header.DeliveryCount, "it comes along")
		settle(fail)
		queue := "work"
		if s.Newer() {
			queue = "dead"
		}
		m, settle = at(queue)
		assert.EqualValues(t, 3, m.Header.DeliveryCount)
		if queue == "work" {
			settle(fail)
			_, settle = at("dead")
		}
		settle(&amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-opt-r": "no"}})
		_, settle = at("parking")
		settle(nil)
	})
}

// Where the topology has a way back the broker moves what is replayed: without a copy, as
// new, and at least once. Everything else stays in order. What can't be moved is copied.
func TestReplayMovesWhereTheTopologyAllowsIt(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 400
		conn, _ := s.Connect(t)
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.Newer() {
				continue
			}
			prefix := string(strategy) + "."
			policy := retry.Policy{MaxRetries: 1, GiveUpAfter: time.Hour, Backoff: retry.Exponential(20*time.Millisecond, 1), Strategy: strategy, ReplayByMove: true, Names: retry.Names{Prefix: prefix}}
			work := prefix + "orders"
			dead := policy.Names.DeadLetterQueue(work)
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: work})
			suite.Load(t, conn, work, n, func(i int, m *client.Message) {
				m.Properties.MessageID = fmt.Sprintf("order-%d", i)
				m.ApplicationProperties = map[string]any{"shop": "s1"}
			})
			failing := func(d *client.Delivery) error {
				if string(d.Message().GetData()) == "0" {
					return errors.New("down")
				}
				return retry.Permanent(&gatewayError{"refused"})
			}
			stop := suite.Consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { return failing(d) })), client.ConsumerConfig{})
			suite.Poll(t, "all are dead", func() bool { return suite.Ready(t, conn, dead) == n })
			require.NoError(t, stop())
			d, err := desk.New(conn, desk.Config{HTTP: s.API(t), Names: policy.Names})
			require.NoError(t, err)
			before, err := d.List(t.Context(), desk.ListConfig{Queue: dead, Limit: n, Count: true})
			require.NoError(t, err)

			// "0" was retried, and republish counts that in a property.
			copied := uint64(0)
			if strategy == retry.StrategyRepublish {
				copied = 1
			}
			var ids, rest []string
			for _, m := range before.Messages {
				if len(m.MessageID)%2 == 0 || m.MessageID == "order-0" { // order-0 and order-10 to order-99
					ids = append(ids, m.MessageID)
				} else {
					rest = append(rest, m.MessageID)
				}
			}
			cfg := desk.ReplayConfig{Queue: dead, Filter: desk.Filter{IDs: ids}, ID: "r1", By: "ada", DryRun: true}
			dry, err := d.Replay(t.Context(), cfg)
			require.NoError(t, err)
			assert.EqualValues(t, 91, dry.Matched)
			assert.EqualValues(t, 91-copied, dry.Moved)
			cfg.DryRun = false
			r, err := d.Replay(t.Context(), cfg)
			require.NoError(t, err)
			assert.EqualValues(t, 91, r.Replayed)
			assert.EqualValues(t, 91-copied, r.Moved)
			assert.True(t, r.Complete)
			suite.Poll(t, "they are back", func() bool { return suite.Ready(t, conn, work) == 91 })
			after, err := d.List(t.Context(), desk.ListConfig{Queue: dead, Limit: n, Count: true})
			require.NoError(t, err)
			var left []string
			for _, m := range after.Messages {
				left = append(left, m.MessageID)
			}
			assert.Equal(t, rest, left)

			// Each is as new, and dies again with the story of both lives.
			old, seen := 0, map[string]int{}
			suite.Consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				m := d.Message()
				id, _ := m.Properties.MessageID.(string)
				death := retry.DeadLetterOf(m)
				if seen[id]++; seen[id] == 1 && (retry.Count(m) != 0 || death.Reason != "" || !death.FirstFailure.IsZero() || death.Error != "" || m.Header.DeliveryCount != 0 ||
					m.Annotations[annotation.Replays] != int64(1) || m.Annotations[annotation.ReplayedBy] != "ada" || m.Annotations[annotation.RoutingKey] != work ||
					m.ApplicationProperties["shop"] != "s1") {
					t.Logf("%v %+v", m.Annotations, death)
					old++
				}
				return failing(d)
			})), client.ConsumerConfig{Concurrency: 1})
			suite.Poll(t, "they are dead again", func() bool { return suite.Ready(t, conn, dead) == n })
			assert.Zero(t, old)
			assert.Len(t, seen, 91)
			assert.Equal(t, 2, seen["order-0"], "it is retried again")
			deadLetter, err := d.Show(t.Context(), desk.ShowConfig{Queue: dead, ID: "order-10"})
			require.NoError(t, err)
			assert.Equal(t, 1, deadLetter.Replays)
			assert.Equal(t, retry.ReasonPermanent, deadLetter.Reason)
			assert.Equal(t, "refused", deadLetter.Error)
			kinds := []string{}
			for _, h := range deadLetter.History {
				kinds = append(kinds, h.Kind)
			}
			assert.Contains(t, kinds, "replayed")
			assert.Contains(t, kinds, "dead-lettered earlier")
			again, err := d.Replay(t.Context(), cfg)
			require.NoError(t, err)
			assert.EqualValues(t, 91, again.Again)
			assert.Zero(t, again.Replayed)

			// What somebody else rejects there is parked, replayed before or not.
			p := s.Peer(t)
			rejected := p.Receiver(dead, n)
			for range n {
				m := p.Next(rejected)
				require.NoError(t, rejected.RejectMessage(t.Context(), m, nil))
			}
			suite.Poll(t, "all are parked", func() bool { return suite.Ready(t, conn, policy.Names.ParkingQueue()) == n })
		}
	})
}

// A dead-letter queue without a way back, a work queue that can be full, an edit, a
// delivery-count and a wish for copies: each has a message copied.
func TestReplayCopiesWhatCannotBeMoved(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{ReplayByMove: true}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"}, declare.QuorumQueue{Name: "short", MaxLength: 100}, declare.QuorumQueue{Name: "limited"})
		s.HTTP(t, "PUT", "/policies/"+s.VHost+"/length", map[string]any{"pattern": "^limited$", "apply-to": "queues", "definition": map[string]any{"max-length": 100}}, nil)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{unlimited("elsewhere"), unlimited("aside")}})
		d := suite.NewDesk(t, s, conn)
		dead := func(edits ...func(m *client.Message)) func(int, *client.Message) {
			return func(_ int, m *client.Message) {
				m.Annotations = map[any]any{annotation.Queue: "orders", annotation.Older.First: int64(5)}
				for _, e := range edits {
					e(m)
				}
			}
		}
		for name, c := range map[string]struct {
			queue string
			edit  func(m *client.Message)
			cfg   desk.ReplayConfig
			moved bool
		}{
			"unchanged":      {moved: true},
			"a time to live": {edit: func(m *client.Message) { m.Header.TTL = time.Hour }, moved: true}, // which the broker removes
			"a count":        {edit: func(m *client.Message) { m.ApplicationProperties = map[string]any{retry.CountProperty: int64(2)} }},
			"a short queue":  {queue: "short.dead", edit: func(m *client.Message) { m.Annotations[annotation.Queue] = "short" }},
			"an edit":        {cfg: desk.ReplayConfig{Edit: func(*desk.Edit) error { return nil }}},
			"copies wanted":  {cfg: desk.ReplayConfig{Copy: true}},
			"another queue":  {cfg: desk.ReplayConfig{Address: address.Queue("elsewhere")}},
			"no way back":    {queue: "aside", cfg: desk.ReplayConfig{Address: address.Queue("orders")}},
		} {
			queue := c.queue
			if queue == "" {
				queue = "orders.dead"
			}
			if c.edit == nil {
				c.edit = func(*client.Message) {}
			}
			suite.Load(t, conn, queue, 1, dead(c.edit))
			c.cfg.Queue, c.cfg.All = queue, true
			r, err := d.Replay(t.Context(), c.cfg)
			require.NoError(t, err, name)
			assert.EqualValues(t, 1, r.Replayed, "%s: %+v", name, r)
			assert.Equal(t, c.moved, r.Moved == 1, name)
		}
		suite.Poll(t, "all are there", func() bool {
			return suite.Ready(t, conn, "orders") == 6 && suite.Ready(t, conn, "short") == 1 && suite.Ready(t, conn, "elsewhere") == 1
		})

		p := s.Peer(t)
		for _, m := range p.Take("orders", 6) {
			assert.Zero(t, m.Header.TTL)
		}
		suite.Load(t, conn, "orders.dead", 1, dead())
		p.Next(p.Receiver("orders.dead", 1))
		require.NoError(t, p.Conn.Close())
		suite.Poll(t, "it is back", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
		r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, 1, r.Replayed)
		assert.Zero(t, r.Moved, "it was delivered before")
		if !suite.InMemory(s) { // no policies there
			suite.Load(t, conn, "limited.dead", 1, dead(func(m *client.Message) { m.Annotations[annotation.Queue] = "limited" }))
			suite.Poll(t, "the policy applies", func() bool {
				dry, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "limited.dead", All: true, DryRun: true})
				require.NoError(t, err)
				return dry.Matched == 1 && dry.Moved == 0
			})
		}
	})
}

// How long it takes to replay by moves and by copies, until all are back.
func TestReplaySpeed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n := suite.Sized(2000, 50_000)
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, retry.Policy{ReplayByMove: true}, declare.QuorumQueue{Name: "orders"})
		d := suite.NewDesk(t, s, conn)
		for _, way := range []string{"copied", "moved"} {
			suite.Load(t, conn, "orders.dead", n, func(i int, m *client.Message) {
				m.Annotations = map[any]any{annotation.Queue: "orders", client.AnnotationError: "refused"}
			})
			began := time.Now()
			r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, Copy: way == "copied"})
			require.NoError(t, err)
			returned := time.Since(began)
			assert.EqualValues(t, n, r.Replayed)
			assert.Equal(t, way == "moved", r.Moved == uint64(n))
			for suite.Ready(t, conn, "orders") != n {
				require.Less(t, time.Since(began), 20*suite.Patience, "all are back")
				time.Sleep(20 * time.Millisecond)
			}
			took := time.Since(began)
			inOrder(t, upTo(n), bodies(s.Peer(t).Take("orders", n)))
			suite.Report(t, s, "%d messages %s: replay returned after %v, all are back after %v (%.0f a second)", n, way, returned.Round(time.Millisecond), took.Round(time.Millisecond), float64(n)/took.Seconds())
		}
	})
}
