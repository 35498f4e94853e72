package consume_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// contenders are consumers of one queue with a single active consumer, by name, each on a separate
// connection.
type contenders struct {
	t     *testing.T
	s     *suite.Site
	queue string
	peers map[string]*watchedPeer
	links map[string]*amqp.Receiver
}

// watchedPeer is a peer whose flow frames are seen: IssueCredit returns before its frame is sent.
type watchedPeer struct {
	*suite.Peer
	flowed chan struct{}
}

func newContenders(t *testing.T, s *suite.Site, conn *client.Conn, queue string) *contenders {
	t.Helper()
	suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: queue, SingleActiveConsumer: true, DeliveryLimit: declare.Unlimited}))
	return &contenders{t, s, queue, map[string]*watchedPeer{}, map[string]*amqp.Receiver{}}
}

func (w *contenders) peer(name string) *watchedPeer {
	w.t.Helper()
	if w.peers[name] == nil {
		p := &watchedPeer{flowed: make(chan struct{}, 100)}
		through := suite.Dropping(w.t, w.s.Host(), func(code byte) bool {
			if code == 0x13 {
				p.flowed <- struct{}{}
			}
			return false
		})
		p.Peer = w.s.PeerAt(w.t, w.s.AMQPURLWith(func(u *url.URL) { u.Host = through }))
		w.peers[name] = p
	}
	return w.peers[name]
}

// attach attaches a consumer, with that priority unless it is nil.
func (w *contenders) attach(name string, credit uint32, priority any) {
	w.t.Helper()
	o := &amqp.ReceiverOptions{Credit: -1}
	if priority != nil {
		o.Properties = map[string]any{"rabbitmq:priority": priority}
	}
	source, err := address.Queue(w.queue).Build()
	require.NoError(w.t, err)
	p := w.peer(name)
	session := p.Site
	r, err := session.NewReceiver(suite.Within(w.t), source, o)
	require.NoError(w.t, err)
	require.NoError(w.t, r.IssueCredit(credit))
	w.links[name] = r
	suite.Await(w.t, p.flowed, "the credit is sent")
	// The session handles frames in order, so it has passed the credit on when this is answered.
	l, err := session.NewSender(suite.Within(w.t), source, nil)
	require.NoError(w.t, err)
	require.NoError(w.t, l.Close(suite.Within(w.t)))
}

func (w *contenders) detach(name string) {
	w.t.Helper()
	require.NoError(w.t, w.links[name].Close(suite.Within(w.t)))
	delete(w.links, name)
}

// disconnect closes the connection of a consumer.
func (w *contenders) disconnect(name string) {
	w.t.Helper()
	require.NoError(w.t, w.peers[name].Conn.Close())
	delete(w.peers, name)
	delete(w.links, name)
}

// publish publishes messages with these bodies.
func (w *contenders) publish(bodies ...string) {
	w.t.Helper()
	for _, b := range bodies {
		w.s.Peer(w.t).Put(w.queue, amqp.NewMessage([]byte(b)))
	}
}

// next returns the body of the next message of a consumer, and leaves it unsettled.
func (w *contenders) next(name string) string {
	w.t.Helper()
	return string(w.peers[name].Next(w.links[name]).GetData())
}

// active publishes a message, and returns which consumer gets it.
func (w *contenders) active() string {
	w.t.Helper()
	w.publish("m")
	ctx, cancel := context.WithTimeout(w.t.Context(), suite.Patience)
	defer cancel()
	got := make(chan string, len(w.links))
	for name, r := range w.links {
		go func() {
			m, err := r.Receive(ctx, nil)
			if err != nil || r.AcceptMessage(context.WithoutCancel(ctx), m) != nil {
				name = ""
			}
			got <- name
		}()
	}
	name := <-got
	cancel()
	for range len(w.links) - 1 {
		assert.Empty(w.t, <-got, "only one gets it")
	}
	return name
}

// The first to attach is active until it leaves. Then the one of the highest priority follows, of
// those the one with the most credit, and of those the one that attached first. One that attaches
// again is behind all that are as good. One of a higher priority takes over at once from one that
// holds nothing.
func TestWhoIsTheSingleActiveConsumer(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		w := newContenders(t, s, conn, "orders")
		w.attach("a", 20, nil)
		w.attach("b", 20, nil)
		w.attach("c", 20, nil)
		w.attach("d", 30, nil)
		w.attach("low", 90, int32(-1))
		assert.Equal(t, "a", w.active())
		w.detach("a")
		w.attach("a", 20, nil)
		assert.Equal(t, "d", w.active(), "it has the most credit")
		w.disconnect("d")
		assert.Equal(t, "b", w.active())
		w.detach("b")
		w.attach("b", 20, nil)
		assert.Equal(t, "c", w.active())
		w.disconnect("c")
		assert.Equal(t, "a", w.active(), "it has attached again before b")
		w.attach("high", 20, int32(1))
		assert.Equal(t, "high", w.active())
		w.detach("high")
		w.disconnect("a")
		w.disconnect("b")
		assert.Equal(t, "low", w.active())
	})
}

// Equal priorities don't spread queues over consumers: all have the same active one, and when that
// is gone, the same one follows.
func TestSingleActiveConsumersDoNotSpread(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		var all []*contenders
		peers := map[string]*watchedPeer{}
		for i := range 6 {
			w := newContenders(t, s, conn, fmt.Sprint("orders.", i))
			w.peers = peers
			all = append(all, w)
		}
		for _, name := range []string{"a", "b", "c"} {
			for _, w := range all {
				w.attach(name, 10, nil)
			}
		}
		for _, gone := range []string{"a", "b"} {
			for _, w := range all {
				assert.Equal(t, gone, w.active())
			}
			require.NoError(t, peers[gone].Conn.Close())
			for _, w := range all {
				delete(w.links, gone)
			}
		}
		for _, w := range all {
			assert.Equal(t, "c", w.active())
		}
	})
}

