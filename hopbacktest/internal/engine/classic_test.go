package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func TestClassicQueuesPutBackWhereItWas(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", nil)
		l.put("c", "1", "2", "3", "4")
		r := l.reader("c", 3)
		one, _ := r.next()
		two, _ := r.next()
		three, _ := r.next()
		r.settle(three, &frames.Modified{Annotations: m{"x-opt-a": "lost"}.symbols()})
		r.settle(one, failed())
		r.settle(two, &frames.Released{})
		r.c.Close()
		r = l.reader("c", 10)
		for _, want := range []string{"1", "2", "3", "4"} {
			_, msg := r.next()
			assert.Equal(t, want, text(msg))
			assert.Equal(t, want == "4", msg.Header.FirstAcquirer)
			assert.Nil(t, ann(msg, "x-opt-a"))
			assert.Nil(t, ann(msg, "x-acquired-count"))
			assert.Nil(t, ann(msg, "x-delivery-count"))
		}
	})
}

func TestClassicQueuesHaveNoDeliveryLimit(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", m{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		l.quorum("dead", nil)
		l.put("c", "m")
		r := l.reader("c", 100)
		for range 50 {
			d, _ := r.next()
			r.settle(d, failed())
		}
		d, _ := r.next()
		r.settle(d, &frames.Modified{UndeliverableHere: true})
		assert.Equal(t, "rejected", ann(l.one("dead"), "x-last-death-reason"))
	})
}

func TestClassicLimits(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("reject", "classic", m{"x-max-length": int64(2), "x-overflow": "reject-publish"})
		l.put("reject", "1", "2")
		assert.IsType(t, &frames.Rejected{}, l.outcome("/queues/reject", nil, "3"))
		l.queue("dlx", "classic", m{"x-max-length": int64(1), "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		l.quorum("dead", nil)
		l.put("dlx", "1")
		assert.IsType(t, &frames.Rejected{}, l.outcome("/queues/dlx", nil, "2"))
		assert.Equal(t, "2", text(l.one("dead")))
		l.queue("drop", "classic", m{"x-max-length": int64(2)})
		l.put("drop", "1", "2", "3")
		assert.Equal(t, []string{"2", "3"}, l.bodies("drop"))
	})
}

func TestClassicPriorities(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", m{"x-max-priority": int64(3)})
		for body, priority := range map[string]uint8{"low": 0, "middle": 2, "high": 9} {
			l.outcome("/queues/c", func(m *frames.Message) { m.Header.Priority = frames.Some(priority) }, body)
		}
		assert.Equal(t, []string{"high", "middle", "low"}, l.bodies("c"))
	})
}

func TestExclusiveAndAutoDeleteQueues(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		status, _ := l.request("PUT", "/queues/own", m{"exclusive": true, "arguments": m{}.strings()}.strings())
		require.Equal(t, 201, status)
		status, _ = l.request("PUT", "/queues/auto", m{"auto_delete": true, "arguments": m{}.strings()}.strings())
		require.Equal(t, 201, status)
		mine := l.conn
		l.connect()
		status, body := l.request("DELETE", "/queues/own", nil)
		assert.Equal(t, 400, status)
		assert.Contains(t, body, "cannot obtain exclusive access to locked queue 'own' in vhost '/'")
		_, fault := l.conn.Begin().OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/own"}})
		require.NotNil(t, fault)
		assert.Equal(t, frames.Symbol("amqp:resource-locked"), fault.Err.Condition)
		r := l.reader("auto", 1)
		r.c.Close()
		_, err := l.b.Queue("/", "auto")
		assert.ErrorIs(t, err, ErrMissing)
		mine.Close()
		_, err = l.b.Queue("/", "own")
		assert.ErrorIs(t, err, ErrMissing)
	})
}

