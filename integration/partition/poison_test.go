package partition_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// process is a worker with separate connections, which a crash ends.
type process struct {
	mu      sync.Mutex
	conns   []net.Conn
	crashed bool
	end     context.CancelFunc
	ended   chan struct{}
}

var errCrashed = errors.New("the process has crashed")

// cut ends its connections.
func (p *process) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *process) crash() {
	p.mu.Lock()
	p.crashed = true
	p.mu.Unlock()
	p.cut()
	p.end()
	<-p.ended
}

// start starts a worker of g.
func start(t *testing.T, s *suite.Site, g partition.Group, h client.Handler, cfg partition.Config) *process {
	t.Helper()
	p := &process{ended: make(chan struct{})}
	ctx, end := context.WithCancel(t.Context())
	p.end = end
	conn, err := client.Connect(ctx, s.AMQPURL(), client.Config{
		Logger: slogOf(s), Reconnect: client.ReconnectBackoff{Min: 10 * time.Millisecond, Max: 100 * time.Millisecond},
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.crashed {
				_ = c.Close()
				return nil, errCrashed
			}
			p.conns = append(p.conns, c)
			return c, nil
		},
	})
	require.NoError(t, err)
	go func() {
		defer close(p.ended)
		_ = partition.Consume(ctx, conn, g, h, cfg)
		_ = conn.Close(context.Background())
	}()
	return p
}

// A message crashes each worker that handles it. It is given up, and those of all partitions that
// the workers held at that time are handled, once each and in their order.
func TestAPoisonMessageTakesNoNeighborAlong(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "poisoned", Partitions: 3}
		const keys, each, poison = 12, 7, "k4/3"
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: 6})
		require.NoError(t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
		suite.Apply(t, conn, topology)
		for n := range each {
			for k := range keys {
				publishing(t, conn, g.Address(fmt.Sprint("k", k)), nil, fmt.Sprintf("k%d/%d", k, n))
			}
		}
		var mu sync.Mutex
		var handled []string
		crashes := make(chan struct{})
		h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			text := string(d.Message().GetData())
			if text == poison {
				select {
				case crashes <- struct{}{}:
				case <-ctx.Done():
				}
				<-ctx.Done()
				return ctx.Err()
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			handled = append(handled, text)
			return nil
		})
		done := func() int {
			mu.Lock()
			defer mu.Unlock()
			return len(slices.Compact(slices.Sorted(slices.Values(handled))))
		}
		worker, n := start(t, s, g, h, partition.Config{}), 0
		deadline := time.After(suite.Patience)
		for done() < keys*each-1 {
			select {
			case <-crashes:
				n++
				worker.crash()
				worker = start(t, s, g, h, partition.Config{})
			case <-deadline:
				require.Fail(t, "not all are handled", "%d of %d after %d crashes", done(), keys*each-1, n)
			case <-time.After(20 * time.Millisecond): // between two looks
			}
		}
		worker.end()
		<-worker.ended
		dead := s.Peer(t).Take("dead", suite.Ready(t, conn, "dead"))
		var texts []string
		for _, m := range dead {
			texts = append(texts, string(m.GetData()))
			assert.Equal(t, string(retry.ReasonDeliveryLimit), m.Annotations[client.AnnotationReason])
		}
		suite.Report(t, s, "partitions: after %d crashes %d dead letters, %d of them healthy", n, len(texts), len(texts)-1)
		assert.Equal(t, []string{poison}, texts)
		assert.LessOrEqual(t, n, 12)
		next := map[string]int{} // of each key: duplicates begin again from where they were
		for _, text := range handled {
			var key, n int
			_, err := fmt.Sscanf(text, "k%d/%d", &key, &n)
			require.NoError(t, err)
			name := fmt.Sprint("k", key)
			if fmt.Sprintf("%s/%d", name, next[name]) == poison {
				next[name]++
			}
			assert.LessOrEqual(t, n, next[name], "%s began before the one before it of its key was handled", text)
			next[name] = max(next[name], n+1)
		}
	})
}

// Lost connections use up no limit: what a worker holds for a blocked key stays, however often its
// connection is lost.
func TestLostConnectionsCondemnNoMessage(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "blocked", Partitions: 1}
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: 4})
		require.NoError(t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
		suite.Apply(t, conn, topology)
		const held = 60
		for n := range held {
			publishing(t, conn, g.Address("a"), nil, fmt.Sprintf("a%02d", n))
		}
		var mu sync.Mutex
		broken, calls, got := true, 0, []string(nil)
		h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			if broken {
				calls++
				return errors.New("busy")
			}
			got = append(got, string(d.Message().GetData()))
			return nil
		})
		tries := func() int {
			mu.Lock()
			defer mu.Unlock()
			return calls
		}
		cfg := partition.Config{Failed: partition.BlockKey, Retry: retry.Policy{Backoff: retry.Exponential(100*time.Millisecond, 1), MaxRetries: 1000}}
		worker := start(t, s, g, h, cfg)
		for range 12 {
			before := tries()
			suite.Poll(t, "it is tried", func() bool { return tries() >= before+2 })
			worker.cut()
		}
		mu.Lock()
		broken = false
		mu.Unlock()
		suite.Poll(t, "all are handled", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(got) >= held || suite.Ready(t, conn, "dead") > 0
		})
		worker.end()
		<-worker.ended
		assert.Zero(t, suite.Ready(t, conn, "dead"), "dead letters")
		assert.Len(t, slices.Compact(slices.Sorted(slices.Values(got))), held)
		assert.True(t, slices.IsSorted(got), "%v", got)
	})
}
