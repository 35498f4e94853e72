package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
)

type sum struct{ A, B int }

func add(_ context.Context, s sum) (int, error) { return s.A + s.B, nil }

// A call gets its own answer, by either way, and the queue of a requester goes with it.
func TestCallGetsItsReply(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		r := suite.Responder(t, conn)
		suite.Consume(t, conn, "sums", rpc.Respond(r, func(ctx context.Context, in sum) (int, error) {
			if in.A < 0 {
				return 0, fmt.Errorf("odd: %w", &rpc.Error{Code: "negative", Text: fmt.Sprint(in.A)})
			}
			return add(ctx, in)
		}), client.ConsumerConfig{Concurrency: 16})
		for _, way := range append(suite.Ways(s), rpc.RepliesAuto) {
			q := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: way, InFlight: 300})
			var all sync.WaitGroup
			for i := range 500 {
				all.Go(func() {
					got, err := q.Call(suite.Within(t), sum{i, 1})
					assert.NoError(t, err)
					assert.Equal(t, i+1, got)
				})
			}
			all.Wait()
			_, err := q.Call(suite.Within(t), sum{A: -1})
			assert.Equal(t, &rpc.Error{Code: "negative", Text: "-1"}, err)
			assert.Equal(t, rpc.Stats{Calls: 501, Replies: 501}, q.Stats(), way)
			assert.NoError(t, q.Close(suite.Within(t)))
			_, err = q.Call(suite.Within(t), sum{})
			assert.ErrorIs(t, err, client.ErrNotSent)
			assert.ErrorIs(t, err, client.ErrClosed)
			// Nothing of it is left.
			var queues []struct{ Name string }
			s.HTTP(t, "GET", "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
			assert.Len(t, queues, 1, way)
		}
		ways := uint64(len(suite.Ways(s)) + 1)
		suite.Poll(t, "the last reply is confirmed", func() bool { return r.Stats().Replied == 501*ways })
		assert.Equal(t, ways, r.Stats().Errors)
	})
}

// The caller of a request that is given up learns why, with every strategy; the request lies in
// the dead-letter queue. Its reply-to and correlation-id survive the hops.
func TestCallerLearnsThatItsRequestIsAbandoned(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range suite.Several(s) {
			t.Run(string(strategy), func(t *testing.T) {
				conn, _ := s.Connect(t)
				work := "work-" + string(strategy)
				policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond), Strategy: strategy}
				policy.Names.RetryExchange, policy.Names.RequeueExchange = work+"-retry", work+"-requeue"
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: work})
				r := suite.Responder(t, conn)
				var attempts sync.Map
				suite.Consume(t, conn, work, retry.With(policy)(rpc.Respond(r, func(_ context.Context, in sum) (int, error) {
					n, _ := attempts.LoadOrStore(in.A, new(atomic.Int64))
					switch tried := n.(*atomic.Int64).Add(1); {
					case in.A == 1 && tried == 3:
						return 7, nil
					case in.A == 3:
						return 0, retry.Permanent(errors.New("never"))
					case in.A == 4:
						panic("oh")
					}
					return 0, errors.New("down")
				})), client.ConsumerConfig{Concurrency: 4})
				for _, way := range suite.Ways(s) {
					attempts.Clear()
					q := suite.Requester[sum, int](t, conn, address.Queue(work), rpc.RequesterConfig{Replies: way})
					got, err := q.Call(suite.Within(t), sum{A: 1})
					require.NoError(t, err)
					assert.Equal(t, 7, got, "after two retries")
					for in, want := range map[int]rpc.GivenUpError{
						2: {Reason: retry.ReasonExhausted, Text: "down"},
						3: {Reason: retry.ReasonPermanent, Text: "never"},
						4: {Reason: client.ReasonPanicked, Text: "panicked: oh"},
					} {
						_, err := q.Call(suite.Within(t), sum{A: in})
						var up *rpc.GivenUpError
						if assert.ErrorAs(t, err, &up) {
							assert.Equal(t, want.Reason, up.Reason)
							assert.Contains(t, up.Text, want.Text)
						}
					}
				}
				n := 3 * len(suite.Ways(s))
				suite.Poll(t, "the dead letters", func() bool { return suite.Ready(t, conn, work+".dead") == n })
				suite.Poll(t, "the counts", func() bool { return r.Stats().GivenUp == uint64(n) })
			})
		}
	})
}

