package retry_test

import (
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// What the playground shows of a message, a client of a real broker sees as well: the test binary of the playground runs
// the page's lab on each broker, and compares. The lab is a program's, so no other package can import it.
func TestThePlaygroundsHistoriesAreThoseOfABroker(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "playground.test")
	build := sync.OnceValues(func() ([]byte, error) {
		return exec.Command("go", "test", "-c", "-o", binary, "github.com/hopback/hopback/operate/playground").CombinedOutput()
	})
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		strategies := []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter}
		if s.Newer() {
			strategies = append(strategies, retry.StrategyNative)
		}
		for _, strategy := range strategies {
			t.Run(string(strategy), func(t *testing.T) {
				t.Parallel()
				out, err := build()
				require.NoError(t, err, "%s", out)
				run := exec.CommandContext(t.Context(), binary, "-test.run=^TestTheSameOnABroker$", "-broker="+suite.NewSite(t, s.Broker).AMQPURL(), "-strategy="+string(strategy))
				out, err = run.CombinedOutput()
				require.NoError(t, err, "%s", out)
			})
		}
	})
}
