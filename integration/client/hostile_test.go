package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// A handler that ends its goroutine, as testing's FailNow does, is a death with all
// that is known of it, and its worker is replaced.
func TestHandlerThatEndsItsGoroutineLeavesItsHistory(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second), Worker: "w-1"}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			runtime.Goexit()
			return nil
		})), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 3 {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		for _, m := range s.Peer(t).Take("orders.dead", 3) {
			d := retry.DeadLetterOf(m)
			assert.EqualValues(t, client.ReasonPanicked, d.Reason)
			assert.Equal(t, "orders", d.Queue)
			assert.Equal(t, "w-1", d.Worker)
			assert.Contains(t, d.Error, "ended its goroutine")
		}
	})
}

// rewriting changes what go-amqp writes: it can't encode what others send.
type rewriting struct {
	net.Conn
	from, to []byte
}

func (r *rewriting) Write(b []byte) (int, error) {
	_, err := r.Conn.Write(bytes.Replace(b, r.from, r.to, 1))
	return len(b), err
}

// putRaw sends a message with something in it replaced by other bytes, as many.
func putRaw(t *testing.T, s *suite.Site, queue string, m *amqp.Message, from, to []byte) {
	t.Helper()
	require.Len(t, to, len(from))
	u, err := url.Parse(s.URL)
	require.NoError(t, err)
	raw, err := net.Dial("tcp", u.Host)
	require.NoError(t, err)
	password, _ := u.User.Password()
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	conn, err := amqp.NewConn(ctx, &rewriting{raw, from, to}, &amqp.ConnOptions{HostName: "vhost:" + s.VHost, SASLType: amqp.SASLTypePlain(u.User.Username(), password)})
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	session, err := conn.NewSession(ctx, nil)
	require.NoError(t, err)
	target, err := address.Queue(queue).Build()
	require.NoError(t, err)
	l, err := session.NewSender(ctx, target, nil)
	require.NoError(t, err)
	require.NoError(t, l.Send(ctx, m, nil))
}

// claimedTwice is size bytes of a list behind its size: a count, and lists within lists that each
// claim all bytes that are left.
func claimedTwice(size int) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, size), uint32(size-4))
	for range 500 {
		left := uint32(size - len(b) - 9)
		b = binary.BigEndian.AppendUint32(append(b, 0xd0), left+4)
		b = binary.BigEndian.AppendUint32(b, left)
	}
	return append(b, bytes.Repeat([]byte{0x40}, size-len(b))...)
}

// A char, a decimal, a binary for a key or a value nested a million levels deep can be sent
// by anybody. go-amqp ends the link over most, after which RabbitMQ 4.3 delivers the
// message again endlessly, and the process over the last and over a footer's key. Nor does a value cost
// more than a small multiple of its size because it claims to have many elements. Here they go to the
// dead-letter queue, or are held where there is none, and the others are handled.
func TestMessagesThatCannotBeDecodedHarmNoOthers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t, suite.Soon)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 3, DeadLetter: declare.ToQueue("dead")},
			declare.QuorumQueue{Name: "nowhere", DeliveryLimit: 3, DeadLetter: declare.Drop()},
		}})
		hostile := func(queue string) (n int) {
			for _, code := range []byte{0x73, 0x74} { // char, decimal32
				m := amqp.NewMessage([]byte(`{"id":-1}`))
				m.ApplicationProperties = map[string]any{"smile": uint32(0x1f600)}
				putRaw(t, s, queue, m, []byte{0x70, 0, 1, 0xf6, 0}, []byte{code, 0, 1, 0xf6, 0})
				n++
			}
			// A text for a key becomes a binary, which isn't a key in Go.
			keyed := amqp.NewMessage([]byte(`{"id":-1}`))
			keyed.Footer = amqp.Annotations{"x-hostile": "v"}
			putRaw(t, s, queue, keyed, []byte("\xa3\x09x-hostile"), []byte("\xa0\x09x-hostile"))
			for _, m := range []*amqp.Message{
				{Data: keyed.Data, ApplicationProperties: map[string]any{"x-hostile": "v"}},
				{Value: map[string]any{"x-hostile": "v"}},
			} {
				putRaw(t, s, queue, m, []byte("\xa1\x09x-hostile"), []byte("\xa0\x09x-hostile"))
			}
			n += 3
			// A body of a data section becomes one of a value in a value in a value.
			for _, levels := range []int{20_000, 1_000_000} {
				body := append(bytes.Repeat([]byte{0, 0x53, 1}, levels), 0x40)
				body = append([]byte{1}, body...)
				size := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
				putRaw(t, s, queue, amqp.NewMessage(body), append([]byte{0, 0x53, 0x75, 0xb0}, size...), []byte{0, 0x53, 0x77, 0, 0x53, 1, 0, 0x53})
				n++
			}
			// One becomes a list that claims as many elements as it has bytes, and has as its first
			// element another one that claims the same bytes again. A decoder that makes room for
			// what is claimed takes more than 10 GB.
			body := claimedTwice(2_000_000)
			size := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
			putRaw(t, s, queue, amqp.NewMessage(body), append([]byte{0, 0x53, 0x75, 0xb0}, size...), append([]byte{0, 0x53, 0x77, 0xd0}, size...))
			return n + 1
		}
		got := make(chan int, 100)
		for _, queue := range []string{"orders", "nowhere"} {
			n := hostile(queue)
			s.Peer(t).Put(queue, amqp.NewMessage([]byte(`{"id":1}`)))
			stop := suite.Consume(t, conn, queue, client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
			assert.Equal(t, 1, suite.Await(t, got, "a message behind them"))
			if queue == "orders" {
				suite.Poll(t, "they are in the dead-letter queue", func() bool { return suite.Ready(t, conn, "dead") == n })
				suite.Poll(t, "each is logged", func() bool { return log.Messages("can't be decoded; it is dead-lettered") == n })
			} else {
				suite.Poll(t, "they are held", func() bool { return log.Messages("it is held until the consumer stops") == n })
			}
			require.NoError(t, stop())
			if queue == "nowhere" {
				suite.Poll(t, "they are back in their queue", func() bool { return suite.Ready(t, conn, queue) == n })
			}
		}
		assert.Empty(t, log.With("lost"))
	})
}

