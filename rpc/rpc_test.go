package rpc_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// world is a broker in memory with a connection, and a queue that nobody consumes from.
func world(t *testing.T, version string) (*hopbacktest.Broker, *client.Conn) {
	t.Helper()
	b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	return b, conn
}

func TestBadInputIsRefusedBeforeAnythingIsSent(t *testing.T) {
	_, conn := world(t, "")
	q := address.Queue("q")
	bad := func(err error, name string) {
		t.Helper()
		var a *argument.Error
		if assert.ErrorAs(t, err, &a) {
			assert.Contains(t, err.Error(), name)
		}
	}
	_, err := rpc.NewRequester[int, int](t.Context(), nil, q, rpc.RequesterConfig{})
	bad(err, "conn")
	_, err = rpc.NewRequester[int, int](t.Context(), conn, address.Address{}, rpc.RequesterConfig{})
	bad(err, "address")
	_, err = rpc.NewRequester[int, int](t.Context(), conn, q, rpc.RequesterConfig{Timeout: -1})
	bad(err, "Timeout")
	_, err = rpc.NewRequester[int, int](t.Context(), conn, q, rpc.RequesterConfig{InFlight: 2049})
	bad(err, "InFlight")
	_, err = rpc.NewRequester[int, int](t.Context(), conn, q, rpc.RequesterConfig{Replies: "pigeon"})
	bad(err, "Replies")
	_, err = rpc.NewRequester[int, chan int](t.Context(), conn, q, rpc.RequesterConfig{})
	bad(err, "Resp")
	_, err = rpc.NewRequester[chan int, int](t.Context(), conn, q, rpc.RequesterConfig{})
	bad(err, "")
	_, err = rpc.NewRequester[int, int](t.Context(), conn, address.Queue("gone"), rpc.RequesterConfig{})
	assert.ErrorIs(t, err, client.ErrNotFound)
	var none *rpc.Requester[int, int]
	_, err = none.Call(t.Context(), 1)
	bad(err, "requester")

	_, err = rpc.NewResponder(t.Context(), nil, rpc.ResponderConfig{})
	bad(err, "conn")
	_, err = rpc.NewResponder(t.Context(), conn, rpc.ResponderConfig{ReplyTimeout: -1})
	bad(err, "ReplyTimeout")
	r, err := rpc.NewResponder(t.Context(), conn, rpc.ResponderConfig{})
	require.NoError(t, err)
	bad(client.Prepare(t.Context(), rpc.Respond(nil, func(context.Context, int) (int, error) { return 0, nil }), client.Start{}), "responder")
	bad(client.Prepare(t.Context(), rpc.Respond[int, int](r, nil), client.Start{}), "handle")
	bad(client.Prepare(t.Context(), rpc.Respond(r, func(context.Context, int) (chan int, error) { return nil, nil }), client.Start{}), "Resp")
	bad(client.Prepare(t.Context(), rpc.Respond(r, func(context.Context, chan int) (int, error) { return 0, nil }), client.Start{}), "")
}

// A call without a deadline ends after the default, to the millisecond, and its request with it.
func TestCallEndsAfterItsTimeout(t *testing.T) {
	for _, version := range []string{"4.3.6", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b, conn := world(t, version)
			q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{})
			require.NoError(t, err)
			began := time.Now()
			_, err = q.Call(context.Background(), 1)
			assert.ErrorIs(t, err, rpc.ErrNoReply)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Equal(t, 30*time.Second, time.Since(began))
			time.Sleep(time.Second)
			synctest.Wait()
			assert.Zero(t, b.Queue("q").Counts().Ready, "the request has expired")
			require.NoError(t, q.Close(t.Context()))
			require.NoError(t, conn.Close(t.Context()))
		})
	}
}

// Close with calls in flight: within ctx they may finish, and then they get an error.
func TestCloseEndsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := world(t, "")
		q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{})
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() {
			_, err := q.Call(context.Background(), 1)
			done <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		assert.ErrorIs(t, q.Close(ctx), context.DeadlineExceeded)
		err = <-done
		assert.ErrorIs(t, err, rpc.ErrNoReply)
		assert.ErrorIs(t, err, client.ErrClosed)
		assert.NoError(t, q.Close(t.Context()))

		// Closing the Conn ends them at once.
		q, err = rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{})
		require.NoError(t, err)
		go func() {
			_, err := q.Call(context.Background(), 1)
			done <- err
		}()
		synctest.Wait()
		require.NoError(t, conn.Close(t.Context()))
		err = <-done
		assert.ErrorIs(t, err, rpc.ErrNoReply)
		assert.ErrorIs(t, err, client.ErrClosed)
		_, err = q.Call(t.Context(), 1)
		assert.ErrorIs(t, err, client.ErrNotSent)
		assert.NoError(t, q.Close(t.Context()))
		_, err = rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{})
		assert.ErrorIs(t, err, client.ErrClosed)
	})
}

