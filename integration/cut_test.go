package integration

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/proxy"
	"github.com/hopback/hopback/retry"
)

// through starts a proxy to the broker, and returns the URL that leads through it.
func (s *site) through(t *testing.T) (*proxy.Proxy, string) {
	t.Helper()
	p, err := proxy.New(s.host())
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p, s.urlOf(func(u *url.URL) { u.Host = p.Addr() })
}

func soon(c *client.Config) {
	c.Reconnect = client.ReconnectBackoff{Min: 10 * time.Millisecond, Max: 200 * time.Millisecond}
}

// Every message that the broker has accepted is handled, or lies in the
// dead-letter queue, however often and wherever the connections are cut.
func TestNoMessageIsLostWhileConnectionsAreCut(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages, cuts, publishers = 2000, 50, 20
		dead := func(id int) bool { return id%10 == 0 } // given up at once
		began := time.Now()
		seed := uint64(began.UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))

		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.connect(t)
		applyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
		wire, through := s.through(t)
		publishing, _ := connectTo(t, through, soon)
		consuming, log := connectTo(t, through, soon)

		// progress is told of every publish and every attempt, so that the cuts come
		// amid the work, and not by the clock.
		progress := make(chan struct{}, 100_000)
		var handled, deadLettered tallyByID
		consume(t, consuming, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o order) error {
			progress <- struct{}{}
			d, _ := client.DeliveryFrom(ctx)
			switch {
			case dead(o.ID):
				return retry.Permanent(errors.New("never"))
			case retry.Count(d.Message()) == 0:
				return errors.New("not yet")
			}
			handled.add(o.ID)
			return nil
		})), client.ConsumerConfig{Concurrency: 8})
		consume(t, direct, "orders.dead", client.JSON(func(_ context.Context, o order) error {
			deadLettered.add(o.ID)
			return nil
		}), client.ConsumerConfig{})

		p := publisher[order](t, publishing, address.Queue("orders"))
		ids := make(chan int)
		var unknown, again atomic.Int64
		var published sync.WaitGroup
		for range publishers {
			published.Go(func() {
				for id := range ids {
					ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
					for {
						err := p.Publish(ctx, order{ID: id})
						progress <- struct{}{}
						if err == nil {
							break
						}
						if errors.Is(err, client.ErrOutcomeUnknown) {
							unknown.Add(1) // it may be there: sending it again may make two
						} else {
							again.Add(1)
						}
						if ctx.Err() != nil {
							t.Errorf("message %d isn't taken: %v", id, err)
							break
						}
					}
					cancel()
				}
			})
		}
		cutting := make(chan int)
		go func() {
			done, next := 0, 20+random.IntN(120)
			for n := 0; done < cuts; n++ {
				select {
				case <-progress:
				case <-time.After(patience):
					cutting <- done
					return
				}
				if n < next {
					continue
				}
				if done++; done%10 == 0 {
					// And now and then nobody answers for a while.
					failures := len(log.with("reconnecting failed"))
					wire.Refuse()
					for len(log.with("reconnecting failed")) == failures {
						wire.Cut() // one may have come in just before
						time.Sleep(5 * time.Millisecond)
					}
					if err := wire.Admit(); err != nil {
						t.Error(err)
					}
				} else {
					wire.Cut()
				}
				next = n + 20 + random.IntN(120)
			}
			cutting <- done
		}()
		for id := range messages {
			ids <- id
		}
		close(ids)
		published.Wait()
		// The cutting ends by itself when nothing moves any more for patience; on a
		// busy machine it takes its time.
		select {
		case done := <-cutting:
			assert.Equal(t, cuts, done, "cuts")
		case <-time.After(6 * patience):
			require.FailNow(t, "the cutting doesn't end")
		}

		// RabbitMQ's dead-letter worker tries again after 180 s what it couldn't hand
		// on: late is not lost.
		waited, told := time.Now(), false
		for handled.ids()+deadLettered.ids() < messages && time.Since(waited) < 240*time.Second {
			time.Sleep(50 * time.Millisecond)
			if late := time.Since(waited); late > 20*time.Second && !told {
				told = true
				s.tellWhereMessagesAre(t)
			}
		}
		if told {
			report(t, s, "the last message came %v after all were published (seed %d)", time.Since(waited).Round(time.Second), seed)
		}
		for id := range messages {
			if dead(id) {
				assert.Positive(t, deadLettered.of(id), "message %d is not in the dead-letter queue", id)
				assert.Zero(t, handled.of(id), "message %d", id)
			} else {
				assert.Positive(t, handled.of(id), "message %d was not handled", id)
				assert.Zero(t, deadLettered.of(id), "message %d", id)
			}
		}
		for _, q := range []string{"orders", "delay_100ms", "orders.dead", "parking_queue"} {
			poll(t, q+" is empty", func() bool { return ready(t, direct, q) == 0 })
		}
		report(t, s, "%d messages, %d cuts (seed %d) in %v: none lost; duplicates: %d handled, %d dead; unknown outcomes %d, certain failures %d; reconnects %d",
			messages, cuts, seed, time.Since(began).Round(100*time.Millisecond),
			handled.total()-handled.ids(), deadLettered.total()-deadLettered.ids(), unknown.Load(), again.Load(), len(log.with("reconnected")))
	})
}

