package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A sender's session is replaced after so many messages, when all of them are
// answered; what is queued meanwhile goes out on the next one, in its order.
func TestSenderReplacesItsSessionInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.renewAfter = 10
		b.verdict = withhold
		s := startSender(b)
		ids := numbered("m", 25)
		answers := sendAll(within(t, time.Hour), s, ids...)
		assert.Len(t, b.history("send"), 10, "the others wait")
		assert.Len(t, b.history("open session"), 1)
		b.answer(9, &amqp.StateAccepted{})
		synctest.Wait()
		assert.Len(t, b.history("open session"), 1, "one isn't answered yet")
		for range 2 {
			b.answer(-1, &amqp.StateAccepted{})
			synctest.Wait()
		}
		assert.Len(t, b.history("open session"), 3)
		b.answer(-1, &amqp.StateAccepted{})
		for i, a := range answers {
			require.NoError(t, <-a)
			assert.Equal(t, "send "+ids[i], b.history("send")[i])
		}
		require.NoError(t, s.close(within(t, time.Hour)))
		b.mu.Lock()
		defer b.mu.Unlock()
		assert.Empty(t, b.sessions, "every session was closed")
		assert.Equal(t, 1, b.mostSessions, "the old one before the next")
	})
}

// A sender that is closed while its session is being replaced sends what is queued.
func TestSenderClosedWhileItsSessionIsReplacedSendsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.renewAfter = 3
		b.verdict = withhold
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, numbered("m", 8)...)
		closed := async(func() error { return s.close(within(t, time.Hour)) })
		for range 3 {
			synctest.Wait()
			b.answer(-1, &amqp.StateAccepted{})
		}
		for _, a := range answers {
			require.NoError(t, <-a)
		}
		require.NoError(t, <-closed)
	})
}
