package publish_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

func TestPublishToNowhereIsErrUnroutable(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		for _, to := range []address.Address{address.Exchange("amq.topic", "nobody.listens"), address.Exchange("amq.fanout", "")} {
			p := suite.Publisher[suite.Order](t, conn, to)
			err := p.Publish(t.Context(), suite.Order{ID: 1})
			assert.ErrorIs(t, err, client.ErrUnroutable)
			assert.True(t, client.SafeToRetry(err))
		}
		anywhere := suite.Publisher[suite.Order](t, conn, address.Address{})
		assert.ErrorIs(t, anywhere.Publish(t.Context(), suite.Order{}, client.PublishTo(address.Queue("missing"))), client.ErrUnroutable)
		assert.ErrorAs(t, anywhere.Publish(t.Context(), suite.Order{}), new(*argument.Error))
		assert.Empty(t, log.All())
	})
}

func TestPublishToWhatIsMissingIsErrNotFound(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		for _, to := range []address.Address{address.Queue("missing"), address.Exchange("missing", "key")} {
			_, err := client.NewPublisher[suite.Order](t.Context(), conn, to, client.PublisherConfig{})
			assert.ErrorIs(t, err, client.ErrNotFound)
			assert.ErrorContains(t, err, "missing")
		}
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		anywhere := suite.Publisher[suite.Order](t, conn, address.Address{})
		err := anywhere.Publish(t.Context(), suite.Order{}, client.PublishTo(address.Exchange("missing", "key")))
		assert.ErrorIs(t, err, client.ErrNotFound)
		suite.Publish(t, anywhere, suite.Order{}, client.PublishTo(address.Queue("orders"))) // the link lives on
		assert.Empty(t, log.With("connection lost"))
	})
}

// An exchange or queue that is deleted while a publisher has its link is reported, too, and
// publishing works again when it is back.
func TestPublisherFindsItsQueueAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t, suite.Soon)
		queue := suite.QueueOf(declare.QuorumQueue{Name: "orders"})
		suite.Apply(t, conn, queue)
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		_, err := declare.DeleteQueue(t.Context(), conn.Management(), "orders")
		require.NoError(t, err)
		err = p.Publish(t.Context(), suite.Order{ID: 2})
		// The broker may end the link before or after it has the message.
		assert.True(t, errors.Is(err, client.ErrUnroutable) || errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrOutcomeUnknown), "%v", err)
		suite.Apply(t, conn, queue)
		suite.Poll(t, "it publishes again", func() bool { return p.Publish(t.Context(), suite.Order{ID: 3}) == nil })
	})
}

// While the exchange is gone, a batch fails soon, with an error for each message; when it is
// back, with its binding, publishing continues.
func TestPublisherFindsItsExchangeAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t, suite.Soon)
		topology := declare.Topology{
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}},
			Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeDirect}},
			Bindings:  []declare.Binding{{Source: "shop", Queue: "orders", Key: "placed"}},
		}
		suite.Apply(t, conn, topology)
		p := suite.Publisher[suite.Order](t, conn, address.Exchange("shop", "placed"))
		stop := make(chan struct{})
		var accepted, lost, refused, batches atomic.Int64
		var stream sync.WaitGroup
		stream.Go(func() {
			for orders := make([]suite.Order, 500); !suite.IsOver(stop); batches.Add(1) {
				err := p.PublishAll(t.Context(), orders)
				failed := 0
				if all, ok := errors.AsType[*client.BatchError](err); ok {
					failed = len(all.Failed)
					for _, f := range all.Failed {
						switch {
						case errors.Is(f.Err, client.ErrOutcomeUnknown):
							lost.Add(1)
						case errors.Is(f.Err, client.ErrNotFound), errors.Is(f.Err, client.ErrUnroutable):
							refused.Add(1)
						default:
							t.Errorf("%v", f.Err)
						}
					}
				}
				accepted.Add(int64(len(orders) - failed))
			}
		})
		for range 3 {
			was := accepted.Load()
			suite.Poll(t, "it publishes", func() bool { return accepted.Load() > was })
			require.NoError(t, declare.DeleteExchange(t.Context(), conn.Management(), "shop"))
			notified := refused.Load()
			suite.Poll(t, "it is reported", func() bool { return refused.Load() > notified })
			suite.Apply(t, conn, topology)
		}
		was := accepted.Load()
		suite.Poll(t, "it publishes", func() bool { return accepted.Load() > was })
		close(stop)
		stream.Wait()
		n := suite.Ready(t, conn, "orders")
		assert.GreaterOrEqual(t, int64(n), accepted.Load())
		assert.LessOrEqual(t, int64(n), accepted.Load()+lost.Load())
		suite.Report(t, s, "%d batches of 500: %d accepted, %d refused, %d unknown, %d stored", batches.Load(), accepted.Load(), refused.Load(), lost.Load(), n)
	})
}

