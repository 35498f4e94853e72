package suite

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// The command's exit codes.
const (
	ExitDone        = 0
	ExitNo          = 1
	ExitUnknown     = 2
	ExitUsage       = 64
	ExitInterrupted = 130
)

// Command is the built command hopback.
var Command = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "hopback-command-")
	if err != nil {
		return "", err
	}
	AtExit(func() { _ = os.RemoveAll(dir) })
	// The packages of tests run at the same time. The first one compiles, and the others find that in the build cache.
	defer rabbitmq.Alone("build-command")()
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir, "github.com/hopback/hopback/cmd/hopback")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return filepath.Join(dir, "hopback"), nil
})

// Shell runs the command hopback. newShell makes it.
type Shell struct {
	t   *testing.T
	bin string
	Env map[string]string
	// never is what must not be printed.
	Never string
	Group string // of commands; "" is topology
}

// Dead runs a command of "hopback dlq".
func (h Shell) Dead(code int, args ...string) printed {
	h.t.Helper()
	h.Group = "dead"
	return h.Run(code, args...)
}

// NewShell builds the command. On a machine that has built nothing yet that takes minutes,
// which must not be part of what a test waits for.
func NewShell(t *testing.T, env map[string]string) Shell {
	t.Helper()
	bin, err := Command()
	require.NoError(t, err)
	return Shell{t: t, bin: bin, Env: env}
}

// Shell has the site's URLs in the environment.
func (s *Site) Shell(t *testing.T) Shell {
	t.Helper()
	return NewShell(t, map[string]string{"HOPBACK_URL": s.AMQPURL(), "HOPBACK_MANAGEMENT_URL": s.ManagementURL})
}

// printed is what a run printed.
type printed struct {
	Stdout, Stderr string
}

// Run wants an exit code. It can be called from several goroutines.
func (h Shell) Run(code int, args ...string) printed {
	h.t.Helper()
	return h.runIn(h.t.Context(), code, args...)
}

// Start is run on a goroutine that ends before the test does. The command is interrupted
// when ctx ends.
func (h Shell) Start(ctx context.Context, code int, args ...string) <-chan printed {
	ended := make(chan printed, 1)
	var running sync.WaitGroup
	running.Go(func() { ended <- h.runIn(ctx, code, args...) })
	h.t.Cleanup(running.Wait)
	return ended
}

func (h Shell) runIn(ctx context.Context, code int, args ...string) printed {
	h.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, h.bin, append([]string{cmp.Or(h.Group, "topology")}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	for k, v := range h.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) && ctx.Err() == nil {
		assert.NoError(h.t, err)
	}
	got := cmd.ProcessState.ExitCode()
	assert.Equal(h.t, code, got, "hopback %s %s\n%s\n%s", cmp.Or(h.Group, "topology"), strings.Join(args, " "), &stdout, &stderr)
	if h.Never != "" {
		assert.NotContains(h.t, stdout.String()+stderr.String(), h.Never, "a password")
	}
	return printed{stdout.String(), stderr.String()}
}

// YAML writes a topology file.
func YAML(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "topology.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

const ShopFile = `
retry: {delays: [1s, 2s], strategy: auto}
work-queues:
  orders: {delivery-limit: 5}
exchanges:
  shop: {type: topic, alternate-exchange: parking_exchange}
bindings:
  - {source: shop, queue: orders, key: order.*}
`
