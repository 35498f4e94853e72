package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func TestWhatWasConfirmedOutlivesARestart(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q2", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		l.quorum("q2", nil)
		l.queue("c", "classic", nil)
		l.put("q", "held", "ready")
		l.put("c", "durable")
		l.outcome("/queues/c", func(m *frames.Message) { m.Header.Durable = false }, "transient")
		l.outcome("/queues/q", func(m *frames.Message) { m.Header.TTL = frames.Some[uint32](60_000) }, "dies")
		r := l.reader("q", 1)
		r.next()
		old := l.conn
		l.b.Stop()
		assert.False(t, l.b.Running())
		for range old.Ready() {
		}
		events := old.Take(nil)
		require.NotEmpty(t, events)
		assert.Equal(t, EventClosed, events[len(events)-1].Kind)
		assert.Nil(t, events[len(events)-1].Err)
		_, err := l.b.Authenticate("PLAIN", "guest", "guest")
		require.ErrorIs(t, err, ErrStopped)
		wait(time.Hour)
		l.b.Start()
		l.connect()
		assert.Equal(t, []string{"held", "ready"}, l.bodies("q"))
		assert.Equal(t, []string{"dies"}, l.bodies("q2"))
		// An absent durable, as clients write false, is true to 4.0.
		want := []string{"durable", "transient"}
		if l.newer() {
			want = want[:1]
		}
		assert.Equal(t, want, l.bodies("c"))
	})
}

func TestDelayedMessagesOutliveARestart(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		if !l.newer() {
			return
		}
		l.quorum("q", nil)
		l.put("q", "m")
		r := l.reader("q", 1)
		d, _ := r.next()
		r.settle(d, &frames.Modified{Annotations: m{"x-opt-delivery-time": time.Now().Add(20 * time.Second).UnixMilli()}.symbols()})
		wait(10 * time.Second)
		l.b.Stop()
		wait(5 * time.Second)
		l.b.Start()
		l.connect()
		r = l.reader("q", 1)
		wait(5*time.Second - time.Millisecond)
		r.none()
		wait(time.Millisecond)
		r.next()
	})
}

func TestADeletedQueueDetachesItsLinks(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		p := l.publisher("/queues/q")
		require.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
		quiet := l.publisher("/queues/q") // its session has published
		first := l.s
		l.s = l.conn.Begin()
		unused := l.publisher("/queues/q")
		l.s = first
		l.events()
		r := l.reader("q", 10)
		d, _ := r.next()
		require.NoError(t, l.b.ForgetQueue("/", "q"))
		var detached []*Publisher
		for _, e := range l.events() {
			if e.Kind == EventDetached {
				assert.Equal(t, frames.Symbol("amqp:resource-deleted"), e.Err.Condition)
				detached = append(detached, e.Publisher)
			}
		}
		assert.ElementsMatch(t, []*Publisher{nil, p, quiet}, detached)
		require.Nil(t, r.s.Settle([]*Delivery{d}, &frames.Accepted{}), "a late settlement does nothing")
		require.Nil(t, unused.Publish(2, false, encoded(t, nil, "m")))
		assert.Equal(t, released, l.events()[0].State)
	})
}

func TestFrozenQueues(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.quorum("other", nil)
		l.bind("amq.fanout", "q", "", nil)
		l.bind("amq.fanout", "other", "", nil)
		l.put("q", "held", "ready")
		r := l.reader("q", 1)
		d, _ := r.next()
		thaw, err := l.b.Freeze("/", "q")
		require.NoError(t, err)
		r.settle(d, failed())
		r.flow(5)
		r.none()
		p := l.publisher("/exchanges/amq.fanout")
		for i := range uint32(3) {
			require.Nil(t, p.Publish(i, i == 2, encoded(t, nil, fmt.Sprint(i))))
		}
		assert.Empty(t, l.events())
		assert.Equal(t, 3, p.Unconfirmed())
		q, _ := l.b.Queue("/", "q")
		assert.Equal(t, 1, q.Ready)
		thaw()
		thaw()
		assert.Equal(t, 3, p.Unconfirmed(), "until they are taken")
		confirmed := 0
		for _, e := range l.events() {
			if e.Kind == EventConfirmed && e.ID == 2 {
				assert.Nil(t, e.State, "it is settled already")
			} else if e.Kind == EventConfirmed {
				assert.Equal(t, accepted, e.State)
				confirmed++
			}
			e.toReader()
		}
		assert.Equal(t, 2, confirmed)
		assert.Zero(t, p.Unconfirmed())
		var got []string
		for _, d := range r.got {
			got = append(got, text(l.decode(d)))
		}
		assert.Equal(t, []string{"held", "ready", "0", "1", "2"}, got)
	})
}