func TestPublishToAFullQueueIsErrRefused(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", MaxLength: 1, Overflow: declare.OverflowRejectPublish}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var err error
		suite.Poll(t, "the queue is full", func() bool { err = p.Publish(t.Context(), suite.Order{}); return err != nil })
		require.ErrorIs(t, err, client.ErrRefused)
		var e *client.Error
		require.ErrorAs(t, err, &e)
		if s.Newer() {
			assert.Equal(t, "amqp:resource-limit-exceeded", e.Condition)
			assert.Contains(t, e.Error(), "orders")
			assert.Equal(t, "orders", e.Queue)
			assert.Equal(t, "maxlen", e.Reason)
		} else {
			assert.Contains(t, e.Text, "gave no reason")
			assert.Empty(t, e.Queue+e.Reason)
		}
		suite.Report(t, s, "%v", err)
		_, err = declare.Purge(t.Context(), conn.Management(), "orders")
		require.NoError(t, err)
		suite.Poll(t, "there is room again", func() bool { return p.Publish(t.Context(), suite.Order{}) == nil })
	})
}

func TestMessageThatIsTooLargeIsRefusedBeforeItIsSent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[*client.Message](t, conn, address.Queue("orders"))
		sent := wire.Sent()
		err := p.Publish(t.Context(), client.NewMessage(make([]byte, 16<<20+1)))
		require.ErrorIs(t, err, client.ErrTooLarge)
		assert.True(t, client.SafeToRetry(err))
		assert.Less(t, wire.Sent()-sent, int64(1000))
		suite.Publish(t, p, client.NewMessage(make([]byte, 8<<20)))
		assert.Len(t, s.Peer(t).Take("orders", 1)[0].GetData(), 8<<20)

		// It is the encoded message that counts, to the byte.
		m := client.NewMessage(make([]byte, 16<<20))
		m.Properties.MessageID = "largest"
		encoded, err := m.MarshalBinary()
		require.NoError(t, err)
		most := 16<<20 - (len(encoded) - 16<<20)
		m.Data[0] = make([]byte, most+1)
		err = p.PublishAll(t.Context(), []*client.Message{client.NewMessage(nil), m})
		var all *client.BatchError
		require.ErrorAs(t, err, &all)
		require.Len(t, all.Failed, 1)
		assert.Equal(t, "largest", all.Failed[0].ID)
		require.ErrorIs(t, err, client.ErrTooLarge)
		m.Data[0] = make([]byte, most)
		suite.Publish(t, p, m)
		suite.Poll(t, "the largest is there", func() bool { return suite.Ready(t, conn, "orders") == 2 })
		assert.Empty(t, log.All())
	})
}

// What would end the link, the session or the connection, or poison a queue, never
// leaves (B8, B9), and the connection lives on.
func TestHostileMessagesAreRefusedBeforeTheyAreSent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[*client.Message](t, conn, address.Queue("orders"))
		loop := map[string]any{}
		loop["self"] = loop
		sent := wire.Sent()
		for name, spoil := range map[string]func(m *client.Message){
			"no body":                    func(m *client.Message) { m.Data = nil },
			"two bodies":                 func(m *client.Message) { m.Value = "v" },
			"annotation key without x-":  func(m *client.Message) { m.Annotations = amqp.Annotations{"tenant": "a"} },
			"annotation key not a text":  func(m *client.Message) { m.Annotations = amqp.Annotations{7: "a"} },
			"null annotation":            func(m *client.Message) { m.Annotations = amqp.Annotations{"x-opt-a": nil} },
			"array in an annotation":     func(m *client.Message) { m.Annotations = amqp.Annotations{"x-opt-a": []int64{1}} },
			"not UTF-8":                  func(m *client.Message) { m.Properties = &amqp.MessageProperties{Subject: new("\xff")} },
			"property not UTF-8":         func(m *client.Message) { m.ApplicationProperties = map[string]any{"k": "\xff"} },
			"property of a Go type":      func(m *client.Message) { m.ApplicationProperties = map[string]any{"k": struct{}{}} },
			"property a list":            func(m *client.Message) { m.ApplicationProperties = map[string]any{"k": []any{1}} },
			"nil pointer":                func(m *client.Message) { m.ApplicationProperties = map[string]any{"k": (*string)(nil)} },
			"channel":                    func(m *client.Message) { m.Data, m.Value = nil, make(chan int) },
			"a map that holds itself":    func(m *client.Message) { m.Data, m.Value = nil, loop },
			"id of a bad type":           func(m *client.Message) { m.Properties = &amqp.MessageProperties{MessageID: 1.5} },
			"delivery tag too long":      func(m *client.Message) { m.DeliveryTag = make([]byte, 33) },
			"negative ttl":               func(m *client.Message) { m.Header = &amqp.MessageHeader{TTL: -1} },
			"delivery annotation, no x-": func(m *client.Message) { m.DeliveryAnnotations = amqp.Annotations{"a": 1} },
		} {
			m := client.NewMessage([]byte("body"))
			spoil(m)
			err := p.Publish(t.Context(), m)
			assert.ErrorAs(t, err, new(*argument.Error), name)
			assert.True(t, client.SafeToRetry(err), name)
		}
		assert.ErrorAs(t, p.Publish(t.Context(), nil), new(*argument.Error))
		assert.Equal(t, sent, wire.Sent())
		suite.Publish(t, p, client.NewMessage([]byte("good")))
		assert.Empty(t, log.All())
	})
}

