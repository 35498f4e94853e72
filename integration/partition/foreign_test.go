package partition

import (
	"context"
	"errors"
	"fmt"

	"net/http"
	"slices"
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
	"github.com/hopback/hopback/retry"
)

// crowd is the workers of several generations, and counts the messages that each has handled.
type crowd struct {
	t    *testing.T
	site *suite.Site
	conn *client.Conn

	mu      sync.Mutex
	handled map[int]map[string]int // generation → text → times
	block   func(generation int, text string) error
	blocked string   // a text that isn't handled yet
	early   []string // later texts of its key that were handled before it
}

func newCrowd(t *testing.T, s *suite.Site) *crowd {
	conn, _ := s.Connect(t)
	return &crowd{t: t, site: s, conn: conn, handled: map[int]map[string]int{}}
}

// start starts a worker, and returns how to stop it.
func (c *crowd) start(g partition.Group) (stop func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	done := make(chan error, 1)
	generation := max(g.Generation, 1)
	go func() {
		done <- partition.Consume(ctx, c.conn, g, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			text := strings.Trim(string(d.Message().GetData()), "\"") // JSON
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.block != nil {
				if err := c.block(generation, text); err != nil {
					return err
				}
			}
			if text == c.blocked {
				c.blocked = ""
			}
			if key, _ := d.Annotation("x-routing-key").(string); key == "key0" && c.blocked != "" {
				c.early = append(c.early, text)
			}
			if c.handled[generation] == nil {
				c.handled[generation] = map[string]int{}
			}
			c.handled[generation][text]++
			return nil
		}), partition.Config{Retry: retry.Policy{Backoff: retry.Exponential(time.Second, 1), MaxRetries: 1000}})
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			assert.NoError(c.t, <-done)
		})
	}
	c.t.Cleanup(stop)
	return stop
}

// publish publishes messages with 50 keys, and returns their texts.
func (c *crowd) publish(g partition.Group, prefix string, n int) []string {
	c.t.Helper()
	p, err := client.NewPublisher[string](c.t.Context(), c.conn, address.Address{}, client.PublisherConfig{})
	require.NoError(c.t, err)
	defer func() { assert.NoError(c.t, p.Close(context.Background())) }()
	var texts []string
	for i := range n {
		text := fmt.Sprintf("%s-%d", prefix, i)
		texts = append(texts, text)
		require.NoError(c.t, p.Publish(c.t.Context(), text, client.PublishTo(g.Address(fmt.Sprint("key", i%50)))))
	}
	return texts
}

// anyOf stands for all generations.
const anyOf = 0

// times counts the texts that a generation has handled: how many of them, and how often in all.
func (c *crowd) times(generation int, texts []string) (messages, times int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, text := range texts {
		n := c.handled[generation][text]
		for _, handled := range c.handled {
			if generation == anyOf {
				n += handled[text]
			}
		}
		if n > 0 {
			messages++
			times += n
		}
	}
	return messages, times
}

// await waits until a generation has handled all texts.
func (c *crowd) await(generation int, texts []string, why string) {
	c.t.Helper()
	if !assert.Eventually(c.t, func() bool { n, _ := c.times(generation, texts); return n == len(texts) }, 2*time.Minute, 20*time.Millisecond, why) {
		n, _ := c.times(generation, texts)
		c.t.Fatalf("%s: generation %d has handled %d of %d", why, generation, n, len(texts))
	}
}

// bind binds a queue of another team to an exchange.
func (c *crowd) bind(queue, exchange string) {
	c.t.Helper()
	suite.Apply(c.t, c.conn, declare.Topology{
		Queues:   []declare.Queue{declare.QuorumQueue{Name: queue, DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: exchange, Queue: queue}},
	})
}

func (c *crowd) messages(queue string) int {
	c.t.Helper()
	info, err := declare.Inspect(c.t.Context(), c.conn.Management(), queue)
	require.NoError(c.t, err)
	return int(info.Messages)
}

