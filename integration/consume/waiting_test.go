package consume_test

import (
	"log/slog"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/internal/suite"
)

// No answer about a waiting message is wrong, while connections and the broker are killed. The messages are parked by their
// handlers, or scheduled.
func TestAnswersAboutWaitingMessagesAreRight(t *testing.T) {
	for name, scheduled := range map[string]bool{"parked": false, "scheduled": true} {
		t.Run(name, func(t *testing.T) { waitInVirtualTime(t, scheduled) })
	}
}

func waitInVirtualTime(t *testing.T, scheduled bool) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0", MaxEvents: -1})
		b.SetLatency(time.Millisecond)
		var conns []*client.Conn
		w := &suite.Waiting{
			Scheduled: scheduled, ParkedNow: func(queue string) int { return b.Queue(queue).Counts().Delayed },
			Messages: suite.Sized(1_000, 25_000), Claimers: 6, Due: 10 * time.Minute,
			CutEvery: time.Second, KillEvery: time.Minute, Slack: 20 * time.Second,
			Connect: func() *client.Conn {
				conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, Reconnect: client.ReconnectBackoff{Max: time.Second}, Logger: slog.New(slog.DiscardHandler)})
				require.NoError(t, err)
				conns = append(conns, conn)
				return conn
			},
			Cut: func() {
				if all := b.Connections(); len(all) > 0 {
					c := all[rand.N(len(all))]
					switch rand.N(3) {
					case 0:
						c.Cut()
					case 1:
						c.CutAfter(hopbacktest.DirectionFromClient, 1+rand.N(6))
					default:
						c.CutBefore(hopbacktest.DirectionToClient, 1+rand.N(6))
					}
				}
			},
			Kill: func() {
				b.Kill()
				time.Sleep(time.Second)
				b.Restart()
			},
		}
		w.Run(t)
		for _, conn := range conns {
			assert.NoError(t, conn.Close(t.Context()))
		}
	})
}

// The same on a broker, with a proxy that cuts all connections.
func TestAnswersAboutWaitingMessagesOfABroker(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		for name, scheduled := range map[string]bool{"parked": false, "scheduled": true} {
			through, url := s.Through(t)
			w := &suite.Waiting{
				Scheduled: scheduled, Messages: suite.Sized(100, 5_000), Claimers: 4, Due: time.Duration(suite.Sized(12, 60)) * time.Second,
				CutEvery: 500 * time.Millisecond, Slack: 20 * time.Second,
				Connect: func() *client.Conn {
					conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.Logger = slog.New(slog.DiscardHandler) })
					return conn
				},
				Cut: func() { through.Cut() },
			}
			t.Log(name)
			w.Run(t)
			_, err := declare.DeleteQueue(t.Context(), w.Admin.Management(), "orders")
			require.NoError(t, err)
		}
	})
}
