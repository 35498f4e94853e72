package integration

import (
	"context"
	_ "embed"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/broker"
)

// Brokers of our own, one of each version, started when the first test wants one and
// shared by those that reconfigure a broker without hurting each other: plugins,
// listeners, authentication. What is felt in every virtual host, as an alarm is, is done
// by one test at a time: forEachOfOursAlone. A test that stops one takes a broker for
// itself with broker.Own.
var ours = map[string]func() (*broker.Broker, error){
	"4.3": sync.OnceValues(func() (*broker.Broker, error) { return startOurs("4.3") }),
	"4.0": sync.OnceValues(func() (*broker.Broker, error) { return startOurs("4.0") }),
}

var started struct {
	sync.Mutex
	brokers []*broker.Broker
}

func startOurs(version string) (*broker.Broker, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	b, err := broker.Own(ctx, os.Stderr, version)
	if err == nil {
		started.Lock()
		defer started.Unlock()
		started.brokers = append(started.brokers, b)
	}
	return b, err
}

// needReal skips a test where only brokers in memory are wanted.
func needReal(t *testing.T) {
	t.Helper()
	if onlyMemory() {
		t.Skip("it needs a real broker, and -brokers=memory... wants none")
	}
}

// forEachOfOurs is forEachBroker, with the brokers that may be reconfigured.
func forEachOfOurs(t *testing.T, test func(t *testing.T, s *site)) {
	t.Helper()
	needReal(t)
	t.Parallel()
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			b, err := ours[version]()
			require.NoError(t, err)
			test(t, newSite(t, b))
		})
	}
}

//go:embed alone.txt
var alone string

// runsAlone is for a test that others would notice, or that would notice them. It isn't
// parallel, so that it runs before all those that are. A lock would not do: who waits for
// one keeps a place among the tests that may run at once, and the subtests of who holds it
// may be waiting for such a place. "make test" runs those in alone.txt in a process with
// brokers of its own, so that all others needn't wait for them.
func runsAlone(t *testing.T) {
	t.Helper()
	require.Contains(t, strings.Split(alone, "\n"), t.Name(), "alone.txt has to list it")
}

// forEachOfOursAlone is forEachOfOurs for a test that the others would notice.
func forEachOfOursAlone(t *testing.T, test func(t *testing.T, s *site)) {
	t.Helper()
	runsAlone(t)
	needReal(t)
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel() // beside the other version
			b, err := ours[version]()
			require.NoError(t, err)
			test(t, newSite(t, b))
		})
	}
}

// run runs a command on the broker.
func (s *site) run(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := s.Exec(ctx, args...)
	require.NoError(t, err)
	return string(out)
}

// eval evaluates Erlang expressions on the broker.
func (s *site) eval(t *testing.T, expressions string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := s.Eval(ctx, expressions)
	require.NoError(t, err)
	return string(out)
}

// enabling is held by whoever enables a plugin: two at once write the same file.
var enabling sync.Mutex

// enable enables a plugin of the broker.
func (s *site) enable(t *testing.T, plugin string) {
	t.Helper()
	enabling.Lock()
	defer enabling.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, s.EnablePlugin(ctx, plugin))
}