func TestAQueueThatIsDeletedBeforeItConfirms(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.quorum("other", nil)
		l.bind("amq.fanout", "q", "", nil)
		l.bind("amq.fanout", "other", "", nil)
		_, err := l.b.Freeze("/", "q")
		require.NoError(t, err)
		require.Nil(t, l.publisher("/queues/q").Publish(1, false, encoded(t, nil, "m")))
		require.Nil(t, l.publisher("/exchanges/amq.fanout").Publish(2, false, encoded(t, nil, "m")))
		require.NoError(t, l.b.ForgetQueue("/", "q"))
		outcomes := map[uint32]any{}
		for _, e := range l.events() {
			if e.Kind == EventConfirmed {
				outcomes[e.ID] = e.State
			}
		}
		assert.Equal(t, map[uint32]any{1: released, 2: accepted}, outcomes)
	})
}

func TestHeldConfirms(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		release, err := l.b.HoldConfirms("/", "q")
		require.NoError(t, err)
		p := l.publisher("/queues/q")
		require.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
		assert.Empty(t, l.events())
		assert.Equal(t, []string{"m"}, l.bodies("q"), "it is stored")
		release()
		assert.Equal(t, accepted, l.events()[0].State)
	})
}

func TestAlarms(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.b.SetAlarm(AlarmMemory, true)
		l.b.SetAlarm(AlarmDisk, true)
		assert.True(t, l.conn.Blocked())
		l.b.SetAlarm(AlarmMemory, false)
		assert.True(t, l.conn.Blocked())
		l.b.SetAlarm(AlarmDisk, false)
		assert.False(t, l.conn.Blocked())
		events := l.events()
		require.Len(t, events, 2)
		assert.Equal(t, []EventKind{EventBlocked, EventUnblocked}, []EventKind{events[0].Kind, events[1].Kind})
	})
}

func TestLeaders(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		b, err := New(Config{Version: l.b.Version(), Node: "rabbit@1", Nodes: []string{"rabbit@1", "rabbit@2"}})
		require.NoError(t, err)
		defer b.Close()
		_, err = b.DeclareQueue("/", "q", QueueSpec{Durable: true, Arguments: map[string]any{"x-queue-type": "quorum"}})
		require.NoError(t, err)
		require.NoError(t, b.MoveLeader("/", "q", "rabbit@2"))
		assert.ErrorIs(t, b.MoveLeader("/", "q", "rabbit@3"), ErrMissing)
		q, err := b.Queue("/", "q")
		require.NoError(t, err)
		assert.Equal(t, "rabbit@2", q.Leader)
		assert.Equal(t, []string{"rabbit@1", "rabbit@2"}, q.Nodes)
	})
}

func TestABrokerHoldsNoMoreThanItMay(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		b := l.b
		b.cfg.MaxMessages = 3
		l.quorum("q", nil)
		l.put("q", "1", "2", "3")
		rejected, ok := l.outcome("/queues/q", nil, "4").(*frames.Rejected)
		require.True(t, ok)
		assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), rejected.Error.Condition)
		assert.Len(t, l.bodies("q"), 3)
		l.put("q", "5")
		b.cfg.MaxMessages, b.cfg.MaxBytes = 1000, 100
		l.put("q", string(make([]byte, 200)))
		assert.IsType(t, &frames.Rejected{}, l.outcome("/queues/q", nil, "6"))
		require.NoError(t, b.ForgetQueue("/", "q"))
		assert.Zero(t, b.messages)
		assert.Zero(t, b.bytes)
	})
}

