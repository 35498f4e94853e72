package engine

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func TestDeliveryLimit(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		for name, c := range map[string]struct {
			requeue    func(l *lab, r *reader, d *Delivery)
			on40, on43 bool // it counts
		}{
			"released":             {func(_ *lab, r *reader, d *Delivery) { r.settle(d, &frames.Released{}) }, true, false},
			"modified, not failed": {func(_ *lab, r *reader, d *Delivery) { r.settle(d, &frames.Modified{}) }, true, false},
			"detached":             {func(_ *lab, r *reader, _ *Delivery) { r.c.Close() }, true, false},
			"failed":               {func(_ *lab, r *reader, d *Delivery) { r.settle(d, failed()) }, true, true},
			"session ended":        {func(_ *lab, r *reader, _ *Delivery) { r.s.End() }, true, true},
			"connection closed":    {func(l *lab, r *reader, _ *Delivery) { r.conn.Close(); l.connect() }, true, true},
		} {
			l.quorum("work", m{"x-delivery-limit": int64(0), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
			l.quorum("dead", nil)
			l.put("work", "m")
			r := l.reader("work", 1)
			d, _ := r.next()
			c.requeue(l, r, d)
			counts := c.on40
			if l.newer() {
				counts = c.on43
			}
			q, err := l.b.Queue("/", "dead")
			require.NoError(t, err)
			assert.Equal(t, counts, q.Ready == 1, name)
			if counts {
				assert.Equal(t, "delivery_limit", ann(l.one("dead"), "x-last-death-reason"))
			}
			require.NoError(t, l.b.ForgetQueue("/", "work"))
			require.NoError(t, l.b.ForgetQueue("/", "dead"))
		}
	})
}

func TestDeliveryLimitOfNAllowsNPlusOneDeliveries(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		for limit, deliveries := range map[any]int{int64(3): 4, nil: 21, int64(-1): 100, "3": 100} {
			args := m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
			if limit != nil {
				args["x-delivery-limit"] = limit
			}
			if _, wrong := limit.(string); wrong { // an ill-typed limit is none at all on 4.0
				deliveries = 21
			}
			l.quorum("work", args)
			l.quorum("dead", m{"x-delivery-limit": int64(-1)})
			l.put("work", "m")
			r := l.reader("work", 1000)
			n := 0
			for r.take(); len(r.got) > 0 && n < 100; r.take() {
				d, msg := r.next()
				assert.Equal(t, uint32(n), msg.Header.DeliveryCount)
				n++
				r.settle(d, failed())
			}
			assert.Equal(t, deliveries, n, "%v", limit)
			r.c.Close()
			if n < 100 {
				dead := l.one("dead")
				assert.Equal(t, uint32(n), dead.Header.DeliveryCount, "it is inherited")
			}
			require.NoError(t, l.b.ForgetQueue("/", "work"))
			require.NoError(t, l.b.ForgetQueue("/", "dead"))
		}
	})
}

func TestCountsOfADelivery(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.put("q", "m")
		r := l.reader("q", 100)
		for i, state := range []any{&frames.Released{}, failed(), &frames.Modified{}, failed()} {
			d, msg := r.next()
			failures := []any{nil, nil, int64(1), int64(1)}[i]
			if l.newer() {
				assert.Equal(t, failures, ann(msg, "x-delivery-count"), i)
				if i > 0 {
					assert.Equal(t, int64(i), ann(msg, "x-acquired-count"))
				}
			} else {
				assert.Nil(t, ann(msg, "x-acquired-count"))
				if i > 0 {
					assert.Equal(t, int64(i), ann(msg, "x-delivery-count"))
				}
			}
			assert.Equal(t, i == 0, msg.Header.FirstAcquirer)
			r.settle(d, state)
		}
		_, msg := r.next()
		assert.Equal(t, uint32(2), msg.Header.DeliveryCount)
	})
}

func TestReturnedMessagesComeFirstInTheOrderOfTheirReturn(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.put("q", "a", "b", "c", "d")
		r := l.reader("q", 3)
		a, _ := r.next()
		b, _ := r.next()
		c, _ := r.next()
		require.Nil(t, r.s.Settle([]*Delivery{c, a}, &frames.Released{}))
		r.settle(b, failed())
		assert.Equal(t, []string{"c", "a", "b", "d"}, l.bodies("q"))
	})
}

