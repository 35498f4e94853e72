package rabbitmq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// run runs a command to its end, or kills it with its children when ctx ends,
// and returns its standard output. An error holds what it wrote last.
func run(ctx context.Context, env []string, name string, args ...string) ([]byte, error) {
	cmd := command(ctx, env, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	return stdout.Bytes(), commandError(ctx, err, name, args, stderr.String()+stdout.String())
}

// command runs in a separate process group and adds env to the environment.
func command(ctx context.Context, env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = ownGroup()
	cmd.Cancel = func() error { return killGroup(cmd.Process) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func commandError(ctx context.Context, err error, name string, args []string, output string) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("there is no %s here", name)
	}
	what := name
	if len(args) > 0 {
		what += " " + args[0]
	}
	if last := lastLines(output, 3); last != "" {
		return fmt.Errorf("%s: %w: %s", what, err, last)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// lastLines returns the last n lines that aren't empty, in one line.
func lastLines(text string, n int) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-n):], " | ")
}