func (c *crowd) reshard(from, to partition.Group) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	defer cancel()
	require.NoError(c.t, partition.Reshard(ctx, c.conn, from, to, partition.ReshardConfig{Late: 100 * time.Millisecond}))
}

func (c *crowd) apply(g partition.Group) { suite.ApplyGroup(c.t, c.conn, g, declare.QuorumQueue{}) }

// applyOld applies the topology that versions without the exchange Name.now had: the next generation
// is reached by the alternate exchange.
func (c *crowd) applyOld(g partition.Group) {
	topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
	require.NoError(c.t, err)
	now := g.Name + ".now"
	topology.Exchanges = slices.DeleteFunc(topology.Exchanges, func(x declare.Exchange) bool { return x.Name == now })
	topology.Bindings = slices.DeleteFunc(topology.Bindings, func(b declare.Binding) bool { return b.Source == now || b.Exchange == now })
	if g.Generation < 2 {
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: g.Name, Exchange: g.Name + ".1"})
	}
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	suite.Apply(c.t, c.conn, topology)
}

// reshardOld does what Reshard did before Name.now existed, for a group whose queues are empty.
func (c *crowd) reshardOld(from, to partition.Group) {
	name := fmt.Sprintf("%s.%d", from.Name, max(from.Generation, 1))
	require.NoError(c.t, declare.DeleteExchange(c.t.Context(), c.conn.Management(), name))
	suite.Apply(c.t, c.conn, declare.Topology{
		Exchanges: []declare.Exchange{{Name: name, Type: declare.ExchangeHeaders}},
		Queues:    []declare.Queue{declare.QuorumQueue{Name: fmt.Sprintf("%s.%d.opened", to.Name, to.Generation), DeadLetter: declare.Drop()}},
	})
}

// export returns the definitions of the virtual host, and restore imports them, as load_definitions
// does when a broker starts.
func (c *crowd) export() map[string]any {
	var all map[string]any
	c.site.HTTP(c.t, http.MethodGet, "/definitions/"+c.site.VHost, nil, &all)
	return all
}

func (c *crowd) restore(definitions map[string]any) {
	c.site.HTTP(c.t, http.MethodPost, "/definitions/"+c.site.VHost, definitions, nil)
}

func first(name string) (from, to partition.Group) {
	return partition.Group{Name: name, Partitions: 4}, partition.Group{Name: name, Partitions: 6, Generation: 2}
}

// A queue that another team binds to the exchange that publishers use gets copies, whether it is
// bound before a Reshard, during it, or afterwards. The group gets every message.
func TestAForeignBindingTakesNothingFromAGroup(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		for _, old := range []bool{false, true} {
			c := newCrowd(t, s)
			from, to := first(fmt.Sprint("orders-", old))
			apply := c.apply
			if old {
				apply = c.applyOld
			}
			apply(from)
			stop := c.start(from)
			c.bind("before-"+from.Name, from.Name)
			c.await(1, c.publish(from, "one", 100), "generation 1")
			apply(to)
			c.start(to)
			c.reshard(from, to)
			stop()
			c.bind("after-"+from.Name, from.Name)
			two := c.publish(from, "two", 200)
			c.await(2, two, "after a Reshard")
			_, times := c.times(2, two)
			assert.Equal(t, 200, times)
			n, _ := c.times(1, two)
			assert.Zero(t, n)
			assert.Equal(t, 300, c.messages("before-"+from.Name), "copies")
			assert.Equal(t, 200, c.messages("after-"+from.Name), "copies")

			third := partition.Group{Name: from.Name, Partitions: 3, Generation: 3}
			apply(third)
			c.start(third)
			c.reshard(to, third)
			c.await(3, c.publish(from, "three", 100), "after two Reshards")
		}
	})
}

