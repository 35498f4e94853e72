package client

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// bareConn is a Conn without its supervisor, on the wire w; nil: disconnected.
func bareConn(t *testing.T, w *link.Wire) *Conn {
	cfg, err := Config{Logger: quiet}.withDefaults()
	require.NoError(t, err)
	c := newConn(cfg, nil)
	t.Cleanup(c.pool.Cancel)
	c.pool.Conns[0].Live = w
	close(c.pool.Conns[0].Done)
	return c
}

func TestNewPublisherWaitsForTheConnectionWithinItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := bareConn(t, nil)
		start := time.Now()
		_, err := NewPublisher[string](within(t, time.Minute), c, address.Queue("q"), PublisherConfig{})
		require.ErrorIs(t, err, failure.ErrNotSent)
		assert.Equal(t, time.Minute, time.Since(start))
		assert.Empty(t, c.users)
	})
}

func TestNewPublisherRefusesWhatCannotWork(t *testing.T) {
	c := bareConn(t, nil)
	for _, to := range []address.Address{address.Queue(""), address.Exchange("", "key")} {
		_, err := NewPublisher[string](t.Context(), c, to, PublisherConfig{})
		require.ErrorAs(t, err, new(*argument.Error))
	}
	_, err := NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{Pending: -1})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{PendingBytes: -1})
	require.ErrorAs(t, err, new(*argument.Error))
}

func TestConsumeRefusesWhatCannotWork(t *testing.T) {
	c := bareConn(t, nil)
	h := HandlerFunc(func(context.Context, *Delivery) error { return nil })
	var argErr *argument.Error
	require.ErrorAs(t, c.Consume(t.Context(), "", h, ConsumerConfig{}), &argErr)
	require.ErrorAs(t, c.Consume(t.Context(), "q", nil, ConsumerConfig{}), &argErr)
	require.ErrorAs(t, c.Consume(t.Context(), "q", HandlerFunc(nil), ConsumerConfig{}), &argErr)
	require.ErrorAs(t, c.Consume(t.Context(), "q", JSON[int](nil), ConsumerConfig{}), &argErr)
	require.ErrorAs(t, c.Consume(t.Context(), "q", Typed(nil, func(context.Context, int) error { return nil }), ConsumerConfig{}), &argErr)
	for _, cfg := range []ConsumerConfig{{Concurrency: -1}, {Concurrency: maxConcurrency + 1}, {Prefetch: -1}, {Prefetch: maxPrefetch + 1}, {Grace: -1}, {ForwardPatience: -1}} {
		require.ErrorAs(t, c.Consume(t.Context(), "q", h, cfg), &argErr, "%+v", cfg)
	}
}

func TestConnCloseEndsWhatWaitsForAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := bareConn(t, nil)
		consuming := async(func() error {
			return c.Consume(t.Context(), "q", HandlerFunc(func(context.Context, *Delivery) error { return nil }), ConsumerConfig{})
		})
		publishing := async(func() error {
			_, err := NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{})
			return err
		})
		managing := async(func() error {
			_, _, err := c.Management().Request(t.Context(), "GET", "/queues/q", nil)
			return err
		})
		synctest.Wait()
		start := time.Now()
		require.NoError(t, c.Close(within(t, time.Minute)))
		assert.Zero(t, time.Since(start))
		require.ErrorIs(t, <-consuming, failure.ErrClosed)
		require.ErrorIs(t, <-publishing, failure.ErrClosed)
		require.ErrorIs(t, <-managing, failure.ErrClosed)

		require.NoError(t, c.Close(t.Context()), "closing twice is closing once")
		require.ErrorIs(t, c.Consume(t.Context(), "q", HandlerFunc(func(context.Context, *Delivery) error { return nil }), ConsumerConfig{}), failure.ErrClosed)
		_, err := NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{})
		require.ErrorIs(t, err, failure.ErrClosed)
		_, _, err = c.Management().Request(t.Context(), "GET", "/queues/q", nil)
		require.ErrorIs(t, err, failure.ErrClosed)
		assert.Equal(t, Broker{}, c.Broker())
	})
}

func TestBrokerVersions(t *testing.T) {
	for _, c := range []struct {
		version string
		want    bool
	}{
		{"4.3.0", true}, {"4.3", true}, {"4.10.1", true}, {"5.0.0", true}, {"4.3.0-rc.1", true},
		{"4.2.9", false}, {"3.13.7", false}, {"4", false}, {"", false}, {"four.three", false},
	} {
		assert.Equal(t, c.want, Broker{Version: c.version}.AtLeast(4, 3), c.version)
	}
}

// preparing is a Handler that only prepares.
type preparing func(context.Context, Start) error

func (p preparing) Handle(context.Context, *Delivery) error    { return nil }
func (p preparing) Prepare(ctx context.Context, s Start) error { return p(ctx, s) }

