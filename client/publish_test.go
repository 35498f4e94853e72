package client

import (
	"context"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// coreOf is a publisher for the queue q.
func coreOf(s *sender) *publisher { return &publisher{s: s, to: address.Queue("q")} }

// A broker that leaves messages unanswered on every session is left for the next
// endpoint.
func TestABrokerThatDoesNotAnswerIsLeftForTheNextEndpoint(t *testing.T) {
	silent := hostileServer(t, stepAnswer, func(net.Conn, []byte) error { return nil })
	other := hostileServer(t, "no step", nil)
	conn, err := Connect(t.Context(), "amqp://u:p@"+silent+"/", Config{Logger: quiet, Endpoints: []string{"amqp://u:p@" + other + "/"}})
	require.NoError(t, err)
	p, err := newPublisher(t.Context(), conn, address.Queue("q"), "/queues/q", senderConfig{Depth: 10, Resend: true, Overdue: 200 * time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	require.NoError(t, p.s.Do(ctx, linktest.WithID("m")))
	state := conn.State()
	assert.EqualValues(t, 2, state.Generation)
	assert.Equal(t, "amqp://u:xxxxx@"+other+"/", state.Endpoint)
	require.NoError(t, conn.Close(ctx))
}

// An edit sees the value and changes its message only. What can't be sent is in the error by
// its index.
func TestPublishAllEditsEachMessageAndListsWhatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(_ string, m *Message) amqp.DeliveryState {
			if linktest.IDOf(m) == "unroutable" {
				return &amqp.StateReleased{}
			}
			return &amqp.StateAccepted{}
		}
		b.Hook = func(step string) error {
			if step == "send large" {
				return linktest.Unsent{Err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		s := newSender("publish", "/queues/q", senderConfig{Resend: true, Depth: 256, Pause: testBackoff.Pause, Overdue: linktest.ForEver}, b)
		t.Cleanup(s.Cut)
		p := &Publisher[*Message]{core: coreOf(s)}
		require.NoError(t, p.PublishAll(t.Context(), nil))
		require.NoError(t, p.PublishAll(t.Context(), []*Message{linktest.WithID("x"), linktest.WithID("y")}))

		bad := linktest.WithID("bad")
		bad.Data = nil
		edited := 0
		err := p.PublishAll(t.Context(), []*Message{linktest.WithID("a"), linktest.WithID("unroutable"), bad, nil, linktest.WithID("large")}, func(v, m *Message) {
			edited++
			assert.Equal(t, v.Properties.MessageID, m.Properties.MessageID, "an edit sees its value")
			assert.NotSame(t, v.Properties, m.Properties, "and changes the message, not the value")
		}, nil)
		var all *BatchError
		require.ErrorAs(t, err, &all)
		assert.Equal(t, 5, all.Of)
		var failed []string
		for _, f := range all.Failed {
			failed = append(failed, fmt.Sprint(f.Index, " ", f.ID))
		}
		assert.Equal(t, []string{"1 unroutable", "2 bad", "3 <nil>", "4 large"}, failed)
		assert.Equal(t, 4, edited)
		for _, kind := range []error{failure.ErrUnroutable, failure.ErrTooLarge} {
			require.ErrorIs(t, err, kind)
		}
		require.ErrorAs(t, err, new(*argument.Error))
		assert.NotErrorIs(t, err, failure.ErrOutcomeUnknown)
		assert.ErrorContains(t, err, "4 of 5 messages were not accepted, the first at index 1")
		assert.False(t, failure.SafeToRetry(err), "one is stored")
		assert.True(t, failure.SafeToRetry(all.Failed[0].Err))
		assert.Equal(t, []string{"send x", "send y", "send a", "send unroutable"}, b.History("send"))

		err = p.PublishAll(t.Context(), []*Message{linktest.WithID("unroutable"), linktest.WithID("large")})
		assert.True(t, failure.SafeToRetry(err), "nothing is stored")
		require.NoError(t, s.Close(within(t, time.Hour)))
		err = p.PublishAll(t.Context(), []*Message{linktest.WithID("late"), linktest.WithID("later")})
		require.ErrorIs(t, err, failure.ErrClosed)
		require.ErrorAs(t, err, &all)
		assert.Len(t, all.Failed, 2)
		assert.True(t, failure.SafeToRetry(err))
	})
}
