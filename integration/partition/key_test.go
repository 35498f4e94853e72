package partition_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// one is a handler for messages of one key: it counts those that run at once.
type one struct {
	mu                sync.Mutex
	texts             []string
	running, together int
}

func (o *one) Handle(ctx context.Context, d *client.Delivery) error {
	o.mu.Lock()
	o.running++
	if o.running > 1 {
		o.together++
	}
	o.texts = append(o.texts, string(d.Message().GetData()))
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running--
	}()
	select {
	case <-time.After(10 * time.Millisecond):
	case <-ctx.Done():
	}
	return nil
}

func (o *one) all() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.texts...)
}

func numbered(n int) (texts []string) {
	for i := range n {
		texts = append(texts, fmt.Sprintf("a%02d", i))
	}
	return texts
}

// A copy of a replayed message brings the routing key along that the message had first. What it is
// published with now is its key.
func TestForwardedCopiesKeepTheOrderOfTheirKey(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "copies", Partitions: 2}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		texts := numbered(20)
		for i, text := range texts {
			first := client.NewMessage([]byte(text))
			first.Annotations = map[any]any{"x-opt-hopback-exchange": "orders", "x-opt-hopback-routing-key": fmt.Sprint("order.", i)}
			p, err := client.NewPublisher[*client.Message](t.Context(), conn, g.Address("customer"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, p.Publish(t.Context(), client.Copy(first)))
			require.NoError(t, p.Close(t.Context()))
		}
		var h one
		stop := consuming(t, s, g, &h, partition.Config{})
		suite.Poll(t, "all are handled", func() bool { return len(h.all()) >= len(texts) })
		stop()
		assert.Equal(t, texts, h.all())
		assert.Zero(t, h.together, "handlers that ran next to another one of the key")
	})
}

// A message whose key isn't known isn't handled: nobody knows which messages it has to wait for.
func TestAMessageWithoutAKeyIsNotHandled(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		for _, failed := range []partition.Failed{partition.SkipMessage, partition.BlockKey} {
			conn, _ := s.Connect(t)
			g := partition.Group{Name: "keyless-" + string(failed), Partitions: 1}
			topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue(g.Name + "-dead")})
			require.NoError(t, err)
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: g.Name + "-dead", DeadLetter: declare.Drop()})
			suite.Apply(t, conn, topology)
			texts := numbered(20)
			publishing(t, conn, g.Address("a"), nil, texts...)
			var h one
			stop := consuming(t, s, g, &h, partition.Config{Failed: failed, Key: func(d *client.Delivery) string {
				text := string(d.Message().GetData())
				if strings.HasSuffix(text, "5") {
					panic(errors.New("no customer"))
				}
				return text[:1]
			}})
			suite.Poll(t, "all are handled, or dead letters", func() bool {
				return len(h.all())+suite.Ready(t, conn, g.Name+"-dead") >= len(texts)
			})
			stop()
			assert.Equal(t, append(append(append([]string(nil), texts[:5]...), texts[6:15]...), texts[16:]...), h.all())
			assert.Zero(t, h.together)
			var dead []string
			for _, m := range s.Peer(t).Take(g.Name+"-dead", 2) {
				dead = append(dead, string(m.GetData()))
				assert.Equal(t, string(client.ReasonPanicked), m.Annotations[client.AnnotationReason])
				assert.Contains(t, m.Annotations[client.AnnotationError], "no customer")
			}
			assert.ElementsMatch(t, []string{"a05", "a15"}, dead)
		}
	})
}

// A policy can make a queue hold returned messages back, so that later ones overtake them. Workers can't
// read policies, and notice it by the order in which messages come.
func TestAPolicyThatReordersIsNoticed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "delayed", Partitions: 1, Window: 2}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		s.Policy(t, "policies", g.Queues()[0], map[string]any{"delayed-retry-type": "all", "delayed-retry-min": 10_000, "delayed-retry-max": 10_000})
		var mu sync.Mutex
		first := 0
		busy := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			first++
			return errors.New("busy")
		})
		publishing(t, conn, address.Queue(g.Queues()[0]), nil, numbered(6)...)
		stop := consuming(t, s, g, busy, partition.Config{Key: func(d *client.Delivery) string { return string(d.Message().GetData()) }})
		suite.Poll(t, "it holds messages", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return first >= 2
		})
		stop()
		own, log := s.Connect(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		var h one
		go func() { ended <- partition.Consume(ctx, own, g, &h, partition.Config{}) }()
		suite.Poll(t, "all are handled", func() bool { return len(h.all()) >= 6 })
		cancel()
		require.NoError(t, <-ended)
		t.Log(h.all())
		assert.NotEmpty(t, log.With("returned messages come after later ones"))
	})
}
