package hopbacktest_test

import (
	"context"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// listening serves a broker over TCP.
func listening(t testing.TB, cfg hopbacktest.Config) (b *hopbacktest.Broker, url string) {
	b = hopbacktest.Start(t, cfg)
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	assert.Equal(t, url, b.URL())
	return b, url
}

func overTCP(t testing.TB, url string) *client.Conn {
	conn, err := client.Connect(context.Background(), url, client.Config{Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

func TestGoAMQPAloneOverTCP(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			_, url := listening(t, hopbacktest.Config{Version: version})
			manage := overTCP(t, url)
			_, err := declare.Apply(t.Context(), manage.Management(), oneQueue(t, "work"))
			require.NoError(t, err)

			conn, err := amqp.Dial(t.Context(), url, &amqp.ConnOptions{SASLType: amqp.SASLTypeAnonymous(), MaxFrameSize: 1024})
			require.NoError(t, err)
			session, err := conn.NewSession(t.Context(), nil)
			require.NoError(t, err)
			sender, err := session.NewSender(t.Context(), "/queues/work", nil)
			require.NoError(t, err)
			large := make([]byte, 300_000)
			for i := range 500 {
				m := amqp.NewMessage([]byte(strconv.Itoa(i)))
				if i == 250 {
					m = amqp.NewMessage(large)
				}
				require.NoError(t, sender.Send(t.Context(), m, nil))
			}
			receiver, err := session.NewReceiver(t.Context(), "/queues/work", &amqp.ReceiverOptions{Credit: 100})
			require.NoError(t, err)
			for i := range 500 {
				m, err := receiver.Receive(t.Context(), nil)
				require.NoError(t, err)
				switch {
				case i == 250:
					assert.Equal(t, large, m.GetData())
				default:
					assert.Equal(t, strconv.Itoa(i), string(m.GetData()))
				}
				if i == 300 {
					require.NoError(t, receiver.RejectMessage(t.Context(), m, nil))
				} else {
					require.NoError(t, receiver.AcceptMessage(t.Context(), m))
				}
			}
			dead, err := session.NewReceiver(t.Context(), "/queues/work.dead", nil)
			require.NoError(t, err)
			m, err := dead.Receive(t.Context(), nil)
			require.NoError(t, err)
			assert.Equal(t, "300", string(m.GetData()))
			assert.Equal(t, "work", m.Annotations["x-first-death-queue"])
			require.NoError(t, dead.AcceptMessage(t.Context(), m))
			_, err = session.NewSender(t.Context(), "/queues/missing", nil)
			var refused *amqp.Error
			require.ErrorAs(t, err, &refused)
			assert.Equal(t, amqp.ErrCondNotFound, refused.Condition)
			require.NoError(t, conn.Close())
		})
	}
}

func TestStopEndsConnectionsOverTCP(t *testing.T) {
	t.Parallel()
	b, url := listening(t, hopbacktest.Config{})
	conn, err := amqp.Dial(t.Context(), url, nil)
	require.NoError(t, err)
	b.Stop()
	<-conn.Done()
	var closed *amqp.ConnError
	require.ErrorAs(t, conn.Err(), &closed)
	require.NotNil(t, closed.RemoteErr)
	assert.Contains(t, closed.RemoteErr.Description, "Connection forced")
	_, err = amqp.Dial(t.Context(), url, nil)
	require.Error(t, err)
	b.Restart()
	conn, err = amqp.Dial(t.Context(), url, nil)
	require.NoError(t, err)
	for _, c := range b.Connections() {
		c.Cut()
	}
	<-conn.Done()
	require.Error(t, conn.Err())
}

func TestLatencyOverTCP(t *testing.T) {
	t.Parallel()
	b, url := listening(t, hopbacktest.Config{})
	b.SetLatency(20 * time.Millisecond)
	conn, err := amqp.Dial(t.Context(), url, nil)
	require.NoError(t, err)
	began := time.Now()
	_, err = conn.NewSession(t.Context(), nil)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, time.Since(began), 40*time.Millisecond)
	require.NoError(t, conn.Close())
}