// With any content in the headers that hopback reads, and any amount of it, a failed message is retried and ends where it should, with every strategy.
func TestHostileHeadersAndBodiesAreSurvived(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		loud := make(map[string]any, 10_000)
		for i := range 10_000 {
			loud[fmt.Sprintf("header-%05d", i)] = int64(i)
		}
		deep := any("bottom")
		for range 30 {
			deep = []any{deep}
		}
		now := time.Now()
		var hostile []*amqp.Message
		for _, count := range []any{"many", "3", "-1", "1e3", strings.Repeat("9", 5000), 2.5, math.NaN(), math.Inf(1), int64(math.MinInt64), uint64(math.MaxUint64), int8(-1), true, nil, []byte("3"), now, amqp.UUID{1}} {
			m := amqp.NewMessage([]byte("{}"))
			m.ApplicationProperties = map[string]any{retry.CountProperty: count}
			hostile = append(hostile, m)
		}
		for _, v := range []any{"text", int64(-5), 1.5, true, []any{int64(1)}, map[string]any{"k": "v"}, now, amqp.UUID{2}, []byte{0xff}, deep} {
			m := amqp.NewMessage([]byte("{}"))
			m.Annotations = amqp.Annotations{}
			for _, key := range []string{
				client.AnnotationReason, client.AnnotationError, client.AnnotationKnownCount, annotation.Retries, annotation.Older.First,
				annotation.Older.Last, annotation.Delay, annotation.Queue, annotation.Older.Worker, "x-opt-own",
			} {
				m.Annotations[key] = v
			}
			hostile = append(hostile, m)
		}
		hostile = append(hostile,
			&amqp.Message{Data: [][]byte{[]byte("{}")}, ApplicationProperties: loud},
			&amqp.Message{Value: deep}, &amqp.Message{Value: map[any]any{int64(1): "k"}}, &amqp.Message{Value: amqp.Null{}},
			&amqp.Message{Sequence: [][]any{{"a"}, {deep}}}, amqp.NewMessage([]byte("{broken")), amqp.NewMessage(nil), amqp.NewMessage([]byte{0xff, 0xfe}),
			&amqp.Message{Data: [][]byte{[]byte("{}")}, Properties: &amqp.MessageProperties{MessageID: strings.Repeat("i", 100_000), CorrelationID: amqp.UUID{3}}},
			&amqp.Message{Data: [][]byte{[]byte("{}")}, Properties: &amqp.MessageProperties{MessageID: []byte{0xff, 0}}},
		)
		for name, edit := range suite.Strategies(s) {
			if name == "ladder" || name == "auto" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				conn, log := s.Connect(t)
				policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond)}
				edit(&policy)
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
				p := s.Peer(t)
				for _, m := range hostile {
					p.Put("orders", m)
				}
				suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(context.Context, suite.Order) error { return errors.New("always") })), client.ConsumerConfig{Concurrency: 4})
				seen := p.Take("orders.dead", len(hostile))
				for _, m := range seen {
					_ = retry.DeadLetterOf(m)
				}
				suite.Poll(t, "nothing is left", func() bool { return suite.Ready(t, conn, "orders") == 0 })
				assert.Empty(t, log.With("lost"))
			})
		}
	})
}
