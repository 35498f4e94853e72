// Command tally reads the output of "go test -json" on its standard input and
// prints what a person wants to see of it: a line for each package, all that a
// failed test has said, and at the end how many tests passed.
//
//	go test -json ./... | tally
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
	if len(os.Args) > 1 {
		fmt.Fprintf(os.Stderr, "tally: takes no argument, but got %q; write: go test -json ./... | tally\n", os.Args[1])
		os.Exit(2)
	}
	if !run(os.Stdin, os.Stdout) {
		os.Exit(1)
	}
}

// run returns whether all is well.
func run(in io.Reader, out io.Writer) bool {
	t := newTally(out)
	t.read(in)
	return t.close()
}