// tellWhereMessagesAre logs what each queue holds, by the HTTP API.
func (s *site) tellWhereMessagesAre(t *testing.T) {
	t.Helper()
	var queues []map[string]any
	s.http(t, http.MethodGet, "/queues/"+s.vhost, nil, &queues)
	for _, q := range queues {
		t.Logf("REPORT %s: %v holds messages %v, ready %v, unacked %v, dlx %v", t.Name(), q["name"], q["messages"], q["messages_ready"], q["messages_unacknowledged"], q["messages_dlx"])
	}
}

// tallyByID counts how often each message was seen.
type tallyByID struct {
	mu sync.Mutex
	n  map[int]int
}

func (c *tallyByID) add(id int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[int]int{}
	}
	c.n[id]++
}

func (c *tallyByID) of(id int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[id]
}

func (c *tallyByID) ids() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.n)
}

func (c *tallyByID) total() (sum int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.n {
		sum += n
	}
	return sum
}

// A broker that falls silent without closing the connection is taken for lost
// after IdleTimeout, and what runs on the connection comes back with it.
func TestSilentConnectionIsReplaced(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const idle = 2 * time.Second
		wire, through := s.through(t)
		conn, log := connectTo(t, through, soon, func(c *client.Config) { c.IdleTimeout = idle })
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		got := make(chan int, 16)
		consume(t, conn, "orders", client.JSON(func(_ context.Context, o order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		p := publisher[order](t, conn, address.Queue("orders"))
		publish(t, p, order{ID: 1})
		require.Equal(t, 1, await(t, got, "the first message"))

		wire.Stall()
		began := time.Now()
		poll(t, "the connection is taken for lost", func() bool { return len(log.with("connection lost")) > 0 })
		took := time.Since(began)
		assert.Less(t, took, idle+lateLimit)
		wire.Cut()
		wire.Resume()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for {
			err := p.Publish(ctx, order{ID: 2})
			if err == nil {
				break
			}
			require.ErrorIs(t, err, client.ErrOutcomeUnknown)
			require.NoError(t, ctx.Err())
		}
		for await(t, got, "the second message") == 1 {
			// Its settlement may not have reached the broker.
		}
		report(t, s, "idle timeout %v, noticed after %v", idle, took.Round(10*time.Millisecond))
	})
}

// An endpoint that is gone is left for the next one.
func TestConnectionMovesToAnotherEndpoint(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		one, first := s.through(t)
		two, second := s.through(t)
		conn, _ := connectTo(t, first, soon, func(c *client.Config) { c.Endpoints = []string{second} })
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		p := publisher[order](t, conn, address.Queue("orders"))
		publish(t, p, order{ID: 1})
		require.Zero(t, two.Accepted())
		one.Refuse()
		require.Equal(t, 1, one.Cut())
		for {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			err := p.Publish(ctx, order{ID: 2})
			cancel()
			if err == nil {
				break
			}
			require.ErrorIs(t, err, client.ErrOutcomeUnknown)
		}
		assert.Equal(t, 1, two.Accepted())
		assert.NotEmpty(t, conn.Broker().Version)
	})
}
