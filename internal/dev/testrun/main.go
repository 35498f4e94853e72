// Command testrun runs hopback's tests and prints what a person wants to see: a line for
// each package, all that a failed test has logged, and at the end how many tests passed.
//
//	testrun all     lint, and all tests with RabbitMQ 4.3 and 4.0; "make test"
//	testrun unit    the tests that need no broker; "make unit"
//	testrun 4.1     integration with a real RabbitMQ of one series; "make integration SERIES=4.1"
//	testrun quick   the same without the race detector, and integration with brokers in memory; "make quick"
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
	plans := map[string]func(*runner){"all": (*runner).all, "unit": (*runner).unit, "quick": (*runner).quick}
	for _, series := range append(append([]string{newest}, versions...), between...) {
		plans[series] = func(r *runner) { r.series(series) }
	}
	if len(os.Args) != 2 || plans[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "testrun: got %q; write: testrun all, unit, quick, or a series of RabbitMQ, such as 4.1\n", os.Args[1:])
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	r := newRunner(ctx, os.Stdout)
	plans[os.Args[1]](r)
	if ctx.Err() != nil {
		r.tally.fail("interrupted")
	}
	stop()
	if !r.tally.close() {
		os.Exit(1)
	}
}
