package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// A queue that dead-letters to a headers exchange moves a message that is settled as
// undeliverable-here by the annotations of the settlement, at least once. What was in them
// can be overwritten. The number of failed deliveries goes along: 4.3 counts it toward the
// next queue's limit, 4.0 doesn't. That of looks doesn't go along.
func TestUndeliverableHereMovesByItsAnnotationsAndKeepsTheDeliveryCount(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		dead := quorum("dead", declare.DeadLetterTarget{Exchange: "replay"})
		work := quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = 1
		apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "replay", Type: declare.Headers, AlternateExchange: "parking"}, {Name: "parking", Type: declare.Fanout}},
			Queues:    []declare.Queue{dead, work, quorum("parking", declare.Drop())},
			Bindings: []declare.Binding{
				{Source: "parking", Queue: "parking"},
				{Source: "replay", Queue: "work", Match: declare.AllWithX, Headers: map[string]any{"x-opt-r": "yes", "x-last-death-reason": "rejected"}},
			},
		})
		p := s.peer(t)
		at := func(queue string) (*amqp.Message, func(*amqp.ModifyMessageOptions)) {
			r := p.receiver(queue, 1)
			m := p.next(r)
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
		p.put("dead", m)
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
		if s.newer() {
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
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 400
		conn, _ := s.connect(t)
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.newer() {
				continue
			}
			prefix := string(strategy) + "."
			policy := retry.Policy{MaxRetries: 1, GiveUpAfter: time.Hour, Backoff: retry.Exponential(20*time.Millisecond, 1), Strategy: strategy, ReplayByMove: true, Names: retry.Names{Prefix: prefix}}
			work := prefix + "orders"
			dead := policy.Names.DeadLetterQueue(work)
			applyRetry(t, conn, policy, declare.QuorumQueue{Name: work})
			load(t, conn, work, n, func(i int, m *client.Message) {
				m.Properties.MessageID = fmt.Sprintf("order-%d", i)
				m.ApplicationProperties = map[string]any{"shop": "s1"}
			})
			failing := func(d *client.Delivery) error {
				if string(d.Message().GetData()) == "0" {
					return errors.New("down")
				}
				return retry.Permanent(&gatewayError{"refused"})
			}
			stop := consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { return failing(d) })), client.ConsumerConfig{})
			poll(t, "all are dead", func() bool { return ready(t, conn, dead) == n })
			require.NoError(t, stop())
			d, err := desk.New(conn, desk.Config{HTTP: s.api(t), Names: policy.Names})
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
			poll(t, "they are back", func() bool { return ready(t, conn, work) == 91 })
			after, err := d.List(t.Context(), desk.ListConfig{Queue: dead, Limit: n, Count: true})
			require.NoError(t, err)
			var left []string
			for _, m := range after.Messages {
				left = append(left, m.MessageID)
			}
			assert.Equal(t, rest, left)

			// Each is as new, and dies again with the story of both lives.
			old, seen := 0, map[string]int{}
			consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				m := d.Message()
				id, _ := m.Properties.MessageID.(string)
				death := retry.DeathOf(m)
				if seen[id]++; seen[id] == 1 && (retry.Count(m) != 0 || death.Reason != "" || !death.FirstFailure.IsZero() || death.Error != "" || m.Header.DeliveryCount != 0 ||
					m.Annotations[annotation.Replays] != int64(1) || m.Annotations[annotation.ReplayedBy] != "ada" || m.Annotations[annotation.RoutingKey] != work ||
					m.ApplicationProperties["shop"] != "s1") {
					t.Logf("%v %+v", m.Annotations, death)
					old++
				}
				return failing(d)
			})), client.ConsumerConfig{Concurrency: 1})
			poll(t, "they are dead again", func() bool { return ready(t, conn, dead) == n })
			assert.Zero(t, old)
			assert.Len(t, seen, 91)
			assert.Equal(t, 2, seen["order-0"], "it is retried again")
			letter, err := d.Show(t.Context(), desk.ShowConfig{Queue: dead, ID: "order-10"})
			require.NoError(t, err)
			assert.Equal(t, 1, letter.Replays)
			assert.Equal(t, retry.ReasonPermanent, letter.Reason)
			assert.Equal(t, "refused", letter.Error)
			kinds := []string{}
			for _, h := range letter.Hops {
				kinds = append(kinds, h.Kind)
			}
			assert.Contains(t, kinds, "replayed")
			assert.Contains(t, kinds, "died")
			again, err := d.Replay(t.Context(), cfg)
			require.NoError(t, err)
			assert.EqualValues(t, 91, again.Again)
			assert.Zero(t, again.Replayed)

			// What somebody else rejects there is parked, replayed before or not.
			p := s.peer(t)
			rejected := p.receiver(dead, n)
			for range n {
				m := p.next(rejected)
				require.NoError(t, rejected.RejectMessage(t.Context(), m, nil))
			}
			poll(t, "all are parked", func() bool { return ready(t, conn, policy.Names.ParkingQueue()) == n })
		}
	})
}

