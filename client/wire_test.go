package client

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/link"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// bareWire is a connection on which nothing can be opened.
func bareWire(t *testing.T) *link.Wire {
	ours, theirs := net.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	w := &link.Wire{Limit: link.MaxSessions, Spare: make(chan struct{}, link.MaxSpare), AMQP: &engine.Conn{}, Net: ours, Ctx: ctx}
	t.Cleanup(func() {
		cancel()
		_ = ours.Close()
		_ = theirs.Close()
	})
	return w
}

func TestWhatIsNotAnsweredIsAbandoned(t *testing.T) {
	wait := func(d time.Duration, err error) func(context.Context) error {
		return func(ctx context.Context) error {
			if !backoff.Sleep(ctx, d) {
				return context.Cause(ctx)
			}
			return err
		}
	}
	synctest.Test(t, func(t *testing.T) {
		w := bareWire(t)
		require.NoError(t, w.Answered(within(t, time.Minute), link.LinkTimeout, wait(link.LinkTimeout-1, nil)))
		require.ErrorIs(t, w.Answered(within(t, time.Minute), link.LinkTimeout, wait(0, linktest.ErrMissing)), linktest.ErrMissing)
		began := time.Now()
		require.ErrorIs(t, w.Answered(within(t, time.Second), link.LinkTimeout, wait(time.Minute, nil)), context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(began))
		require.Nil(t, w.GivenUp.Load(), "its caller had no more time")

		err := w.Answered(t.Context(), link.LinkTimeout, wait(time.Minute, nil))
		require.ErrorIs(t, err, failure.ErrConnectionLost)
		assert.ErrorContains(t, err, "the broker didn't answer within 15s")
		require.NotNil(t, w.GivenUp.Load())
		_, err = w.Net.Read(make([]byte, 1))
		require.Error(t, err, "it is closed")
	})
}