// An int is a priority. Of another type, the broker ignores it without an error.
func TestOnlyAnIntIsAPriority(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for _, c := range []struct {
			priority any
			counts   bool
		}{{int32(5), true}, {uint32(5), false}, {int64(5), false}, {uint64(5), false}, {int16(5), false}, {uint8(5), false}, {"5", false}, {true, false}} {
			w := newContenders(t, s, conn, fmt.Sprintf("orders.%T", c.priority))
			w.attach("first", 10, nil)
			w.attach("better", 10, c.priority)
			assert.Equal(t, map[bool]string{true: "better", false: "first"}[c.counts], w.active(), "%T", c.priority)
		}
	})
}

// What a consumer held when its connection ended is appended to what was returned before. So the
// order holds only if each consumer takes at least as much at once as the one before it held.
func TestOrderBehindALostSingleActiveConsumer(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for name, c := range map[string]struct {
			credit uint32 // of the second consumer
			want   string
		}{
			"smaller": {2, "[3 4 5 1 2 6 7 8]"},
			"same":    {5, "[1 2 3 4 5 6 7 8]"},
			"larger":  {7, "[1 2 3 4 5 6 7 8]"},
		} {
			w := newContenders(t, s, conn, "orders."+name)
			w.publish("1", "2", "3", "4", "5", "6", "7", "8")
			w.attach("a", 5, nil)
			for range 5 {
				w.next("a")
			}
			w.attach("b", c.credit, nil)
			w.disconnect("a")
			for i := range c.credit {
				assert.Equal(t, fmt.Sprint(i+1), w.next("b"))
			}
			w.attach("c", 20, nil)
			w.disconnect("b")
			var got []string
			for range 8 {
				got = append(got, w.next("c"))
			}
			assert.Equal(t, c.want, fmt.Sprint(got), name)
		}
	})
}

// With the same priority, no way of leaving leaves anything behind. If one of a higher priority
// waits while the active consumer holds messages, and this one goes, RabbitMQ 4.3 keeps a ghost of
// it: once no better consumer is left, the ghost is active, and the queue is stuck.
func TestWhatASingleActiveConsumerLeavesBehind(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for name, leave := range map[string]func(w *contenders){
			"detach": func(w *contenders) { w.detach("a") },
			"session": func(w *contenders) {
				require.NoError(t, w.peers["a"].Site.Close(suite.Within(t)))
				delete(w.links, "a")
			},
			"connection": func(w *contenders) { w.disconnect("a") },
		} {
			for _, priority := range []int32{0, 1} {
				w := newContenders(t, s, conn, fmt.Sprint("orders.", name, priority))
				w.publish("1", "2")
				w.attach("a", 30, nil)
				w.next("a")
				w.next("a")
				w.attach("b", 10, priority)
				leave(w)
				assert.Equal(t, "1", w.next("b"))
				assert.Equal(t, "2", w.next("b"))
				w.attach("c", 10, nil)
				w.detach("b")
				require.NoError(t, w.links["c"].DrainCredit(suite.Within(t), nil))
				for n := range 2 {
					m := w.links["c"].Prefetched()
					if s.Newer() && priority > 0 {
						assert.Nil(t, m, "the ghost is the active one")
					} else if assert.NotNil(t, m, "%s, priority %d", name, priority) {
						assert.Equal(t, fmt.Sprint(n+1), string(m.GetData()))
					}
				}
			}
		}
	})
}

// Workers of a queue with a single active consumer are lost one after the other, each with its
// whole window in hand. With the same Prefetch and NoIsolation, no handler begins a message before
// all earlier ones were completed.
func TestAFixedWindowKeepsTheOrderWhenWorkersAreLost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, workers, each, window = 60, 8, 3, 20
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", SingleActiveConsumer: true, DeliveryLimit: declare.Unlimited}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		var mu sync.Mutex
		next := 0 // the first that no handler has completed
		handle := func(o suite.Order) (completed int) {
			mu.Lock()
			defer mu.Unlock()
			assert.LessOrEqual(t, o.ID, next, "%d has begun before %d was completed", o.ID, next)
			next = max(next, o.ID+1)
			return next
		}
		cfg := client.ConsumerConfig{Prefetch: window, NoIsolation: true}
		for range workers {
			wire, through := s.Through(t)
			worker, _ := suite.ConnectTo(t, through, suite.Soon)
			lost := make(chan struct{})
			n, left := 0, make(chan struct{}, messages)
			suite.Consume(t, worker, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
				if n++; n > each {
					left <- struct{}{}
					<-lost
					return errors.New("the process is gone")
				}
				handle(o)
				return nil
			}), cfg)
			suite.Await(t, left, "the worker has handled some")
			suite.Poll(t, "it holds its window", func() bool {
				c := worker.Stats().Consumers
				return len(c) == 1 && c[0].Unsettled >= window/2
			})
			wire.Refuse()
			wire.Cut()
			close(lost)
		}
		done := make(chan struct{})
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error {
			if handle(o) == messages {
				close(done)
			}
			return nil
		}), cfg)
		suite.Await(t, done, "all are handled")
	})
}
