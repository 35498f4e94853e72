package client

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A caller finds the link lost while the flight's goroutine takes a message from the queue.
// Both messages go out on the next link.
func TestAMessageTakenFromTheQueueAsTheLinkIsLostIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.do(within(t, time.Minute), withID("first")))
		b.hook = func(step string) error {
			if step == "send a" || step == "send b" {
				return errFakeLink
			}
			return nil
		}
		sess, err := b.open(t.Context())
		require.NoError(t, err)
		sender, err := sess.sender(t.Context(), "/queues/q")
		require.NoError(t, err)
		f := newFlight(s, sess, newFlightLink(sender))
		a := &outgoing{msg: withID("a"), to: &call{answer: make(chan error, 1)}}
		queued := &outgoing{msg: withID("b"), to: &call{answer: make(chan error, 1)}}
		require.True(t, f.try(a))
		f.put(queued)
		assert.True(t, f.closed())
		f.land()
		assert.Equal(t, []*outgoing{a, queued}, s.again)
		s.again = nil
		closeSession(sess)
		require.NoError(t, s.close(within(t, time.Minute)))
	})
}

// A message that no link has taken, since the link turned out to be lost, wasn't sent.
func TestAMessageThatALostLinkDidNotTakeIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.do(within(t, time.Minute), withID("first")))
		var back atomic.Bool
		b.hook = func(step string) error {
			if !back.Load() && (step == "send a" || step == "open session") {
				return errFakeLink
			}
			return nil
		}
		require.ErrorIs(t, s.do(within(t, time.Second), withID("a")), ErrNotSent)
		back.Store(true)
		require.NoError(t, s.do(within(t, time.Minute), withID("b")))
		assert.Equal(t, []string{"send first", "send b"}, b.history("send"))
		require.NoError(t, s.close(within(t, time.Minute)))
	})
}