// A check that sees an empty Broker treats it as an old one.
func TestConsumeBegunDuringAReconnectWaitsForTheBroker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := bareConn(t, nil)
		enough := errors.New("enough")
		seen := make(chan Broker, 1)
		h := preparing(func(_ context.Context, s Start) error {
			seen <- s.Broker
			return enough
		})
		consuming := async(func() error { return c.Consume(t.Context(), "q", h, ConsumerConfig{}) })
		synctest.Wait()
		assert.Empty(t, seen, "there is no broker yet")
		require.NoError(t, c.Consume(within(t, time.Second), "q", h, ConsumerConfig{}), "ctx ends the wait")

		w := bareWire(t)
		w.Version, w.Node = "4.3.6", "rabbit@a"
		c.pool.Mu.Lock()
		c.pool.Conns[0].Change(w, nil)
		c.pool.Mu.Unlock()
		require.ErrorIs(t, <-consuming, enough)
		assert.Equal(t, Broker{Version: "4.3.6", Node: "rabbit@a"}, <-seen)

		c.pool.Mu.Lock()
		c.pool.Conns[0].Change(nil, failure.ErrConnectionLost)
		c.pool.Mu.Unlock()
		consuming = async(func() error { return c.Consume(t.Context(), "q", h, ConsumerConfig{}) })
		synctest.Wait()
		require.NoError(t, c.Close(within(t, time.Minute)))
		require.ErrorIs(t, <-consuming, failure.ErrClosed)
		assert.Empty(t, seen)
	})
}

func TestASlowStartIsLoggedOnceAndSaysWhy(t *testing.T) {
	for _, alarm := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := bareWire(t)
			w.Blockage = &link.Blockage{Log: quiet}
			w.Blockage.Notify(alarm)
			c := bareConn(t, w)
			log := &lines{}
			c.log = log.logger()
			h := preparing(func(ctx context.Context, _ Start) error {
				<-ctx.Done()
				return ctx.Err()
			})
			ctx, stop := context.WithCancel(t.Context())
			var all sync.WaitGroup
			for range 1000 {
				all.Go(func() { assert.NoError(t, c.Consume(ctx, "q", h, ConsumerConfig{})) })
			}
			time.Sleep(prepareQuiet)
			stop()
			all.Wait()
			assert.Equal(t, 1, strings.Count(log.String(), "can't start yet"))
			assert.Contains(t, log.String(), "waiting=1000")
			assert.Equal(t, alarm, strings.Contains(log.String(), "alarm"), "it isn't guessed")
		})
	}
}

// Why nothing can be sent is in the error that a caller sees, and not in State alone.
func TestPublishErrorsNameTheOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := bareConn(t, nil)
		c.pool.Conns[0].Why = &failure.Error{Op: "connect", Target: "amqp://u@h", Kind: failure.ErrAuthentication, Text: `the broker refused PLAIN for user "u"`}
		check := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, failure.ErrNotSent)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, failure.ErrAuthentication)
			assert.ErrorContains(t, err, `not sent: context deadline exceeded: hopback: connect amqp://u@h: authentication failed: the broker refused PLAIN for user "u"`)
			assert.True(t, failure.SafeToRetry(err))
		}
		_, err := NewPublisher[string](within(t, time.Second), c, address.Queue("q"), PublisherConfig{})
		check(err)

		s := newSender("publish", "/queues/q", senderConfig{Depth: 2, Outage: c.pool.Outage}, linktest.SessionsOf(func(ctx context.Context) (link.Session, error) { return c.pool.OpenSession(ctx) }))
		defer s.Cut()
		check(s.Do(within(t, time.Second), linktest.WithID("m")))
		p := coreOf(s)
		check(p.publishAll(within(t, time.Second), 1, func(int) (*Message, error) { return linktest.WithID("m"), nil }))

		w := bareWire(t)
		w.Blockage = &link.Blockage{Log: quiet}
		c.pool.Conns[0].Live, c.pool.Conns[0].Why = w, nil
		require.NoError(t, c.pool.Outage())
		w.Blockage.Notify(true)
		require.ErrorContains(t, c.pool.Outage(), "memory or disk alarm")
	})
}

// What waits for a connection that is closed in order gets an error.
func TestNoSessionOnAConnectionThatWasClosedInOrder(t *testing.T) {
	c, err := Connect(t.Context(), "amqp://u:p@"+hostileServer(t, "", nil)+"/", Config{Logger: quiet})
	require.NoError(t, err)
	w, err := c.pool.Wire(t.Context())
	require.NoError(t, err)
	require.NoError(t, w.AMQP.Close(t.Context()))
	_, err = w.Session(t.Context(), 1, func() {})
	require.Error(t, err)
	for range cap(w.Spare) {
		w.Spare <- struct{}{}
	}
	_, err = w.OpenSession(t.Context(), 1)
	require.Error(t, err)
	require.NoError(t, c.Close(t.Context()))
}