// A body that can't be read, and an Outcome, are reported without retry.With, too.
// A reply that can never be sent isn't tried again, as one is while the broker is away: the
// handler would only run again. The caller gets an error, and the request is dead-lettered.
func TestAReplyThatCanNotBeSentIsNotRetried(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(50 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "reports"})
		r := suite.Responder(t, conn)
		var calls atomic.Int64
		handler := rpc.Respond(r, func(_ context.Context, kind string) (any, error) {
			calls.Add(1)
			if kind == "large" {
				return strings.Repeat("x", 17<<20), nil
			}
			return func() {}, nil
		})
		suite.Consume(t, conn, "reports", retry.With(policy)(handler), client.ConsumerConfig{})
		for i, kind := range []string{"large", "a function"} {
			q := suite.Requester[string, any](t, conn, address.Queue("reports"), rpc.RequesterConfig{})
			_, err := q.Call(suite.Within(t), kind)
			given, ok := errors.AsType[*rpc.GivenUpError](err)
			require.True(t, ok, "%s: %v", kind, err)
			assert.Equal(t, client.ReasonUnsendable, given.Reason, kind)
			suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, "reports.dead") == i+1 })
			assert.Equal(t, int64(i+1), calls.Load(), kind)
		}
		reasons := make(chan client.Reason, 2)
		suite.Consume(t, conn, "reports.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			reasons <- retry.DeadLetterOf(d.Message()).Reason
			return nil
		}), client.ConsumerConfig{})
		for range 2 {
			assert.Equal(t, client.ReasonUnsendable, suite.Await(t, reasons, "a dead letter"))
		}
	})
}

func TestCallerLearnsOfADeathWithoutRetries(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		r := suite.Responder(t, conn)
		suite.Consume(t, conn, "sums", rpc.Respond(r, func(context.Context, sum) (int, error) {
			return 0, client.DeadLetter{Reason: "unheard of"}
		}), client.ConsumerConfig{})
		q := suite.Requester[any, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{})
		for v, reason := range map[any]client.Reason{sum{}: "unheard of", "text": client.ReasonUndecodable} {
			_, err := q.Call(suite.Within(t), v)
			var up *rpc.GivenUpError
			require.ErrorAs(t, err, &up)
			assert.Equal(t, reason, up.Reason)
		}
	})
}

// A reply above MaxMessageSize fails its call, and no other. The request isn't repeated: its handler has
// run.
func TestAReplyThatIsTooLargeFailsItsCall(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		small, _ := s.Connect(t, func(c *client.Config) { c.MaxMessageSize = 200_000 })
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "texts"}))
		r := suite.Responder(t, conn)
		var calls atomic.Int32
		suite.Consume(t, conn, "texts", rpc.Respond(r, func(_ context.Context, n int) (string, error) {
			calls.Add(1)
			return strings.Repeat("x", n), nil
		}), client.ConsumerConfig{})
		for _, way := range suite.Ways(s) {
			calls.Store(0)
			q := suite.Requester[int, string](t, small, address.Queue("texts"), rpc.RequesterConfig{Replies: way})
			_, err := q.Call(suite.Within(t), 1_000_000)
			require.ErrorIs(t, err, rpc.ErrUndecodable)
			assert.ErrorContains(t, err, "MaxMessageSize")
			assert.False(t, client.SafeToRetry(err))
			text, err := q.Call(suite.Within(t), 100_000)
			require.NoError(t, err)
			assert.Len(t, text, 100_000)
			assert.EqualValues(t, 2, calls.Load())
		}
	})
}

