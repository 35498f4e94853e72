package partition_test

import (
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
	"github.com/hopback/hopback/partition"
)

// seen is a handler that notes the texts of messages.
type seen struct {
	mu    sync.Mutex
	texts []string
}

func (s *seen) Handle(_ context.Context, d *client.Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.texts = append(s.texts, string(d.Message().GetData()))
	return nil
}

func (s *seen) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.texts...)
}

// consuming runs a worker of g until stop is called.
func consuming(t *testing.T, s *suite.Site, g partition.Group, h client.Handler, cfg partition.Config) (stop func()) {
	t.Helper()
	conn, _ := s.Connect(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- partition.Consume(ctx, conn, g, h, cfg) }()
	return func() {
		t.Helper()
		cancel()
		assert.NoError(t, <-ended)
	}
}

// publishing publishes texts to an address.
func publishing(t *testing.T, conn *client.Conn, to address.Address, edit func(*client.Message), texts ...string) {
	t.Helper()
	p, err := client.NewPublisher[string](t.Context(), conn, to, client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(t.Context(), texts, func(text string, m *client.Message) {
		m.Data = [][]byte{[]byte(text)}
		if edit != nil {
			edit(m)
		}
	}))
	require.NoError(t, p.Close(t.Context()))
}

// Anyone who may publish can write the annotation of a marker. A worker handles such a message like
// any other, in its order, before a Reshard, during one, and afterwards, and the Reshard ends.
func TestForgedMarkersAreHandled(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "forged", Partitions: 1}
		next := partition.Group{Name: "forged", Partitions: 1, Generation: 2}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		var h seen
		stop := consuming(t, s, g, &h, partition.Config{})
		var want []string
		forge := func(when string) {
			t.Helper()
			for n, marker := range []string{"x", "", "KJHGFDSAPOIUZTREWQMNBVCXYL", "KJHGFDSAPOIUZTREWQMNBVCXYL/KJHGFDSAPOIUZTREWQMNBVCXYL", "/"} {
				for i, to := range []address.Address{g.Address("a"), address.Queue(g.Queues()[0])} {
					text := fmt.Sprint(when, n, i)
					want = append(want, text, text+"+")
					publishing(t, conn, to, func(m *client.Message) { m.Annotations = map[any]any{"x-opt-hopback-marker": marker} }, text)
					publishing(t, conn, to, nil, text+"+")
				}
			}
		}
		direct := func(when string) {
			t.Helper()
			want = append(want, when, "")
			publishing(t, conn, address.Queue(g.Queues()[0]), func(m *client.Message) { m.Annotations = map[any]any{"x-opt-hopback-marker": "x/y"} }, "")
			publishing(t, conn, address.Queue(g.Queues()[0]), func(m *client.Message) { m.Annotations = map[any]any{"x-opt-hopback-marker": "x/y"} }, when)
		}
		forge("before ")
		direct("before")
		suite.Poll(t, "all are handled", func() bool { return len(h.all()) >= len(want) })
		assert.ElementsMatch(t, want, h.all())
		suite.ApplyGroup(t, conn, next, declare.QuorumQueue{})
		resharded := make(chan error, 1)
		go func() {
			resharded <- partition.Reshard(t.Context(), conn, g, next, partition.ReshardConfig{Late: time.Millisecond})
		}()
		direct("during")
		require.NoError(t, <-resharded)
		direct("after")
		suite.Poll(t, "all are handled", func() bool { return len(h.all()) >= len(want) })
		stop()
		assert.ElementsMatch(t, want, h.all())
		place := map[string]int{}
		for i, text := range h.all() {
			place[text] = i
		}
		for n := 0; n < 20; n += 2 {
			assert.Less(t, place[want[n]], place[want[n+1]], "%s comes before the next message of its key", want[n])
		}
	})
}
