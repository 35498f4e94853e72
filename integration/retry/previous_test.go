package retry_test

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/previous/common"
)

// The revision that workers of this one run next to: the latest release, once there is one.
const previousRevision = "../previous.txt"

// errNoHistory is why the previous revision can't be built.
var errNoHistory = errors.New("the repository's history doesn't have it")

// previous builds the worker with the previous revision.
var previous = sync.OnceValues(func() (bin string, err error) {
	text, err := os.ReadFile(previousRevision)
	if err != nil {
		return "", err
	}
	revision := strings.TrimSpace(string(text))
	if other := os.Getenv("HOPBACK_PREVIOUS"); other != "" {
		revision = other
	}
	if out, err := exec.Command("git", "cat-file", "-e", revision+"^{commit}").CombinedOutput(); err != nil {
		return "", fmt.Errorf("revision %s: %w (a shallow clone? git fetch --unshallow): %w: %s", revision, errNoHistory, err, out)
	}
	dir, err := os.MkdirTemp("", "hopback-previous-")
	if err != nil {
		return "", err
	}
	suite.AtExit(func() { _ = os.RemoveAll(dir) })
	var archive, problems bytes.Buffer
	git := exec.Command("git", "archive", revision)
	git.Dir, git.Stdout, git.Stderr = "../..", &archive, &problems
	if err := git.Run(); err != nil {
		return "", fmt.Errorf("git archive %s: %w: %s", revision, err, &problems)
	}
	untar := exec.Command("tar", "-x", "-C", dir)
	untar.Stdin = &archive
	if out, err := untar.CombinedOutput(); err != nil {
		return "", fmt.Errorf("tar: %w: %s", err, out)
	}
	worker := filepath.Join(dir, "integration", "previous")
	if err := os.RemoveAll(worker); err != nil {
		return "", err
	}
	if err := os.CopyFS(worker, os.DirFS("../previous")); err != nil {
		return "", err
	}
	bin = filepath.Join(dir, "worker")
	build := exec.Command("go", "build", "-trimpath", "-tags", "previous", "-o", bin, "./integration/previous")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the worker with revision %s: %w: %s", revision, err, out)
	}
	return bin, nil
})

// runPrevious runs the previous worker's command to its end, and returns what it has printed.
func runPrevious(t *testing.T, bin string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*suite.Patience)
	defer cancel()
	for {
		c := exec.CommandContext(ctx, bin, args...)
		var problems bytes.Buffer
		c.Stderr = &problems
		out, err := c.Output()
		if strings.Contains(problems.String(), "cluster_not_formed") && ctx.Err() == nil {
			continue // a busy broker keeps nothing of the queue, and that revision declares it only once
		}
		require.NoError(t, err, "%s: %s", args[1:], &problems)
		return string(out)
	}
}

// startPrevious runs the previous worker until the test ends.
func startPrevious(t *testing.T, bin string, notify func(common.Attempt), args ...string) {
	t.Helper()
	c := exec.Command(bin, args...)
	in, err := c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	var problems bytes.Buffer
	c.Stderr = &problems
	require.NoError(t, c.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var a common.Attempt
			if json.Unmarshal(lines.Bytes(), &a) == nil {
				notify(a)
			}
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	t.Cleanup(func() {
		_ = in.Close() // it drains and ends
		late := time.AfterFunc(2*suite.Patience, func() { _ = c.Process.Kill() })
		<-read
		err := c.Wait()
		late.Stop()
		assert.NoError(t, err, "%s: %s", args[1:], &problems)
	})
}

// attempted has the attempts of all messages.
type attempted struct {
	mu sync.Mutex
	of map[string][]common.Attempt
}

func (a *attempted) add(x common.Attempt) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of[x.Body] = append(a.of[x.Body], x)
}

// passes says how many messages went from a worker of one revision to one of the other.
func (a *attempted) passes() (toPrevious, toCurrent int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, all := range a.of {
		for i := 1; i < len(all); i++ {
			if all[i-1].Worker != all[i].Worker && all[i].Worker == "previous" {
				toPrevious++
			} else if all[i-1].Worker != all[i].Worker {
				toCurrent++
			}
		}
	}
	return toPrevious, toCurrent
}

