package fair_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

var orders = fair.Queue{Name: "orders", Lanes: 2}

// shop is a fair queue whose handler waits for a gate if the tenant's name begins with "noisy".
type shop struct {
	conn   *client.Conn
	policy retry.Policy
	cfg    fair.Config
	gate   chan struct{}
	fails  func(ctx context.Context, text string) error

	mu      sync.Mutex
	handled map[string]int    // times, by text
	queues  map[string]string // the last queue, by text
	tenants map[string]string // its group-id, by text
	noisy   map[string]bool
}

func newShop(t *testing.T, s *suite.Site, policy retry.Policy) *shop {
	conn, _ := s.Connect(t)
	h := &shop{conn: conn, policy: policy, gate: make(chan struct{}), handled: map[string]int{}, queues: map[string]string{}, tenants: map[string]string{}, noisy: map[string]bool{}}
	h.cfg = fair.Config{Concurrency: 4, Retry: policy, OnNoisy: func(tenant string, noisy bool) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.noisy[tenant] = h.noisy[tenant] || noisy
	}}
	topology, err := orders.Topology(policy, declare.QuorumQueue{})
	require.NoError(t, err)
	suite.Apply(t, conn, topology)
	return h
}

func (h *shop) handle(ctx context.Context, d *client.Delivery) error {
	text := string(d.Message().GetData())
	h.mu.Lock()
	h.queues[text] = d.Queue()
	if p := d.Message().Properties; p != nil && p.GroupID != nil {
		h.tenants[text] = *p.GroupID
	}
	h.mu.Unlock()
	if strings.HasPrefix(text, "noisy") {
		select {
		case <-h.gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if h.fails != nil {
		if err := h.fails(ctx, text); err != nil {
			return err
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handled[text]++
	return nil
}

// work starts a worker on a connection.
func (h *shop) work(t *testing.T, conn *client.Conn) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- fair.Consume(ctx, conn, orders, client.HandlerFunc(h.handle), h.cfg) }()
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

func (h *shop) count(prefix string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for text := range h.handled {
		if strings.HasPrefix(text, prefix) {
			n++
		}
	}
	return n
}

// send publishes n messages of a tenant, whose texts are its name and a number from first on.
func (h *shop) send(t *testing.T, tenant string, first, n int, edit ...func(*client.Message)) {
	p, err := client.NewPublisher[string](t.Context(), h.conn, address.Address{}, client.PublisherConfig{Codec: client.RawCodec{}})
	require.NoError(t, err)
	texts := make([]string, n)
	for i := range texts {
		texts[i] = fmt.Sprintf("%s %d", tenant, first+i)
	}
	to := orders.To(tenant)
	require.NoError(t, p.PublishAll(t.Context(), texts, func(_ string, m *client.Message) {
		to(m)
		for _, e := range edit {
			e(m)
		}
	}))
	require.NoError(t, p.Close(t.Context()))
}

// bound returns the lanes that RabbitMQ routes a tenant's messages to.
func (h *shop) bound(t *testing.T, tenant string) (lanes []int) {
	for i := range orders.Lanes {
		found, err := declare.Bindings(t.Context(), h.conn.Management(), declare.Binding{Source: fmt.Sprint("orders.sort.", i), Queue: fmt.Sprint("orders.bulk.", i), Key: tenant})
		require.NoError(t, err)
		if len(found) > 0 {
			lanes = append(lanes, i)
		}
	}
	return lanes
}

// noise makes a tenant so noisy that it is bound to a lane, while its handlers wait.
func (h *shop) noise(t *testing.T, tenant string, n int) {
	h.send(t, tenant, 0, n)
	for i := n; len(h.bound(t, tenant)) == 0; i++ {
		require.Less(t, i, n+1000, "it isn't bound")
		h.send(t, tenant, i, 1)
	}
}

func newer(t *testing.T, test func(t *testing.T, s *suite.Site)) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if s.Newer() {
			test(t, s)
		}
	})
}

func native() retry.Policy {
	return retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond)}
}