// A call that ends without a reply says so. Its request expires, so that nobody works for it; a
// late reply is counted; so is a second one, and what is no reply at all.
func TestCallWithoutAReplyEndsWithItsContext(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		for _, way := range suite.Ways(s) {
			q := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: way, Timeout: 100 * time.Millisecond})
			_, err := q.Call(context.Background(), sum{})
			assert.ErrorIs(t, err, rpc.ErrNoReply)
			assert.ErrorIs(t, err, client.ErrOutcomeUnknown)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			assert.False(t, client.SafeToRetry(err))
			suite.Poll(t, "the request has expired", func() bool { return suite.Ready(t, conn, "sums") == 0 })

			// Now with a responder that is too late, answers twice, and to nobody.
			p := s.Peer(t)
			in := p.Receiver("sums", 10)
			late, cancel := context.WithCancel(suite.Within(t))
			ended := make(chan error, 1)
			go func() {
				_, err := q.Call(late, sum{1, 2})
				ended <- err
			}()
			m, err := in.Receive(suite.Within(t), nil)
			require.NoError(t, err)
			cancel()
			assert.ErrorIs(t, suite.Await(t, ended, "the end"), context.Canceled)
			out, err := p.Site.NewSender(suite.Within(t), "", nil)
			require.NoError(t, err)
			reply := func(to *amqp.Message, id any) {
				r := amqp.NewMessage([]byte("3"))
				r.Properties = &amqp.MessageProperties{To: to.Properties.ReplyTo, CorrelationID: id}
				require.NoError(t, out.Send(suite.Within(t), r, nil))
			}
			reply(m, m.Properties.CorrelationID)
			reply(m, m.Properties.CorrelationID)
			reply(m, "somebody else's")
			reply(m, uint64(7))
			reply(m, nil)
			suite.Poll(t, "the replies", func() bool {
				st := q.Stats()
				return st.Late == 1 && st.Duplicates == 1 && st.Strays == 3
			})
			require.NoError(t, in.AcceptMessage(suite.Within(t), m))
			assert.Zero(t, q.Stats().Waiting)
			require.NoError(t, in.Close(suite.Within(t)))
		}
	})
}

// A reply that nobody waits for any more harms nobody: its request is accepted.
func TestReplyToNobodyIsDropped(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		r := suite.Responder(t, conn)
		handled := make(chan struct{}, 10)
		suite.Consume(t, conn, "sums", rpc.Respond(r, func(ctx context.Context, in sum) (int, error) {
			handled <- struct{}{}
			return add(ctx, in)
		}), client.ConsumerConfig{})
		p := suite.Publisher[sum](t, conn, address.Queue("sums"))
		to := func(replyTo string) func(*client.Message) {
			return func(m *client.Message) { m.Properties.ReplyTo = &replyTo }
		}
		suite.Publish(t, p, sum{})
		suite.Publish(t, p, sum{}, to(""))
		for _, nowhere := range []string{"/queues/gone", "gone", "/nonsense", "/queues/%zz", "/exchanges/amq.fanout", "/queues/amq.rabbitmq.reply-to.nonsense", "/queues/a/b", " "} {
			suite.Publish(t, p, sum{}, to(nowhere))
		}
		for range 10 {
			suite.Await(t, handled, "a request")
		}
		suite.Poll(t, "the counts", func() bool {
			st := r.Stats()
			return st.Unwanted == 2 && st.Unclaimed == 8
		})
		suite.Poll(t, "all is accepted", func() bool { return suite.Ready(t, conn, "sums") == 0 })
	})
}

