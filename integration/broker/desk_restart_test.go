package broker_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/operate/desk"
)

// countedLog counts the lines of a log that contain a text.
type countedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *countedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *countedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// A replay waits for its broker to come back, for longer than eight tries take, and then replays
// every message. So do the refusals of a broker that isn't quite up yet end no replay.
func TestAReplayContinuesAfterARestartOfTheBroker(t *testing.T) {
	suite.NeedReal(t)
	t.Parallel()
	for _, version := range suite.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
			defer cancel()
			own, err := rabbitmq.Own(ctx, os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			s := &suite.Site{Broker: own, VHost: "%2F"}
			conn, _ := suite.ConnectTo(t, own.URL, suite.Soon)
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
				declare.QuorumQueue{Name: "work", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited},
			}})
			const n = 2000
			suite.Load(t, conn, "dead", n)
			log := &countedLog{}
			d, err := desk.New(conn, desk.Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
			require.NoError(t, err)
			begun := make(chan struct{})
			var once sync.Once
			type result struct {
				report desk.ReplayReport
				err    error
			}
			ended := make(chan result, 1)
			go func() {
				report, err := d.Replay(ctx, desk.ReplayConfig{Queue: "dead", All: true, Address: address.Queue("work"), Rate: 200, OnProgress: func(p desk.Progress) {
					if p.Done >= 100 {
						once.Do(func() { close(begun) })
					}
				}})
				ended <- result{report, err}
			}()
			suite.Await(t, begun, "a part of the replay")
			require.NoError(t, own.Stop(ctx))
			suite.Poll(t, "many tries", func() bool { return len(ended) > 0 || log.count("connection was lost during a replay") > 9 })
			require.NoError(t, own.Start(ctx))
			r := <-ended
			require.NoError(t, r.err, "%+v", r.report)
			assert.Zero(t, r.report.Failed, "%v", r.report.Failures)
			assert.True(t, r.report.Complete)
			suite.Poll(t, "all are there", func() bool { return suite.Ready(t, conn, "work") >= n })
			assert.Zero(t, suite.Ready(t, conn, "dead"))
			t.Logf("REPORT %s: %d messages replayed over a restart, %d of them may be there twice, in %d scans", s.Version, n, r.report.Unknown, r.report.Scans)
		})
	}
}
