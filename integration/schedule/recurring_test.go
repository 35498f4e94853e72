package schedule_test

import (
	"context"
	"slices"
	"strings"
	"sync"
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
	"github.com/hopback/hopback/schedule"
)

// What the token of a group relies on. A queue for one message takes another one while a consumer holds the first, so
// max-length doesn't make a token unique. A consumer that holds a message is counted, which
// distinguishes its token from one that is gone. What a settlement writes into a message stays, though it is long.
func TestAQueueForOneMessageTakesAnother(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		queue := declare.QuorumQueue{Name: "one", MaxLength: 1, Overflow: declare.OverflowRejectPublish, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}
		suite.Apply(t, conn, suite.QueueOf(queue))
		p := suite.PublisherOf(t, conn, address.Queue("one"))
		suite.Publish(t, p, "first")
		peer := s.Peer(t)
		r := peer.Receiver("one", 1)
		first := peer.Next(r)
		info, err := declare.Inspect(suite.Within(t), conn.Management(), "one")
		require.NoError(t, err)
		assert.Equal(t, [2]uint64{0, 1}, [2]uint64{info.Messages, info.Consumers})
		suite.Publish(t, p, "second")
		long := strings.Repeat("x", 16<<10)
		require.NoError(t, r.ModifyMessage(suite.Within(t), first, &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{annotation.Recurring: long}}))
		require.NoError(t, r.Close(suite.Within(t)))
		suite.Poll(t, "both are there", func() bool { return suite.Ready(t, conn, "one") == 2 })
		got := map[string]bool{}
		for _, m := range peer.Take("one", 2) {
			got[string(m.GetData())] = true
			if string(m.GetData()) == `"first"` {
				assert.Equal(t, long, m.Annotations[annotation.Recurring])
			}
		}
		assert.Len(t, got, 2)
	})
}

// seen collects message-ids.
type seen struct {
	mu  sync.Mutex
	ids map[string]int
}

func (s *seen) Handle(_ context.Context, d *client.Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ids == nil {
		s.ids = map[string]int{}
	}
	id, _ := d.Message().Properties.MessageID.(string)
	s.ids[id]++
	return nil
}

// times are those of a message, in order.
func (s *seen) times(name string) (all []time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.ids {
		if of, at, ok := schedule.ParseMessageID(id); ok && of == name {
			all = append(all, at)
		}
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

// run runs a worker until stop is called.
func run(t *testing.T, conn *client.Conn, cfg schedule.RunConfig) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- schedule.Group{Conn: conn, Name: "g"}.Run(ctx, cfg) }()
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

func each(name string, d time.Duration) schedule.Recurring {
	return schedule.Recurring{Name: name, Times: schedule.Every(d), To: address.Queue("work"), Missed: schedule.MissedAll}
}

// Each second comes once, without a gap, while workers start and stop, and somebody pauses, resumes, purges, deletes, and
// puts other messages into the queue.
func TestRecurringMessagesOnABroker(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology, err := schedule.GroupTopology(schedule.Names{}, "g")
		require.NoError(t, err)
		suite.Apply(t, conn, topology)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		got := &seen{}
		suite.Consume(t, conn, "work", got, client.ConsumerConfig{})
		cfg := schedule.RunConfig{Recurring: []schedule.Recurring{each("second", time.Second), each("hold", time.Second)}}
		further := func(name string, n int) {
			t.Helper()
			had := len(got.times(name))
			suite.Poll(t, name, func() bool { return len(got.times(name)) >= had+n })
		}
		g := schedule.Group{Conn: conn, Name: "g"}
		ctx := suite.Within(t)
		other, _ := s.Connect(t)
		stop := run(t, conn, cfg)
		further("second", 2)
		stopOther := run(t, other, cfg)
		further("second", 2)
		stop()
		further("second", 2)

		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"hold"}, Why: "a test"}))
		l, err := g.List(ctx, schedule.ListConfig{})
		require.NoError(t, err)
		require.NotNil(t, l.Recurring[0].Paused)
		further("second", 2)
		before := got.times("hold")
		further("second", 3)
		assert.Equal(t, before, got.times("hold"))
		id, err := g.RunNow(ctx, "hold")
		require.NoError(t, err)
		suite.Poll(t, "the message that was asked for", func() bool { got.mu.Lock(); defer got.mu.Unlock(); return got.ids[id] == 1 })

		token := schedule.Names{}.TokenQueue("g")
		suite.Publish(t, suite.PublisherOf(t, other, address.Queue(token)), "not a token")
		forged := amqp.NewMessage([]byte("x"))
		forged.Annotations = amqp.Annotations{annotation.Recurring: int64(7)}
		s.Peer(t).Put(token, forged)
		further("second", 2)
		assert.Equal(t, 2, suite.Ready(t, conn, schedule.Names{}.UndeliverableQueue()))
		_, err = declare.Purge(ctx, conn.Management(), token)
		require.NoError(t, err)
		further("second", 3)
		_, err = declare.DeleteQueue(ctx, conn.Management(), token)
		require.NoError(t, err)
		suite.Apply(t, conn, topology)
		further("second", 3)
		assert.Len(t, got.times("hold"), len(before)+1, "the pause was kept")
		require.NoError(t, g.Resume(ctx, "hold"))
		further("hold", 2)
		stopOther()

		// A worker of another version, which starts last, publishes; the one before doesn't.
		run(t, conn, cfg)
		further("second", 1)
		run(t, other, schedule.RunConfig{Recurring: []schedule.Recurring{each("second", time.Second), each("added", time.Second)}})
		further("added", 3)
		l, err = g.List(ctx, schedule.ListConfig{})
		require.NoError(t, err)
		assert.Equal(t, "added", l.Recurring[0].Name)
		times := got.times("second")
		for n := 1; n < len(times); n++ {
			assert.Equal(t, time.Second, times[n].Sub(times[n-1]), times[n])
		}
	})
}

