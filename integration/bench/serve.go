package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
	"time"

	"github.com/hopback/hopback/hopbacktest"
)

// memoryScheme begins a -url that names a hopbacktest broker, such as "memory:4.0.5".
const memoryScheme = "memory"

// childEnv tells a copy of this program what to do in place of main: see childMain.
const childEnv = "HOPBACK_BENCH_CHILD"

// childMain is what a copy of this program does that startMemory or runIdle has started. It
// returns false if there is nothing of the kind to do.
func childMain() bool {
	what, arg, _ := strings.Cut(os.Getenv(childEnv), " ")
	var err error
	switch what {
	case "":
		return false
	case "serve":
		err = serve(arg)
	case "idle":
		err = idleChild(arg)
	default:
		err = fmt.Errorf("%s is %q", childEnv, what)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	return true
}

// child is a copy of this program that does what.
func child(ctx context.Context, what string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), childEnv+"="+what)
	cmd.Stderr = os.Stderr
	return cmd, nil
}

// serve runs a hopbacktest broker until standard input ends, which it also does when the
// parent is killed.
func serve(version string) error {
	// The broker should cost as little as it can: it is there so that clients are the limit.
	debug.SetGCPercent(400)
	b, err := hopbacktest.New(hopbacktest.Config{Version: version, MaxEvents: -1})
	if err != nil {
		return err
	}
	defer b.Close()
	url, err := b.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(url)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// startMemory starts a hopbacktest broker in a separate process, so that its CPU isn't
// counted as the client's.
func startMemory(version string) (url string, end func(), err error) {
	cmd, err := child(context.Background(), "serve "+version)
	if err != nil {
		return "", nil, err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	end = func() {
		_ = in.Close()
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		_ = cmd.Wait()
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		end()
		return "", nil, fmt.Errorf("the broker in memory hasn't started: %w", err)
	}
	return strings.TrimSpace(line), end, nil
}