func TestReleasedWithoutALimitGoesToTheTailOn40(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-delivery-limit": int64(-1)})
		l.put("q", "a", "b", "c")
		r := l.reader("q", 1)
		a, _ := r.next()
		r.settle(a, &frames.Released{})
		r.c.Close()
		want := []string{"b", "c", "a"}
		if l.newer() {
			want = []string{"a", "b", "c"}
		}
		assert.Equal(t, want, l.bodies("q"))
	})
}

func TestPriorities(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		send := func(priority int, body string) {
			l.outcome("/queues/q", func(m *frames.Message) {
				if priority >= 0 {
					m.Header.Priority = frames.Some(uint8(priority))
				}
			}, body)
		}
		for i := range 4 {
			send(-1, fmt.Sprintf("none%d", i))
			send(0, fmt.Sprintf("zero%d", i))
			send(9, fmt.Sprintf("nine%d", i))
			send(5, fmt.Sprintf("five%d", i))
		}
		got := l.bodies("q")
		if l.newer() {
			assert.Equal(t, []string{
				"nine0", "nine1", "nine2", "nine3", "five0", "five1", "five2", "five3",
				"none0", "none1", "none2", "none3", "zero0", "zero1", "zero2", "zero3",
			}, got)
			return
		}
		assert.Equal(t, []string{
			"nine0", "five0", "none0", "nine1", "five1", "zero0", "nine2", "five2", "none1", "nine3", "five3", "zero1",
			"none2", "zero2", "none3", "zero3",
		}, got)
	})
}

func TestConsumersOfAHigherPriorityAndTurns(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		low := l.reader("q", 10)
		high := l.reader("q", 2, func(a *frames.Attach) {
			a.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:priority"), Value: int32(5)}}
		})
		also := l.reader("q", 10)
		l.put("q", "a", "b", "c", "d", "e", "f")
		low.take()
		assert.Len(t, high.got, 2)
		assert.Len(t, low.got, 2)
		assert.Len(t, also.got, 2)
	})
}

func TestDrainAnswersBehindTheDeliveries(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.put("q", "a", "b")
		r := l.reader("q", 0)
		r.take()
		r.events = nil
		r.c.Flow(&frames.Flow{DeliveryCount: frames.Some[uint32](0), LinkCredit: frames.Some[uint32](5), Drain: true})
		r.take()
		require.Len(t, r.events, 3)
		last := r.events[2]
		require.Equal(t, EventFlowed, last.Kind)
		assert.Equal(t, uint32(5), last.Flow.DeliveryCount.Value)
		assert.Zero(t, last.Flow.LinkCredit.Value)
		assert.True(t, last.Flow.Drain)
		l.put("q", "c")
		r.take()
		assert.Len(t, r.got, 2)
	})
}

func TestDelayedByDeliveryTime(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-max-length": int64(2), "x-overflow": "reject-publish"})
		l.put("q", "a")
		r := l.reader("q", 1)
		d, _ := r.next()
		at := time.Now().Add(time.Hour)
		r.settle(d, &frames.Modified{Annotations: m{"x-opt-delivery-time": at.UnixMilli(), "x-opt-mine": "kept"}.symbols()})
		r.flow(10)
		if !l.newer() {
			_, msg := r.next()
			assert.Equal(t, at.UnixMilli(), ann(msg, "x-opt-delivery-time"))
			return
		}
		r.none()
		q, err := l.b.Queue("/", "q")
		require.NoError(t, err)
		assert.Equal(t, 1, q.Delayed)
		assert.Zero(t, q.Ready)
		assert.Equal(t, at.UnixMilli(), q.NextDelayed.UnixMilli())
		wait(time.Hour - time.Millisecond)
		r.none()
		wait(time.Millisecond)
		d, msg := r.next()
		assert.Equal(t, "kept", ann(msg, "x-opt-mine"))
		assert.Zero(t, msg.Header.DeliveryCount)
		r.settle(d, &frames.Modified{Annotations: m{"x-opt-delivery-time": time.Now().Add(-time.Hour).UnixMilli()}.symbols()})
		r.next() // the past means at once
	})
}

