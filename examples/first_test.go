package examples

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/broker"
)

// TestFirst runs the program of README.md until its message is charged, interrupts it,
// and wants it to end well.
func TestFirst(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "first")
	text, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "./first").CombinedOutput()
	require.NoError(t, err, "%s", text)
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			brokers, err := broker.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			defer func() { assert.NoError(t, brokers[0].Release(t.Context())) }()
			v := newVHost(t, brokers[0])
			run := command(t, filepath.Dir(bin), "first", v)
			said, err := run.StderrPipe()
			require.NoError(t, err)
			require.NoError(t, run.Start())
			var lines []string
			for s := bufio.NewScanner(said); s.Scan(); {
				lines = append(lines, s.Text())
				if strings.HasSuffix(s.Text(), "charged o-1") {
					require.NoError(t, run.Process.Signal(os.Interrupt))
				}
			}
			assert.NoError(t, run.Wait())
			assert.Len(t, lines, 1, "nothing but: charged o-1")
			for _, queue := range []string{"orders", "orders.dead", "delay_1s", "delay_10s", "delay_60s", "parking_queue"} {
				assert.Contains(t, v.queues(t), `"`+queue+`"`)
			}
		})
	}
}
