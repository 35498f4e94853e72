package broker_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/stream"
)

// A stream's replica is started again, as after the loss of a node. Until then RabbitMQ refuses
// readers, and that passes: a consumer that starts in this time tries again.
func TestAStreamWithoutAReplicaIsTriedAgain(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.StreamOf(t, admin, "log", 10)
		// The stream's writer is killed over and over.
		s.EvalOK(t, fmt.Sprintf(`register(killer, spawn(fun() -> F = fun(F) ->
			{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"%s">>, queue, <<"log">>)),
			exit(amqqueue:get_pid(Q), kill),
			receive stop -> ok after 1 -> F(F) end end, F(F) end)), ok.`, s.VHost))
		stop := sync.OnceFunc(func() { s.EvalOK(t, `killer ! stop, ok.`) })
		defer stop()

		conn, _ := s.Connect(t, suite.Soon)
		got := make(chan int, 100)
		streamLog := suite.NewLogbook(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- stream.Consume(ctx, conn, "log", client.JSON(func(_ context.Context, n int) error { got <- n; return nil }), stream.Config{Logger: slog.New(streamLog)})
		}()
		suite.Poll(t, "it was refused", func() bool {
			select {
			case err := <-ended:
				require.FailNow(t, "the consumer has ended", "%v", err)
			default:
			}
			return len(streamLog.With("running replica")) > 0
		})
		stop()
		for n := range 10 {
			assert.Equal(t, n, suite.Await(t, got, "a message"))
		}
		cancel()
		require.NoError(t, <-ended)
	})
}
