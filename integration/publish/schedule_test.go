package publish_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/schedule"
)

// What schedule relies on, and what keeps it from simpler ways. The highest level of the
// ladder holds messages for 310 days, which is over 2³² ms: no timer fires early for that.
// On 4.0 messages of a higher priority would block the others in it for as long. A delivery time that
// is published has no effect in any version.
func TestWhatTheLadderOfSchedulesReliesOn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		const long, short = 100 * time.Millisecond << 28, 8 * time.Second
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "year", MessageTTL: long, DeadLetter: declare.ToQueue("done")},
			declare.QuorumQueue{Name: "second", MessageTTL: short, DeadLetter: declare.ToQueue("done")},
			suite.Quorum("done", declare.Drop()),
			suite.Quorum("at once", declare.Drop()),
		}})
		p := s.Peer(t)
		body := func(text string, priority uint8) *amqp.Message {
			m := amqp.NewMessage([]byte(text))
			m.Header = &amqp.MessageHeader{Durable: true, Priority: priority}
			return m
		}
		p.Put("year", body("a", 4))
		p.Put("year", body("b", 9))

		later := body("published", 4)
		later.Annotations = amqp.Annotations{"x-opt-delivery-time": time.Now().Add(time.Hour).UnixMilli()}
		p.Put("at once", later)
		if s.HoldsPublished() {
			p.Put("at once", body("behind it", 4))
			assert.Equal(t, "behind it", string(p.Take("at once", 1)[0].GetData()), "the other one's time is to come")
		} else {
			assert.Equal(t, "published", string(p.Take("at once", 1)[0].GetData()), "its time is ignored")
		}

		done := p.Receiver("done", 2) // it waits, so each message comes when its time is over
		began := time.Now()
		p.Put("second", body("low", 4))
		time.Sleep(short / 2) // only so that the other comes later; nothing is waited for
		p.Put("second", body("high", 9))
		got := []*amqp.Message{p.Next(done), p.Next(done)}
		took := time.Since(began)
		order := []string{"high", "low"} // the queue looks at its head alone
		if s.Newer() {
			order = []string{"low", "high"} // and 4.3 at that of each priority
		}
		assert.Equal(t, order, []string{string(got[0].GetData()), string(got[1].GetData())})
		assert.GreaterOrEqual(t, took, short+short/2)
		assert.Equal(t, 2, suite.Ready(t, conn, "year"), "it holds them still")
	})
}

// dueNotes notes when messages come.
type dueNotes struct {
	mu   sync.Mutex
	came []noted
}

type noted struct {
	queue, id string
	at        time.Time
	m         *client.Message
}

func (a *dueNotes) Handle(_ context.Context, d *client.Delivery) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	id, _ := d.Message().Properties.MessageID.(string)
	a.came = append(a.came, noted{d.Queue(), id, time.Now(), d.Message()})
	return nil
}

func (a *dueNotes) all() []noted {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.came)
}

