package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

// goTool is the go command; make sets GO.
var goTool = cmp.Or(os.Getenv("GO"), "go")

// runner runs commands, and counts the tests among them. Its methods may be called
// concurrently.
type runner struct {
	ctx   context.Context
	tally *tally
	began time.Time
	// race says whether the race detector can be had.
	race func() bool
	// limit is how long the tests of one package may take, as go test's -timeout.
	limit string
}

func newRunner(ctx context.Context, out io.Writer) *runner {
	r := &runner{ctx: ctx, tally: newTally(out), began: time.Now(), limit: "25m"}
	r.race = sync.OnceValue(func() bool {
		env, err := r.output(goTool, "env", "CGO_ENABLED", "CC")
		enabled, compiler, _ := strings.Cut(strings.TrimSpace(string(env)), "\n")
		if err == nil && enabled == "1" {
			_, err = exec.LookPath(compiler)
		}
		if err != nil || enabled != "1" {
			r.tally.printf("no C compiler, so without the race detector; install gcc to have it\n")
			return false
		}
		return true
	})
	return r
}

// together runs steps at once and waits for all of them.
func together(steps ...func()) {
	var all sync.WaitGroup
	for _, step := range steps {
		all.Go(step)
	}
	all.Wait()
}

// phase shows where the time goes.
func (r *runner) phase(name string) {
	r.tally.printf("after %.0f s: %s\n", time.Since(r.began).Seconds(), name)
}

// test runs "go test -json" with arguments, strings or slices of them, and counts the tests.
// Tests of brokers aren't cached: what a broker does isn't in the cache's key.
func (r *runner) test(args ...any) {
	if r.ctx.Err() != nil {
		return
	}
	line := []string{"test", "-json"}
	for _, a := range args {
		switch a := a.(type) {
		case string:
			line = append(line, a)
		case []string:
			line = append(line, a...)
		}
	}
	if slices.Contains(line, "-race") && !r.race() {
		line = slices.DeleteFunc(line, func(a string) bool { return a == "-race" })
	}
	cmd := r.command(goTool, line...)
	from, to := io.Pipe()
	cmd.Stdout, cmd.Stderr = to, os.Stderr
	var err error
	began := time.Now()
	go func() {
		err = cmd.Run()
		_ = to.Close()
	}()
	// If a test has failed, so has the command.
	if well := r.tally.read(from); well && err != nil {
		r.tally.fail(fmt.Sprintf("go %s: %v", strings.Join(line, " "), err))
	}
	if s := cmd.ProcessState; s != nil { // with compilers and tests, without brokers
		r.tally.printf("took %.0f s, and %.0f s of CPU: go %s\n", time.Since(began).Seconds(), (s.UserTime() + s.SystemTime()).Seconds(), brief(line))
	}
}

// brief is a command line with no more than its first packages.
func brief(line []string) string {
	const most = 8
	if len(line) > most {
		line = append(slices.Clone(line[:most]), fmt.Sprintf("and %d more arguments", len(line)-most))
	}
	return strings.Join(line, " ")
}

// list returns the packages that patterns match.
func (r *runner) list(patterns ...string) []string {
	out, err := r.output(goTool, append([]string{"list"}, patterns...)...)
	if err != nil && r.ctx.Err() == nil {
		r.tally.fail(fmt.Sprintf("go list %s: %v", strings.Join(patterns, " "), err))
	}
	return strings.Fields(string(out))
}

// output runs a command and returns what it prints.
func (r *runner) output(name string, args ...string) ([]byte, error) {
	var out bytes.Buffer
	cmd := r.command(name, args...)
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	err := cmd.Run()
	return out.Bytes(), err
}

// command is one that ends with the runner's context, and its children with it.
func (r *runner) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(r.ctx, name, args...)
	inGroup(cmd)
	cmd.WaitDelay = 20 * time.Second
	return cmd
}
