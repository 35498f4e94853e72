package cluster

import (
	"context"
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
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/retry"
)

// calls are the calls that run, by worker, without those whose worker has lost its connection since they began.
type calls struct {
	mu      sync.Mutex
	running map[int]map[int]struct{} // messages, by worker
	most    int                      // that ran at once, since it was set to 0
	handled map[int]bool
}

// begin notes a call, and returns how many run.
func (c *calls) begin(worker, message int) (sum int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[worker][message] = struct{}{}
	for _, of := range c.running {
		sum += len(of)
	}
	c.most = max(c.most, sum)
	return sum
}

func (c *calls) end(worker, message int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running[worker], message)
	c.handled[message] = true
}

func (c *calls) lost(worker int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.running[worker])
}

// is reports what yes does, which may read all fields.
func (c *calls) is(yes func() bool) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return yes()
	}
}

// Workers on all nodes share a limit of calls at once, which isn't exceeded when a node is killed. RabbitMQ 4.3 keeps the
// exclusive queues of a node that is down, so the slots of its workers are missing until it is back; the rest is used.
// RabbitMQ 4.0 deletes them; there, one run of four had a call too many for a moment after the kill.
func TestSlotsOfANodeThatIsDownStayTaken(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		const limit, workers, queue = 4, 6, "limited"
		older := strings.HasSuffix(t.Name(), "/4.0")
		operator := connect(t, c, c.Nodes[0])
		topology, err := retry.Topology(retry.Policy{Strategy: retry.StrategyDeadLetter, MaxRetries: 1}, declare.QuorumQueue{Name: queue, DeliveryLimit: 100})
		require.NoError(t, err)
		suite.Apply(t, operator, topology)
		p := suite.Publisher[int](t, operator, address.Queue(queue))
		published := 0
		publish := func(n int) {
			for range n {
				suite.Publish(t, p, published)
				published++
			}
		}
		publish(300)
		running := &calls{running: map[int]map[int]struct{}{}, handled: map[int]bool{}}
		for i := range workers {
			running.running[i] = map[int]struct{}{}
			conn := connect(t, c, c.Nodes[i%len(c.Nodes)], func(cfg *client.Config) {
				cfg.OnEvent = func(e client.Event) {
					if e.Kind == client.EventLost {
						running.lost(i)
					}
				}
			})
			h := client.JSON(func(_ context.Context, n int) error {
				defer running.end(i, n)
				if sum := running.begin(i, n); !older {
					assert.LessOrEqual(t, sum, limit)
				}
				time.Sleep(50 * time.Millisecond) // what a call takes
				return nil
			})
			// One slot at most, so that the node that is killed doesn't have all.
			suite.Consume(t, conn, queue, ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true})(h), client.ConsumerConfig{Concurrency: 1})
		}
		used := func(want int, when string) {
			t.Helper()
			began := time.Now()
			running.is(func() bool { running.most = 0; return true })()
			poll(t, fmt.Sprintf("%d slots are used %s", want, when), running.is(func() bool { return running.most >= want }))
			fmt.Printf("REPORT %s: %d slots are used %s, after %v\n", t.Name(), want, when, time.Since(began).Round(100*time.Millisecond))
		}
		handled := func() {
			t.Helper()
			poll(t, "all messages are handled", running.is(func() bool { return len(running.handled) == published }))
		}
		used(limit, "at first")
		slots := map[*rabbitmq.Node]int{}
		poll(t, "all slots have calls", running.is(func() bool {
			clear(slots)
			n := 0
			for i, of := range running.running {
				slots[c.Nodes[i%len(c.Nodes)]] += len(of)
				n += len(of)
			}
			return n == limit
		}))
		var down *rabbitmq.Node
		for n, has := range slots {
			if has > 0 {
				down = n
			}
		}
		left := limit
		if !older {
			left -= slots[down]
		}
		require.NoError(t, down.Kill(t.Context()))
		publish(300)
		used(left, "while a node is down")
		handled()
		running.is(func() bool { return older || assert.LessOrEqual(t, running.most, left) })()
		require.NoError(t, down.Start(t.Context()))
		require.NoError(t, c.AwaitAll(t.Context()))
		publish(300)
		used(limit, "when it is back")
		handled()
	})
}
