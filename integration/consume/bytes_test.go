package consume_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

const mebi = 1 << 20

// publishSized publishes a message of each size. Its message-id is its number.
func publishSized(t *testing.T, conn *client.Conn, queue string, sizes ...int) {
	t.Helper()
	p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	for i, size := range sizes {
		m := client.NewMessage(bytes.Repeat([]byte{'m'}, size))
		m.Properties = &client.Properties{MessageID: fmt.Sprint(i)}
		require.NoError(t, p.Publish(ctx, m))
	}
}

// held counts the messages that handlers hold until they get a token.
type held struct {
	mu                        sync.Mutex
	n, bytes, mostBytes, most int
	handled                   map[string]int
	redelivered               int
	next                      chan struct{}
}

func newHeld() *held { return &held{handled: map[string]int{}, next: make(chan struct{}, 1000)} }

func (h *held) handle(ctx context.Context, d *client.Delivery) error {
	size := len(d.Message().GetData())
	h.mu.Lock()
	h.n++
	h.bytes += size
	h.most, h.mostBytes = max(h.most, h.n), max(h.mostBytes, h.bytes)
	h.handled[fmt.Sprint(d.Message().Properties.MessageID)]++
	if d.DeliveryCount() > 0 {
		h.redelivered++
	}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.n--
		h.bytes -= size
		h.mu.Unlock()
	}()
	select {
	case <-h.next:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (h *held) now() (n, bytes, handled int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.n, h.bytes, len(h.handled)
}

// A consumer holds no more bytes than PrefetchBytes allows, though Prefetch allows more messages and
// handlers are free. A message that is larger is handled alone.
func TestAConsumerHoldsAtMostItsBytes(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "large", DeadLetter: declare.Drop()}}})
		sizes := make([]int, 24)
		for i := range sizes {
			sizes[i] = mebi - 300
		}
		sizes[12] = 9 * mebi
		publishSized(t, conn, "large", sizes...)
		h := newHeld()
		stop := suite.Consume(t, conn, "large", client.HandlerFunc(h.handle), client.ConsumerConfig{Concurrency: 30, Prefetch: 30, PrefetchBytes: 4 * mebi})
		suite.Poll(t, "as many as there is room for", func() bool { n, _, _ := h.now(); return n >= 3 })
		for i := range sizes {
			suite.Poll(t, "the next", func() bool { n, _, _ := h.now(); return n > 0 })
			n, b, _ := h.now()
			assert.True(t, b <= 4*mebi || n == 1, "%d messages with %d bytes after %d", n, b, i)
			h.next <- struct{}{}
			suite.Poll(t, "handled", func() bool { n, _, handled := h.now(); return handled-n > i })
		}
		require.NoError(t, stop())
		assert.Zero(t, suite.Ready(t, conn, "large"))
		assert.Len(t, h.handled, len(sizes))
		assert.LessOrEqual(t, h.most, 4)
		assert.LessOrEqual(t, h.mostBytes, 9*mebi)
		assert.Zero(t, h.redelivered)
	})
}

// While a consumer has no room for more bytes, the broker can't answer a drain. The consumer can be
// limited all the same, continues, and stops, without losing its link or handling a message twice.
func TestAConsumerWithoutRoomForBytesIsLimitedAndStops(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		var events suite.Events
		conn, _ := s.Connect(t, func(c *client.Config) { c.OnEvent = events.Observe })
		sizes := make([]int, 12)
		for i := range sizes {
			sizes[i] = mebi
		}
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "larger", DeadLetter: declare.Drop()}}})
		publishSized(t, conn, "larger", sizes...)
		h := newHeld()
		control := &client.Control{}
		stop := suite.Consume(t, conn, "larger", client.HandlerFunc(h.handle), client.ConsumerConfig{Concurrency: 12, Prefetch: 12, PrefetchBytes: 3 * mebi, Control: control})
		suite.Poll(t, "as many as there is room for", func() bool { n, _, _ := h.now(); return n >= 2 })
		release := control.Limit(1)
		for range 4 {
			_, _, before := h.now()
			h.next <- struct{}{}
			suite.Poll(t, "the next", func() bool { _, _, handled := h.now(); return handled > before })
		}
		release()
		suite.Poll(t, "as many as there is room for", func() bool { n, _, _ := h.now(); return n >= 2 })
		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		close(h.next)
		require.NoError(t, suite.Await(t, stopped, "the end"))
		assert.Empty(t, events.Of("consume", client.EventLost))
		assert.Zero(t, h.redelivered)
		_, _, first := h.now()

		again := newHeld()
		close(again.next)
		stop = suite.Consume(t, conn, "larger", client.HandlerFunc(again.handle), client.ConsumerConfig{})
		suite.Poll(t, "the rest", func() bool { _, _, handled := again.now(); return handled+first >= len(sizes) })
		require.NoError(t, stop())
		for id, n := range again.handled {
			assert.Zero(t, h.handled[id], "%s was handled twice", id)
			assert.Equal(t, 1, n)
		}
		if s.Newer() {
			assert.Zero(t, again.redelivered, "no delivery was counted")
		}
	})
}

// A message above MaxMessageSize is dead-lettered, whole and with a reason, and the others are
// handled. A queue that would drop it keeps it until the consumer stops.
func TestAMessageThatIsTooLargeIsDeadLettered(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t, func(c *client.Config) { c.MaxMessageSize = mebi })
		unlimited, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "work"})
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "drops", DeadLetter: declare.Drop()}}})
		for _, queue := range []string{"work", "drops"} {
			publishSized(t, conn, queue, 10, 3*mebi, 20, mebi+1, 30)
		}
		h := newHeld()
		close(h.next)
		stop := suite.Consume(t, conn, "work", retry.With(policy)(client.HandlerFunc(h.handle)), client.ConsumerConfig{})
		suite.Poll(t, "two dead letters", func() bool { return suite.Ready(t, conn, "work.dead") == 2 })
		suite.Poll(t, "three handled", func() bool { _, _, handled := h.now(); return handled == 3 })
		require.NoError(t, stop())
		assert.Equal(t, map[string]int{"0": 1, "2": 1, "4": 1}, h.handled)

		dead := make(chan *client.Message, 2)
		stop = suite.Consume(t, unlimited, "work.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		var sizes []int
		for range 2 {
			m := suite.Await(t, dead, "a dead letter")
			sizes = append(sizes, len(m.GetData()))
			assert.Equal(t, string(client.ReasonTooLarge), m.Annotations[client.AnnotationReason])
			assert.Contains(t, m.Annotations[client.AnnotationError], "MaxMessageSize")
		}
		assert.ElementsMatch(t, []int{3 * mebi, mebi + 1}, sizes)
		require.NoError(t, stop())

		h = newHeld()
		close(h.next)
		stop = suite.Consume(t, conn, "drops", client.HandlerFunc(h.handle), client.ConsumerConfig{})
		suite.Poll(t, "three handled", func() bool { _, _, handled := h.now(); return handled == 3 })
		require.NoError(t, stop())
		assert.EqualValues(t, 2, suite.Ready(t, conn, "drops"))
	})
}