// BenchmarkTCP is go-amqp with a broker over TCP: HOPBACK_BENCH_URL's, or one in memory.
func BenchmarkTCP(b *testing.B) {
	url := os.Getenv("HOPBACK_BENCH_URL")
	if url == "" {
		_, url = listening(b, hopbacktest.Config{MaxEvents: -1})
	}
	ctx := context.Background()
	manage := overTCP(b, url)
	topology := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "hopbacktest-bench", DeliveryLimit: 20, DeadLetter: declare.Drop()}}}
	_, err := declare.Apply(ctx, manage.Management(), topology)
	require.NoError(b, err)
	dial := func(b *testing.B) (*amqp.Session, func()) {
		conn, err := amqp.Dial(ctx, url, nil)
		require.NoError(b, err)
		session, err := conn.NewSession(ctx, nil)
		require.NoError(b, err)
		return session, func() { _ = conn.Close() }
	}
	body := make([]byte, 256)
	publish := func(b *testing.B, n int) {
		var all sync.WaitGroup
		var left atomic.Int64
		left.Store(int64(n))
		for range 4 {
			session, end := dial(b)
			defer end()
			sender, err := session.NewSender(ctx, "/queues/hopbacktest-bench", nil)
			require.NoError(b, err)
			receipts := make(chan amqp.SendReceipt, 400)
			all.Go(func() {
				defer close(receipts)
				for left.Add(-1) >= 0 {
					r, err := sender.SendWithReceipt(ctx, amqp.NewMessage(body), nil)
					if !assert.NoError(b, err) {
						return
					}
					receipts <- r
				}
			})
			all.Go(func() {
				for r := range receipts {
					if _, err := r.Wait(ctx); !assert.NoError(b, err) {
						return
					}
				}
			})
		}
		all.Wait()
	}
	b.Run("Publish", func(b *testing.B) {
		b.ReportAllocs()
		publish(b, b.N)
	})
	b.Run("Consume", func(b *testing.B) {
		publish(b, b.N)
		b.ResetTimer()
		b.ReportAllocs()
		var all sync.WaitGroup
		var left atomic.Int64
		left.Store(int64(b.N))
		done, stop := context.WithCancel(ctx)
		for range 4 {
			session, end := dial(b)
			defer end()
			receiver, err := session.NewReceiver(ctx, "/queues/hopbacktest-bench", &amqp.ReceiverOptions{Credit: 400})
			require.NoError(b, err)
			all.Go(func() {
				for {
					m, err := receiver.Receive(done, nil)
					if err != nil {
						return
					}
					if err := receiver.AcceptMessage(ctx, m); !assert.NoError(b, err) {
						return
					}
					if left.Add(-1) == 0 {
						stop()
					}
				}
			})
		}
		all.Wait()
		stop()
	})
	b.Run("HopbackPublish", func(b *testing.B) {
		b.ReportAllocs()
		publishAll(b, manage, body)
	})
	b.Run("HopbackConsume", func(b *testing.B) {
		publishAll(b, manage, body)
		b.ResetTimer()
		b.ReportAllocs()
		var left atomic.Int64
		left.Store(int64(b.N))
		done, stop := context.WithCancel(ctx)
		require.NoError(b, manage.Consume(done, "hopbacktest-bench", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			if left.Add(-1) == 0 {
				stop()
			}
			return nil
		}), client.ConsumerConfig{Concurrency: 64}))
	})
}

// publishAll publishes b.N messages with four publishers.
func publishAll(b *testing.B, conn *client.Conn, body []byte) {
	ctx := context.Background()
	var all sync.WaitGroup
	for i := range 4 {
		n := b.N / 4
		if i == 0 {
			n += b.N % 4
		}
		p, err := client.NewPublisher[*client.Message](ctx, conn, address.Queue("hopbacktest-bench"), client.PublisherConfig{})
		require.NoError(b, err)
		batch := make([]*client.Message, n)
		for i := range batch {
			batch[i] = client.NewMessage(body)
		}
		all.Go(func() {
			assert.NoError(b, p.PublishAll(ctx, batch))
			assert.NoError(b, p.Close(ctx))
		})
	}
	b.ResetTimer()
	all.Wait()
}