// Another client answers, and another client asks.
func TestRequesterAndResponderOfGoAMQP(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "theirs"}))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "ours"}))
		p := s.Peer(t)

		// They answer to the message-id, as the official clients do.
		in := p.Receiver("theirs", 10)
		out, err := p.Site.NewSender(suite.Within(t), "", nil)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() {
			for range suite.Ways(s) {
				m, err := in.Receive(suite.Within(t), nil)
				if err != nil {
					done <- err
					return
				}
				r := amqp.NewMessage(m.GetData())
				r.Properties = &amqp.MessageProperties{To: m.Properties.ReplyTo, CorrelationID: m.Properties.MessageID}
				done <- errors.Join(out.Send(suite.Within(t), r, nil), in.AcceptMessage(suite.Within(t), m))
			}
		}()
		for _, way := range suite.Ways(s) {
			q := suite.Requester[string, string](t, conn, address.Queue("theirs"), rpc.RequesterConfig{Replies: way})
			got, err := q.Call(suite.Within(t), "echo")
			require.NoError(t, err)
			assert.Equal(t, "echo", got)
			require.NoError(t, suite.Await(t, done, "the answer"))
		}

		// They ask, with a message-id alone.
		suite.Consume(t, conn, "ours", rpc.Respond(suite.Responder(t, conn), add), client.ConsumerConfig{})
		var replies *amqp.Receiver
		if s.AtLeast("4.2") {
			replies, err = p.Site.NewReceiver(suite.Within(t), "", &amqp.ReceiverOptions{
				DynamicAddress: true, SourceCapabilities: []string{"rabbitmq:volatile-queue"}, SourceExpiryPolicy: amqp.ExpiryPolicyLinkDetach,
				RequestedSenderSettleMode: amqp.SenderSettleModeSettled.Ptr(), Credit: 10,
			})
			require.NoError(t, err)
		} else {
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "client.gen-answers"}))
			replies = p.Receiver("client.gen-answers", 10)
		}
		to := replies.Address()
		m := amqp.NewMessage([]byte(`{"A":40,"B":2}`))
		m.Properties = &amqp.MessageProperties{MessageID: "their id", ReplyTo: &to}
		var reply *amqp.Message
		for limit := suite.Within(t); reply == nil; { // go-amqp grants credit when it gets to that, and without it a direct reply is dropped
			require.NoError(t, limit.Err())
			p.Put("ours", m)
			ctx, cancel := context.WithTimeout(limit, time.Second)
			reply, err = replies.Receive(ctx, nil)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				require.NoError(t, err)
			}
		}
		assert.Equal(t, "42", string(reply.GetData()))
		assert.Equal(t, "their id", reply.Properties.CorrelationID)
	})
}

// On RabbitMQ 4.2 and later direct replies are dropped beyond the credit of their link, though
// the broker accepts them. So a requester bounds its calls: with 128 in flight for each link,
// none is dropped even if the requester reads nothing for a while.
func TestDirectRepliesAreDroppedWithoutCredit(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.AtLeast("4.2") {
			s.Peer(t).RefusesDynamic(t)
			return
		}
		p := s.Peer(t)
		direct := func(credit uint32) *amqp.Receiver {
			r, err := p.Site.NewReceiver(suite.Within(t), "", &amqp.ReceiverOptions{
				DynamicAddress: true, SourceCapabilities: []string{"rabbitmq:volatile-queue"}, SourceExpiryPolicy: amqp.ExpiryPolicyLinkDetach,
				RequestedSenderSettleMode: amqp.SenderSettleModeSettled.Ptr(), Credit: -1,
			})
			require.NoError(t, err)
			if credit > 0 {
				require.NoError(t, r.IssueCredit(credit))
			}
			return r
		}
		scarce, ample := direct(10), direct(256)
		out, err := s.Peer(t).Site.NewSender(suite.Within(t), "", nil)
		require.NoError(t, err)
		send := func(to string, n int) {
			for i := range n {
				m := amqp.NewMessage(fmt.Append(nil, i))
				m.Properties = &amqp.MessageProperties{To: &to}
				r, err := out.SendWithReceipt(suite.Within(t), m, nil)
				require.NoError(t, err)
				state, err := r.Wait(suite.Within(t))
				require.NoError(t, err)
				require.IsType(t, &amqp.StateAccepted{}, state)
			}
		}
		send(scarce.Address(), 20)
		send(ample.Address(), 200)
		for i := range 200 {
			m, err := ample.Receive(suite.Within(t), nil)
			require.NoError(t, err)
			assert.Equal(t, fmt.Sprint(i), string(m.GetData()))
		}
		for range 10 {
			_, err := scarce.Receive(suite.Within(t), nil)
			require.NoError(t, err)
		}
		require.NoError(t, scarce.IssueCredit(10))
		var m *amqp.Message
		suite.Poll(t, "a reply, when the credit is there", func() bool {
			send(scarce.Address(), 1)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			m, err = scarce.Receive(ctx, nil)
			return err == nil
		})
		assert.Equal(t, "0", string(m.GetData()), "ten were dropped")

		// To the sender, a link that is gone still accepts replies.
		gone := ample.Address()
		require.NoError(t, ample.Close(suite.Within(t)))
		send(gone, 1)
		_, err = p.Site.NewSender(suite.Within(t), gone, nil)
		var refused *amqp.Error
		require.ErrorAs(t, err, &refused)
		assert.Equal(t, amqp.ErrCondNotFound, refused.Condition)
	})
}