func TestDelayedRetryArguments(t *testing.T) {
	for kind, want := range map[string][2]bool{"all": {true, true}, "failed": {true, false}, "returned": {false, true}, "disabled": {false, false}} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(t, Config{})
				l.quorum("q", m{"x-delayed-retry-type": kind, "x-delayed-retry-min": int64(1000), "x-delayed-retry-max": int64(2500)})
				l.put("q", "m")
				r := l.reader("q", 100)
				var delays []time.Duration
				for i := range 6 {
					d, _ := r.next()
					began := time.Now()
					if i < 4 {
						r.settle(d, failed())
					} else {
						r.settle(d, &frames.Released{})
					}
					for r.take(); len(r.got) == 0; r.take() {
						wait(100 * time.Millisecond)
					}
					delays = append(delays, time.Since(began).Round(100*time.Millisecond))
				}
				zero := time.Duration(0)
				expected := []time.Duration{zero, zero, zero, zero, zero, zero}
				if want[0] {
					copy(expected, []time.Duration{time.Second, 2 * time.Second, 2500 * time.Millisecond, 2500 * time.Millisecond})
				}
				if want[1] {
					expected[4], expected[5] = 2500*time.Millisecond, 2500*time.Millisecond
				}
				assert.Equal(t, expected, delays)
			})
		})
	}
}

func TestConsumerTimeout(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		slow, other := l.reader("q", 10), l.reader("q", 10)
		l.put("q", "a", "b")
		d, _ := slow.next()
		o, _ := other.next()
		other.settle(o, &frames.Accepted{})
		wait(30 * time.Minute)
		slow.take()
		if !l.newer() {
			assert.Empty(t, other.got)
			return
		}
		last := slow.events[len(slow.events)-1]
		assert.Equal(t, EventRevoked, last.Kind)
		assert.Equal(t, d, last.Delivery)
		o, msg := other.next()
		assert.Zero(t, msg.Header.DeliveryCount)
		other.settle(o, &frames.Accepted{})
		// The slow one gets nothing until it settles, which has no effect on the message.
		other.flow(0)
		l.put("q", "c")
		slow.none()
		slow.settle(d, &frames.Accepted{})
		_, msg = slow.next()
		assert.Equal(t, "c", text(msg))
	})
}

func TestSingleActiveConsumer(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-single-active-consumer": true})
		first, second := l.reader("q", 1), l.reader("q", 10)
		l.put("q", "a", "b")
		first.take()
		require.Len(t, first.got, 1)
		assert.Empty(t, second.got)
		first.c.Close()
		second.take()
		assert.Len(t, second.got, 2)
		if l.newer() {
			var active []any
			for _, e := range second.events {
				if e.Kind == EventFlowed && e.Flow.Properties != nil {
					v, _ := e.Flow.Properties.Get("rabbitmq:active")
					active = append(active, v)
				}
			}
			assert.Equal(t, []any{false, true}, active)
		}
		// One of a higher priority takes over, once the other holds nothing.
		high := l.reader("q", 10, func(a *frames.Attach) {
			a.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:priority"), Value: int32(5)}}
		})
		l.put("q", "c")
		high.take()
		assert.Empty(t, high.got)
		require.Nil(t, second.s.Settle(second.got, &frames.Accepted{}))
		high.take()
		assert.Len(t, high.got, 1)
	})
}

// A value that RabbitMQ can't guess the type of closes the connection of each consumer, until
// the message has come back too often.
func TestPoisonedMessages(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		admin := l.conn
		for _, value := range []any{nil, 1.5, float32(1)} {
			l.conn = admin
			l.s = admin.Begin()
			l.quorum("q", m{"x-delivery-limit": int64(2), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
			l.quorum("dead", nil)
			l.put("q", "m")
			r := l.reader("q", 1)
			d, _ := r.next()
			r.settle(d, &frames.Modified{Annotations: m{"x-opt-a": value}.symbols()})
			crashed := 0
			for q, _ := l.b.Queue("/", "q"); q.Ready > 0; q, _ = l.b.Queue("/", "q") {
				l.connect()
				r := l.reader("q", 1)
				r.take()
				require.Equal(t, EventClosed, r.events[len(r.events)-1].Kind)
				assert.Equal(t, frames.Symbol("amqp:internal-error"), r.events[len(r.events)-1].Err.Condition)
				crashed++
			}
			if l.newer() {
				assert.Equal(t, 3, crashed)
			} else {
				assert.Equal(t, 2, crashed)
			}
			l.conn = admin
			l.s = admin.Begin()
			require.NoError(t, l.b.ForgetQueue("/", "q"))
			require.NoError(t, l.b.ForgetQueue("/", "dead"))
		}
	})
}

