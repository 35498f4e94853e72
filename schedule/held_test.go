package schedule_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/schedule"
)

// arrivals notes when each message of a queue came.
type arrivals struct {
	mu sync.Mutex
	at map[string][]time.Time
	of map[string]*client.Message
}

func (a *arrivals) Handle(_ context.Context, d *client.Delivery) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	id := d.Message().Properties.MessageID.(string)
	a.at[id] = append(a.at[id], time.Now())
	a.of[id] = d.Message()
	return nil
}

func newArrivals() *arrivals {
	return &arrivals{at: map[string][]time.Time{}, of: map[string]*client.Message{}}
}

// newest is a world of RabbitMQ 4.4 without a ladder.
func newest(t *testing.T, queues ...declare.Queue) *world {
	t.Helper()
	w := &world{t: t, idle: 10 * time.Minute, broker: hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0"})}
	w.conn = w.connect()
	w.apply(declare.Topology{Queues: queues})
	return w
}

func quorum(name string) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()}
}

// On RabbitMQ 4.4 the target queue itself holds messages: no ladder, no copies, none early, each
// once.
func TestAQueueOfRabbitMQ44HoldsItsMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newest(t, quorum("orders"))
		p := newPublisher[int](w, address.Queue("orders"))
		got := newArrivals()
		w.consume("orders", got)
		random := rand.New(rand.NewPCG(44, 44))
		due := map[string]time.Time{}
		const messages = 2000
		all := make([]int, messages)
		for i := range all {
			all[i] = i
		}
		whens := map[int]schedule.When{}
		for i := range all {
			whens[i] = schedule.After(time.Duration(random.Int64N(int64(20 * time.Minute))))
		}
		scheduled, err := p.PublishAll(t.Context(), all, func(v int) schedule.When { return whens[v] })
		require.NoError(t, err)
		for _, s := range scheduled {
			due[s.ID] = s.Due
		}
		synctest.Wait()
		assert.Equal(t, messages, w.broker.Queue("orders").Counts().Delayed)
		time.Sleep(21 * time.Minute)
		synctest.Wait()
		require.Len(t, got.at, messages)
		for id, at := range got.at {
			require.Len(t, at, 1, id)
			late := at[0].Sub(due[id])
			require.GreaterOrEqual(t, late, time.Duration(0), id)
			require.LessOrEqual(t, late, 5*time.Millisecond, id)
		}
	})
}

// A delay is a delay, however wrong this host's clock is, and a time is one by the broker's clock.
func TestAHeldMessageGoesByTheBrokersClock(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{-time.Hour, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			w := newest(t, quorum("orders"))
			w.broker.StepClock(step)
			p := newPublisher[string](w, address.Queue("orders"))
			got := newArrivals()
			w.consume("orders", got)
			began := time.Now()
			after, err := p.Publish(t.Context(), schedule.After(10*time.Minute), "x")
			require.NoError(t, err)
			assert.WithinDuration(t, began.Add(10*time.Minute), after.Due, time.Millisecond)
			at, err := p.Publish(t.Context(), schedule.At(began.Add(step+20*time.Minute)), "x")
			require.NoError(t, err)
			time.Sleep(2 * time.Hour)
			synctest.Wait()
			require.Len(t, got.at, 2)
			for id, want := range map[string]time.Duration{after.ID: 10 * time.Minute, at.ID: 20 * time.Minute} {
				late := got.at[id][0].Sub(began) - want
				assert.GreaterOrEqual(t, late, time.Duration(0))
				assert.LessOrEqual(t, late, 10*time.Millisecond)
			}
		})
	}
}

// Ttl and priority are those of the message, and count from its time on.
func TestAHeldMessageKeepsItsTTLAndPriority(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newest(t, quorum("orders"), quorum("other"))
		p := newPublisher[string](w, address.Address{})
		at := func(id string, ttl time.Duration, to string) []func(*client.Message) {
			return []func(*client.Message){client.PublishTo(address.Queue(to)), func(m *client.Message) {
				m.Properties.MessageID = id
				m.Header = &client.Header{Priority: 9, TTL: ttl}
			}}
		}
		_, err := p.Publish(t.Context(), schedule.After(time.Minute), "x", at("in time", 10*time.Second, "orders")...)
		require.NoError(t, err)
		_, err = p.Publish(t.Context(), schedule.After(time.Minute), "x", at("too late", 10*time.Second, "other")...)
		require.NoError(t, err)
		time.Sleep(65 * time.Second)
		got := newArrivals()
		w.consume("orders", got)
		time.Sleep(10 * time.Second)
		w.consume("other", got)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, got.at, 1)
		m := got.of["in time"]
		require.NotNil(t, m)
		assert.Equal(t, uint8(9), m.Header.Priority)
		assert.True(t, m.Header.Durable)
		assert.NotContains(t, m.Annotations, annotation.TTL)
		assert.NotContains(t, m.Annotations, annotation.Priority)
	})
}

