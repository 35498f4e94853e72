package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// toward are the arguments of a queue whose dead letters go on.
func toward(exchange, key string, atLeastOnce bool, more m) m {
	args := m{"x-dead-letter-exchange": exchange}
	if key != "" {
		args["x-dead-letter-routing-key"] = key
	}
	if atLeastOnce {
		args["x-dead-letter-strategy"], args["x-overflow"] = "at-least-once", "reject-publish"
	}
	for k, v := range more {
		args[k] = v
	}
	return args
}

// eitherWay runs a test with each version and strategy.
func eitherWay(t *testing.T, test func(t *testing.T, l *lab, atLeastOnce bool)) {
	t.Helper()
	for _, atLeastOnce := range []bool{false, true} {
		t.Run(fmt.Sprintf("at least once %v", atLeastOnce), func(t *testing.T) {
			bothVersions(t, func(t *testing.T, l *lab) { test(t, l, atLeastOnce) })
		})
	}
}

func TestADeathIsToldInAnnotations(t *testing.T) {
	eitherWay(t, func(t *testing.T, l *lab, once bool) {
		l.exchange("dlx", "fanout", nil)
		l.quorum("work", toward("dlx", "", once, nil))
		l.quorum("dead", nil)
		l.bind("dlx", "dead", "", nil)
		l.exchange("in", "topic", nil)
		l.bind("in", "work", "#", nil)
		l.outcome("/exchanges/in/the.key", func(msg *frames.Message) {
			msg.Annotations = m{"x-cc": frames.List{"copy"}}.symbols()
			msg.Header.TTL = frames.Some[uint32](60_000)
			msg.Properties = &frames.Properties{MessageID: "id"}
		}, "m")
		r := l.reader("work", 1)
		d, _ := r.next()
		died := time.Now()
		r.settle(d, &frames.Modified{UndeliverableHere: true, Annotations: m{"x-opt-why": "so"}.symbols()})
		msg := l.one("dead")
		for key, want := range map[string]any{
			"x-first-death-queue": "work", "x-first-death-reason": "rejected", "x-first-death-exchange": "in",
			"x-last-death-queue": "work", "x-last-death-reason": "rejected", "x-last-death-exchange": "in",
			"x-exchange": "dlx", "x-routing-key": "the.key", "x-opt-why": "so",
		} {
			assert.Equal(t, want, ann(msg, key), key)
		}
		assert.Equal(t, "id", msg.Properties.MessageID)
		assert.False(t, msg.Header.TTL.Set, "a ttl ends with the death")
		assert.Zero(t, msg.Header.DeliveryCount)
		assert.False(t, msg.Header.FirstAcquirer)
		deaths := ann(msg, "x-opt-deaths").(frames.Array)
		require.Len(t, deaths.Elements, 1)
		death := deaths.Elements[0].(frames.Map)
		for key, want := range map[string]any{
			"queue": "work", "reason": frames.Symbol("rejected"), "count": uint64(1), "exchange": "in", "ttl": uint32(60_000),
			"first-time": frames.Timestamp(died.UnixMilli()), "last-time": frames.Timestamp(died.UnixMilli()),
		} {
			got, _ := death.Get(key)
			assert.Equal(t, want, got, key)
		}
		keys, _ := death.Get("routing-keys")
		want := []any{"the.key", "copy"}
		if !l.newer() {
			want = want[:1]
		}
		assert.Equal(t, want, keys.(frames.Array).Elements)
	})
}

func TestOutcomesThatDeadLetter(t *testing.T) {
	eitherWay(t, func(t *testing.T, l *lab, once bool) {
		l.quorum("work", toward("", "dead", once, nil))
		l.quorum("dead", nil)
		for _, c := range []struct {
			state any
			count uint32
		}{
			{&frames.Rejected{}, 1}, {&frames.Modified{UndeliverableHere: true}, 0}, {&frames.Modified{UndeliverableHere: true, DeliveryFailed: true}, 1},
		} {
			l.put("work", "m")
			r := l.reader("work", 1)
			d, _ := r.next()
			r.settle(d, c.state)
			msg := l.one("dead")
			assert.Equal(t, c.count, msg.Header.DeliveryCount, "%#v", c.state)
			r.c.Close()
		}
	})
}

func TestMessagesExpireAtTheHeadOnly(t *testing.T) {
	eitherWay(t, func(t *testing.T, l *lab, once bool) {
		l.quorum("delay", toward("", "work", once, nil))
		l.quorum("work", nil)
		began := time.Now()
		send := func(ttl uint32, body string) {
			l.outcome("/queues/delay", func(m *frames.Message) { m.Header.TTL = frames.Some(ttl) }, body)
		}
		send(2000, "long")
		send(200, "short")
		r := l.reader("work", 10)
		wait(2*time.Second - time.Millisecond)
		r.none()
		wait(time.Millisecond)
		_, msg := r.next()
		assert.Equal(t, "long", text(msg))
		assert.Equal(t, "expired", ann(msg, "x-last-death-reason"))
		_, msg = r.next()
		assert.Equal(t, "short", text(msg))
		assert.Equal(t, 2*time.Second, time.Since(began))
	})
}

