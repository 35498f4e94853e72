package client

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// A caller finds the link lost while the flight's goroutine takes a message from the queue.
// Both messages go out on the next link.
func TestAMessageTakenFromTheQueueAsTheLinkIsLostIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID("first")))
		b.Hook = func(step string) error {
			if step == "send a" || step == "send b" {
				return linktest.ErrFakeLink
			}
			return nil
		}
		sess, err := b.Open(t.Context())
		require.NoError(t, err)
		sender, err := sess.Sender(t.Context(), "/queues/q")
		require.NoError(t, err)
		f := newFlight(s, sess, newFlightLink(sender))
		a := &outgoing{msg: linktest.WithID("a"), to: &call{answer: make(chan error, 1)}}
		queued := &outgoing{msg: linktest.WithID("b"), to: &call{answer: make(chan error, 1)}}
		require.True(t, f.try(a))
		f.put(queued)
		assert.True(t, f.Closed())
		f.land()
		assert.Equal(t, []*outgoing{a, queued}, s.again)
		s.again = nil
		link.CloseSession(sess)
		require.NoError(t, s.Close(within(t, time.Minute)))
	})
}

// A message that no link has taken, since the link turned out to be lost, wasn't sent.
func TestAMessageThatALostLinkDidNotTakeIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID("first")))
		var back atomic.Bool
		b.Hook = func(step string) error {
			if !back.Load() && (step == "send a" || step == "open session") {
				return linktest.ErrFakeLink
			}
			return nil
		}
		require.ErrorIs(t, s.Do(within(t, time.Second), linktest.WithID("a")), failure.ErrNotSent)
		back.Store(true)
		require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID("b")))
		assert.Equal(t, []string{"send first", "send b"}, b.History("send"))
		require.NoError(t, s.Close(within(t, time.Minute)))
	})
}