// A call outlives the loss of its connection: with direct replies the request is sent again, and
// with a queue the reply waits in it. With NoResend the caller of a direct reply gets an error.
func TestCallAndTheLossOfItsConnection(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		started, release := make(chan struct{}, 10), make(chan struct{})
		suite.Consume(t, direct, "sums", rpc.Respond(suite.Responder(t, direct), func(ctx context.Context, in sum) (int, error) {
			started <- struct{}{}
			<-release
			return add(ctx, in)
		}), client.ConsumerConfig{Concurrency: 10})
		for _, way := range suite.Ways(s) {
			for _, noResend := range []bool{false, true} {
				wire, through := s.Through(t)
				conn, _ := suite.ConnectTo(t, through, suite.Soon)
				q := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: way, NoResend: noResend})
				release = make(chan struct{})
				type result struct {
					got int
					err error
				}
				done := make(chan result, 1)
				go func() {
					got, err := q.Call(suite.Within(t), sum{1, 2})
					done <- result{got, err}
				}()
				suite.Await(t, started, "the request")
				suite.Poll(t, "the request's confirmation", func() bool { return conn.Stats().Publishers[0].Unconfirmed == 0 })
				wire.Cut()
				resent := way == rpc.RepliesDirect && !noResend
				if resent {
					suite.Await(t, started, "the request again")
				}
				if way == rpc.RepliesDirect && noResend {
					r := suite.Await(t, done, "the end")
					assert.ErrorIs(t, r.err, rpc.ErrNoReply)
					assert.ErrorIs(t, r.err, client.ErrConnectionLost)
					close(release)
				} else {
					close(release)
					r := suite.Await(t, done, "the reply")
					assert.NoError(t, r.err)
					assert.Equal(t, 3, r.got)
				}
				assert.EqualValues(t, map[bool]int{true: 1, false: 0}[resent], q.Stats().Resent)
				// It works again by itself.
				got, err := q.Call(suite.Within(t), sum{2, 2})
				<-started
				assert.NoError(t, err)
				assert.Equal(t, 4, got)
				assert.NoError(t, q.Close(suite.Within(t)))
			}
		}
	})
}

// A reply queue that is gone is declared again, and calls that await replies in it are sent
// again or told.
func TestReplyQueueIsDeclaredAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t, suite.Soon)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		q := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: rpc.RepliesByQueue})
		notified := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: rpc.RepliesByQueue, NoResend: true})
		done, ended := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := q.Call(suite.Within(t), sum{1, 2})
			done <- err
		}()
		go func() {
			_, err := notified.Call(suite.Within(t), sum{1, 2})
			ended <- err
		}()
		suite.Poll(t, "the requests", func() bool { return suite.Ready(t, conn, "sums") == 2 })
		var queues []struct{ Name string }
		s.HTTP(t, "GET", "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
		for _, x := range queues {
			if x.Name != "sums" {
				s.HTTP(t, "DELETE", "/queues/"+s.VHost+"/"+url.PathEscape(x.Name), nil, nil)
			}
		}
		assert.ErrorIs(t, suite.Await(t, ended, "the end"), rpc.ErrNoReply)
		suite.Poll(t, "the request again", func() bool { return suite.Ready(t, conn, "sums") == 3 })
		r := suite.Responder(t, conn)
		suite.Consume(t, conn, "sums", rpc.Respond(r, add), client.ConsumerConfig{})
		assert.NoError(t, suite.Await(t, done, "the reply"))
		suite.Poll(t, "the second reply", func() bool { return q.Stats().Duplicates == 1 && notified.Stats().Late == 1 })
	})
}