// A message that has expired behind one of a higher priority waits there, and costs no time.
func TestExpiredBehindAHigherPriorityWaits(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("work", nil)
		send := func(priority uint8, ttl frames.Optional[uint32], body string) {
			l.outcome("/queues/work", func(m *frames.Message) { m.Header.Priority, m.Header.TTL = frames.Some(priority), ttl }, body)
		}
		send(0, frames.Some[uint32](1000), "low")
		send(9, frames.Optional[uint32]{}, "high")
		wait(time.Hour) // it would never end if the queue tried again and again
		r := l.reader("work", 10)
		_, msg := r.next()
		assert.Equal(t, "high", text(msg))
		r.none()
	})
}

func TestTheShorterTTLCounts(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("delay", toward("", "work", true, m{"x-message-ttl": int64(1000)}))
		l.quorum("work", nil)
		for ttl, want := range map[uint32]time.Duration{100: 100 * time.Millisecond, 5000: time.Second, 0: time.Millisecond} {
			began := time.Now()
			l.outcome("/queues/delay", func(m *frames.Message) { m.Header.TTL = frames.Some(ttl) }, "m")
			r := l.reader("work", 1)
			for r.take(); len(r.got) == 0; r.take() {
				wait(time.Millisecond)
			}
			assert.Equal(t, want, time.Since(began).Round(time.Millisecond), "%d", ttl)
			r.settle(r.got[0], &frames.Accepted{})
			r.c.Close()
		}
	})
}

// A message that goes in circles by expiry alone is dropped, or kept if nothing may be lost. A
// rejection breaks the circle.
func TestCycles(t *testing.T) {
	eitherWay(t, func(t *testing.T, l *lab, once bool) {
		l.quorum("a", toward("", "b", once, m{"x-message-ttl": int64(1000)}))
		l.quorum("b", toward("", "a", once, m{"x-message-ttl": int64(1000)}))
		l.put("a", "m")
		wait(10 * time.Second)
		a, _ := l.b.Queue("/", "a")
		b, _ := l.b.Queue("/", "b")
		if once {
			assert.Equal(t, 1, b.DeadLettering)
		}
		assert.Zero(t, a.Messages)
		assert.Zero(t, b.Ready)

		l.quorum("work", toward("", "wait", once, nil))
		l.quorum("wait", toward("", "work", once, m{"x-message-ttl": int64(1000)}))
		l.put("work", "m")
		for i := range 5 {
			r := l.reader("work", 1)
			d, msg := r.next()
			if i > 0 {
				deaths := ann(msg, "x-opt-deaths").(frames.Array).Elements
				require.Len(t, deaths, 2)
				count, _ := deaths[0].(frames.Map).Get("count")
				assert.Equal(t, uint64(i), count)
				queue, _ := deaths[0].(frames.Map).Get("queue")
				assert.Equal(t, "wait", queue)
			}
			r.settle(d, &frames.Rejected{})
			r.c.Close()
			wait(time.Second)
		}
	})
}

func TestAtMostOnceDropsWhatHasNoWay(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		for _, args := range []m{nil, toward("missing", "", false, nil), toward("", "missing", false, nil), {"x-dead-letter-strategy": "at-least-once"}} {
			l.quorum("work", args)
			l.put("work", "m")
			r := l.reader("work", 1)
			d, _ := r.next()
			r.settle(d, &frames.Rejected{})
			q, _ := l.b.Queue("/", "work")
			assert.Zero(t, q.Messages, "%v", args)
			require.NoError(t, l.b.ForgetQueue("/", "work"))
		}
	})
}

// 32 dead letters are in flight at once. One that can't be routed, or is rejected, is retried every 180 s.
func TestAtLeastOnceKeepsAndStallsAndTriesAgain(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("delay", toward("dlx", "", true, m{"x-message-ttl": int64(1000)}))
		for i := range 33 {
			l.put("delay", fmt.Sprintf("%d", i))
		}
		wait(time.Second)
		q, _ := l.b.Queue("/", "delay")
		assert.Equal(t, 33, q.DeadLettering)
		assert.Equal(t, 33, q.Messages)
		assert.Zero(t, q.Ready)
		status, reply := l.request("GET", "/queues/delay", nil)
		require.Equal(t, 200, status)
		count, _ := reply.(frames.Map).Get("message_count")
		assert.Equal(t, uint64(0), count)
		// The exchange comes: nothing happens until the 180 s are over.
		l.exchange("dlx", "fanout", nil)
		l.quorum("work", nil)
		l.bind("dlx", "work", "", nil)
		wait(179 * time.Second)
		r := l.reader("work", 100)
		r.take()
		assert.Empty(t, r.got)
		wait(time.Second)
		r.take()
		assert.Len(t, r.got, 33)
		q, _ = l.b.Queue("/", "delay")
		assert.Zero(t, q.Messages)
		assert.Equal(t, "dlx", ann(l.decode(r.got[0]), "x-exchange"))
		assert.Equal(t, "delay", ann(l.decode(r.got[0]), "x-routing-key"))
	})
}

