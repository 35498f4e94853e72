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
// which no test was executed.
//
//	go test -json ./... | tally -again FILE
//
// writes the tests that failed to FILE, a package and a top-level test a line, to be
// run again by themselves: on a noisy machine a test can fail that passes alone. FILE
// is empty if all is well, if more than 8 tests failed, or if anything else did, a data
// race or a panic among it: then it isn't the noise. A package whose
// process a failed test in virtual time has ended is run again as a whole: its line says
// ".*" in the place of a test.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	again := flag.String("again", "", "the `file` that gets the tests to run again")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "tally: takes no argument, but got %q; write: go test -json ./... | tally\n", flag.Arg(0))
		os.Exit(2)
	}
	well, tests := run(os.Stdin, os.Stdout)
	if *again != "" {
		if err := os.WriteFile(*again, []byte(strings.Join(tests, "")), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, "tally:", err)
			os.Exit(1)
		}
	}
	if !well {
		os.Exit(1)
	}
}

// run returns whether all is well, and if not, what to run again.
func run(in io.Reader, out io.Writer) (well bool, again []string) {
	t := newTally(out)
	t.read(in)
	return t.close(), t.again()
}
