// Command tally reads the output of "go test -json" on its standard input and
// prints what a person wants to see of it: a line for each package, all that a
// failed test has said, and at the end how many tests passed.
//
//	go test -json ./... | tally [--failed WHAT]...
//
// Lines that begin with "REPORT " are printed for tests that pass, too: with
// them an integration test tells what it measured.
//
// A test without subtests counts once, and so does each innermost subtest. A
// test with subtests counts only if it failed although none of them did. The
// last line is always "N passed, N failed, N skipped".
//
// The exit code is 1 if anything failed, which includes a package that can't
// be built, a test that never ended, output that breaks off, and a run in
// which no test was executed. --failed adds a failure found elsewhere, such as
// by a linter.
package main

import (
	"fmt"
	"io"
	"os"
)

func main() {
	var failed []string
	args := os.Args[1:]
	for ; len(args) >= 2 && args[0] == "--failed"; args = args[2:] {
		failed = append(failed, args[1])
	}
	if len(args) > 0 {
		fmt.Fprintf(os.Stderr, "tally: can't make sense of %q; write: go test -json ./... | tally [--failed WHAT]...\n", args[0])
		os.Exit(2)
	}
	if !run(os.Stdin, os.Stdout, failed) {
		os.Exit(1)
	}
}

// run returns whether all is well.
func run(in io.Reader, out io.Writer, failedElsewhere []string) bool {
	t := newTally(out)
	t.read(in)
	for _, what := range failedElsewhere {
		t.fail(what)
	}
	return t.close()
}
