package desk_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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

// lanes are the reasons for which the orders of a morgue are dead, one after the other.
var lanes = []client.Reason{retry.ReasonPermanent, "bad-address", "fraud", client.ReasonPanicked}

// gatewayError is an error with a type.
type gatewayError struct{ text string }

func (e *gatewayError) Error() string { return e.text }

// deadLetterQueue declares the work queue "orders" and has n orders die in it, each of the lane of
// its number. Their message-ids are "order-0" and so on.
func deadLetterQueue(t *testing.T, conn *client.Conn, policy retry.Policy, n int) {
	t.Helper()
	suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
	suite.Load(t, conn, "orders", n, func(i int, m *client.Message) {
		m.Properties.MessageID = fmt.Sprintf("order-%d", i)
		m.ApplicationProperties = map[string]any{"shop": fmt.Sprintf("s%d", i%10)}
	})
	stop := suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		i, _ := strconv.Atoi(string(d.Message().GetData()))
		switch lane := lanes[i%len(lanes)]; lane {
		case retry.ReasonPermanent:
			return retry.Permanent(&gatewayError{fmt.Sprintf("gateway 10.0.0.%d:443 refused order %d", i%256, i)})
		case client.ReasonPanicked:
			return client.DeadLetter{Reason: lane, Err: errors.New("index out of range")}
		default:
			return client.DeadLetter{Reason: lane, Err: fmt.Errorf("order %d: %s", i, lane)}
		}
	})), client.ConsumerConfig{Concurrency: 20, Prefetch: 500})
	began := time.Now()
	for suite.Ready(t, conn, "orders.dead") != n {
		require.Less(t, time.Since(began), 10*suite.Patience, "all orders are dead")
		time.Sleep(50 * time.Millisecond)
	}
	require.NoError(t, stop())
}

// handled counts what a consumer has handled, by the body.
type handled struct {
	mu   sync.Mutex
	seen map[string]int
	last map[string]*client.Message
}

func newHandled() *handled {
	return &handled{seen: map[string]int{}, last: map[string]*client.Message{}}
}

func (h *handled) add(m *client.Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen[string(m.GetData())]++
	h.last[string(m.GetData())] = m
}

func (h *handled) counts() (distinct, twice int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range h.seen {
		twice += n - 1
	}
	return len(h.seen), twice
}

func (h *handled) Handle(_ context.Context, d *client.Delivery) error {
	h.add(d.Message())
	return nil
}

