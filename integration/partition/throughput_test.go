package partition_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
)

// How many messages a second a group with so many partitions takes and hands out, on one node, and
// what a message costs. docs/partitions.md has the numbers.
func TestThroughputOfPartitions(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("it measures a broker: set HOPBACK_LONG=1")
	}
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		for _, n := range []int{1, 4, 16, 64} {
			g := partition.Group{Name: fmt.Sprint("rate-", n), Partitions: n}
			suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
			found, err := partitionrig.Measure(t.Context(), g, 60_000, func() time.Duration {
				ms, err := strconv.Atoi(strings.TrimSpace(s.EvalOK(t, "erlang:element(1, erlang:statistics(runtime)).")))
				require.NoError(t, err)
				return time.Duration(ms) * time.Millisecond
			}, conn)
			require.NoError(t, err)
			suite.Report(t, s, "throughput: %d partitions: %v", n, found)
		}
	})
}