func TestAtLeastOnceStallsBehindAFullQueue(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.exchange("dlx", "direct", nil)
		l.quorum("delay", toward("dlx", "", true, m{"x-message-ttl": int64(1000)}))
		l.quorum("full", m{"x-max-length": int64(1), "x-overflow": "reject-publish"})
		l.quorum("free", nil)
		l.bind("dlx", "full", "full", nil)
		l.bind("dlx", "free", "free", nil)
		l.exchange("in", "fanout", nil)
		l.bind("in", "delay", "", nil)
		l.put("full", "1", "2")
		for range 32 {
			l.outcome("/exchanges/in/full", nil, "stuck")
		}
		l.outcome("/exchanges/in/free", nil, "behind")
		wait(time.Second)
		assert.Empty(t, l.bodies("free"))
		assert.Equal(t, []string{"1", "2"}, l.bodies("full"))
		r := l.reader("full", 100)
		wait(179 * time.Second)
		r.take()
		require.Empty(t, r.got)
		wait(time.Second)
		for len(r.got) > 0 { // it takes two at a time
			require.Nil(t, r.s.Settle(r.got, &frames.Accepted{}))
			r.got = nil
			wait(180 * time.Second)
			r.take()
		}
		assert.Equal(t, []string{"behind"}, l.bodies("free"))
	})
}

// A queue that doesn't confirm holds a dead letter up, which isn't sent twice for it.
func TestDeadLetterAwaitsItsConfirmation(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("delay", toward("", "work", true, m{"x-message-ttl": int64(1000)}))
		l.quorum("work", nil)
		thaw, err := l.b.Freeze("/", "work")
		require.NoError(t, err)
		l.put("delay", "m")
		wait(time.Hour)
		q, _ := l.b.Queue("/", "delay")
		assert.Equal(t, 1, q.DeadLettering)
		thaw()
		q, _ = l.b.Queue("/", "delay")
		assert.Zero(t, q.Messages)
		assert.Equal(t, []string{"m"}, l.bodies("work"))
		wait(time.Hour)
		assert.Empty(t, l.bodies("work"))
	})
}

func TestExpiredDeliveriesGoBackAndExpire(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", toward("", "dead", true, m{"x-message-ttl": int64(1000)}))
		l.quorum("dead", nil)
		l.put("q", "m")
		r := l.reader("q", 1)
		d, _ := r.next()
		wait(time.Minute)
		assert.Empty(t, l.bodies("dead"), "what a consumer holds doesn't expire")
		r.settle(d, failed())
		assert.Equal(t, "expired", ann(l.one("dead"), "x-last-death-reason"))
	})
}

func TestUnusedQueuesExpire(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-expires": int64(60_000)})
		l.put("q", "m")
		wait(30 * time.Second)
		r := l.reader("q", 1)
		wait(time.Hour)
		r.c.Close()
		wait(59 * time.Second)
		_, err := l.b.Queue("/", "q")
		require.NoError(t, err)
		wait(2 * time.Second)
		_, err = l.b.Queue("/", "q")
		assert.ErrorIs(t, err, ErrMissing)
	})
}

// RabbitMQ 4.0 purges what is ready, 4.3 what waits for its dead-lettering, too.
func TestPurgeAndDeadLetters(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("delay", toward("dlx", "", true, m{"x-message-ttl": int64(1000)}))
		l.put("delay", "1", "2")
		wait(time.Second)
		l.put("delay", "3")
		status, reply := l.request("DELETE", "/queues/delay/messages", nil)
		require.Equal(t, 200, status)
		q, _ := l.b.Queue("/", "delay")
		if l.newer() {
			assert.Equal(t, frames.Map{{Key: "message_count", Value: uint64(3)}}, reply)
			assert.Zero(t, q.Messages)
			return
		}
		assert.Equal(t, frames.Map{{Key: "message_count", Value: uint64(1)}}, reply)
		assert.Equal(t, 2, q.DeadLettering)
	})
}

// What is dropped at once, RabbitMQ 4.0 dead-letters in the opposite order.
func TestOrderOfDeadLettersThatAreDroppedAtOnce(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("dead", nil)
		l.quorum("q", m{"x-max-length": int64(0), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		r := l.reader("q", 3)
		l.put("q", "1", "2", "3")
		r.take()
		r.c.Close()
		want := []string{"1", "2", "3"}
		if !l.newer() {
			want = []string{"3", "2", "1"}
		}
		assert.Equal(t, want, l.bodies("dead"))
	})
}