// A group is found by its survey, shown, and replayed. All others stay where they are. The
// replayed ones start over, GiveUpAfter included, and say that they were replayed.
func TestReplayOfOneGroup(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 400
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 3, GiveUpAfter: time.Hour, Backoff: retry.Exponential(100*time.Millisecond, 2)}
		deadLetterQueue(t, conn, policy, n)
		d := suite.NewDesk(t, s, conn)

		survey, err := d.Survey(t.Context(), desk.SurveyConfig{})
		require.NoError(t, err)
		require.Len(t, survey.Groups, 4)
		var group desk.Group
		for _, g := range survey.Groups {
			assert.EqualValues(t, n/4, g.Count)
			assert.Equal(t, "orders", g.Queue)
			assert.Equal(t, "orders.dead", g.In)
			if g.Reason == retry.ReasonPermanent {
				group = g
			}
		}
		assert.Equal(t, "gateway # refused order #", group.Text)
		assert.Equal(t, "*desk_test.gatewayError", group.ErrorType)
		assert.WithinDuration(t, time.Now(), group.Newest, time.Hour)
		require.NotEmpty(t, survey.Queues)
		assert.Equal(t, "dead-letter", survey.Queues[0].Role)
		assert.EqualValues(t, n, survey.Queues[0].Seen)

		deadLetter, err := d.Show(t.Context(), desk.ShowConfig{Queue: "orders.dead", ID: group.Example})
		require.NoError(t, err)
		assert.Equal(t, group.Example, deadLetter.ID)
		assert.Equal(t, "json", deadLetter.BodyForm)
		assert.NotEmpty(t, deadLetter.History)
		_, err = d.Show(t.Context(), desk.ShowConfig{Queue: "orders.dead", ID: "none"})
		require.ErrorAs(t, err, new(*desk.NoMessageError))

		filter := desk.Filter{Groups: []string{group.ID}}
		dry, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", Filter: filter, DryRun: true})
		require.NoError(t, err)
		assert.EqualValues(t, n/4, dry.Matched)
		assert.EqualValues(t, n, dry.Seen)
		assert.Zero(t, dry.Replayed)
		require.Len(t, dry.Groups, 1)
		assert.EqualValues(t, n/4, dry.Groups[0].Count)
		_, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead"})
		require.ErrorContains(t, err, "selects all")

		h := newHandled()
		suite.Consume(t, conn, "orders", retry.With(policy)(h), client.ConsumerConfig{Concurrency: 4})
		first, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", Filter: filter, ID: "r1", By: "ada", Max: 30})
		require.NoError(t, err)
		assert.EqualValues(t, 30, first.Replayed)
		assert.False(t, first.Complete)
		rest, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", Filter: filter, ID: "r1", By: "ada"})
		require.NoError(t, err)
		assert.EqualValues(t, n/4-30, rest.Replayed)
		assert.True(t, rest.Complete)
		assert.Zero(t, rest.Failed)
		suite.Poll(t, "all are handled", func() bool { got, _ := h.counts(); return got == n/4 })
		_, twice := h.counts()
		assert.Zero(t, twice)
		m := h.last["0"]
		assert.Equal(t, int64(1), m.Annotations[annotation.Replays])
		assert.Equal(t, "r1", m.Annotations[annotation.Replay])
		assert.Equal(t, "ada", m.Annotations[annotation.ReplayedBy])
		assert.Equal(t, "order-0", m.Properties.MessageID)
		assert.Equal(t, "s0", m.ApplicationProperties["shop"])
		assert.Zero(t, retry.Count(m))
		assert.True(t, retry.DeadLetterOf(m).FirstFailure.IsZero())
		assert.Empty(t, retry.DeadLetterOf(m).Reason)

		var want []string
		for i := range n {
			if lanes[i%4] != retry.ReasonPermanent {
				want = append(want, strconv.Itoa(i))
			}
		}
		left := s.Peer(t).Take("orders.dead", n*3/4)
		got := bodies(left)
		assert.ElementsMatch(t, want, got)
	})
}

// A replayed message that fails again is retried as a new one, dies again with the history
// of both lives, and isn't replayed again by the same replay.
func TestReplayThatFailsAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.Newer() {
				continue
			}
			policy := retry.Policy{MaxRetries: 1, GiveUpAfter: time.Hour, Backoff: retry.Exponential(20*time.Millisecond, 1), Strategy: strategy, Names: retry.Names{Prefix: string(strategy) + "."}}
			work := "orders." + string(strategy)
			dead := policy.Names.DeadLetterQueue(work)
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: work})
			suite.Load(t, conn, work, 1)
			var mu sync.Mutex
			calls := 0
			suite.Consume(t, conn, work, retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
				mu.Lock()
				defer mu.Unlock()
				calls++
				return fmt.Errorf("failure number %d", calls)
			})), client.ConsumerConfig{})
			d, err := desk.New(conn, desk.Config{HTTP: s.API(t), Names: policy.Names})
			require.NoError(t, err)
			const rounds = 12
			size := 0
			for round := 1; round <= rounds; round++ {
				suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, dead) == 1 })
				list, err := d.List(t.Context(), desk.ListConfig{Queue: dead})
				require.NoError(t, err)
				require.Len(t, list.Messages, 1)
				m := list.Messages[0]
				assert.Equal(t, retry.ReasonExhausted, m.Reason)
				assert.Equal(t, round-1, m.Replays)
				assert.Equal(t, 1, m.Retries)
				mu.Lock()
				assert.Equal(t, 2*round, calls, "it is retried as a new one is")
				mu.Unlock()
				if round > 9 {
					assert.InDelta(t, size, m.Size, 200, "it doesn't grow")
				}
				size = m.Size
				cfg := desk.ReplayConfig{Queue: dead, All: true, ID: fmt.Sprintf("r%d", round-1)}
				if round > 1 {
					same, err := d.Replay(t.Context(), cfg)
					require.NoError(t, err)
					assert.EqualValues(t, 1, same.Again)
					assert.Zero(t, same.Replayed)
				}
				if round == rounds {
					deadLetter, err := d.Show(t.Context(), desk.ShowConfig{Queue: dead, ID: m.ID})
					require.NoError(t, err)
					replays := 0
					for _, event := range deadLetter.History {
						if event.Kind == "replayed" {
							replays++
						}
					}
					assert.Equal(t, 8, replays, "of the last lives")
					break
				}
				cfg.ID = fmt.Sprintf("r%d", round)
				done, err := d.Replay(t.Context(), cfg)
				require.NoError(t, err)
				require.EqualValues(t, 1, done.Replayed)
				suite.Poll(t, "it fails again", func() bool { mu.Lock(); defer mu.Unlock(); return calls >= 2*round+2 })
			}
		}
	})
}