// A noisy tenant's handlers are stuck, and others are handled. Its messages are routed to a lane, and
// to the main queue again when it is quiet.
func TestOthersAreHandledWhileATenantIsStuck(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		h := newShop(t, s, native())
		h.work(t, h.conn)
		other, _ := s.Connect(t)
		h.work(t, other)
		h.noise(t, "noisy", 100)
		for i := range 30 {
			h.send(t, fmt.Sprint("quiet", i), 0, 1)
		}
		suite.Poll(t, "the quiet are handled", func() bool { return h.count("quiet") == 30 })
		assert.Zero(t, h.count("noisy"))
		h.send(t, "noisy", 5000, 10)
		suite.Poll(t, "it is reported", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.noisy["noisy"]
		})
		close(h.gate)
		suite.Poll(t, "the noisy are handled", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			for i := range 10 {
				if h.handled[fmt.Sprint("noisy ", 5000+i)] == 0 {
					return false
				}
			}
			return len(h.handled) >= 140
		})
		suite.Poll(t, "it is unbound", func() bool { return len(h.bound(t, "noisy")) == 0 })
		h.mu.Lock()
		defer h.mu.Unlock()
		for text, n := range h.handled {
			assert.Equal(t, 1, n, text)
			tenant, _, _ := strings.Cut(text, " ")
			assert.Equal(t, tenant, h.tenants[text], "the tenant of %q", text)
			if strings.HasPrefix(text, "quiet") {
				assert.Equal(t, "orders", h.queues[text])
			}
		}
	})
}

// What fails in a lane is retried in it, by each strategy, and keeps its tenant. What isn't retried any
// more is in the one dead-letter queue, and a replay handles it as the same tenant.
func TestRetriesAndDeadLettersOfLanes(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyNative, retry.StrategyRepublish, retry.StrategyAuto} {
			t.Run(string(strategy), func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				policy := native()
				policy.Strategy = strategy
				h := newShop(t, s, policy)
				healed := make(chan struct{})
				h.fails = func(ctx context.Context, text string) error {
					switch {
					case strings.HasSuffix(text, "7") && retry.Attempt(ctx) == 1:
						return errors.New("not yet")
					case strings.HasSuffix(text, "3") && !suite.IsOver(healed):
						return errors.New("never")
					}
					return nil
				}
				h.work(t, h.conn)
				h.noise(t, "noisy", 60)
				h.send(t, "noisy", 5000, 10)
				close(h.gate)
				suite.Poll(t, "all but the failing are handled", func() bool {
					h.mu.Lock()
					defer h.mu.Unlock()
					return h.handled["noisy 5007"] > 0 && h.handled["noisy 5009"] > 0
				})
				dead := 0
				suite.Poll(t, "dead letters", func() bool {
					dead = suite.Ready(t, h.conn, "orders.dead")
					h.mu.Lock()
					defer h.mu.Unlock()
					return dead >= 7 && len(h.queues) == len(h.handled)+dead
				})
				h.mu.Lock()
				assert.Contains(t, h.queues["noisy 5007"], "orders.bulk.")
				assert.Contains(t, h.queues["noisy 5003"], "orders.bulk.")
				h.mu.Unlock()
				close(healed)
				report, err := suite.NewDesk(t, s, h.conn).Replay(suite.Within(t), desk.ReplayConfig{Queue: "orders.dead", All: true, Accept: []desk.WarningCode{desk.WarningLimit}})
				require.NoError(t, err)
				assert.EqualValues(t, dead, report.Replayed)
				suite.Poll(t, "the replayed are handled", func() bool {
					h.mu.Lock()
					defer h.mu.Unlock()
					return len(h.handled) == len(h.queues)
				})
				h.mu.Lock()
				defer h.mu.Unlock()
				for text, n := range h.handled {
					assert.Equal(t, 1, n, text)
					assert.Equal(t, "noisy", h.tenants[text], text)
				}
				assert.Zero(t, suite.Ready(t, h.conn, "parking_queue"))
			})
		}
	})
}

// A message without a group-id keeps its tenant on its way through a lane, a retry, and a replay.
func TestATenantIsKeptWithoutAGroupID(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		policy := native()
		policy.Strategy = retry.StrategyRepublish
		h := newShop(t, s, policy)
		var mu sync.Mutex
		weighed := map[string]bool{}
		h.cfg.Weight = func(tenant string) int {
			mu.Lock()
			defer mu.Unlock()
			weighed[tenant] = true
			return 1
		}
		h.fails = func(ctx context.Context, text string) error {
			if retry.Attempt(ctx) < 3 {
				return errors.New("not yet")
			}
			return nil
		}
		close(h.gate)
		h.send(t, "noisy", 0, 200, func(m *client.Message) { m.Properties.GroupID = nil })
		h.work(t, h.conn)
		suite.Poll(t, "all are handled", func() bool { return h.count("noisy") == 200 })
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(t, map[string]bool{"noisy": true}, weighed)
	})
}