// Workers of the previous revision and of this one share a queue, with every strategy: each
// message is attempted as often as the policy says by workers of both, and both read the
// same from the dead letters of both. Either declares its topology next to the other's.
func TestWorkersOfThePreviousRevisionShareQueues(t *testing.T) {
	bin, err := previous()
	if errors.Is(err, errNoHistory) {
		t.Skip(err)
	}
	require.NoError(t, err)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		turn := 0
		for name := range suite.Strategies(s) {
			first := []string{"current", "previous"}[turn%2]
			turn++
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				sharedWithPrevious(t, s, bin, name, first)
			})
		}
	})
}

func sharedWithPrevious(t *testing.T, s *suite.Site, bin, strategy, first string) {
	conn, _ := s.Connect(t)
	queue := "orders-" + strategy
	policy := common.Policy(strategy, "current")
	if first == "current" {
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue})
	}
	runPrevious(t, bin, s.AMQPURL(), "apply", queue, strategy)
	if first == "previous" {
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue})
	}
	suite.Apply(t, conn, declare.Topology{Bindings: []declare.Binding{{Source: "amq.topic", Queue: queue, Key: strategy + ".#"}}})

	all := &attempted{of: map[string][]common.Attempt{}}
	startPrevious(t, bin, all.add, s.AMQPURL(), "work", queue, strategy)
	suite.Consume(t, conn, queue, common.Worker(strategy, "current", all.add), client.ConsumerConfig{Prefetch: 1})
	suite.AwaitConsumers(t, conn, queue, 2)
	const n, twice = 40, 10
	p := suite.PublisherOf(t, conn, address.Exchange("amq.topic", strategy+".made"))
	for i := range n {
		body := fmt.Sprintf("always %d", i)
		if i < twice {
			body = fmt.Sprintf("twice %d", i)
		}
		suite.Publish(t, p, body)
	}
	suite.Poll(t, "all others are dead", func() bool { return suite.Ready(t, conn, queue+".dead") == n-twice })
	suite.AssertEmpty(t, s, queue)
	all.mu.Lock()
	assert.Len(t, all.of, n)
	for body, attempts := range all.of {
		want := 1 + common.MaxRetries
		if strings.HasPrefix(body, "twice") {
			want = 3
		}
		assert.Len(t, attempts, want, body)
		counts := map[int]bool{}
		for _, a := range attempts {
			counts[a.Count] = true
		}
		assert.Len(t, counts, want, "%s: each attempt has its own number: %v", body, attempts)
	}
	all.mu.Unlock()
	toPrevious, toCurrent := all.passes()
	assert.NotZero(t, toPrevious, "retried by the current one, handled by the previous")
	assert.NotZero(t, toCurrent, "the other way around")

	check := func(reader string, l common.DeadLetter) {
		assert.Contains(t, []string{"previous", "current"}, l.Worker, "%s: %+v", reader, l)
		l.Worker, l.Body = "", ""
		assert.Equal(t, common.DeadLetter{
			Queue: queue, Exchange: "amq.topic", RoutingKey: strategy + ".made", Reason: "exhausted", Error: "no", Retries: common.MaxRetries, Ordered: true,
		}, l, reader)
	}
	const half = (n - twice) / 2
	deadLetters := strings.Split(strings.TrimSpace(runPrevious(t, bin, s.AMQPURL(), "dead", queue, fmt.Sprint(half))), "\n")
	require.Len(t, deadLetters, half)
	for _, line := range deadLetters {
		var l common.DeadLetter
		require.NoError(t, json.Unmarshal([]byte(line), &l))
		check("the previous reader", l)
	}
	for _, m := range s.Peer(t).Take(queue+".dead", n-twice-half) {
		check("the current reader", common.DeadLetterOf(m))
	}
}
