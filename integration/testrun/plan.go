package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// versions of RabbitMQ that all tests run with. Debian has packages of them.
var versions = []string{"4.3", "4.0"}

// newest is a supported version that Debian doesn't have yet. The integration tests run with it where
// the environment names one, and in memory.
const newest = "4.4"

// between are the supported versions in between. Only Docker has them, and the public workflow
// runs the tests of integration with each, and with the newest.
var between = []string{"4.2", "4.1"}

// moduleUnits are the packages whose tests need no broker, in modules other than the root.
var moduleUnits = []string{"./adapter/officialclient", "./hopbackotel", "./cmd/hopback/...", "./operate/topologyfile"}

// toolUnits are those of our own tools.
var toolUnits = []string{"./integration/chaos", "./integration/clockstep", "./integration/explore", "./integration/service", "./integration/testrun"}

// subjects are the packages of integration whose tests run with brokers of both versions, real ones and those
// in memory, without integration/broker. The ones that take longest come first.
var subjects = []string{
	"./integration/retry", "./integration/topology", "./integration/client", "./integration/desk",
	"./integration/consume", "./integration/publish", "./integration/rpc", "./integration/schedule", "./integration/stream", "./integration/partition", "./integration/fair",
}

// readers are the packages whose tests read the source of all others, or run the code of the documents in separate processes. The race
// detector finds nothing in them, and would take minutes of CPU.
var readers = []string{"./integration", "./integration/docs", "./integration/vocabulary", "./integration/surface", "./internal/inside"}

// unit runs the tests that need no broker.
func (r *runner) unit() {
	r.test("-race", "-count=1", r.unitPackages(), moduleUnits)
	r.test("-count=1", readers)
	r.allocations()
}

// quick runs them, and integration with the brokers in memory, at once.
func (r *runner) quick() {
	together(
		func() { r.test(subjects, "./integration/broker", "-brokers=memory", "-parallel=32") },
		func() { r.test(readers, r.unitPackages(), moduleUnits) },
	)
}

// series runs integration with a real broker of one series, or with the newest in memory where no real
// one can be had.
func (r *runner) series(version string) {
	packages := []string{"./integration/broker", "./integration/doctor"}
	if version == newest {
		brokers, err := rabbitmq.Need(r.ctx, os.Stderr, version)
		defer func() { r.release(brokers) }()
		var none *rabbitmq.NoWayError
		if errors.As(err, &none) && os.Getenv("HOPBACK_BROKER_WITH") == "" {
			r.withoutNewest(none)
			version, packages = "memory-"+newest, packages[:1] // the doctor examines real ones only
		}
	}
	r.test("-count=1", "-timeout=30m", "-p=2", subjects, packages, "-brokers="+version, "-parallel=8")
}

// withoutNewest says that no real broker of the newest series was used.
func (r *runner) withoutNewest(why error) {
	r.tally.printf("no real RabbitMQ %s was used, only hopbacktest's: %v\n", newest, why)
}