// A requester is in its connection's Stats, and in the service's health.
func TestRequesterIsObserved(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		conn, _ := s.Connect(t, suite.Soon)
		q := suite.Requester[sum, int](t, conn, address.Queue("sums"), rpc.RequesterConfig{Replies: rpc.RepliesByQueue})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = q.Call(ctx, sum{1, 2})
		}()
		suite.Poll(t, "the call waits", func() bool {
			all := conn.Stats().Requesters
			return len(all) == 1 && all[0].Up && all[0].Waiting == 1 && all[0].To == address.Queue("sums")
		})
		before := conn.Stats().Requesters[0].Since
		var queues []struct{ Name string }
		s.HTTP(t, "GET", "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
		for _, x := range queues {
			if x.Name != "sums" {
				s.HTTP(t, "DELETE", "/queues/"+s.VHost+"/"+url.PathEscape(x.Name), nil, nil)
			}
		}
		suite.Poll(t, "it was down, and is up again", func() bool {
			all := conn.Stats().Requesters
			return len(all) == 1 && all[0].Up && all[0].Since.After(before) && all[0].Waiting == 1
		})
		cancel()
		<-ended
		require.NoError(t, q.Close(suite.Within(t)))
		assert.Empty(t, conn.Stats().Requesters)
	})
}

// The caller's trace goes to the handler, as that of any message.
func TestCallersContextReachesTheInstruments(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		traced := func(c *client.Config) { c.Instrument = tracer{} }
		conn, _ := s.Connect(t, traced)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "sums"}))
		suite.Consume(t, conn, "sums", rpc.Respond(suite.Responder(t, conn), func(ctx context.Context, _ sum) (string, error) {
			id, _ := ctx.Value(traceKey{}).(string)
			return id, nil
		}), client.ConsumerConfig{})
		q := suite.Requester[sum, string](t, conn, address.Queue("sums"), rpc.RequesterConfig{})
		got, err := q.Call(context.WithValue(suite.Within(t), traceKey{}, "the caller's"), sum{})
		require.NoError(t, err)
		assert.Equal(t, "the caller's", got)
	})
}

type traceKey struct{}

// tracer carries a word from the publisher's ctx to the handler's.
type tracer struct{ instrument.None }

func (tracer) Publish(ctx context.Context, m instrument.Sending) instrument.Publication {
	if id, ok := ctx.Value(traceKey{}).(string); ok {
		m.SetProperty("trace", id)
	}
	return nil
}

func (tracer) Handle(ctx context.Context, d instrument.Delivery) (context.Context, instrument.Handling) {
	return context.WithValue(ctx, traceKey{}, d.Message().ApplicationProperties["trace"]), nil
}

// Each call returns its own answer or a typed error within its ctx, while connections are cut.
// goleak looks for goroutines that are left when all tests have ended.
func TestCallsWhileConnectionsAreCut(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		calls, cuts := suite.Sized(100, 10_000), suite.Sized(2, 20)
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, suite.QueueOf(declare.QuorumQueue{Name: "sums", DeliveryLimit: declare.Unlimited}))
		for _, way := range suite.Ways(s) {
			began := time.Now()
			wire, through := s.Through(t)
			asking, _ := suite.ConnectTo(t, through, suite.Soon)
			answering, _ := suite.ConnectTo(t, through, suite.Soon)
			// A handler continues when it was noticed, or when all cuts are made: so each cut
			// comes while calls are in flight.
			progress, cutAll := make(chan struct{}), make(chan struct{})
			notify := func() {
				select {
				case progress <- struct{}{}:
				case <-cutAll:
				}
			}
			r := suite.Responder(t, answering)
			stop := suite.Consume(t, answering, "sums", rpc.Respond(r, func(ctx context.Context, in sum) (int, error) {
				notify()
				return add(ctx, in)
			}), client.ConsumerConfig{Concurrency: 32})
			q := suite.Requester[sum, int](t, asking, address.Queue("sums"), rpc.RequesterConfig{Replies: way})

			limit := time.Duration(suite.Sized(2, 10)) * suite.Patience
			var all sync.WaitGroup
			var answered, failed, untyped, wrong, overdue atomic.Int64
			slots := make(chan struct{}, calls)
			for i := range calls {
				all.Go(func() {
					slots <- struct{}{}
					defer func() { <-slots }()
					ctx, cancel := context.WithTimeout(context.Background(), limit)
					defer cancel()
					got, err := q.Call(ctx, sum{i, i})
					if time.Since(began) > limit+5*time.Second {
						overdue.Add(1)
					}
					var typed *client.Error
					switch {
					case err == nil && got == 2*i:
						answered.Add(1)
					case err == nil:
						wrong.Add(1)
					case errors.As(err, &typed):
						failed.Add(1)
						t.Log(err)
					default:
						untyped.Add(1)
					}
				})
			}
			cutting := make(chan int)
			over := make(chan struct{})
			go func() {
				done := 0
				defer func() {
					close(cutAll)
					cutting <- done
				}()
				for done < cuts {
					// After some of the answers, and never when nothing moves.
					for range 1 + random.IntN(max(calls/cuts/2, 1)) {
						select {
						case <-progress:
						case <-over:
							return
						}
					}
					wire.Cut()
					done++
				}
			}()
			all.Wait()
			close(over)
			done := suite.Await(t, cutting, "the cutting")
			assert.Equal(t, cuts, done, "cuts, while calls were in flight")
			assert.Zero(t, wrong.Load(), "answers to other calls")
			assert.Zero(t, untyped.Load(), "errors without a type")
			assert.Zero(t, overdue.Load(), "calls that outlived their ctx")
			assert.EqualValues(t, calls, answered.Load()+failed.Load())
			assert.EqualValues(t, calls, answered.Load(), "answered")
			st := q.Stats()
			suite.Report(t, s, "%s: %d calls, %d cuts in %v: %d answered, %d failed, %d sent again, %d second replies, %d late", way, calls, done,
				time.Since(began).Round(time.Millisecond), answered.Load(), failed.Load(), st.Resent, st.Duplicates, st.Late)
			assert.Zero(t, st.Waiting)
			assert.NoError(t, q.Close(suite.Within(t)))
			require.NoError(t, stop())
			assert.NoError(t, asking.Close(suite.Within(t)))
			assert.NoError(t, answering.Close(suite.Within(t)))
			wire.Close()
		}
	})
}

