package broker_test

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
)

var waiting = flag.Int("waiting", 50_000, "messages of TestAnswersAboutWaitingMessagesOutliveKillsOfTheBroker; there are twice as many calls")

// No answer about a waiting message is wrong while the broker is killed, and its connections are cut.
// TestAnswersAboutWaitingMessagesAreRight in package consume is the small one, in memory.
func TestAnswersAboutWaitingMessagesOutliveKillsOfTheBroker(t *testing.T) {
	if !suite.Long() {
		t.Skip("it takes minutes: set HOPBACK_LONG=1")
	}
	suite.NeedPrivate(t)
	version := suite.Versions()[0]
	if version < "4.4" {
		t.Skip("only queues of RabbitMQ 4.4 park messages: set HOPBACK_TREE_4_4, or -brokers=4.4")
	}
	for name, scheduled := range map[string]bool{"parked": false, "scheduled": true} {
		t.Run(name, func(t *testing.T) {
			own, err := rabbitmq.Own(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			through, url := suite.NewSite(t, own).Through(t)
			kills := 0
			w := &suite.Waiting{
				Scheduled: scheduled, Messages: *waiting, Claimers: 4, Due: time.Duration(*waiting) * 10 * time.Millisecond,
				CutEvery: 5 * time.Second, KillEvery: 30 * time.Second,
				Slack: 2 * time.Minute, // a broker takes that long to start on a busy machine
				Connect: func() *client.Conn {
					conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.Logger = slog.New(slog.DiscardHandler) })
					return conn
				},
				Cut: func() { through.Cut() },
				Kill: func() {
					kills++
					assert.NoError(t, own.Kill(t.Context()))
					for own.Start(t.Context()) != nil {
						if t.Context().Err() != nil {
							return
						}
					}
				},
			}
			w.Run(t)
			t.Logf("%d kills of the broker", kills)
			assert.Positive(t, kills)
		})
	}
}