// A dead-letter queue without a way back, a work queue that can be full, an edit, a
// delivery-count and a wish for copies: each has a message copied.
func TestReplayCopiesWhatCannotBeMoved(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		policy := retry.Policy{ReplayByMove: true}
		applyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"}, declare.QuorumQueue{Name: "short", MaxLength: 100}, declare.QuorumQueue{Name: "limited"})
		s.http(t, "PUT", "/policies/"+s.vhost+"/length", map[string]any{"pattern": "^limited$", "apply-to": "queues", "definition": map[string]any{"max-length": 100}}, nil)
		apply(t, conn, declare.Topology{Queues: []declare.Queue{unlimited("elsewhere"), unlimited("aside")}})
		d := newDesk(t, s, conn)
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
			"as it is":       {moved: true},
			"a time to live": {edit: func(m *client.Message) { m.Header.TTL = time.Hour }},
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
			load(t, conn, queue, 1, dead(c.edit))
			c.cfg.Queue, c.cfg.All = queue, true
			r, err := d.Replay(t.Context(), c.cfg)
			require.NoError(t, err, name)
			assert.EqualValues(t, 1, r.Replayed, "%s: %+v", name, r)
			assert.Equal(t, c.moved, r.Moved == 1, name)
		}
		poll(t, "all are there", func() bool {
			return ready(t, conn, "orders") == 6 && ready(t, conn, "short") == 1 && ready(t, conn, "elsewhere") == 1
		})

		load(t, conn, "orders.dead", 1, dead())
		p := s.peer(t)
		p.next(p.receiver("orders.dead", 1))
		require.NoError(t, p.conn.Close())
		poll(t, "it is back", func() bool { return ready(t, conn, "orders.dead") == 1 })
		r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, 1, r.Replayed)
		assert.Zero(t, r.Moved, "it was delivered before")
		if !slices.ContainsFunc(memory, func(b *memoryBroker) bool { return b.Broker == s.Broker }) { // no policies there
			load(t, conn, "limited.dead", 1, dead(func(m *client.Message) { m.Annotations[annotation.Queue] = "limited" }))
			poll(t, "the policy applies", func() bool {
				dry, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "limited.dead", All: true, DryRun: true})
				require.NoError(t, err)
				return dry.Matched == 1 && dry.Moved == 0
			})
		}
	})
}

// How long it takes to replay by moves and by copies, until all are back.
func TestReplaySpeed(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		n := sized(2000, 50_000)
		conn, _ := s.connect(t)
		applyRetry(t, conn, retry.Policy{ReplayByMove: true}, declare.QuorumQueue{Name: "orders"})
		d := newDesk(t, s, conn)
		for _, way := range []string{"copied", "moved"} {
			load(t, conn, "orders.dead", n, func(i int, m *client.Message) {
				m.Annotations = map[any]any{annotation.Queue: "orders", client.AnnotationError: "refused"}
			})
			began := time.Now()
			r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, Copy: way == "copied"})
			require.NoError(t, err)
			returned := time.Since(began)
			assert.EqualValues(t, n, r.Replayed)
			assert.Equal(t, way == "moved", r.Moved == uint64(n))
			for ready(t, conn, "orders") != n {
				require.Less(t, time.Since(began), 20*patience, "all are back")
				time.Sleep(20 * time.Millisecond)
			}
			took := time.Since(began)
			inOrder(t, upTo(n), bodies(s.peer(t).take("orders", n)))
			report(t, s, "%d messages %s: replay returned after %v, all are back after %v (%.0f a second)", n, way, returned.Round(time.Millisecond), took.Round(time.Millisecond), float64(n)/took.Seconds())
		}
	})
}