// Messages for a queue that is bound, for one that isn't, and for an exchange, with all
// that they have, come at their time or a little later. What has no target any more is in
// the queue that says so.
func TestScheduledMessagesComeAtTheirTime(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		ladder, err := schedule.Topology(schedule.Names{}, "bound", "gone")
		require.NoError(t, err)
		own := declare.Topology{
			Exchanges: []declare.Exchange{{Name: "events", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{suite.Quorum("bound", declare.Drop()), suite.Quorum("gone", declare.Drop()), suite.Quorum("unbound", declare.Drop()), suite.Quorum("topics", declare.Drop())},
			Bindings:  []declare.Binding{{Source: "events", Queue: "topics", Key: "order.#"}},
		}
		both, err := declare.Merge(own, ladder)
		require.NoError(t, err)
		suite.Apply(t, conn, both)
		p, err := schedule.NewPublisher[string](t.Context(), conn, address.Address{}, schedule.PublisherConfig{})
		require.NoError(t, err)
		to := func(a address.Address) func(*client.Message) { return client.PublishTo(a) }
		due := map[string]time.Time{}
		put := func(id string, when schedule.When, a address.Address, edit ...func(*client.Message)) {
			t.Helper()
			sent, err := p.Publish(t.Context(), when, id, append(edit, to(a), func(m *client.Message) { m.Properties.MessageID = id })...)
			require.NoError(t, err)
			assert.Equal(t, id, sent.ID)
			due[id] = sent.Due
		}
		_, err = declare.Delete(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{suite.Quorum("gone", declare.Drop())}})
		require.NoError(t, err)
		put("gone", schedule.After(600*time.Millisecond), address.Queue("gone"))
		put("nowhere", schedule.After(0), address.Exchange("events", "invoice.paid"))
		put("no exchange", schedule.After(0), address.Exchange("never", ""))
		put("past", schedule.At(time.Now().Add(-time.Hour)), address.Queue("bound"))
		put("bound", schedule.After(700*time.Millisecond), address.Queue("bound"))
		put("exact", schedule.At(time.Now().Add(time.Second)), address.Queue("bound"))
		put("unbound", schedule.After(900*time.Millisecond), address.Queue("unbound"))
		put("topic", schedule.After(800*time.Millisecond), address.Exchange("events", "order.paid"))
		put("whole", schedule.After(500*time.Millisecond), address.Queue("bound"), func(m *client.Message) {
			m.Header.TTL, m.Header.Priority = 30*time.Second, 7
			subject := "a subject"
			m.Properties.Subject = &subject
			m.ApplicationProperties = map[string]any{"n": int64(1)}
			m.Annotations = amqp.Annotations{"x-mine": "kept"}
		})

		var a dueNotes
		for _, queue := range []string{"bound", "unbound", "topics", (schedule.Names{}).UndeliverableQueue()} {
			suite.Consume(t, conn, queue, &a, client.ConsumerConfig{})
		}
		suite.Dispatch(t, conn, schedule.DispatchConfig{})
		t.Cleanup(func() {
			if t.Failed() {
				for _, c := range a.all() {
					t.Logf("%s came to %s", c.id, c.queue)
				}
				s.LogWhereMessagesAre(t)
			}
		})
		suite.Poll(t, "all messages have come", func() bool { return len(a.all()) >= len(due) })
		late := map[string]time.Duration{}
		queues := map[string]string{}
		for _, c := range a.all() {
			late[c.id], queues[c.id] = c.at.Sub(due[c.id]), c.queue
			assert.GreaterOrEqual(t, late[c.id], time.Duration(0), "%s is early", c.id)
			switch c.id {
			case "gone", "nowhere", "no exchange":
				assert.Equal(t, string(client.ReasonUndeliverable), c.m.Annotations[client.AnnotationReason])
				assert.NotEmpty(t, c.m.Annotations[client.AnnotationError])
			case "whole":
				assert.EqualValues(t, 7, c.m.Header.Priority)
				assert.Positive(t, c.m.Header.TTL)
				assert.Equal(t, "a subject", *c.m.Properties.Subject)
				assert.Equal(t, map[string]any{"n": int64(1)}, c.m.ApplicationProperties)
				assert.Equal(t, "kept", c.m.Annotations["x-mine"])
				assert.Equal(t, "/queues/bound", c.m.Annotations[annotation.To])
			}
		}
		lost := (schedule.Names{}).UndeliverableQueue()
		want := map[string]string{
			"gone": lost, "nowhere": lost, "no exchange": lost, "past": "bound", "bound": "bound", "exact": "bound", "unbound": "unbound", "topic": "topics", "whole": "bound",
		}
		assert.Equal(t, want, queues)
		fmt.Printf("REPORT %s: late by %v (bound), %v (exact), %v (topic), %v (whole)\n", t.Name(), late["bound"], late["exact"], late["topic"], late["whole"])
	})
}

// A message in the ladder names its target. Dispatch delivers it only where Allow allows,
// and never into the ladder itself, where it would come back without end.
func TestDispatchDeliversToAllowedTargetsOnly(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		names := schedule.Names{}
		ladder, err := schedule.Topology(names)
		require.NoError(t, err)
		both, err := declare.Merge(ladder, declare.Topology{Queues: []declare.Queue{suite.Quorum("reminders", declare.Drop()), suite.Quorum("payments", declare.Drop())}})
		require.NoError(t, err)
		suite.Apply(t, conn, both)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- schedule.Dispatch(ctx, conn, schedule.DispatchConfig{Allow: func(to address.Address) bool { return to != address.Queue("payments") }})
		}()
		p := s.Peer(t)
		forbidden := []string{
			"/queues/payments", "/queues/schedule_dispatch", "/exchanges/schedule_dispatch", "/exchanges/schedule_due/x", "/queues/schedule_28",
			"/exchanges/schedule_0/0", "/queues/schedule_undeliverable",
		}
		for _, to := range append(forbidden, "/queues/reminders") {
			m := amqp.NewMessage([]byte(to))
			m.Annotations = amqp.Annotations{annotation.To: to}
			p.Put("schedule_dispatch", m)
		}
		got := map[string]bool{}
		for _, m := range p.Take("schedule_undeliverable", len(forbidden)) {
			got[string(m.GetData())] = true
			assert.Equal(t, string(client.ReasonUndeliverable), m.Annotations[client.AnnotationReason])
			assert.Contains(t, m.Annotations[client.AnnotationError], "the address")
		}
		for _, to := range forbidden {
			assert.True(t, got[to], to)
		}
		assert.Equal(t, "/queues/reminders", string(p.Take("reminders", 1)[0].GetData()))
		suite.AssertEmpty(t, s, "payments")
		cancel()
		require.NoError(t, suite.Await(t, ended, "Dispatch ends"))

		pub, err := schedule.NewPublisher[string](suite.Within(t), conn, address.Address{}, schedule.PublisherConfig{})
		require.NoError(t, err)
		for _, to := range []address.Address{address.Queue("schedule_dispatch"), address.Exchange("schedule_3", "x")} {
			_, err = pub.Publish(suite.Within(t), schedule.After(time.Second), "x", client.PublishTo(to))
			require.ErrorAs(t, err, new(*argument.Error))
		}
	})
}