// Two of a group's workers are killed a few times: no time is missing.
func TestWorkersOfAGroupLoseTheirConnections(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology, err := schedule.GroupTopology(schedule.Names{}, "g")
		require.NoError(t, err)
		suite.Apply(t, conn, topology)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		got := &seen{}
		suite.Consume(t, conn, "work", got, client.ConsumerConfig{})
		cfg := schedule.RunConfig{Recurring: []schedule.Recurring{each("second", time.Second)}}
		for range 4 {
			ctx, cancel := context.WithCancel(context.Background())
			dying, err := client.Connect(ctx, s.AMQPURL(), client.Config{})
			require.NoError(t, err)
			done := make(chan error, 1)
			go func() { done <- schedule.Group{Conn: dying, Name: "g"}.Run(ctx, cfg) }()
			had := len(got.times("second"))
			suite.Poll(t, "a message", func() bool { return len(got.times("second")) >= had+2 })
			closed, closing := context.WithCancel(context.Background())
			closing()
			_ = dying.Close(closed) // at once: nothing is returned in order
			cancel()
			<-done
		}
		run(t, conn, cfg)
		had := len(got.times("second"))
		suite.Poll(t, "the last worker's", func() bool { return len(got.times("second")) >= had+2 })
		times := got.times("second")
		for n := 1; n < len(times); n++ {
			assert.Equal(t, time.Second, times[n].Sub(times[n-1]), times[n])
		}
	})
}

// Two teams with groups of the same name, apart from their prefixes, each with two workers in each place; the one that
// asks for a message is another user.
func TestRecurringInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(_ *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		names := schedule.Names{}
		if m.Second {
			names.Prefix = "second_"
		}
		return func(t *testing.T, p *suite.Place) {
			topology, err := schedule.GroupTopology(names, p.Queue)
			require.NoError(t, err)
			suite.Apply(t, p.Owner, topology)
			suite.Apply(t, p.Owner, suite.QueueOf(suite.Quorum(p.Queue, declare.Drop())))
			got := &seen{}
			worker := p.As(t, "^$", `^amq\.default$`, ".*")
			suite.Consume(t, worker, p.Queue, got, client.ConsumerConfig{})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 2)
			message := each("second", time.Second)
			message.To = address.Queue(p.Queue)
			for range 2 {
				go func() {
					ended <- schedule.Group{Conn: worker, Name: p.Queue, Names: names}.Run(ctx, schedule.RunConfig{Recurring: []schedule.Recurring{message}})
				}()
			}
			suite.Poll(t, "three messages", func() bool { return len(got.times("second")) >= 3 })
			id, err := schedule.Group{Conn: p.As(t, "^$", `^amq\.default$`, ".*"), Name: p.Queue, Names: names}.RunNow(suite.Within(t), "second")
			require.NoError(t, err)
			suite.Poll(t, "the message that was asked for", func() bool { got.mu.Lock(); defer got.mu.Unlock(); return got.ids[id] == 1 })
			cancel()
			for range 2 {
				require.NoError(t, suite.Await(t, ended, "Run ends"))
			}
			suite.AssertEmpty(t, p.Site, names.UndeliverableQueue())
		}
	})
}