// A queue that another team binds to the exchange that it knows gets copies, before and while a tenant
// is bound to a lane, and takes nothing. verify and doctor are content with that, and report a queue that is
// bound to an exchange behind it.
func TestAForeignBindingTakesNothingFromAFairQueue(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		h := newShop(t, s, native())
		const quiet, more = 20, 10
		suite.Apply(t, h.conn, declare.Topology{
			Queues:   []declare.Queue{declare.QuorumQueue{Name: "audit", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "orders.in", Queue: "audit"}},
		})
		h.work(t, h.conn)
		for i := range quiet {
			h.send(t, fmt.Sprint("quiet", i), 0, 1)
		}
		h.noise(t, "noisy", 100)
		h.send(t, "noisy", 5000, more)
		close(h.gate)
		suite.Poll(t, "all are handled", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return len(h.handled) >= quiet+100+more && h.handled[fmt.Sprint("noisy ", 5000+more-1)] > 0
		})
		suite.Poll(t, "the audit queue has a copy of each", func() bool {
			return suite.Ready(t, h.conn, "audit") == h.count("")
		})
		topology, err := orders.Topology(h.policy, declare.QuorumQueue{})
		require.NoError(t, err)
		verified := func() (found []string) {
			v, err := suite.Verified(t.Context(), s.Sources(t, h.conn), topology)
			require.NoError(t, err)
			for _, f := range v.Findings {
				found = append(found, f.Rule+" "+f.Resource.Name)
			}
			return found
		}
		assert.Empty(t, verified())
		suite.Apply(t, h.conn, declare.Topology{Bindings: []declare.Binding{{Source: "orders.sort.1", Queue: "audit", Key: "acme"}}})
		assert.Equal(t, []string{"foreign-binding orders.sort.1"}, verified())
	})
}

// Workers die while they move and handle a noisy tenant's messages. Nothing is lost.
func TestNothingIsLostWhenWorkersDie(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		const n, deaths = 3000, 5
		policy := native()
		policy.MaxRetries = 2 * deaths // RabbitMQ counts deliveries to workers that die, too
		h := newShop(t, s, policy)
		close(h.gate)
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for i := range 10 {
				h.send(t, fmt.Sprint("noisy", i%2), i*n/10, n/10)
			}
		}()
		for i := range deaths {
			var mu sync.Mutex
			var conns []net.Conn
			dead := false
			conn, _ := s.Connect(t, func(c *client.Config) {
				dial := c.Dial
				if dial == nil {
					dial = (&net.Dialer{}).DialContext
				}
				c.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
					conn, err := dial(ctx, network, to)
					mu.Lock()
					defer mu.Unlock()
					if dead && err == nil {
						_ = conn.Close()
						return nil, errors.New("dead")
					}
					conns = append(conns, conn)
					return conn, err
				}
			})
			h.work(t, conn)
			suite.Poll(t, "some are handled", func() bool { return h.count("noisy") >= (i+1)*n/20 })
			mu.Lock()
			dead = true
			for _, c := range conns {
				_ = c.Close()
			}
			mu.Unlock()
		}
		h.work(t, h.conn)
		suite.Await(t, sent, "the publisher's end")
		suite.Poll(t, "all are handled", func() bool { return h.count("noisy") == n })
		assert.Zero(t, suite.Ready(t, h.conn, "orders.dead"))
	})
}

// Two workers have bound a tenant to different lanes at the same time. Each message comes once, and both
// bindings go when the tenant is quiet.
func TestATenantBoundToTwoLanes(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		h := newShop(t, s, native())
		for i := range 2 {
			suite.Apply(t, h.conn, declare.Topology{Bindings: []declare.Binding{{Source: fmt.Sprint("orders.sort.", i), Queue: fmt.Sprint("orders.bulk.", i), Key: "noisy"}}})
		}
		h.send(t, "noisy", 0, 50)
		assert.Equal(t, 50, suite.Ready(t, h.conn, "orders.bulk.0"))
		assert.Zero(t, suite.Ready(t, h.conn, "orders.bulk.1")+suite.Ready(t, h.conn, "orders"))
		close(h.gate)
		h.work(t, h.conn)
		suite.Poll(t, "all are handled", func() bool { return h.count("noisy") == 50 })
		suite.Poll(t, "it is unbound", func() bool { return len(h.bound(t, "noisy")) == 0 })
	})
}