// A hostile outcome can't harm the connection either: error texts and annotations
// are made fit, or left out.
func TestHostileOutcomesLeaveTheConnectionAlone(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 1, DeadLetter: declare.ToQueue("dead")},
		}})
		outcomes := []error{
			suite.HostileError{},
			client.DeadLetter{Reason: client.Reason(strings.Repeat("r", 100_000)), Err: suite.HostileError{}},
			client.DeadLetter{Annotations: map[string]any{"x-opt-null": nil}},
			client.DeadLetter{Annotations: map[string]any{"x-opt-huge": strings.Repeat("h", 200_000)}},
			client.DeadLetter{Annotations: map[string]any{"no-x": "a"}},
			client.Modify{DeadLetter: true, Annotations: map[string]any{"x-opt-double": 1.5}},
			client.Modify{Annotations: map[string]any{"x-opt-bad": "\xff"}},
			client.Forward{To: address.Queue(""), Message: client.NewMessage(nil)},
			client.Forward{To: address.Queue("dead"), Message: &client.Message{}},
			client.Forward{To: address.Queue("dead"), Message: nil},
			client.Forward{To: address.Queue("dead"), Message: client.NewMessage(make([]byte, 17<<20))},
		}
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { return outcomes[o.ID] }), client.ConsumerConfig{Concurrency: 4})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range outcomes {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		s.Peer(t).Take("dead", len(outcomes))
		assert.Empty(t, log.With("lost"))
	})
}

func TestManyPublishersAtOnceAreAllConfirmed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const publishers, each = 500, 2
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		began := time.Now()
		var wg sync.WaitGroup
		for i := range publishers {
			wg.Go(func() {
				for n := range each {
					ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
					assert.NoError(t, p.Publish(ctx, suite.Order{ID: i*each + n}))
					cancel()
				}
			})
		}
		wg.Wait()
		suite.Report(t, s, "%d goroutines, %d messages confirmed in %v", publishers, publishers*each, time.Since(began).Round(time.Millisecond))
		seen := map[string]bool{}
		for _, m := range s.Peer(t).Take("orders", publishers*each) {
			seen[string(m.GetData())] = true
		}
		assert.Len(t, seen, publishers*each)
	})
}

// Callers that give up during large messages break nothing for the others (B10, B11).
func TestCancelledPublishesHarmNobodyElse(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const rounds, large = 40, 1 << 20
		conn, log := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		drain := make(chan int, 10_000)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			drain <- len(d.Message().GetData())
			return nil
		}), client.ConsumerConfig{})
		p := suite.Publisher[*client.Message](t, conn, address.Queue("orders"))
		body := make([]byte, large)
		var gaveUp, outcomeKnown atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range rounds / 4 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(200_000))*time.Microsecond)
					err := p.Publish(ctx, client.NewMessage(body))
					cancel()
					switch {
					case err == nil:
						outcomeKnown.Add(1)
					case errors.Is(err, client.ErrNotSent) || errors.Is(err, client.ErrOutcomeUnknown):
						assert.ErrorIs(t, err, context.DeadlineExceeded)
						gaveUp.Add(1)
					default:
						t.Error(err)
					}
				}
			})
			wg.Go(func() {
				for range rounds / 4 {
					ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
					assert.NoError(t, p.Publish(ctx, client.NewMessage([]byte("innocent"))))
					cancel()
				}
			})
		}
		wg.Wait()
		for innocent := 0; innocent < rounds; {
			if suite.Await(t, drain, fmt.Sprintf("innocent message %d", innocent)) != large {
				innocent++
			}
		}
		assert.Empty(t, log.All())
		suite.Report(t, s, "%d large messages given up, %d sent in time, %d others untouched", gaveUp.Load(), outcomeKnown.Load(), rounds)
	})
}

// A broker that falls silent, with the window full and messages waiting, blocks neither
// callers nor Close.
func TestClosePublisherEndsThoughTheBrokerIsSilent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through, suite.Soon)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{})
		wire.Stall()
		published := make(chan error, 1)
		go func() { published <- p.PublishAll(context.Background(), make([]suite.Order, 2000)) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		assert.ErrorIs(t, p.Publish(ctx, suite.Order{ID: 1}), context.DeadlineExceeded)
		began := time.Now()
		ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		assert.ErrorIs(t, p.Close(ctx), client.ErrOutcomeUnknown)
		closed := time.Since(began)
		assert.Less(t, closed, suite.LateLimit)
		err := suite.Await(t, published, "the batch ends with its publisher")
		var batch *client.BatchError
		require.ErrorAs(t, err, &batch)
		assert.ErrorIs(t, err, client.ErrOutcomeUnknown)
		assert.ErrorIs(t, err, client.ErrNotSent)
		ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		_ = conn.Close(ctx)
		assert.Less(t, time.Since(began), 2*suite.LateLimit)
		wire.Resume()
		suite.Report(t, s, "Publisher.Close with a ctx of 500 ms took %v; %d of 2000 messages were told", closed.Round(time.Millisecond), len(batch.Failed))
	})
}
