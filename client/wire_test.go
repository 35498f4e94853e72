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
	"github.com/hopback/hopback/internal/link"
)

// bareWire is a connection on which nothing can be opened.
func bareWire(t *testing.T) *wire {
	ours, theirs := net.Pipe()
	w := &wire{limit: maxSessions, spare: make(chan struct{}, maxSpare), amqp: &engine.Conn{}, net: ours}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	t.Cleanup(func() {
		w.cancel()
		_ = ours.Close()
		_ = theirs.Close()
	})
	return w
}

func TestWhatIsNotAnsweredIsGivenUp(t *testing.T) {
	wait := func(d time.Duration, err error) func(context.Context) error {
		return func(ctx context.Context) error {
			if !link.Pause(ctx, d) {
				return context.Cause(ctx)
			}
			return err
		}
	}
	synctest.Test(t, func(t *testing.T) {
		w := bareWire(t)
		require.NoError(t, w.answered(within(t, time.Minute), linkTimeout, wait(linkTimeout-1, nil)))
		require.ErrorIs(t, w.answered(within(t, time.Minute), linkTimeout, wait(0, errMissing)), errMissing)
		began := time.Now()
		require.ErrorIs(t, w.answered(within(t, time.Second), linkTimeout, wait(time.Minute, nil)), context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(began))
		require.Nil(t, w.givenUp.Load(), "its caller had no more time")

		err := w.answered(t.Context(), linkTimeout, wait(time.Minute, nil))
		require.ErrorIs(t, err, ErrConnectionLost)
		assert.ErrorContains(t, err, "the broker didn't answer within 15s")
		require.NotNil(t, w.givenUp.Load())
		_, err = w.net.Read(make([]byte, 1))
		require.Error(t, err, "it is closed")
	})
}