// A message that fails again each time is replayed a thousand times, by copies and by moves
// in turn. It counts them, and doesn't grow.
func TestAThousandReplaysOfOneMessage(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		rounds := suite.Sized(60, 1000)
		conn, _ := s.Connect(t)
		policy := retry.Policy{ReplayByMove: true, GiveUpAfter: time.Hour}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		suite.Load(t, conn, "orders", 1)
		var calls atomic.Int64
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			return retry.Permanent(fmt.Errorf("gateway 10.0.0.1 refused the order, for the time number %d: %s", calls.Add(1), strings.Repeat("no ", 300)))
		})), client.ConsumerConfig{})
		d := suite.NewDesk(t, s, conn)
		who := strings.Repeat("w", 100)
		var sizes []int
		for round := 1; round <= rounds; round++ {
			suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
			if round%50 == 0 || round < 20 {
				list, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
				require.NoError(t, err)
				require.Len(t, list.Messages, 1)
				require.Equal(t, round-1, list.Messages[0].Replays)
				sizes = append(sizes, list.Messages[0].Size)
			}
			copied := round%2 == 0
			r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, ID: fmt.Sprintf("%0100d", round), By: who, Copy: copied})
			require.NoError(t, err)
			require.EqualValues(t, 1, r.Replayed)
			require.Equal(t, !copied, r.Moved == 1, "round %d", round)
			suite.Poll(t, "it fails again", func() bool { return calls.Load() == int64(round+1) })
		}
		last := sizes[len(sizes)-1]
		assert.InDelta(t, sizes[len(sizes)-2], last, 200, "%v", sizes)
		assert.Less(t, last-sizes[0], 9<<10, "%v", sizes)
		suite.Report(t, s, "%d replays of one message: %d bytes before the first, %d at last; all sizes %v", rounds, sizes[0], last, sizes)
	})
}

