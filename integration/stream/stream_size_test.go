package stream_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/stream"
)

// A message of a stream that is larger than client.Config.MaxMessageSize isn't held in memory, and the
// handler doesn't get it. Config.Failed decides, but there is no copy of a message that isn't whole.
func TestAStreamMessageAboveTheLimit(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: "log"}, declare.QuorumQueue{Name: "failed", DeadLetter: declare.Drop()}}})
		p := suite.Publisher[string](t, admin, address.Queue("log"))
		const large = 3 // its offset
		for i := range 7 {
			body := "small"
			if i == large {
				body = strings.Repeat("l", 1<<20)
			}
			suite.Publish(t, p, body)
		}
		conn, _ := s.Connect(t, func(c *client.Config) { c.MaxMessageSize = 100_000 })
		for _, c := range []struct {
			name string
			cfg  stream.Config
			want int
		}{
			{"skip", stream.Config{Failed: stream.FailedSkip}, 6},
			{"stop", stream.Config{}, large},
			{"forward", stream.Config{FailedQueue: "failed"}, large},
		} {
			t.Run(c.name, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
				defer cancel()
				n := 0
				c.cfg.Logger = slog.New(suite.NewLogbook(t))
				store := &stream.MemoryStore{}
				c.cfg.Consumer, c.cfg.Offsets, c.cfg.SaveEvery = "one", store, 1
				err := stream.Consume(ctx, conn, "log", client.JSON(func(_ context.Context, body string) error {
					assert.Equal(t, "small", body)
					if n++; n == 6 {
						cancel()
					}
					return nil
				}), c.cfg)
				assert.Equal(t, c.want, n)
				next, _, loading := store.Load(t.Context(), "one", "log")
				require.NoError(t, loading)
				if c.want == 6 {
					require.NoError(t, err)
					assert.EqualValues(t, 7, next)
					return
				}
				failed, ok := errors.AsType[*stream.HandlerError](err)
				require.True(t, ok, "%v", err)
				assert.Equal(t, []any{uint64(large), client.ReasonTooLarge}, []any{failed.Offset, failed.Reason})
				assert.ErrorIs(t, err, client.ErrTooLarge)
				assert.EqualValues(t, large, next)
			})
		}
		suite.AssertEmpty(t, s, "failed")
	})
}