// A few bytes of annotations can stand for a lot of memory. It counts for what the broker
// may hold, whether a sender or a consumer sends them.
func TestAnnotationsCountForWhatABrokerHolds(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		b := l.b
		b.cfg.MaxBytes = 1 << 20
		l.quorum("q", nil)
		nulls := m{"x-opt-n": make(frames.List, 1000)}.symbols()
		held := 0
		for ; held < 1000; held++ {
			state := l.outcome("/queues/q", func(msg *frames.Message) { msg.Annotations = nulls }, "m")
			if _, ok := state.(*frames.Rejected); ok {
				break
			}
		}
		assert.Less(t, held, 80, "each takes 16 KB")
		require.NoError(t, b.ForgetQueue("/", "q"))
		assert.Zero(t, b.bytes)

		// An array of nulls is 16 bytes for 65,536 of them, which all arrays share.
		l.quorum("q", nil)
		array := m{"x-opt-n": frames.Array{Type: 0x40, Elements: make([]any, 1<<16)}}.symbols()
		for range 10 {
			assert.Equal(t, accepted, l.outcome("/queues/q", func(msg *frames.Message) { msg.Annotations = array }, "m"))
		}
		assert.Less(t, b.bytes, int64(5_000))
		r := l.reader("q", 1)
		d, _ := r.next()
		msg, err := frames.DecodeMessage(d.Append(nil))
		require.NoError(t, err)
		v, _ := msg.Annotations.Get("x-opt-n")
		assert.Len(t, v.(frames.Array).Elements, 1<<16)
		r.s.End()

		// A consumer adds annotations, again and again.
		r = l.reader("q", 1)
		failed := false
		for i := range 18 { // below the delivery limit
			d, _ := r.next()
			fault := r.s.Settle([]*Delivery{d}, &frames.Modified{Annotations: m{fmt.Sprintf("x-opt-%d", i): make(frames.List, 10_000)}.symbols()})
			if failed = fault != nil; failed {
				assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), fault.Err.Condition)
				break
			}
			r.flow(1)
		}
		assert.True(t, failed, "it stores all annotations that a consumer adds")
		require.NoError(t, b.ForgetQueue("/", "q"))
		assert.Zero(t, b.bytes)
		assert.Zero(t, b.messages)
	})
}

// The counts of queues are right in every case.
func TestNothingIsLeftInTheCounts(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "d", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish", "x-delivery-limit": int64(0)})
		l.quorum("d", m{"x-max-length": int64(2)})
		for range 3 {
			l.put("q", "1", "2", "3", "4", "5")
			r := l.reader("q", 5)
			r.take()
			for i, state := range []any{&frames.Accepted{}, &frames.Rejected{}, failed(), &frames.Released{}, &frames.Modified{UndeliverableHere: true, Annotations: m{"x-opt-a": "b"}.symbols()}} {
				r.settle(r.got[i], state)
			}
			r.s.End()
		}
		for _, name := range []string{"q", "d"} {
			q, err := l.b.Queue("/", name)
			require.NoError(t, err)
			all, err := l.b.Messages("/", name)
			require.NoError(t, err)
			assert.Len(t, all, q.Messages)
			require.NoError(t, l.b.EmptyQueue("/", name))
			q, err = l.b.Queue("/", name)
			require.NoError(t, err)
			assert.Zero(t, q.Messages)
			assert.Zero(t, q.ReadyBytes)
		}
		assert.Zero(t, l.b.messages)
		assert.Zero(t, l.b.bytes)
	})
}

func TestLogAndChanges(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		changed := l.b.Changed()
		l.quorum("q", nil)
		<-changed
		l.outcome("/queues/q", func(m *frames.Message) { m.Properties = &frames.Properties{MessageID: "id"} }, "m")
		r := l.reader("q", 1)
		d, _ := r.next()
		r.settle(d, &frames.Accepted{})
		var kinds []string
		for _, e := range l.b.Log(0) {
			if e.Queue == "q" {
				kinds = append(kinds, e.Kind)
				assert.Equal(t, e.Kind == "queue declared", e.MessageID == nil)
			}
		}
		assert.Equal(t, []string{"queue declared", "published", "delivered", "accepted"}, kinds)
	})
}

func TestSettledLinks(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		p := l.publisher("/queues/q")
		require.Nil(t, p.Publish(1, true, encoded(t, nil, "m")))
		assert.Empty(t, l.events())
		r := l.reader("q", 10, func(a *frames.Attach) { a.SenderSettleMode = frames.Some[uint8](1) })
		d, _ := r.next()
		assert.True(t, d.Settled())
		q, _ := l.b.Queue("/", "q")
		assert.Zero(t, q.Messages)
	})
}

// RabbitMQ 4.3 searches endlessly for a message that it can drop.
func TestAQueueWithMoreDelayedThanItMayHoldHangs(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-max-length": int64(1)})
		r := l.reader("q", 2)
		l.put("q", "1", "2")
		later := &frames.Modified{Annotations: m{"x-opt-delivery-time": time.Now().Add(time.Hour).UnixMilli()}.symbols()}
		for range 2 {
			d, _ := r.next()
			r.settle(d, later)
		}
		hangs := 0
		for _, e := range l.b.Log(0) {
			if e.Kind == logHung {
				hangs++
			}
		}
		if !l.newer() {
			assert.Zero(t, hangs)
			return
		}
		assert.Equal(t, 1, hangs)
		p := l.publisher("/queues/q")
		require.Nil(t, p.Publish(100, false, encoded(t, nil, "3")))
		r.flow(5)
		assert.Empty(t, l.events())
		require.NoError(t, l.b.ForgetQueue("/", "q"))
	})
}