func TestAnnotationsOfModified(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.outcome("/queues/q", func(msg *frames.Message) {
			msg.Annotations = m{"x-opt-mine": "kept", "x-opt-both": "old"}.symbols()
		}, "m")
		r := l.reader("q", 10)
		d, _ := r.next()
		r.settle(d, &frames.Modified{Annotations: m{
			"x-opt-both": "new", "x-opt-n": int32(7), "x-opt-t": frames.Timestamp(9), "x-opt-b": true, "x-opt-l": frames.List{"a", int64(1)},
			"x-opt-u": frames.UUID{'u'}, "x-opt-s": frames.Symbol("sym"),
		}.symbols()})
		d, msg := r.next()
		for key, want := range map[string]any{
			"x-opt-mine": "kept", "x-opt-both": "new", "x-opt-n": int64(7), "x-opt-t": int64(9), "x-opt-b": true, "x-opt-l": frames.List{"a", int64(1)},
			"x-opt-u": "u" + string(make([]byte, 15)), "x-opt-s": "sym",
		} {
			assert.Equal(t, want, ann(msg, key), key)
		}
		fault := r.s.Settle([]*Delivery{d}, &frames.Modified{Annotations: frames.Map{{Key: frames.Symbol("mine"), Value: "x"}}})
		require.NotNil(t, fault)
		assert.Equal(t, ScopeSession, fault.Ends)
	})
}

func TestMessageWithoutAHeader(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.outcome("/queues/q", func(m *frames.Message) { m.Header = nil }, "m")
		msg := l.one("q")
		assert.Equal(t, !l.newer(), msg.Header.Durable)
		assert.False(t, msg.Header.Priority.Set)
	})
}

// A queue takes one message more than its length, and then none until it is below four fifths.
func TestRejectPublish(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-max-length": int64(10), "x-overflow": "reject-publish"})
		p := l.publisher("/queues/q")
		send := func() any {
			require.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
			return l.events()[0].State
		}
		n := 0
		var state any
		for state = send(); n < 100; state = send() {
			if _, ok := state.(*frames.Accepted); !ok {
				break
			}
			n++
		}
		assert.Equal(t, 11, n)
		rejected := state.(*frames.Rejected)
		if l.newer() {
			assert.Equal(t, "amqp:resource-limit-exceeded: queue 'q' exceeded maximum length", rejected.Error.Error())
		} else {
			assert.Nil(t, rejected.Error)
		}
		r := l.reader("q", 2)
		r.take()
		require.Nil(t, r.s.Settle(r.got, &frames.Accepted{}))
		assert.IsType(t, &frames.Rejected{}, send(), "9 are left")
		l.events()
		r.flow(1)
		r.take()
		require.Nil(t, r.s.Settle(r.got, &frames.Accepted{}))
		assert.IsType(t, &frames.Accepted{}, send(), "8 are left")
	})
}

func TestDropHead(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-max-length": int64(2), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		l.quorum("dead", nil)
		l.put("q", "a", "b", "c", "d")
		assert.Equal(t, []string{"c", "d"}, l.bodies("q"))
		r := l.reader("dead", 10)
		for _, want := range []string{"a", "b"} {
			_, msg := r.next()
			assert.Equal(t, want, text(msg))
			assert.Equal(t, "maxlen", ann(msg, "x-first-death-reason"))
		}
		l.quorum("bytes", m{"x-max-length-bytes": int64(30)})
		l.put("bytes", "1234567890", "1234567890", "1234567890")
		assert.Len(t, l.bodies("bytes"), 2)
	})
}

// A single active consumer that is to give way, and goes with messages in its hands, stays in
// a queue of RabbitMQ 4.3 permanently.
func TestASingleActiveConsumerThatGoesWhileItGivesWayStays(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-single-active-consumer": true})
		l.put("q", "1", "2")
		first := l.reader("q", 3)
		first.take()
		l.s = l.conn.Begin()
		second, fault := l.s.OpenConsumer(&frames.Attach{Name: "second", Source: &frames.Source{Address: "/queues/q"}, Properties: frames.Map{{Key: "rabbitmq:priority", Value: int32(1)}}})
		require.Nil(t, fault)
		first.s.End()
		q, err := l.b.Queue("/", "q")
		require.NoError(t, err)
		assert.Equal(t, 2, q.Ready)
		if !l.newer() {
			assert.Equal(t, 1, q.Consumers)
			return
		}
		assert.Equal(t, 2, q.Consumers)
		second.Close()
		q, _ = l.b.Queue("/", "q")
		assert.Equal(t, 1, q.Consumers)
		assert.Equal(t, 1, q.Ready, "the one that isn't there has the other")
	})
}

