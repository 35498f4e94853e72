package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
)

// How a broker was come by; see the package documentation. Its value is what
// HOPBACK_BROKER_WITH is set to.
type How string

// The ways to a broker, in the order in which they are tried.
const (
	HowEnvironment How = "env"
	HowDocker      How = "docker"
	HowChroot      How = "chroot"
	HowDockerBuilt How = "docker-built"
)

// supported versions, newest first. Docker has an image of each. packaged are those that Debian
// has, too; "any" starts one of these.
var (
	supported = []string{"4.4", "4.3", "4.2", "4.1", "4.0"}
	packaged  = []string{"4.3", "4.0"}
)

// known says whether a version can be asked for.
func known(version string) bool { return slices.Contains(supported, version) }

// Given says whether the environment names a broker of this version, or a tree to start one from.
func Given(version string) bool {
	return os.Getenv(envName("HOPBACK_URL_", version)) != "" || os.Getenv(envName("HOPBACK_TREE_", version)) != ""
}

// MayStart reports whether tests may start brokers and other servers, which "make test" allows by setting
// HOPBACK_TEST_BROKERS to "start". "go test ./..." alone uses what the environment names, and starts nothing.
func MayStart() bool { return os.Getenv("HOPBACK_TEST_BROKERS") != "" }

// NeedsStart skips a test that starts brokers or other servers, unless [MayStart] reports true.
func NeedsStart(t interface {
	Helper()
	Skip(args ...any)
}) {
	t.Helper()
	if !MayStart() {
		t.Skip("it starts servers: run make test, or set HOPBACK_TEST_BROKERS=start")
	}
}

// Named returns the broker that HOPBACK_URL names, of whichever supported version it is. HOPBACK_MANAGEMENT_URL
// names its HTTP API, unless that is on port 15672 of the same host. Release doesn't stop it. The error is an
// [*argument.Error] if a variable can't be used.
func Named(ctx context.Context, out io.Writer) (*Broker, error) {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return nil, err
	}
	b, err := l.fromEnvironment(ctx, "", l.getenv("HOPBACK_URL"))
	if err == nil {
		l.out.prefixed("broker "+b.Version)("%s from HOPBACK_URL: %s", b.FullVersion, redacted(b.URL))
	}
	return b, err
}

// releaseTimeout bounds what has to be done even after the caller's context
// has ended, such as stopping a broker.
const releaseTimeout = 60 * time.Second

// ErrNotOurs is what the fault methods of a [Broker] return when the broker
// comes from the environment: it isn't ours to stop. [Own] returns it where
// HOPBACK_BROKER_WITH=env forbids starting one.
var ErrNotOurs = errors.New("broker: it comes from the environment and is not ours to start or stop")

// Broker is one running RabbitMQ. Its methods are safe for concurrent use, as
// far as stopping a broker twice at once makes sense.
type Broker struct {
	// Version is the release series: "4.4", "4.3", or "4.0".
	Version string
	// FullVersion is what the broker says of itself, such as "4.3.6".
	FullVersion string
	// URL for AMQP, with user and password: amqp://guest:guest@127.0.0.1:24300.
	URL string
	// ManagementURL of the HTTP API, with user and password and with no path:
	// http://guest:guest@127.0.0.1:24301.
	ManagementURL string
	// How the broker was come by.
	How How

	l    *launcher
	name string // of the record; empty for the environment
	node int    // of a cluster, from 1; 0: it stands alone

	mu    sync.Mutex
	lease *flock // shared while this process uses the broker; nil once released
}

// Need returns one running broker for each version asked for, in that order,
// and starts those that don't run. A version is "4.3", "4.0", or "any": the
// newest that can be had.
//
// Each broker is reported in one line on out, and so is what it waits for
// while it starts, since the first time on a machine takes a minute; a nil out
// keeps it quiet.
//
// The error is an [*argument.Error] for a version or an environment variable
// that can't be used, and a [*NoWayError] where no way leads to a broker.
// On an error nothing is left running that this call has started.
func Need(ctx context.Context, out io.Writer, versions ...string) ([]*Broker, error) {
	return Up(ctx, out, false, versions...)
}

// Up is [Need], and with keep the brokers go on running when every process has
// released them, until [Down].
func Up(ctx context.Context, out io.Writer, keep bool, versions ...string) ([]*Broker, error) {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return nil, err
	}
	return l.need(ctx, keep, versions)
}

// Own starts a broker for the caller alone, which no other process shares, for
// tests that kill or restart it. version is as for [Need], whose errors it
// returns, but HOPBACK_URL_* are not looked at. Release ends it. One whose
// process crashed before is stopped by the next process that uses this package.
func Own(ctx context.Context, out io.Writer, version string) (*Broker, error) {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return nil, err
	}
	if l.only == HowEnvironment {
		return nil, fmt.Errorf("HOPBACK_BROKER_WITH=env: %w", ErrNotOurs)
	}
	b, _, err := l.own(ctx, version, 1)
	return b, err
}

