package consume_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/internal/suite"
)

// Claimers that are killed while they claim lose no message, and each message is handled by a claimer. What a killed one had
// claimed becomes ready early, and its handler parks it again.
func TestKilledClaimersLoseNoMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0", MaxEvents: -1})
		b.SetLatency(time.Millisecond)
		n, kills := suite.Sized(1_000, 10_000), 50
		conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
		require.NoError(t, err)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("orders", declare.Drop())))
		ctx, stop := context.WithCancel(t.Context())
		early := 0
		var consuming sync.WaitGroup
		consuming.Go(func() {
			assert.NoError(t, conn.Consume(ctx, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				if parked, again := d.Parked(); again {
					early++
					return parked
				}
				return client.Park{Token: string(d.Message().GetData()), Until: time.Now().Add(240 * time.Hour)}
			}), client.ConsumerConfig{Concurrency: 1}))
		})
		suite.Load(t, conn, "orders", n)
		queue := b.Queue("orders")
		for queue.Counts().Delayed < n {
			time.Sleep(time.Second)
		}
		k := newKillable(n, b.URL(), b.Dial)
		k.strict = true
		killed := 0
		for ; len(k.left) > 0; time.Sleep(5 * time.Second) { // until the consumer has parked what came early
			// A life handles about one message per ms, so half of them are left after the last kill.
			var after time.Duration
			if killed < kills {
				killed++
				after = time.Millisecond + rand.N(time.Duration(n/kills)*time.Millisecond)
			}
			k.life(t, after)
		}
		stop()
		consuming.Wait()
		t.Logf("%d messages, %d claimers killed, %d came early, %d handled more than once", n, killed, early, k.twice())
		assert.Len(t, k.handled, n)
		assert.Equal(t, kills, killed)
		assert.Positive(t, early, "no claimer was killed while it had a message")
		assert.Equal(t, hopbacktest.Counts{}, queue.Counts())
		require.NoError(t, conn.Close(t.Context()))
	})
}

// The same with a broker, whose consumer may park what came early at any time.
func TestKilledClaimersOfABrokerLoseNoMessage(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		n, kills := suite.Sized(200, 10_000), suite.Sized(5, 50)
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("orders", declare.Drop())))
		var parked, early atomic.Int64
		stop := suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if p, again := d.Parked(); again {
				early.Add(1)
				return p
			}
			parked.Add(1)
			return client.Park{Token: string(d.Message().GetData()), Until: time.Now().Add(240 * time.Hour)}
		}), client.ConsumerConfig{})
		suite.Load(t, conn, "orders", n)
		for parked.Load() < int64(n) {
			require.NoError(t, t.Context().Err())
			time.Sleep(100 * time.Millisecond)
		}
		var d net.Dialer
		k := newKillable(n, s.AMQPURL(), d.DialContext)
		killed := 0
		for began := time.Now(); len(k.left) > 0; {
			require.Less(t, time.Since(began), 10*time.Minute, "%d messages are lost", len(k.left))
			var after time.Duration
			if killed < kills {
				killed++
				after = 50*time.Millisecond + rand.N(500*time.Millisecond)
			}
			k.life(t, after)
		}
		// A claimer that was killed behind its handler left its message ready. If the next one asked before the consumer had
		// parked it again, it found none.
		ctx := suite.Within(t)
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		suite.Poll(t, "nothing is left", func() bool {
			for token := range k.open {
				_, err := c.Cancel(ctx, token)
				require.NoError(t, err)
			}
			var q struct{ Messages int }
			s.HTTP(t, "GET", "/queues/"+s.VHost+"/orders", nil, &q)
			return q.Messages == 0
		})
		require.NoError(t, stop())
		suite.Report(t, s, "%d messages, %d claimers killed, %d came early, %d handled more than once", n, killed, early.Load(), k.twice())
		assert.Len(t, k.handled, n)
	})
}

// killable is a program that claims messages, and starts again after it was killed.
type killable struct {
	url     string
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	strict  bool // all that is left is parked
	mu      sync.Mutex
	open    map[string]bool // that were handled, and found no more
	left    map[string]bool // whose claims weren't answered with 1
	handled map[string]int
}

// newKillable is for messages from 0 to n-1.
func newKillable(n int, url string, dial func(ctx context.Context, network, addr string) (net.Conn, error)) *killable {
	k := &killable{url: url, dial: dial, open: map[string]bool{}, handled: map[string]int{}, left: map[string]bool{}}
	for i := range n {
		k.left[fmt.Sprint(i)] = true
	}
	return k
}

// twice is how many messages were handled more than once.
func (k *killable) twice() (n int) {
	for _, times := range k.handled {
		if times > 1 {
			n++
		}
	}
	return n
}

// life is one life of the program: it claims all that is left, and is killed after some time; 0: it isn't.
func (k *killable) life(t *testing.T, after time.Duration) {
	ctx, die := context.WithCancel(t.Context())
	defer die()
	var sockets []net.Conn
	conn, err := client.Connect(ctx, k.url, client.Config{Logger: slog.New(slog.DiscardHandler), Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		s, err := k.dial(ctx, network, addr)
		if err == nil {
			k.mu.Lock()
			defer k.mu.Unlock()
			sockets = append(sockets, s)
		}
		return s, err
	}})
	require.NoError(t, err)
	c, err := client.NewClaimer(ctx, conn, "orders")
	require.NoError(t, err)
	if after > 0 {
		time.AfterFunc(after, func() {
			k.mu.Lock()
			for _, s := range sockets {
				_ = s.Close()
			}
			k.mu.Unlock()
			die()
		})
	}
	tokens := make(chan string, len(k.left))
	for token := range k.left {
		tokens <- token
	}
	close(tokens)
	var workers sync.WaitGroup
	for range 10 {
		workers.Go(func() {
			for token := range tokens {
				if ctx.Err() != nil {
					return
				}
				k.claim(ctx, t, c, token)
			}
		})
	}
	workers.Wait()
	die()
	_ = c.Close(ctx)
	_ = conn.Close(ctx)
}

func (k *killable) claim(ctx context.Context, t *testing.T, c *client.Claimer, token string) {
	n, err := c.Claim(ctx, token, client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		select {
		case <-time.After(rand.N(20 * time.Millisecond)):
		case <-ctx.Done():
			return ctx.Err() // killed: it never gets there
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		k.handled[string(d.Message().GetData())]++
		return nil
	}))
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case n == 1:
		delete(k.left, token)
	case err == nil && k.handled[token] > 0: // by an earlier life
		delete(k.left, token)
		k.open[token] = true
	case err == nil && k.strict:
		t.Errorf("%s was lost", token)
		delete(k.left, token)
	case err == nil: // the consumer has it
	case !errors.Is(err, client.ErrConnectionLost) && !errors.Is(err, client.ErrOutcomeUnknown) && !errors.Is(err, client.ErrNotSent):
		t.Errorf("%s: %v", token, err)
	}
}
