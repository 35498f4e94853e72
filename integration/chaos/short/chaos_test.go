// Package chaos_test holds the short form of package chaos: a handful of faults on
// one node, with all strategies at once. "make chaos" has the long form.
package chaos_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/chaos"
	"github.com/hopback/hopback/integration/rabbitmq"
)

func TestMain(m *testing.M) {
	chaos.RunIfWorker()
	goleak.VerifyTestMain(m)
}

// With every kind of fault in the network, the broker, and the workers, every accepted
// message is handled, or dead-lettered for the right reason; and nothing else is.
func TestNothingIsLostInTheShortForm(t *testing.T) {
	rabbitmq.NeedsStart(t)
	const messages = 4000
	kinds := []chaos.Kind{chaos.HalfOpen, chaos.Reset, chaos.BrokerKilled, chaos.WorkerKilled}
	for version, seed := range map[string]uint64{"4.3": 1, "4.0": 2} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 7*time.Minute)
			defer cancel()
			var log strings.Builder
			report, err := chaos.Run(ctx, chaos.Config{
				Version: version, Seed: seed, Messages: messages, Faults: len(kinds), Workers: 1, Kinds: kinds, Out: &log,
			})
			t.Log(log.String())
			require.NoError(t, err)
			var table strings.Builder
			require.NoError(t, report.Write(&table))
			t.Log(table.String())
			assert.True(t, report.Good(), "something is wrong; the history is in %s", report.History)
			var all chaos.Tally
			for _, r := range report.Rows {
				all.Accepted += r.Accepted
				all.Handled += r.Handled
				all.Dead += r.Dead
				all.Duplicates += r.Duplicates
				all.Lost += r.Lost
			}
			assert.Greater(t, all.Accepted, messages*9/10)
			assert.Greater(t, all.Dead, messages/10)
			assert.Len(t, report.Faults, len(kinds))
			for _, f := range report.Faults {
				assert.Empty(t, f.Error, "%v", f.Fault)
			}
			fmt.Fprintf(os.Stdout, "REPORT %s %s: seed %d, %d faults, accepted %d, handled %d, dead %d, duplicates %d, lost %d, in %v\n",
				t.Name(), report.Full, seed, len(report.Faults), all.Accepted, all.Handled, all.Dead, all.Duplicates, all.Lost, report.Took.Round(time.Second))
		})
	}
}