// A request can't make its responder write to a queue that isn't for replies, nor answer
// itself without end. What isn't a reply queue by its name is allowed by Allow.
func TestReplyGoesToReplyQueuesOnly(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		for _, queue := range []string{"sums", "payments", "answers", "echo", "client.gen-1"} {
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: queue}))
		}
		r := suite.Responder(t, conn)
		suite.Consume(t, conn, "sums", rpc.Respond(r, add), client.ConsumerConfig{})
		p := suite.Publisher[sum](t, conn, address.Queue("sums"))
		to := func(replyTo string) func(*client.Message) {
			return func(m *client.Message) { m.Properties.ReplyTo = &replyTo }
		}
		for _, forbidden := range []string{"/queues/payments", "payments", "/queues/sums", "/exchanges/amq.direct/payments", "/queues/hopback%2Dreplies"} {
			suite.Publish(t, p, sum{}, to(forbidden))
		}
		suite.Publish(t, p, sum{}, to("/queues/client.gen-1"))
		suite.Poll(t, "the counts", func() bool { return r.Stats().Unclaimed == 5 && r.Stats().Replied == 1 })
		assert.Zero(t, suite.Ready(t, conn, "payments"))
		assert.Equal(t, 1, suite.Ready(t, conn, "client.gen-1"))
		assert.Len(t, log.With("a reply was dropped"), 2, "of five, the first for each reason")

		// A handler that returns the unchanged request would answer itself.
		all, err := rpc.NewResponder(suite.Within(t), conn, rpc.ResponderConfig{Allow: func(to address.Address) bool { return true }})
		require.NoError(t, err)
		handled := make(chan struct{}, 10_000)
		suite.Consume(t, conn, "echo", rpc.Respond(all, func(_ context.Context, m *client.Message) (*client.Message, error) {
			handled <- struct{}{}
			return m, nil
		}), client.ConsumerConfig{})
		q := suite.Publisher[sum](t, conn, address.Queue("echo"))
		suite.Publish(t, q, sum{}, to("/queues/echo"))
		suite.Publish(t, q, sum{}, to("echo"))
		suite.Publish(t, q, sum{}, to("/queues/answers"))
		suite.Poll(t, "the answer", func() bool { return all.Stats().Replied == 1 && all.Stats().Unclaimed == 2 })
		suite.AssertEmpty(t, s, "echo")
		assert.Len(t, handled, 3)
	})
}
