package broker_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
)

// registered reports whether the node has written down that it has a member of the queue.
// After a crash it looks there; what isn't there begins as a new, empty member.
func registered(t *testing.T, s *suite.Site, queue string) bool {
	t.Helper()
	out := s.EvalOK(t, fmt.Sprintf(`#{data_dir := Dir} = ra_system:fetch(quorum_queues),
		{ok, Bytes} = file:read_file(filename:join(Dir, "names.dets")),
		binary:match(Bytes, <<"%s_%s">>) =/= nomatch.`, s.VHost, queue))
	return strings.Contains(out, "true")
}

// Persist has the broker write down the queues that were declared before it, at once.
func TestPersistHasTheBrokerWriteNewQueuesDown(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for n := range 3 {
			name := fmt.Sprintf("new-%d", n)
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: name}))
			began := time.Now()
			require.NoError(t, declare.Persist(t.Context(), conn.Management(), "new."))
			suite.Report(t, s, "Persist took %v", time.Since(began).Round(time.Millisecond))
			assert.True(t, registered(t, s, name))
		}
		assert.False(t, registered(t, s, "never-declared"))
		var queues []struct{ Name string }
		s.HTTP(t, "GET", "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
		assert.Len(t, queues, 3, "%v", queues)
	})
}

// A queue that was declared right before a kill -9 comes back empty; after Persist it has
// all that was confirmed.
func TestAPersistedQueueSurvivesAKill(t *testing.T) {
	if !suite.Long() {
		t.Skip("it kills its own brokers; HOPBACK_LONG=1 runs it")
	}
	suite.NeedPrivate(t)
	for _, version := range suite.Versions() {
		t.Run(version, func(t *testing.T) {
			const messages = 20
			own, err := rabbitmq.Own(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			for _, persist := range []bool{true, false} {
				conn, _ := suite.ConnectTo(t, own.URL)
				queue := fmt.Sprintf("persisted-%v", persist)
				suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: queue}))
				if persist {
					require.NoError(t, declare.Persist(t.Context(), conn.Management(), "persist."))
				}
				p := suite.Publisher[suite.Order](t, conn, address.Queue(queue))
				for id := range messages {
					suite.Publish(t, p, suite.Order{ID: id})
				}
				require.NoError(t, own.Kill(t.Context()))
				for own.Start(t.Context()) != nil {
					require.NoError(t, t.Context().Err())
				}
				conn, _ = suite.ConnectTo(t, own.URL)
				if persist {
					suite.Poll(t, "the messages", func() bool { return suite.Ready(t, conn, queue) == messages })
					continue
				}
				fmt.Printf("REPORT %s %s: without Persist, %d of %d messages survived\n", t.Name(), version, suite.Ready(t, conn, queue), messages)
			}
		})
	}
}
