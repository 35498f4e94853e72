package integration

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// failsOnce is a handler that fails each message's first attempt, and says which messages
// succeeded.
func failsOnce() (client.HandlerFunc, chan string) {
	handled := make(chan string, 1000)
	return func(ctx context.Context, d *client.Delivery) error {
		if retry.Attempt(ctx) == 1 {
			return errors.New("once")
		}
		text, _ := client.Body(d.Message())
		handled <- string(text)
		return nil
	}, handled
}

// assertEachOnce waits for messages from all places, each handled once.
func assertEachOnce(t *testing.T, handled chan string, places, messages int) {
	t.Helper()
	seen := map[string]int{}
	for range places * messages {
		seen[await(t, handled, "a handled message")]++
	}
	assert.Len(t, seen, places*messages, "each message is handled once")
}

// A program connects to two clusters and consumes with one decorated handler from both. Each
// consumer retries by the strategy that its own broker supports, whichever started last.
func TestOneDecoratorOnTwoClusters(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages = 20
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyAuto}
		sites := []*site{s}
		for _, b := range neighbours(s) {
			if b != s.Broker {
				sites = append(sites, newSite(t, b))
			}
		}
		h, handled := failsOnce()
		decorated := retry.With(policy)(h)
		for _, s := range sites {
			conn, _ := s.connect(t)
			applyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
			started := make(chan struct{}, 1)
			h := client.Wrap(decorated, func(ctx context.Context, d *client.Delivery) error {
				if text, _ := client.Body(d.Message()); string(text) == "start" {
					started <- struct{}{}
					return nil
				}
				return decorated.Handle(ctx, d)
			})
			consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 4})
			publish(t, publisherOf(t, conn, address.Queue("orders")), "start")
			await(t, started, "the consumer's start")
		}
		for i, s := range sites {
			conn, _ := s.connect(t)
			p := publisherOf(t, conn, address.Queue("orders"))
			for n := range messages {
				publish(t, p, fmt.Sprint(i, " ", n))
			}
		}
		assertEachOnce(t, handled, len(sites), messages)
		for _, s := range sites {
			assertEmpty(t, s, "orders")
			assertEmpty(t, s, "orders.dead")
		}
	})
}

// The same with two virtual hosts of one broker, whose queues have one name and differ in
// what they support: the second is a classic queue with another dead-letter exchange.
func TestOneDecoratorOnTwoVirtualHosts(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages = 20
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyAuto, Waive: retry.AllGuards()}
		h, handled := failsOnce()
		decorated := retry.With(policy)(h)
		other := newSite(t, s.Broker)
		conns := map[*site]*client.Conn{}
		for _, at := range []*site{other, s} {
			conn, _ := at.connect(t)
			conns[at] = conn
			if at == s {
				applyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
			} else {
				applyRetry(t, conn, policy)
				apply(t, conn, declare.Topology{
					Queues:   []declare.Queue{declare.ClassicQueue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "amq.fanout", AtMostOnce: true}}},
					Bindings: []declare.Binding{{Source: "requeue_exchange", Queue: "orders", Key: "*.*.orders"}},
				})
			}
			started := make(chan struct{}, 1)
			h := client.Wrap(decorated, func(ctx context.Context, d *client.Delivery) error {
				if text, _ := client.Body(d.Message()); string(text) == "start" {
					started <- struct{}{}
					return nil
				}
				return decorated.Handle(ctx, d)
			})
			consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 4})
			publish(t, publisherOf(t, conn, address.Queue("orders")), "start")
			await(t, started, "the consumer's start")
		}
		for at, conn := range conns {
			p := publisherOf(t, conn, address.Queue("orders"))
			for n := range messages {
				publish(t, p, fmt.Sprint(at.vhost, " ", n))
			}
		}
		assertEachOnce(t, handled, 2, messages)
		assertEmpty(t, s, "orders")
		assertEmpty(t, other, "orders")
	})
}
