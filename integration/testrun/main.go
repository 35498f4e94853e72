// Command testrun runs hopback's tests and prints what a person wants to see: a line for
// each package, all that a failed test has logged, and at the end how many tests passed.
//
//	testrun test    lint, unit tests, integration in memory and with RabbitMQ 4.3; "make test"
//	testrun rest    all that test leaves out: 4.0, 4.4 in memory, the race detector, brokers that die, examples, and more
//	testrun all     test and rest; "make test-all"
//	testrun stress  all next to 30 busy processes; "make stress"
//	testrun unit    the tests that need no broker; "make unit"
//	testrun 4.1     integration with a real RabbitMQ of one series; "make integration SERIES=4.1"
//	testrun quick   unit without the race detector, and integration with brokers in memory; "make quick"
//
// No test is run twice to see whether it passes the second time.
//
// Lines that begin with "REPORT " are printed for tests that pass, too: with them an
// integration test reports what it measured.
//
// A test without subtests counts once, and so does each innermost subtest. A test with
// subtests counts only if it failed although none of them did. The last line is always
// "N passed, N failed, N skipped".
//
// HOPBACK_TEST_TIMES names a file that gets a line for each test, the slowest first: seconds, how it
// ended, package, and test.
//
// The exit code is 1 if anything failed. That includes a package that can't be built, a test
// that never ended, output that breaks off, a command that fails or runs no test, and a
// signal. It is 2 for bad arguments.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	plans := map[string]func(*runner){
		"test": (*runner).usual, "rest": (*runner).rest, "all": (*runner).all, "stress": (*runner).stress, "unit": (*runner).unit, "quick": (*runner).quick,
	}
	for _, series := range append(append([]string{newest}, versions...), between...) {
		plans[series] = func(r *runner) { r.series(series) }
	}
	if len(os.Args) != 2 || plans[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "testrun: got %q; write: testrun test, rest, all, stress, unit, quick, or a series of RabbitMQ, such as 4.1\n", os.Args[1:])
		os.Exit(2)
	}
	// See broker.MayStart. What must not start anything names brokers in memory.
	if os.Getenv("HOPBACK_TEST_BROKERS") == "" {
		_ = os.Setenv("HOPBACK_TEST_BROKERS", "start")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	r := newRunner(ctx, os.Stdout)
	plans[os.Args[1]](r)
	if ctx.Err() != nil {
		r.tally.fail("interrupted")
	}
	stop()
	if file := os.Getenv("HOPBACK_TEST_TIMES"); file != "" {
		if err := os.WriteFile(file, []byte(r.tally.table()), 0o644); err != nil {
			r.tally.fail("HOPBACK_TEST_TIMES: " + err.Error())
		}
	}
	if !r.tally.close() {
		os.Exit(1)
	}
}
