package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// A sender's session is replaced after so many messages, when all of them are
// answered; what is queued during that time goes out on the next one, in its order.
func TestSenderReplacesItsSessionInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.RenewAfter = 10
		b.Verdict = linktest.Withhold
		s := startSender(b)
		ids := linktest.Numbered("m", 25)
		answers := sendAll(within(t, time.Hour), s, ids...)
		assert.Len(t, b.History("send"), 10, "the others wait")
		assert.Len(t, b.History("open session"), 1)
		b.Answer(9, &amqp.StateAccepted{})
		synctest.Wait()
		assert.Len(t, b.History("open session"), 1, "one isn't answered yet")
		for range 2 {
			b.Answer(-1, &amqp.StateAccepted{})
			synctest.Wait()
		}
		assert.Len(t, b.History("open session"), 3)
		b.Answer(-1, &amqp.StateAccepted{})
		for i, a := range answers {
			require.NoError(t, <-a)
			assert.Equal(t, "send "+ids[i], b.History("send")[i])
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
		b.Mu.Lock()
		defer b.Mu.Unlock()
		assert.Empty(t, b.Sessions, "every session was closed")
		assert.Equal(t, 1, b.MostSessions, "the old one before the next")
	})
}

// A sender that is closed while its session is being replaced sends what is queued.
func TestSenderClosedWhileItsSessionIsReplacedSendsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.RenewAfter = 3
		b.Verdict = linktest.Withhold
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, linktest.Numbered("m", 8)...)
		closed := async(func() error { return s.Close(within(t, time.Hour)) })
		for range 3 {
			synctest.Wait()
			b.Answer(-1, &amqp.StateAccepted{})
		}
		for _, a := range answers {
			require.NoError(t, <-a)
		}
		require.NoError(t, <-closed)
	})
}