// An exchange of the type x-modulus-hash also leads to exchanges. While it has two bindings, it
// routes each message by one of them, always the same for a key.
func TestModulusHashLeadsToExchanges(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		c := newCrowd(t, s)
		topology := declare.Topology{Exchanges: []declare.Exchange{{Name: "now", Type: declare.ExchangeModulusHash}}}
		for _, name := range []string{"a", "b"} {
			topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: name, Type: declare.ExchangeFanout})
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()})
			topology.Bindings = append(topology.Bindings, declare.Binding{Source: name, Queue: name}, declare.Binding{Source: "now", Exchange: name})
		}
		suite.Apply(t, c.conn, topology)
		g := partition.Group{Name: "now", Partitions: 1}
		c.publish(g, "both", 100)
		a, b := c.messages("a"), c.messages("b")
		assert.Equal(t, 100, a+b)
		assert.NotZero(t, a)
		assert.NotZero(t, b)
		c.publish(g, "again", 100)
		assert.Equal(t, []int{2 * a, 2 * b}, []int{c.messages("a"), c.messages("b")})
		require.NoError(t, declare.DeleteBinding(t.Context(), c.conn.Management(), declare.Binding{Source: "now", Exchange: "a"}))
		c.publish(g, "one", 100)
		assert.Equal(t, []int{2 * a, 2*b + 100}, []int{c.messages("a"), c.messages("b")})
	})
}

// While a key is blocked in the old generation, Reshard opens the new one for all other keys. It can
// be canceled and called again, and ends when the key isn't blocked any more. Then the key's later
// messages are handled.
func TestReshardDoesNotWaitForABlockedKey(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		c := newCrowd(t, s)
		from, to := first("orders")
		c.apply(from)
		blocked := c.publish(from, "one", 1)[0] // of the first key
		c.blocked = blocked
		stuck, free := make(chan struct{}), make(chan struct{})
		var once sync.Once
		c.block = func(generation int, text string) error {
			if text != blocked {
				return nil
			}
			once.Do(func() { close(stuck) })
			select {
			case <-free:
				return nil
			default:
				return errors.New("busy")
			}
		}
		c.start(from)
		<-stuck
		c.await(1, c.publish(from, "before", 100)[1:50], "other keys in the old generation")
		c.apply(to)
		c.start(to)
		c.start(to)
		reshard := func(ctx context.Context) chan error {
			done := make(chan error, 1)
			go func() {
				done <- partition.Reshard(ctx, c.conn, from, to, partition.ReshardConfig{Late: 100 * time.Millisecond})
			}()
			return done
		}
		for round := range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			done := reshard(ctx)
			texts := c.publish(from, fmt.Sprint("during", round), 100)
			others := slices.Concat(texts[1:50], texts[51:])
			if round < 2 {
				c.await(anyOf, others, "other keys")
			}
			n, _ := c.times(anyOf, []string{texts[0], texts[50]})
			assert.Zero(t, n, "the blocked key waits")
			if round == 2 {
				close(free)
				require.NoError(t, <-done)
				c.await(anyOf, texts, "all keys")
				cancel()
				break
			}
			cancel()
			require.ErrorIs(t, <-done, context.Canceled)
			now, next, err := partition.Find(t.Context(), c.conn, "orders")
			require.NoError(t, err)
			assert.Equal(t, []int{1, 2}, []int{now.Generation, next.Generation}, "it isn't finished")
		}
		for round := range 3 {
			var texts []string
			for i := range 100 {
				texts = append(texts, fmt.Sprintf("during%d-%d", round, i))
			}
			c.await(anyOf, texts, "all keys")
			_, times := c.times(anyOf, texts)
			assert.Equal(t, 100, times)
		}
		n, _ := c.times(1, []string{blocked, "before-0", "before-50"})
		assert.Equal(t, 3, n)
		c.mu.Lock()
		defer c.mu.Unlock()
		assert.Empty(t, c.early, "handled before an earlier message of the key")
	})
}

