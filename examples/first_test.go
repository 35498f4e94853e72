package examples

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/broker"
)

// vary are the parts of a log line that differ from run to run.
var vary = regexp.MustCompile(`^[0-9/]+ [0-9:]+|message_id=[A-Z0-9]+`)

// printed returns the block of README.md that shows what its program prints.
func printed(t *testing.T) []string {
	t.Helper()
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(readme), "is the whole program. It prints:\n\n```\n")
	require.True(t, found, "README.md shows what the program prints")
	block, _, found := strings.Cut(after, "\n```")
	require.True(t, found, "the block ends")
	return strings.Split(block, "\n")
}

// alike returns lines without the parts that vary.
func alike(lines []string) (same []string) {
	for _, line := range lines {
		same = append(same, vary.ReplaceAllString(line, "…"))
	}
	return same
}

// TestFirst runs the program of README.md until its message is charged, interrupts it,
// and wants it to print what README.md shows, and to end well.
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
			assert.Equal(t, alike(printed(t)), alike(lines), "README.md shows what the program prints")
			for _, queue := range []string{"orders", "orders.dead", "delay_1s", "delay_10s", "delay_60s", "parking_queue"} {
				assert.Contains(t, v.queues(t), `"`+queue+`"`)
			}
		})
	}
}
