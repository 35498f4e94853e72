package integration

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
	"github.com/hopback/hopback/internal/broker"
)

// registered reports whether the node has written down that it has a member of the queue.
// After a crash it looks there; what isn't there begins as a new, empty member.
func (s *site) registered(t *testing.T, queue string) bool {
	t.Helper()
	out := s.eval(t, fmt.Sprintf(`#{data_dir := Dir} = ra_system:fetch(quorum_queues),
		{ok, Bytes} = file:read_file(filename:join(Dir, "names.dets")),
		binary:match(Bytes, <<"%s_%s">>) =/= nomatch.`, s.vhost, queue))
	return strings.Contains(out, "true")
}

// Persist has the broker write down the queues that were declared before it, at once.
func TestPersistHasTheBrokerWriteNewQueuesDown(t *testing.T) {
	forEachOfOurs(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		for n := range 3 {
			name := fmt.Sprintf("new-%d", n)
			apply(t, conn, queueOf(declare.QuorumQueue{Name: name}))
			began := time.Now()
			require.NoError(t, declare.Persist(t.Context(), conn.Management(), "new."))
			report(t, s, "Persist took %v", time.Since(began).Round(time.Millisecond))
			assert.True(t, s.registered(t, name))
		}
		assert.False(t, s.registered(t, "never-declared"))
		var queues []struct{ Name string }
		s.http(t, "GET", "/queues/"+s.vhost+"?disable_stats=true", nil, &queues)
		assert.Len(t, queues, 3, "%v", queues)
	})
}

// A queue that was declared right before a kill -9 comes back empty; after Persist it has
// all that was confirmed.
func TestAPersistedQueueSurvivesAKill(t *testing.T) {
	if !long() {
		t.Skip("it kills its own brokers; HOPBACK_LONG=1 runs it")
	}
	needReal(t)
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			const messages = 20
			own, err := broker.Own(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			for _, persist := range []bool{true, false} {
				conn, _ := connectTo(t, own.URL)
				queue := fmt.Sprintf("persisted-%v", persist)
				apply(t, conn, queueOf(declare.QuorumQueue{Name: queue}))
				if persist {
					require.NoError(t, declare.Persist(t.Context(), conn.Management(), "persist."))
				}
				p := publisher[order](t, conn, address.Queue(queue))
				for id := range messages {
					publish(t, p, order{ID: id})
				}
				require.NoError(t, own.Kill(t.Context()))
				for own.Start(t.Context()) != nil {
					require.NoError(t, t.Context().Err())
				}
				conn, _ = connectTo(t, own.URL)
				if persist {
					poll(t, "the messages", func() bool { return ready(t, conn, queue) == messages })
					continue
				}
				fmt.Printf("REPORT %s %s: without Persist, %d of %d messages survived\n", t.Name(), version, ready(t, conn, queue), messages)
			}
		})
	}
}
