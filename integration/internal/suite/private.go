package suite

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// ours are private brokers, one of each version, started when the first test wants one and shared by
// the tests of a process that reconfigure a broker without hurting each other: plugins,
// listeners, authentication. Tests whose effects reach every virtual host, as an alarm's do,
// run one at a time: ForEachOfOursAlone. A test that stops a broker starts another one
// with broker.Own. All of these tests are in integration/broker, so that other processes
// start no private brokers.
var ours = map[string]func() (*rabbitmq.Broker, error){
	"4.4": sync.OnceValues(func() (*rabbitmq.Broker, error) { return startOurs("4.4") }),
	"4.3": sync.OnceValues(func() (*rabbitmq.Broker, error) { return startOurs("4.3") }),
	"4.2": sync.OnceValues(func() (*rabbitmq.Broker, error) { return startOurs("4.2") }),
	"4.1": sync.OnceValues(func() (*rabbitmq.Broker, error) { return startOurs("4.1") }),
	"4.0": sync.OnceValues(func() (*rabbitmq.Broker, error) { return startOurs("4.0") }),
}

var started struct {
	sync.Mutex
	brokers []*rabbitmq.Broker
}

func startOurs(version string) (*rabbitmq.Broker, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	b, err := rabbitmq.Own(ctx, os.Stderr, version)
	if err == nil {
		started.Lock()
		defer started.Unlock()
		started.brokers = append(started.brokers, b)
	}
	return b, err
}

// NeedReal skips a test where only brokers in memory are used.
func NeedReal(t *testing.T) {
	t.Helper()
	if onlyMemory() {
		t.Skip("it needs a real broker: name one in HOPBACK_URL, or run make test")
	}
}

// NeedPrivate skips a test that starts brokers to reconfigure or kill them, where no real broker is used, or
// where tests start nothing.
func NeedPrivate(t *testing.T) {
	t.Helper()
	NeedReal(t)
	if byDefault() {
		rabbitmq.NeedsStart(t)
	}
}

// ForEachOfOurs is ForEachBroker, with the brokers that may be reconfigured.
func ForEachOfOurs(t *testing.T, test func(t *testing.T, s *Site)) {
	t.Helper()
	NeedPrivate(t)
	t.Parallel()
	for _, version := range Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			b, err := ours[version]()
			require.NoError(t, err)
			test(t, NewSite(t, b))
		})
	}
}

// ForEachOfOursAlone is ForEachOfOurs for a test that others would notice, or that would
// notice them. It isn't parallel, so it runs before all those that are. A lock won't do: a
// test that waits for one keeps a place among the tests that may run at once, and the
// subtests of the test that holds it may be waiting for such a place.
func ForEachOfOursAlone(t *testing.T, test func(t *testing.T, s *Site)) {
	t.Helper()
	NeedPrivate(t)
	for _, version := range Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel() // next to the other version
			b, err := ours[version]()
			require.NoError(t, err)
			test(t, NewSite(t, b))
		})
	}
}

// RunOK runs a command on the broker.
func (s *Site) RunOK(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := s.Exec(ctx, args...)
	require.NoError(t, err)
	return string(out)
}

// EvalOK evaluates Erlang expressions on the broker.
func (s *Site) EvalOK(t *testing.T, expressions string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := s.Eval(ctx, expressions)
	require.NoError(t, err)
	return string(out)
}

// enabling is held while a plugin is enabled: two at once write the same file.
var enabling sync.Mutex

// Enable enables a plugin of the broker.
func (s *Site) Enable(t *testing.T, plugin string) {
	t.Helper()
	enabling.Lock()
	defer enabling.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, s.EnablePlugin(ctx, plugin))
}