// A quorum queue hands out what it has in portions. A session that crashes over a message has
// written the portions before that one's, and it is only that one's which are lost if they were
// settled.
func TestPortionsBeforeAndBehindAPoisonedMessage(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		large := strings.Repeat(".", 70_000)
		for _, settled := range []bool{true, false} {
			l.quorum("q", nil)
			l.put("q", "0"+large, "1"+large, "2"+large, "3"+large)
			l.outcome("/queues/q", func(m *frames.Message) { m.Annotations = frames.Map{{Key: frames.Symbol("x-a")}} }, "4")
			l.put("q", "5"+large, "6"+large, "7"+large)
			l.connect()
			r := l.reader("q", 10, func(a *frames.Attach) {
				if settled {
					a.SenderSettleMode = frames.Some[uint8](1)
				}
			})
			r.take()
			var got string
			for _, d := range r.got {
				got += text(l.decode(d))[:1]
			}
			assert.Equal(t, "012", got)
			assert.Equal(t, EventClosed, r.events[len(r.events)-1].Kind)
			l.connect()
			q, _ := l.b.Queue("/", "q")
			if settled {
				assert.Equal(t, 2, q.Ready)
				got = ""
				for _, body := range l.bodies("q") {
					got += body[:1]
				}
				assert.Equal(t, "67", got)
			} else {
				assert.Equal(t, 8, q.Ready)
			}
			require.NoError(t, l.b.ForgetQueue("/", "q"))
		}
	})
}

// A message that has expired behind another one is dead-lettered as soon as that one is dropped.
func TestWhatHasExpiredIsNextOnceTheHeadIsDropped(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		for _, kind := range []string{"quorum", "classic"} {
			l.queue("q", kind, m{"x-max-length": int64(2), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
			l.quorum("dead", nil)
			l.put("q", "head")
			l.outcome("/queues/q", func(m *frames.Message) { m.Header.TTL = frames.Some[uint32](20) }, "brief")
			wait(time.Second)
			q, _ := l.b.Queue("/", "q")
			assert.Equal(t, 2, q.Ready, "it is behind the head")
			l.put("q", "last")
			wait(0)
			assert.Equal(t, []string{"head", "brief"}, l.bodies("dead"))
			assert.Equal(t, []string{"last"}, l.bodies("q"))
			require.NoError(t, l.b.ForgetQueue("/", "q"))
			require.NoError(t, l.b.ForgetQueue("/", "dead"))
		}
	})
}

// Dead letters come to a queue one by one, and it drops each by itself.
func TestAQueueDropsEachDeadLetterByItself(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "full"})
		l.quorum("full", m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-max-length": int64(1)})
		l.quorum("dead", nil)
		l.put("q", "1", "2", "3", "4")
		r := l.reader("q", 10)
		r.take()
		require.Len(t, r.got, 4)
		require.Nil(t, r.s.Settle(r.got, &frames.Rejected{}))
		assert.Equal(t, []string{"1", "2", "3"}, l.bodies("dead"))
		assert.Equal(t, []string{"4"}, l.bodies("full"))
	})
}

// A single active consumer that gives way, and requeues the last message that it holds, is
// followed by none in RabbitMQ 4.0, until another one comes or goes.
func TestNoConsumerIsActiveOnceALastMessageWasGivenBack(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", m{"x-single-active-consumer": true})
		first := l.reader("q", 1)
		l.put("q", "m")
		d, _ := first.next()
		second := l.reader("q", 1, func(a *frames.Attach) {
			a.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:priority"), Value: int32(1)}}
		})
		first.settle(d, &frames.Released{})
		if !l.newer() {
			second.flow(1)
			second.none()
			first.c.Close()
		}
		_, msg := second.next()
		assert.Equal(t, "m", text(msg))
	})
}