// Names that no tenant should have harm nobody.
func TestHostileTenants(t *testing.T) {
	newer(t, func(t *testing.T, s *suite.Site) {
		h := newShop(t, s, native())
		close(h.gate)
		peer := s.Peer(t)
		text := func(key string, n int) *amqp.Message {
			m := amqp.NewMessage([]byte(fmt.Sprintf("x%d %d", len(key), n)))
			m.Properties = &amqp.MessageProperties{GroupID: &key}
			return m
		}
		keys := []string{"", strings.Repeat("long", 500), "#", "*.*", "a/b%c d", "\x00\x01", "orders", "日本"}
		for _, key := range keys {
			for n := range 100 {
				peer.Send(address.Queue("orders"), text(key, n))
			}
			if len(key) <= 255 && !strings.Contains(key, "\x00") {
				h.send(t, key, 0, 100)
			}
		}
		h.work(t, h.conn)
		suite.Poll(t, "nothing waits", func() bool {
			return !slices.ContainsFunc(orders.Queues(), func(q string) bool { return suite.Ready(t, h.conn, q) > 0 })
		})
		suite.Poll(t, "all are handled", func() bool { return h.count("") > 1000 })
		h.send(t, "quiet", 0, 1)
		suite.Poll(t, "the quiet one is handled", func() bool { return h.count("quiet") == 1 })
		assert.Zero(t, suite.Ready(t, h.conn, "orders.dead"))

		p, err := client.NewPublisher[string](t.Context(), h.conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		for _, bad := range []string{"\xff\xfe", strings.Repeat("x", 256)} {
			require.ErrorAs(t, p.Publish(t.Context(), "x", orders.To(bad)), new(*argument.Error))
		}
	})
}

// An older broker, and a queue with other lanes, are refused.
func TestRefusals(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		if !s.Newer() {
			err := fair.Consume(t.Context(), conn, orders, h, fair.Config{})
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later")
			return
		}
		require.ErrorIs(t, fair.Consume(t.Context(), conn, orders, h, fair.Config{}), declare.ErrNotFound)
		newShop(t, s, native())
		err := fair.Consume(t.Context(), conn, fair.Queue{Name: "orders", Lanes: 3}, h, fair.Config{})
		require.ErrorAs(t, err, new(*argument.Error))
		topology, err := fair.Queue{Name: "orders", Lanes: 3}.Topology(native(), declare.QuorumQueue{})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict)
	})
}

// Two users, two teams, two connections: what a lane's copy keeps, and what a worker needs to be
// permitted. Without the permission to bind, messages are moved one by one.
func TestFairQueuesInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		if !m.AllNewer() {
			return nil
		}
		return func(t *testing.T, p *suite.Place) {
			q := fair.Queue{Name: p.Queue + "-fair", Lanes: 2}
			policy := m.Tuned(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)})
			topology, err := q.Topology(policy, declare.QuorumQueue{})
			require.NoError(t, err)
			suite.Apply(t, p.Owner, topology)
			conn, sign := p.AsPublisher(t)
			publisher := suite.PublisherOf(t, conn, address.Address{})
			for i := range 100 {
				suite.Publish(t, publisher, fmt.Sprint(i), sign, q.To("noisy"))
			}
			moved := make(chan bool, 200)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			worker := p.As(t, "^$", `^amq\.default$|^retry_exchange$`, "^"+q.Name)
			go func() {
				done <- fair.Consume(ctx, worker, q, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					p.KeepsUser(t, d.Message())
					time.Sleep(time.Millisecond)
					moved <- d.Queue() != q.Name
					return nil
				}), fair.Config{Retry: policy, Concurrency: 2})
			}()
			n := 0
			for range 100 {
				if suite.Await(t, moved, "a message") {
					n++
				}
			}
			assert.Positive(t, n, "moved")
			cancel()
			require.NoError(t, <-done)
			for _, queue := range append(q.Queues(), q.Name+".dead") {
				suite.AssertEmpty(t, p.Site, queue)
			}
		}
	})
}
