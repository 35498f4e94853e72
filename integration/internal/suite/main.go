// Package suite is what the integration tests of all subjects share: brokers, real ones
// and those in memory, a virtual host for each test, and helpers that more than one subject
// uses.
//
// Every test runs with RabbitMQ 4.3, the newest that hopback supports, and with 4.0, the oldest.
// Most run with both in memory, too: see package hopbacktest, and integration/memory.txt. A flag
// such as -brokers=4.1 names another series, for Docker's images. A missing broker is a failure.
// Package broker finds or starts them.
package suite

import (
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// Brokers are those that every test runs with.
var Brokers []*rabbitmq.Broker

// parallel is how many tests run at once: they mostly wait for the broker, so
// there may be more of them than there are cores.
const parallel = "16"

// Main runs the tests of one package.
func Main(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

// atExit has what is done after the tests.
var atExit struct {
	sync.Mutex
	all []func()
}

// AtExit has something done after the tests.
func AtExit(f func()) {
	atExit.Lock()
	defer atExit.Unlock()
	atExit.all = append(atExit.all, f)
}

// which brokers the tests run with.
var which = flag.String("brokers", "", `"real", "memory", "memory-4.4", "memory-4.3", "memory-4.0", "all", or the series of one real broker, such as "4.1"; `+
	"default: those that HOPBACK_URL or HOPBACK_URL_4_3, and so on, name, else 4.3 in memory; all, if HOPBACK_TEST_BROKERS=start")

// Versions are the series of the real brokers.
func Versions() (all []string) {
	if oneSeries.MatchString(*which) {
		return []string{*which}
	}
	if given() {
		for _, version := range []string{"4.4", "4.3", "4.2", "4.1", "4.0"} {
			if rabbitmq.Given(version) {
				all = append(all, version)
			}
		}
		return all
	}
	if rabbitmq.Given("4.4") { // Debian has none
		return []string{"4.4", "4.3", "4.0"}
	}
	return []string{"4.3", "4.0"}
}

var oneSeries = regexp.MustCompile(`^4\.\d$`)

// byDefault reports whether neither a flag nor the environment says which brokers to use, so the tests use those
// that are there and start nothing.
func byDefault() bool { return *which == "" && !rabbitmq.MayStart() }

// named reports whether the tests run with the one broker that HOPBACK_URL names.
func named() bool { return byDefault() && os.Getenv("HOPBACK_URL") != "" }

// given reports whether they run with the brokers that HOPBACK_URL_4_3, and so on, name.
func given() bool {
	return byDefault() && !named() && slices.ContainsFunc([]string{"4.4", "4.3", "4.2", "4.1", "4.0"}, rabbitmq.Given)
}

// onlyMemory reports whether no real broker is used.
func onlyMemory() bool {
	return strings.HasPrefix(*which, "memory") || byDefault() && !named() && !given()
}

// inMemory are the versions in memory to run with.
func inMemory() []string {
	switch {
	case strings.HasPrefix(*which, "memory-"):
		return []string{strings.TrimPrefix(*which, "memory-")}
	case *which == "real" || oneSeries.MatchString(*which) || named() || given():
		return nil
	case byDefault():
		return []string{"4.3"}
	}
	return []string{"4.4", "4.3", "4.0"}
}

func start(ctx context.Context) (err error) {
	switch *which {
	case "", "all", "real", "memory", "memory-4.4", "memory-4.3", "memory-4.0":
	default:
		if !oneSeries.MatchString(*which) {
			return fmt.Errorf("-brokers=%s: use all, real, memory, memory-4.4, memory-4.3, memory-4.0, or a series such as 4.1", *which)
		}
	}
	if exempted, err = Exempt("../memory.txt"); err != nil {
		return err
	}
	for _, version := range []string{"4.4", "4.3", "4.0"} {
		if len(inMemory()) == 0 {
			break
		}
		b, err := startMemory(version) // of all versions, since some tests use two
		if err != nil {
			return err
		}
		Memory = append(Memory, b)
	}
	switch {
	case named():
		var b *rabbitmq.Broker
		if b, err = rabbitmq.Named(ctx, os.Stderr); err == nil {
			Brokers = []*rabbitmq.Broker{b}
		}
	case !onlyMemory():
		Brokers, err = rabbitmq.Need(ctx, os.Stderr, Versions()...)
	case byDefault():
		fmt.Println("no broker is named, so these tests run with RabbitMQ 4.3 in memory; to use yours: HOPBACK_URL=amqp://user:password@host go test ./integration/...")
	}
	return err
}

func run(m *testing.M) int {
	set := map[string]bool{}
	flag.Visit(func(f *flag.Flag) { set[f.Name] = true })
	if !set["test.parallel"] {
		_ = flag.Set("test.parallel", parallel)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := start(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	for _, b := range Memory {
		b.close()
	}
	for _, f := range atExit.all {
		f()
	}
	for _, b := range append(Brokers, started.brokers...) {
		if err := b.Release(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// ForEachBroker runs test with each broker, all at the same time, each in a
// separate virtual host.
func ForEachBroker(t *testing.T, test func(t *testing.T, s *Site)) {
	t.Helper()
	t.Parallel()
	for _, b := range Brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			test(t, NewSite(t, b))
		})
	}
	forEachInMemory(t, test)
}