// What a queue can't hold goes through the ladder, on 4.4, too.
func TestTheLadderIsForWhatAQueueCantHold(t *testing.T) {
	t.Parallel()
	ttl := quorum("ttl")
	ttl.MessageTTL = time.Hour
	limited := quorum("drops")
	limited.MaxLength, limited.Overflow = 10, declare.OverflowDropHead
	for name, c := range map[string]struct {
		queue  declare.Queue
		cfg    schedule.PublisherConfig
		ttl    time.Duration
		ladder bool
	}{
		"a quorum queue":                   {queue: quorum("q")},
		"a quorum queue that rejects":      {queue: declare.QuorumQueue{Name: "rejects", DeadLetter: declare.Drop(), MaxLength: 10, Overflow: declare.OverflowRejectPublish}},
		"a classic queue":                  {queue: declare.ClassicQueue{Name: "classic", DeadLetter: declare.Drop()}, ladder: true},
		"a queue with a ttl":               {queue: ttl, ladder: true},
		"a queue that drops its oldest":    {queue: limited, ladder: true},
		"the ladder is asked for":          {queue: quorum("asked"), cfg: schedule.PublisherConfig{Ladder: true}, ladder: true},
		"a ttl that would be over 49 days": {queue: quorum("long"), ttl: 49*day + 16*time.Hour, ladder: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newest(t, c.queue)
				queue := fmt.Sprint(queueName(c.queue))
				p, err := schedule.NewPublisher[string](t.Context(), w.conn, address.Queue(queue), c.cfg)
				require.NoError(t, err)
				_, err = p.Publish(t.Context(), schedule.After(30*time.Minute), "x", func(m *client.Message) { m.Header.TTL = c.ttl })
				if c.ladder {
					require.ErrorIs(t, err, client.ErrNotFound, "there is no ladder")
					assert.ErrorContains(t, err, "apply schedule.Topology")
					return
				}
				require.NoError(t, err)
				assert.Equal(t, 1, w.broker.Queue(queue).Counts().Delayed)
			})
		})
	}
}

func queueName(q declare.Queue) string {
	switch q := q.(type) {
	case declare.QuorumQueue:
		return q.Name
	case declare.ClassicQueue:
		return q.Name
	}
	panic("another type")
}

// A queue that is replaced by one that can't hold messages is noticed soon.
func TestAReplacedQueueIsNoticed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newest(t, quorum("orders"))
		p := newPublisher[string](w, address.Queue("orders"))
		_, err := p.Publish(t.Context(), schedule.After(time.Hour), "x")
		require.NoError(t, err)
		_, err = declare.DeleteQueue(t.Context(), w.conn.Management(), "orders")
		require.NoError(t, err)
		w.apply(declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		time.Sleep(11 * time.Second)
		_, err = p.Publish(t.Context(), schedule.After(time.Hour), "x")
		require.ErrorIs(t, err, client.ErrNotFound)
	})
}

// Cancel works for held messages as it does for those in the ladder.
func TestAHeldMessageCanBeCanceled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newest(t, quorum("orders"))
		p := newPublisher[string](w, address.Queue("orders"))
		store := schedule.OnDedupe(dedupe.NewMemory(0))
		got := newArrivals()
		w.consume("orders", schedule.With(schedule.Config{Store: store})(got))
		canceled, err := p.Publish(t.Context(), schedule.After(time.Minute), "x")
		require.NoError(t, err)
		kept, err := p.Publish(t.Context(), schedule.After(time.Minute), "x")
		require.NoError(t, err)
		inTime, err := schedule.Cancel(t.Context(), store, canceled)
		require.NoError(t, err)
		assert.True(t, inTime)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		assert.Len(t, got.at, 1)
		assert.Contains(t, got.at, kept.ID)
	})
}

// A publisher asks the broker whether the queue holds messages, and what time it is. While the
// connection is lost, it waits with that, and doesn't take a ladder that isn't there.
func TestPublishingWaitsForABrokerThatIsDown(t *testing.T) {
	t.Parallel()
	for name, when := range map[string]func() schedule.When{
		"after": func() schedule.When { return schedule.After(10 * time.Minute) },
		"at":    func() schedule.When { return schedule.At(time.Now().Add(time.Hour + 10*time.Minute)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newest(t, quorum("orders"))
				w.broker.StepClock(time.Hour)
				p := newPublisher[string](w, address.Queue("orders"))
				w.broker.Kill()
				began := time.Now()
				ended, end := context.WithTimeout(t.Context(), 15*time.Second)
				defer end()
				_, err := p.Publish(ended, when(), "never sent")
				require.ErrorIs(t, err, client.ErrNotSent)
				assert.Equal(t, 15*time.Second, time.Since(began))
				published := make(chan error)
				go func() {
					_, err := p.Publish(t.Context(), when(), "x")
					published <- err
				}()
				time.Sleep(time.Minute) // as a broker that starts on a busy machine
				w.broker.Restart()
				require.NoError(t, <-published)
				assert.Equal(t, hopbacktest.Counts{Messages: 1, Delayed: 1}, w.broker.Queue("orders").Counts())
			})
		})
	}
}
