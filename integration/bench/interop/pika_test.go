package interop

import (
	_ "embed"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/retry"
)

//go:embed pika_worker.py
var pikaWorker string

// pikaDelivery is what the Python worker prints of a delivery.
type pikaDelivery struct {
	Queue      string
	Body       string
	Properties map[string]any
	Headers    map[string]any
}

// Celery and many others publish headers over AMQP 0-9-1 that hold tables and lists, which AMQP
// 1.0 can't show. Central moves the messages, so each attempt has all headers and properties as
// they were published, and so has the dead letter. Headers that look like Central's own change
// nothing about that.
func TestCentralKeepsEveryHeaderOfPika(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond)}
		topology, err := retry.CentralTopology(policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
		require.NoError(t, err)
		s.consume(t, "failed_queue", retry.Central(policy, retry.CentralConfig{Queues: []string{"orders"}}), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})

		python, err := service.Python(t.Context(), os.Stderr, "pika", "python3-pika")
		require.NoError(t, err)
		cmd := exec.CommandContext(t.Context(), python, "-c", pikaWorker, s.url.String())
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		require.NoError(t, err, stderr.String())
		all := map[string][]pikaDelivery{}
		for line := range strings.Lines(string(out)) {
			var d pikaDelivery
			require.NoError(t, json.Unmarshal([]byte(line), &d), line)
			all[d.Body] = append(all[d.Body], d)
		}
		require.ElementsMatch(t, []string{"plain", "nested", "forged"}, slices.Collect(maps.Keys(all)))
		for body, seen := range all {
			require.Len(t, seen, 5, body)
			sent := seen[0]
			for i, d := range seen[1:] {
				where := "orders"
				if i == 3 {
					where = "orders.dead"
				}
				assert.Equal(t, where, d.Queue, "%s, %d", body, i)
				assert.Equal(t, sent.Properties, d.Properties, "%s, %d", body, i)
				for key, want := range sent.Headers {
					if !strings.HasPrefix(key, "x-opt-hopback-") { // those are rewritten
						assert.Equal(t, want, d.Headers[key], "%s, %d: %s", body, i, key)
					}
				}
				for key := range d.Headers {
					_, had := sent.Headers[key]
					added := slices.ContainsFunc([]string{"x-opt-hopback-", "x-death", "x-first-death-", "x-last-death-", "x-acquired-count", "x-delivery-count"}, func(p string) bool { return strings.HasPrefix(key, p) })
					assert.True(t, had || added, "%s, %d: %s is new", body, i, key)
				}
			}
		}
	})
}
