package client_test

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
	"github.com/hopback/hopback/integration/internal/suite"
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
		seen[suite.Await(t, handled, "a handled message")]++
	}
	assert.Len(t, seen, places*messages, "each message is handled once")
}

// A program connects to two clusters and consumes with one decorated handler from both. Each
// consumer retries by the strategy that its own broker supports, whichever started last.
func TestOneDecoratorOnTwoClusters(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyAuto}
		sites := []*suite.Site{s}
		for _, b := range suite.Neighbours(s) {
			if b != s.Broker {
				sites = append(sites, suite.NewSite(t, b))
			}
		}
		h, handled := failsOnce()
		decorated := retry.With(policy)(h)
		for _, s := range sites {
			conn, _ := s.Connect(t)
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
			started := make(chan struct{}, 1)
			h := client.Wrap(decorated, func(ctx context.Context, d *client.Delivery) error {
				if text, _ := client.Body(d.Message()); string(text) == "start" {
					started <- struct{}{}
					return nil
				}
				return decorated.Handle(ctx, d)
			})
			suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 4})
			suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "start")
			suite.Await(t, started, "the consumer's start")
		}
		for i, s := range sites {
			conn, _ := s.Connect(t)
			p := suite.PublisherOf(t, conn, address.Queue("orders"))
			for n := range messages {
				suite.Publish(t, p, fmt.Sprint(i, " ", n))
			}
		}
		assertEachOnce(t, handled, len(sites), messages)
		for _, s := range sites {
			suite.AssertEmpty(t, s, "orders")
			suite.AssertEmpty(t, s, "orders.dead")
		}
	})
}

// The same with two virtual hosts of one broker, whose queues have one name and differ in
// what they support: the second is a classic queue with another dead-letter exchange.
func TestOneDecoratorOnTwoVirtualHosts(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyAuto, Waive: retry.AllGuards()}
		h, handled := failsOnce()
		decorated := retry.With(policy)(h)
		other := suite.NewSite(t, s.Broker)
		conns := map[*suite.Site]*client.Conn{}
		for _, at := range []*suite.Site{other, s} {
			conn, _ := at.Connect(t)
			conns[at] = conn
			if at == s {
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
			} else {
				suite.ApplyRetry(t, conn, policy)
				suite.Apply(t, conn, declare.Topology{
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
			suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 4})
			suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "start")
			suite.Await(t, started, "the consumer's start")
		}
		for at, conn := range conns {
			p := suite.PublisherOf(t, conn, address.Queue("orders"))
			for n := range messages {
				suite.Publish(t, p, fmt.Sprint(at.VHost, " ", n))
			}
		}
		assertEachOnce(t, handled, 2, messages)
		suite.AssertEmpty(t, s, "orders")
		suite.AssertEmpty(t, other, "orders")
	})
}