// What can't go where it should go stays where it is, with the reason, and blocks no
// other: a queue or an exchange that is gone, and a key that nothing is bound for.
func TestReplayToWhatIsGone(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		dying := func(name string) declare.QuorumQueue {
			return declare.QuorumQueue{Name: name, DeadLetter: declare.DeadLetterTarget{RoutingKey: "dead"}}
		}
		suite.Apply(t, conn, declare.Topology{
			Queues:    []declare.Queue{unlimited("dead"), dying("there"), dying("gone")},
			Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeDirect}, {Name: "left", Type: declare.ExchangeDirect}},
			Bindings: []declare.Binding{
				{Source: "shop", Queue: "there", Key: "bound"}, {Source: "shop", Queue: "gone", Key: "unbound"}, {Source: "left", Queue: "there", Key: "k"},
			},
		})
		origins := []struct{ queue, exchange, key string }{
			{"there", "shop", "bound"}, {"gone", "shop", "unbound"}, {"there", "left", "k"}, {"", "", ""}, {"there", "", "there"},
		}
		p := s.Peer(t)
		for i := range 5 {
			for j, o := range origins {
				to := address.Exchange(o.exchange, o.key)
				m := amqp.NewMessage(fmt.Appendf(nil, "%d.%d", i, j))
				m.Properties = &amqp.MessageProperties{MessageID: "m"} // so it isn't one of AMQP 0-9-1
				switch {
				case o.queue == "":
					p.Put("dead", m)
					continue
				case o.exchange == "":
					to = address.Queue(o.key)
				}
				// A worker without hopback may write that, too.
				m.Annotations = amqp.Annotations{annotation.Exchange: o.exchange, annotation.RoutingKey: o.key}
				require.IsType(t, &amqp.StateAccepted{}, p.Send(to, m))
				r := p.Receiver(o.queue, 1)
				require.NoError(t, r.RejectMessage(t.Context(), p.Next(r), nil))
				require.NoError(t, r.Close(t.Context()))
			}
		}
		suite.Poll(t, "all are dead", func() bool { return suite.Ready(t, conn, "dead") == 25 })
		_, err := declare.Delete(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{dying("gone")}, Exchanges: []declare.Exchange{{Name: "left", Type: declare.ExchangeDirect}}})
		require.NoError(t, err)
		d := suite.NewDesk(t, s, conn)
		dry, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true, DryRun: true})
		require.NoError(t, err)
		assert.EqualValues(t, 25, dry.Matched)
		assert.EqualValues(t, 10, dry.Failed, "a queue that is gone, and one that isn't named: %v", dry.Failures)
		r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true, ToExchange: true})
		require.NoError(t, err)
		assert.EqualValues(t, 10, r.Replayed, "%+v", r)
		assert.EqualValues(t, 15, r.Failed)
		texts := fmt.Sprint(r.Failures)
		assert.Contains(t, texts, "no queue is bound")
		assert.Contains(t, texts, "not-found")
		assert.Contains(t, texts, "doesn't record which queue")
		assert.Equal(t, 15, suite.Ready(t, conn, "dead"))
		r, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, 5, r.Replayed)
		assert.Contains(t, fmt.Sprint(r.Failures), `queue "gone" doesn't exist`)
		r, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true, Address: address.Queue("there")})
		require.NoError(t, err)
		assert.EqualValues(t, 10, r.Replayed)
		suite.Poll(t, "all are there", func() bool { return suite.Ready(t, conn, "there") == 25 })
		_, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "none", All: true})
		require.ErrorIs(t, err, declare.ErrNotFound)
	})
}

// An edited message is replayed with another body and other properties; everything else is
// unchanged. A message that the edit refuses stays.
func TestMendedMessageIsReplayed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, 8)
		d := suite.NewDesk(t, s, conn)
		r, err := d.Replay(t.Context(), desk.ReplayConfig{
			Queue: "orders.dead", Filter: desk.Filter{IDs: []string{"order-5", "order-6"}},
			Edit: func(e *desk.Edit) error {
				b, ok := e.Body()
				if !ok || string(b) == "6" {
					return errors.New("not this one")
				}
				e.SetBody([]byte(`{"edited":` + string(b) + `}`))
				e.SetContentType("application/json")
				e.SetProperty("shop", nil)
				e.SetProperty("edited", true)
				return nil
			},
		})
		require.NoError(t, err)
		assert.EqualValues(t, 1, r.Replayed)
		assert.EqualValues(t, 1, r.Failed)
		require.Len(t, r.Failures, 1)
		assert.Equal(t, "order-6", r.Failures[0].MessageID)
		m := s.Peer(t).Take("orders", 1)[0]
		assert.JSONEq(t, `{"edited":5}`, string(m.GetData()))
		assert.Equal(t, "order-5", m.Properties.MessageID)
		assert.Equal(t, "application/json", *m.Properties.ContentType)
		assert.Equal(t, map[string]any{"edited": true}, m.ApplicationProperties)
		assert.Equal(t, 7, suite.Ready(t, conn, "orders.dead"))
	})
}