// More calls than may be in flight wait for their turn.
func TestCallsWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := world(t, "")
		q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{InFlight: 1})
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() {
			_, err := q.Call(context.Background(), 1)
			done <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = q.Call(ctx, 2)
		assert.ErrorIs(t, err, client.ErrNotSent)
		assert.True(t, client.SafeToRetry(err))
		assert.ErrorIs(t, <-done, rpc.ErrNoReply)
		require.NoError(t, conn.Close(t.Context()))
	})
}

// Hostile replies and errors neither panic nor hang.
func TestHostileErrorsAndReplies(t *testing.T) {
	_, conn := world(t, "")
	r, err := rpc.NewResponder(t.Context(), conn, rpc.ResponderConfig{})
	require.NoError(t, err)
	var nothing *rpc.Error
	answers := []error{
		&rpc.Error{}, &rpc.Error{Code: strings.Repeat("\xffé", 500), Text: strings.Repeat("\xff", 100_000)},
		client.DeadLetter{Reason: client.Reason(strings.Repeat("\xff", 500)), Err: nothing},
	}
	h := rpc.Respond(r, func(_ context.Context, i int) (any, error) {
		if i < len(answers) {
			return nil, answers[i]
		}
		return "no number", nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- conn.Consume(ctx, "q", h, client.ConsumerConfig{}) }()
	q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("q"), rpc.RequesterConfig{})
	require.NoError(t, err)
	var answer *rpc.Error
	_, err = q.Call(t.Context(), 0)
	require.ErrorAs(t, err, &answer)
	assert.Equal(t, "error", answer.Code)
	_, err = q.Call(t.Context(), 1)
	require.ErrorAs(t, err, &answer)
	assert.LessOrEqual(t, len(answer.Code), 3*256)
	assert.LessOrEqual(t, len(answer.Text), client.ErrorTextLimit)
	var up *rpc.GivenUpError
	_, err = q.Call(t.Context(), 2)
	assert.ErrorAs(t, err, &up)
	_, err = q.Call(t.Context(), 3)
	assert.ErrorIs(t, err, rpc.ErrUndecodable)
	_, err = q.Call(t.Context(), 3, nil, func(m *client.Message) { m.Properties, m.Header = nil, nil })
	assert.ErrorIs(t, err, rpc.ErrUndecodable)
	cancel()
	assert.NoError(t, <-ended)
}

// A request that expired while it waited for its retry isn't handled again.
func TestExpiredRequestIsNotHandledAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := world(t, "")
		policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10 * time.Second), Strategy: retry.StrategyRepublish}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		r, err := rpc.NewResponder(t.Context(), conn, rpc.ResponderConfig{})
		require.NoError(t, err)
		handled := 0
		h := rpc.Respond(r, func(context.Context, int) (int, error) {
			handled++
			return 0, errors.New("down")
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- conn.Consume(ctx, "work", retry.With(policy)(h), client.ConsumerConfig{}) }()
		q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("work"), rpc.RequesterConfig{Timeout: 15 * time.Second})
		require.NoError(t, err)
		_, err = q.Call(context.Background(), 1)
		assert.ErrorIs(t, err, rpc.ErrNoReply)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, 2, handled)
		assert.EqualValues(t, 1, r.Stats().Expired)
		assert.EqualValues(t, 1, q.Stats().Late, "the caller would have been told")
		cancel()
		assert.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
	})
}

// A reply that the broker doesn't accept, as in an alarm, is no failure of the handler: its request isn't a dead letter
// after that has succeeded each time.
func TestAReplyThatIsNotAcceptedIsNoFailedAttempt(t *testing.T) {
	for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
		t.Run(string(strategy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, conn := world(t, "")
				policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Second), Strategy: strategy}
				topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
				require.NoError(t, err)
				_, err = declare.Apply(t.Context(), conn.Management(), topology)
				require.NoError(t, err)
				r, err := rpc.NewResponder(t.Context(), conn, rpc.ResponderConfig{})
				require.NoError(t, err)
				var attempts []int
				h := rpc.Respond(r, func(ctx context.Context, n int) (int, error) {
					if attempts = append(attempts, retry.Attempt(ctx)); len(attempts) == 1 {
						b.SetMemoryAlarm(true)
						time.Sleep(time.Second)
					}
					return n, nil
				})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- conn.Consume(ctx, "work", retry.With(policy)(h), client.ConsumerConfig{}) }()
				time.AfterFunc(5*time.Minute, func() { b.SetMemoryAlarm(false) })
				q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("work"), rpc.RequesterConfig{Timeout: time.Hour})
				require.NoError(t, err)
				n, err := q.Call(context.Background(), 7)
				require.NoError(t, err)
				assert.Equal(t, 7, n)
				assert.Len(t, attempts, 10, "one in 30 s")
				assert.Equal(t, attempts[0], attempts[len(attempts)-1])
				cancel()
				assert.NoError(t, <-ended)
				require.NoError(t, conn.Close(t.Context()))
			})
		})
	}
}