// Release says that the caller needs the broker no more, and ends it if nobody
// else uses it, unless it came from the environment or was started to be kept,
// or HOPBACK_KEEP is set. It does so within a minute, even when ctx has ended.
// Releasing twice does nothing.
func (b *Broker) Release(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lease == nil {
		return nil
	}
	lease := b.lease
	b.lease = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return b.l.release(ctx, b.name, lease)
}

// Stop ends the broker in an orderly way; its data stay for [Broker.Start].
func (b *Broker) Stop(ctx context.Context) error {
	return b.do("stop", func(d driver, s *state) error { return d.stop(ctx, s) })
}

// Kill ends the broker at once, as kill -9 does; its data stay for [Broker.Start].
func (b *Broker) Kill(ctx context.Context) error {
	return b.do("kill", func(d driver, s *state) error { return d.kill(ctx, s) })
}

// Start starts the broker again after Stop or Kill, on the same ports and with
// its data, and returns when it serves.
func (b *Broker) Start(ctx context.Context) error {
	return b.do("start", func(d driver, s *state) error { return b.l.startAgain(ctx, d, s) })
}

// Upgrade stops the broker, and starts another version on its data and its ports, as an upgrade of a
// node in place does. Only a broker in a chroot can be upgraded. Afterwards b is of that version.
func (b *Broker) Upgrade(ctx context.Context, version string) error {
	if err := checkVersions([]string{version}); err != nil {
		return err
	}
	return b.do("upgrade", func(d driver, s *state) error {
		if s.How != HowChroot {
			return fmt.Errorf("it runs by %s, and only a broker in a chroot can be upgraded", s.How)
		}
		source, err := d.prepare(ctx, version, b.l.out.prefixed("broker "+b.name))
		if err != nil {
			return err
		}
		if err := d.stop(ctx, s); err != nil {
			return err
		}
		s.Version, s.Source = version, source
		full, err := b.l.startedAgain(ctx, d, s)
		if err == nil {
			b.Version, b.FullVersion = version, full
		}
		return err
	})
}

// Restart is Stop and Start.
func (b *Broker) Restart(ctx context.Context) error {
	if err := b.Stop(ctx); err != nil {
		return err
	}
	return b.Start(ctx)
}

// Exec runs a command where the broker runs, as the broker's user and with its
// settings, and returns what it printed on its standard output:
//
//	b.Exec(ctx, "rabbitmqctl", "close_all_connections", "test")
//
// The error holds the end of its standard error.
func (b *Broker) Exec(ctx context.Context, args ...string) ([]byte, error) {
	if len(args) == 0 {
		return nil, argument.New("args", nil, "is empty", `name a command, such as "rabbitmqctl", "status"`)
	}
	var out []byte
	err := b.do(args[0], func(d driver, s *state) (err error) {
		out, err = d.exec(ctx, s, args)
		return err
	})
	return out, err
}

// do finds the driver and the current state, which another process may have
// changed since.
func (b *Broker) do(what string, f func(driver, *state) error) error {
	if b.name == "" {
		return fmt.Errorf("broker %s: %s: %w", b.Version, what, ErrNotOurs)
	}
	s, err := b.l.load(b.name)
	if err == nil && (s == nil || b.node > len(s.Nodes)) {
		err = errors.New("it has been taken down")
	}
	if err == nil {
		d := b.l.driver(s.How)
		if b.node > 0 {
			s = s.node(b.node - 1)
		}
		err = f(d, s)
	}
	if err != nil && b.node > 0 {
		return fmt.Errorf("cluster %s: %s node %d: %w", b.name, what, b.node, err)
	}
	if err != nil {
		return fmt.Errorf("broker %s: %s: %w", b.Version, what, err)
	}
	return nil
}

// checkVersions refuses versions that can't be started.
func checkVersions(versions []string) error {
	if len(versions) == 0 {
		return argument.New("versions", nil, "is empty", "ask for "+strings.Join(supported, ", ")+" or any")
	}
	for _, v := range versions {
		if v != "any" && !known(v) {
			return argument.New("version", v, "is not supported", "ask for "+strings.Join(supported, ", ")+", or any")
		}
	}
	return nil
}

// NoWayError says that no broker could be had, and what was tried.
type NoWayError struct {
	Version string // "4.3"
	Tried   []Attempt
}

// Attempt is a way that was tried in vain.
type Attempt struct {
	How How
	Err error
}

func (e *NoWayError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "broker %s: none could be had (", e.Version)
	for i, a := range e.Tried {
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "%s: %v", a.How, a.Err)
	}
	b.WriteString("); " + e.Remedy())
	return b.String()
}

// Remedy says what to do to have a broker.
func (e *NoWayError) Remedy() string {
	return fmt.Sprintf("set %s to the amqp:// URL of a RabbitMQ %s, or install Docker with compose, or be root on Debian", envName("HOPBACK_URL_", e.Version), e.Version)
}

// Unwrap returns the reason of every attempt.
func (e *NoWayError) Unwrap() []error {
	errs := make([]error, len(e.Tried))
	for i, a := range e.Tried {
		errs[i] = a.Err
	}
	return errs
}