func TestDynamicQueues(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		s := l.conn.Begin()
		c, fault := s.OpenConsumer(&frames.Attach{Name: "dyn", Source: &frames.Source{Dynamic: true, Capabilities: []frames.Symbol{"temporary-queue"}}})
		if !l.newer() {
			require.NotNil(t, fault)
			return
		}
		require.Nil(t, fault)
		address := c.Attach().Source.Address.(string)
		p := l.publisher(address)
		require.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
		c.Flow(&frames.Flow{LinkCredit: frames.Some[uint32](1)})
		kinds := map[EventKind]int{}
		for _, e := range l.events() {
			kinds[e.Kind]++
		}
		assert.Equal(t, 1, kinds[EventDelivered])
		c.Close()
		assert.Empty(t, l.b.Queues("/"))
		wait(time.Second)
	})
}

func TestClassicQueuesTakeALinksEndForAFailure(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", nil)
		l.put("c", "m")
		r := l.reader("c", 1)
		r.next()
		r.c.Close()
		want := uint32(0)
		if l.newer() {
			want = 1
		}
		assert.Equal(t, want, l.one("c").Header.DeliveryCount)
	})
}

func TestClassicQueuesDontCountTheBytesOfAnnotations(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		annotated := func(m *frames.Message) { m.Annotations = frames.Map{{Key: frames.Symbol("x-a"), Value: int64(1)}} }
		l.queue("c", "classic", m{"x-max-length-bytes": int64(60), "x-overflow": "reject-publish"})
		assert.IsType(t, &frames.Accepted{}, l.outcome("/queues/c", annotated, "m"))
	})
}

func TestClassicQueuesKeepTheCountOfADeadLetter(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", nil)
		l.quorum("q", m{"x-delivery-limit": int64(0), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "c"})
		l.put("q", "m")
		r := l.reader("q", 1)
		d, _ := r.next()
		r.settle(d, failed())
		assert.Equal(t, uint32(1), l.one("c").Header.DeliveryCount)
	})
}

// A session crashes over a message that it can't write. Those that a classic queue gave it
// before have been written.
func TestClassicQueuesDeliverWhatIsBeforeAPoisonedMessage(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", nil)
		l.put("c", "1")
		l.outcome("/queues/c", func(m *frames.Message) { m.Annotations = frames.Map{{Key: frames.Symbol("x-a")}} }, "2")
		l.connect()
		r := l.reader("c", 2)
		r.take()
		require.Len(t, r.events, 2)
		assert.Equal(t, EventDelivered, r.events[0].Kind)
		assert.Equal(t, EventClosed, r.events[1].Kind)
	})
}

// What comes back to a classic queue beyond its length is dropped, even if somebody waits for it.
func TestClassicQueuesDropWhatComesBackBeforeTheyDeliverIt(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", m{"x-max-length": int64(1)})
		held := l.reader("c", 3)
		l.put("c", "1", "2", "3")
		other := l.reader("c", 3)
		held.c.Close()
		_, msg := other.next()
		assert.Equal(t, "3", text(msg))
		other.none()
	})
}

// The single active consumer of a classic queue stays until it goes. Then the first of the
// highest priority is next, whether it has credit or not. All get the queue's count.
func TestSingleActiveConsumersOfClassicQueuesStay(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.queue("c", "classic", m{"x-single-active-consumer": true})
		high := func(a *frames.Attach) {
			a.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:priority"), Value: int32(1)}}
		}
		first, low, second, third := l.reader("c", 1), l.reader("c", 9), l.reader("c", 0, high), l.reader("c", 9, high)
		l.put("c", "1", "2", "3")
		d, msg := first.next()
		assert.Equal(t, "1", text(msg))
		first.settle(d, &frames.Accepted{})
		third.c.Flow(&frames.Flow{DeliveryCount: frames.Some(third.c.count), LinkCredit: frames.Some[uint32](9), Echo: true})
		third.take()
		assert.Equal(t, uint32(2), third.events[len(third.events)-1].Flow.Available.Value)
		first.c.Close()
		low.none()
		third.none()
		second.flow(9)
		_, msg = second.next()
		assert.Equal(t, "2", text(msg))
	})
}