// Definitions that were exported before a Reshard are imported afterwards, as load_definitions does
// when a broker starts. Messages still reach the new generation, once each. What the import brings back
// is removed, and if the old queues got messages, they are moved.
func TestAGroupSurvivesOldDefinitions(t *testing.T) {
	for name, old := range map[string]bool{"now": false, "before": true} {
		t.Run(name, func(t *testing.T) {
			suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
				if !s.Newer() {
					return
				}
				c := newCrowd(t, s)
				from, to := first("orders")
				apply := c.apply
				if old {
					apply = c.applyOld
				}
				apply(from)
				exported := c.export()
				stop := c.start(from)
				apply(to)
				leave := c.start(to)
				c.reshard(from, to)
				c.restore(exported)
				one := c.publish(from, "old workers still run", 100)
				c.await(2, one, "after the import")
				n, times := c.times(2, one)
				assert.Equal(t, []int{100, 100}, []int{n, times})
				n, _ = c.times(1, one)
				assert.Zero(t, n)

				// The old queues were deleted, and come back.
				stop()
				leave()
				c.delete(from.Queues()...)
				c.restore(exported)
				two := c.publish(from, "old workers are gone", 100)
				c.start(to)
				c.await(2, two, "after another import")
				_, times = c.times(2, two)
				assert.Equal(t, 100, times)
				c.unbound(from)
			})
		})
	}
}

// Everything that Reshard left behind is deleted before old definitions are imported, so half of the
// messages reach the old queues. The next worker moves them, and repairs the routes. The same goes for
// a group that was resharded before Name.now existed, where all of them do.
func TestMessagesInOldQueuesAreMoved(t *testing.T) {
	for name, old := range map[string]bool{"now": false, "before": true} {
		t.Run(name, func(t *testing.T) {
			suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
				if !s.Newer() {
					return
				}
				c := newCrowd(t, s)
				from, to := first("orders")
				if old {
					c.applyOld(from)
					exported := c.export()
					c.applyOld(to)
					c.reshardOld(from, to)
					c.restore(exported)
				} else {
					c.apply(from)
					exported := c.export()
					stop := c.start(from)
					c.apply(to)
					leave := c.start(to)
					c.reshard(from, to)
					stop()
					leave()
					c.delete(from.Queues()...)
					require.NoError(t, declare.DeleteExchange(t.Context(), c.conn.Management(), "orders.1"))
					c.restore(exported)
				}
				texts := c.publish(from, "text", 100)
				waiting := 0
				for _, q := range from.Queues() {
					waiting += c.messages(q)
				}
				t.Log(waiting, "in old queues")
				assert.NotZero(t, waiting)
				states, err := partition.Inspect(t.Context(), c.conn, to)
				require.NoError(t, err)
				found := 0
				for _, s := range states {
					if s.Generation == 1 {
						found += int(s.Waiting)
					}
				}
				assert.Equal(t, waiting, found, "Inspect shows them")
				c.start(to)
				c.await(2, texts, "moved")
				c.unbound(from)
				c.await(2, c.publish(from, "later", 100), "the routes are repaired")
				_, times := c.times(2, texts)
				if !old {
					assert.Equal(t, 100, times)
				}
			})
		})
	}
}

// unbound waits until nothing leads to the queues of a generation.
func (c *crowd) unbound(g partition.Group) {
	c.t.Helper()
	assert.EventuallyWithT(c.t, func(t *assert.CollectT) {
		for _, b := range []declare.Binding{
			{Source: g.Name, Exchange: g.Name + ".1"}, {Source: g.Name + ".now", Exchange: g.Name + ".1"}, {Source: g.Name + ".1", Queue: g.Queues()[0]},
		} {
			found, err := declare.Bindings(c.t.Context(), c.conn.Management(), b)
			assert.NoError(t, err)
			assert.Empty(t, found)
		}
	}, 2*time.Minute, 100*time.Millisecond)
}

func (c *crowd) delete(queues ...string) {
	for _, q := range queues {
		_, err := declare.DeleteQueue(c.t.Context(), c.conn.Management(), q)
		require.NoError(c.t, err)
	}
}