// settings save CPU, which is what limits a run on two cores.
func settings() {
	// The linker takes two thirds of the time for test binaries without tables for a
	// debugger. Lint runs vet. With -trimpath a fresh clone finds in the build cache what
	// another one has compiled and checked; without it, lint alone takes 75 seconds of CPU more there.
	_ = os.Setenv("GOFLAGS", strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath -ldflags=-w -vet=off"))
	// Compilers, linters and tests collect garbage less often, for a tenth less CPU.
	if os.Getenv("GOGC") == "" {
		_ = os.Setenv("GOGC", "300")
	}
	// The brokers take most of the CPU. So they take a third less.
	_ = os.Setenv("HOPBACK_BROKER_LEAN", "1")
}

// usual runs what a change has to pass before it is worth more: lint, the tests that need no broker, and
// integration in memory and with a real RabbitMQ 4.3. If no real one can be had here, it says so and what it left out.
func (r *runner) usual() {
	settings()
	var leftOut *rabbitmq.NoWayError
	together(
		func() {
			r.phase("lint")
			r.lint()
			r.phase("tests that need no broker")
			r.test("-count=1", "-timeout="+r.limit, r.unitPackages(), readers)
			r.phase("what needs no broker is done")
		},
		// These two mostly wait.
		func() {
			leftOut = r.real()
			r.phase("integration with real brokers is done")
		},
		func() {
			r.phase("integration, in memory")
			r.test("-count=1", "-timeout="+r.limit, subjects, "./integration/broker", "-brokers=memory-4.3")
			r.phase("integration in memory is done")
		},
	)
	if leftOut != nil {
		r.tally.printf("%s\n", leftOutLine(leftOut))
	}
	r.phase("done")
}

// real runs integration with a real broker of the first version. It returns why there is none.
func (r *runner) real() (leftOut *rabbitmq.NoWayError) {
	brokers, err := rabbitmq.Need(r.ctx, os.Stderr, versions[0])
	defer func() { r.release(brokers) }()
	if errors.As(err, &leftOut) && os.Getenv("HOPBACK_BROKER_WITH") == "" {
		return leftOut
	}
	if err != nil {
		r.tally.fail("no broker: " + err.Error())
		return nil
	}
	r.phase("integration, with RabbitMQ " + versions[0])
	r.test("-count=1", "-timeout="+r.limit, "-p=3", subjects, "./integration/doctor", "-brokers="+versions[0], "-parallel=8")
	return nil
}

// leftOutLine says in one line what usual left out, and what to do. Why each way to a broker failed was printed when it was tried.
func leftOutLine(why *rabbitmq.NoWayError) string {
	return fmt.Sprintf("left out: all tests with a real RabbitMQ %s; to run them, %s", why.Version, why.Remedy())
}

// rest runs everything that usual leaves out, in two lanes at once, since each of them mostly waits: one begins with
// what needs no broker, and one with what needs the shared ones. The first time on a machine the brokers take a
// minute or so to build. Brokers that run already are used and left running.
func (r *runner) rest() {
	settings()
	together(func() {
		r.withoutBrokers()
		r.withFaultyBrokers()
		r.phase("other modules, without servers")
		r.test("-race", "-count=1", "-timeout="+r.limit, moduleUnits)
		r.phase("the first lane is done")
	}, func() {
		r.withBrokers()
		r.withOtherServers()
	})
	r.phase("done")
}

// all runs everything.
func (r *runner) all() {
	r.usual()
	if r.ctx.Err() == nil {
		r.rest()
	}
}

// stress runs everything next to busy processes.
func (r *runner) stress() {
	const busy = 30
	var processes []*exec.Cmd
	defer func() {
		for _, p := range processes {
			_ = p.Process.Kill()
			_ = p.Wait()
		}
	}()
	for range busy {
		p := exec.Command("sh", "-c", "while :; do :; done")
		if err := p.Start(); err != nil {
			r.tally.fail("start a busy process: " + err.Error())
			return
		}
		processes = append(processes, p)
	}
	r.limit = "3h" // for each package: each process gets a sixteenth of a core
	r.all()
}

// withoutBrokers is the lane of what needs none of the shared brokers. It keeps one core busy: with
// more at once, all of it takes as long, and tests fail because nothing comes in time.
func (r *runner) withoutBrokers() {
	r.phase("tests that need no broker, with the race detector")
	r.test("-race", "-count=1", "-timeout="+r.limit, r.unitPackages())
	r.test("-count=1", "-run=^TestAllocations", "./hopbackotel") // usual has counted the others
	// The race detector checks with a broker in memory. With the real ones, which
	// take most of the CPU, it would only make everything slower once more.
	r.phase("integration, in memory")
	together( // the last tests of each mostly wait
		func() {
			r.test("-race", "-count=1", "-timeout="+r.limit, subjects, "./integration/broker", "-brokers=memory-4.3")
		},
		// Elsewhere than in the public workflow this is mostly all that runs as 4.4. What 4.0 does in
		// memory is left to quick: integration/differ compares it with the real one.
		func() {
			r.test("-count=1", "-timeout="+r.limit, subjects, "./integration/broker", "-brokers=memory-4.4")
		},
	)
	r.phase("what needs no broker is done")
}

// withFaultyBrokers mostly waits for brokers that it starts and kills.
func (r *runner) withFaultyBrokers() {
	r.phase("brokers that die")
	faulty := slices.DeleteFunc(r.list("./integration/rabbitmq/...", "./integration/chaos/short", "./integration/cluster"), func(pkg string) bool {
		return strings.HasSuffix(pkg, "/cmd/broker")
	})
	r.test("-race", "-count=1", "-p=3", "-timeout="+r.limit, faulty)
}

// withOtherServers runs the modules that start a PostgreSQL, a Redis, or a Prometheus, and the tools.
func (r *runner) withOtherServers() {
	r.phase("other modules, with servers")
	r.test("-race", "-count=1", "-p=1", "-timeout="+r.limit, "./postgres/...", "./middleware/dedupe/redisstore")
	r.test("-count=1", "-timeout="+r.limit, "./hopbackotel/dashboards")
	// The workspace leaves tools out.
	if out, err := r.output("env", "GOWORK=off", goTool, "-C", "integration/tools", "test", "-count=1", "./..."); err != nil {
		r.tally.fail("go -C integration/tools test ./...: " + err.Error() + "\n" + string(out))
	}
	r.phase("the second lane is done")
}

// withBrokers is the lane of what needs the shared brokers. What usual runs with 4.3 isn't run again.
func (r *runner) withBrokers() {
	brokers, err := rabbitmq.Need(r.ctx, os.Stderr, versions...)
	defer func() { r.release(brokers) }()
	if err != nil {
		r.tally.fail("no broker: " + err.Error())
		return
	}
	if !rabbitmq.Given(newest) {
		r.withoutNewest(errors.New("HOPBACK_URL_4_4 isn't set"))
	}
	r.phase("integration, with real brokers")
	together(
		// These mostly wait for the brokers that they start, reconfigure and kill.
		func() { r.test("-count=1", "-timeout="+r.limit, "./integration/broker", "-brokers=real") },
		func() {
			for _, version := range append([]string{newest}, versions[1:]...) {
				if version != newest || rabbitmq.Given(newest) {
					r.test("-count=1", "-timeout="+r.limit, "-p=2", subjects, "./integration/doctor", "-brokers="+version, "-parallel=8")
				}
			}
		},
	)
	// After all of that a broker can take more than 5 s to start a quorum queue, for
	// minutes, and RabbitMQ 4.3 gives up then (cluster_not_formed). So the rest gets fresh ones.
	r.phase("fresh brokers")
	r.release(brokers)
	if r.ctx.Err() != nil {
		return
	}
	if brokers, err = r.fresh(); err != nil {
		r.tally.fail("no fresh broker: " + err.Error())
		return
	}
	r.phase("examples, a browser, random sequences, other clients, OpenTelemetry, the outbox")
	together(
		// Examples measure how late messages are, so one package at a time.
		func() {
			r.test("-race", "-count=1", "-p=1", "-timeout="+r.limit, "./integration/proxy", r.list("./examples/..."))
		},
		func() {
			r.test("-count=1", "-timeout="+r.limit, "./integration/differ")
			// It uses a shared broker where one runs, so it waits until they have been replaced.
			r.test("-race", "-count=1", "-timeout="+r.limit, "./integration/rabbitmq/cmd/broker")
			r.browser()
			r.test("-race", "-count=1", "-timeout="+r.limit, "./adapter/officialclient/integration")
			r.test("-count=1", "-timeout="+r.limit, "./integration/bench/interop")
			r.test("-race", "-count=1", "-timeout="+r.limit, "./hopbackotel/integration")
			r.test("-exec=env HOPBACK_TEST_BROKERS=real", "-count=1", "-timeout="+r.limit, "-run=^Test(WhatTheBrokerLacks|WhatIsForbidden|MessageSigned)", "./postgres/outbox")
		},
	)
}

// browser tests the pages, and prints the size of the playground, which it builds, and how long that takes to start. The
// tests install Chromium where they can. Elsewhere they are skipped and say so.
func (r *runner) browser() {
	folder, err := os.MkdirTemp("", "hopback-figures-")
	if err != nil {
		r.tally.fail("no folder for the playground's figures: " + err.Error())
		return
	}
	defer func() { _ = os.RemoveAll(folder) }()
	name := filepath.Join(folder, "figures")
	r.test("-exec=env HOPBACK_FIGURES="+name, "-count=1", "-timeout="+r.limit, "./integration/browser")
	if figures, err := os.ReadFile(name); err == nil { // without Chromium there are none
		r.tally.printf("%s", figures)
	}
}

// fresh starts brokers in place of those that were released. Docker may still be removing them.
func (r *runner) fresh() (brokers []*rabbitmq.Broker, err error) {
	for _, pause := range []time.Duration{5, 10, 20, 0} {
		if brokers, err = rabbitmq.Need(r.ctx, os.Stderr, versions...); err == nil || pause == 0 {
			return brokers, err
		}
		select {
		case <-time.After(pause * time.Second):
		case <-r.ctx.Done():
		}
	}
	return nil, err
}

// release stops the brokers that nobody else uses and that weren't there before.
func (r *runner) release(brokers []*rabbitmq.Broker) {
	for _, b := range brokers {
		if err := b.Release(context.Background()); err != nil {
			r.tally.fail("stop a broker: " + err.Error())
		}
	}
}

// allocations are counted, and memory is measured, without the race detector, which adds some.
func (r *runner) allocations() {
	r.test("-count=1", "-timeout="+r.limit, "-run=^TestAllocations", "./client", "./retry", "./hopbackotel", "./operate/doctor")
}

// unitPackages are the root module's that need no broker, but for the readers.
func (r *runner) unitPackages() []string {
	return slices.DeleteFunc(r.list("./..."), func(pkg string) bool {
		return strings.Contains(pkg, "/integration") && !slices.ContainsFunc(toolUnits, func(unit string) bool { return strings.HasSuffix(pkg, unit[1:]) }) ||
			slices.ContainsFunc(readers, func(reader string) bool { return strings.HasSuffix(pkg, reader[1:]) })
	})
}

func (r *runner) lint() {
	out, err := r.output("make", "--no-print-directory", "lint")
	r.tally.printf("%s", out)
	if err != nil {
		r.tally.fail("lint: " + err.Error())
	}
}
