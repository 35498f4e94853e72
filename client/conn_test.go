package client

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// bareConn is a Conn without its supervisor, on the wire w; nil: disconnected.
func bareConn(t *testing.T, w *wire) *Conn {
	cfg, err := Config{Logger: quiet}.withDefaults()
	require.NoError(t, err)
	c := &Conn{
		cfg: cfg, log: quiet, live: w,
		closing: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}), users: map[closer]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	t.Cleanup(c.cancel)
	c.mgmt = newManagement(c)
	close(c.done)
	return c
}

// bareWire is a connection on which nothing can be opened.
func bareWire(t *testing.T) *wire {
	ours, theirs := net.Pipe()
	w := &wire{amqp: &amqp.Conn{}, net: ours, channels: &channels{}, turn: make(chan struct{}, 1)}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	t.Cleanup(func() {
		w.cancel()
		_ = ours.Close()
		_ = theirs.Close()
	})
	return w
}

func TestBoundedHandsOverOrDiscards(t *testing.T) {
	value := func(d time.Duration, err error) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			_, deadline := ctx.Deadline()
			time.Sleep(d)
			if deadline {
				return "", errors.New("go-amqp would make the deadline into the connection's")
			}
			return "value", err
		}
	}
	t.Run("in time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := bareWire(t)
			v, err := bounded(within(t, time.Second), w, value(0, nil), func(string) { t.Error("discarded") })
			require.NoError(t, err)
			assert.Equal(t, "value", v)
			assert.Empty(t, w.turn)
		})
	})
	t.Run("its error", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, err := bounded(within(t, time.Second), bareWire(t), value(0, errMissing), func(string) { t.Error("discarded") })
			require.ErrorIs(t, err, errMissing)
		})
	})
	t.Run("after ctx has ended it is discarded", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := bareWire(t)
			discarded := make(chan string, 1)
			_, err := bounded(within(t, time.Second), w, value(2*time.Second, nil), func(v string) { discarded <- v })
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Equal(t, "value", <-discarded)
			assert.Empty(t, w.turn)
		})
	})
	t.Run("without an answer the connection is given up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := bareWire(t)
			_, err := bounded(t.Context(), w, func(context.Context) (string, error) {
				_, err := w.net.Read(make([]byte, 1)) // until it is closed
				return "", err
			}, func(string) {})
			require.Error(t, err)
		})
	})
}

// What waits for a queue neither waits for its turn nor takes it, and has longer.
func TestPatientHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := bareWire(t)
		w.turn <- struct{}{} // another opens or closes something
		v, err := patient(t.Context(), w, func(context.Context) (string, error) {
			time.Sleep(attachTimeout - time.Second)
			return "value", nil
		}, func(string) { t.Error("discarded") })
		require.NoError(t, err)
		assert.Equal(t, "value", v)
		assert.Len(t, w.turn, 1, "it is still the other's")

		_, err = patient(t.Context(), w, func(context.Context) (string, error) {
			_, err := w.net.Read(make([]byte, 1)) // until it is closed
			return "", err
		}, func(string) {})
		require.Error(t, err, "not for ever either")
	})
}

func TestSessionsThatWereNeverOpenedAreNotCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := bareWire(t)
		c := bareConn(t, w)
		w.turn <- struct{}{} // another opens or closes something
		for range 2 * maxSessions {
			_, err := c.openSession(within(t, time.Second))
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		assert.Zero(t, w.sessions.Load())
	})
}

func TestNewPublisherTellsThatNoSessionIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := bareWire(t)
		w.sessions.Store(maxSessions)
		c := bareConn(t, w)
		_, err := NewPublisher[string](within(t, time.Hour), c, address.Queue("q"), PublisherConfig{})
		require.ErrorIs(t, err, ErrSessionLimit)
		assert.ErrorContains(t, err, "client.Connect", "it says what to do")
		assert.Equal(t, int64(maxSessions), w.sessions.Load())
		synctest.Wait()
		assert.Empty(t, c.users)
	})
}

func TestNewPublisherWaitsForTheConnectionWithinItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := bareConn(t, nil)
		start := time.Now()
		_, err := NewPublisher[string](within(t, time.Minute), c, address.Queue("q"), PublisherConfig{})
		require.ErrorIs(t, err, ErrNotSent)
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
		require.ErrorIs(t, <-consuming, ErrClosed)
		require.ErrorIs(t, <-publishing, ErrClosed)
		require.ErrorIs(t, <-managing, ErrClosed)

		require.NoError(t, c.Close(t.Context()), "closing twice is closing once")
		require.ErrorIs(t, c.Consume(t.Context(), "q", HandlerFunc(func(context.Context, *Delivery) error { return nil }), ConsumerConfig{}), ErrClosed)
		_, err := NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{})
		require.ErrorIs(t, err, ErrClosed)
		_, _, err = c.Management().Request(t.Context(), "GET", "/queues/q", nil)
		require.ErrorIs(t, err, ErrClosed)
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
