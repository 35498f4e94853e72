package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is one line of go test -json; see "go doc test2json" and, for builds,
// "go help buildjson".
type event struct {
	Action      string
	Package     string
	ImportPath  string // of builds
	Test        string
	Time        time.Time
	Elapsed     float64 // seconds
	Output      string
	FailedBuild string
}

// counts of tests by how they ended.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(action string) {
	switch action {
	case "pass":
		c.passed++
	case "fail":
		c.failed++
	case "skip":
		c.skipped++
	}
}

// test is one that has begun.
type test struct {
	output strings.Builder
	line   string // output after the last line break
	ended  string // pass, fail or skip; empty while it runs
	begun  time.Time
	paused bool // until it may run beside others
}

// pkg is a package whose tests have begun.
type pkg struct {
	tests  map[string]*test // by name; "" is the package itself
	failed bool
	ended  bool
	last   time.Time // of an event
}

// The groups in which tests are counted.
const (
	unit        = "unit tests"
	integration = "integration tests"
)

type tally struct {
	out      io.Writer
	packages map[string]*pkg
	groups   map[string]*counts
	failures []string
	skips    []string
	// failed has the top-level tests that failed; other says that anything else did.
	failed map[string]bool
	other  bool
}

func newTally(out io.Writer) *tally {
	return &tally{out: out, packages: map[string]*pkg{}, groups: map[string]*counts{}, failed: map[string]bool{}}
}

func (t *tally) printf(format string, args ...any) { _, _ = fmt.Fprintf(t.out, format, args...) }

// fail notes a failure that is no test's.
func (t *tally) fail(what string) {
	t.failures = append(t.failures, what)
	t.other = true
}

// maxAgain is how many tests may fail and be run again.
const maxAgain = 8

// What a test says whose failure isn't the noise of a machine.
const (
	dataRace = "WARNING: DATA RACE"
	panicked = "panic: "
)

// leftBubble is said when a test in virtual time has failed and left goroutines behind.
// It ends the process, so that the tests that hadn't had their turn have to be run, too.
const leftBubble = "panic: deadlock: main bubble goroutine has exited"

// again returns the tests to run again, a line each.
func (t *tally) again() (lines []string) {
	if t.other || len(t.failed) > maxAgain {
		return nil
	}
	for line := range t.failed {
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

func (t *tally) read(in io.Reader) {
	r := bufio.NewReader(in)
	for {
		line, err := r.ReadBytes('\n')
		if text := bytes.TrimSpace(line); len(text) > 0 {
			var e event
			switch {
			case text[0] != '{':
				t.printf("%s\n", text) // the go command speaking
			case json.Unmarshal(text, &e) != nil:
				t.fail("the output of go test breaks off: " + string(text))
			default:
				t.event(e)
			}
		}
		if err != nil {
			if err != io.EOF {
				t.fail("the output of go test can't be read: " + err.Error())
			}
			break
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.packages)) {
		if p := t.packages[name]; !p.ended {
			t.printf("%s never ended\n", name)
			t.endPackage(event{Action: "fail", Package: name}, p)
		}
	}
}

func (t *tally) event(e event) {
	switch e.Action {
	case "build-output":
		t.printf("%s", e.Output)
		return
	case "build-fail":
		return // a package's failure follows, which is counted
	}
	p := t.packages[e.Package]
	if p == nil || p.ended { // a package may be tested again, in another way
		p = &pkg{tests: map[string]*test{}}
		t.packages[e.Package] = p
	}
	c := p.tests[e.Test]
	if c == nil {
		c = &test{}
		p.tests[e.Test] = c
	}
	if e.Time.After(p.last) {
		p.last = e.Time
	}
	switch e.Action {
	case "run":
		c.begun = e.Time
	case "pause":
		c.paused = true
	case "cont":
		c.paused, c.begun = false, e.Time
	case "output":
		t.output(c, e.Output)
	case "pass", "fail", "skip":
		c.ended = e.Action
		if e.Test == "" {
			t.endPackage(e, p)
		}
	}
}

// logged is what t.Log puts before a line.
var logged = regexp.MustCompile(`^\s*(\S+\.go:\d+: )?`)

// output keeps what a test says, and passes reports on.
func (t *tally) output(c *test, text string) {
	c.output.WriteString(text)
	c.line += text
	for {
		line, rest, whole := strings.Cut(c.line, "\n")
		if !whole {
			return
		}
		c.line = rest
		if report := line[len(logged.FindString(line)):]; strings.HasPrefix(report, "REPORT ") {
			t.printf("%s\n", report)
		}
	}
}

// endPackage counts the tests of a package, which can only be done now that
// it is known which of them have subtests.
func (t *tally) endPackage(e event, p *pkg) {
	p.ended = true
	names := slices.Sorted(maps.Keys(p.tests))
	ran, told, waiting := 0, false, 0
	for _, name := range names {
		c := p.tests[name]
		if name == "" {
			continue
		}
		unended := ""
		if c.ended == "" { // the process died meanwhile
			c.ended = "fail"
			unended = fmt.Sprintf(": not ended after %.0f s", p.last.Sub(c.begun).Seconds())
		}
		below := func(ended string) bool {
			return slices.ContainsFunc(names, func(n string) bool {
				other := p.tests[n]
				return strings.HasPrefix(n, name+"/") && (ended == "" || other.ended == ended || ended == "fail" && other.ended == "" && !other.paused)
			})
		}
		if unended != "" && c.paused {
			told = true
			if !below("") {
				ran++
				waiting++
				t.group(e.Package, name).add("fail")
			}
			continue
		}
		if c.ended == "fail" {
			told = true
			if unended == "" || !silent(c.output.String()) {
				t.printf("\n%s %s:\n%s", e.Package, name, c.output.String())
			}
		}
		if below("") && (c.ended != "fail" || below("fail")) {
			continue
		}
		ran++
		t.group(e.Package, name).add(c.ended)
		switch c.ended {
		case "fail":
			t.failures = append(t.failures, e.Package+" "+name+unended)
			top, _, _ := strings.Cut(name, "/")
			t.failed[e.Package+" "+top+"\n"] = true
		case "skip":
			t.skips = append(t.skips, fmt.Sprintf("%s %s: %s", e.Package, name, skipReason(c.output.String())))
		}
	}
	if waiting > 0 {
		t.failures = append(t.failures, fmt.Sprintf("%s: %d tests had not had their turn", e.Package, waiting))
	}
	t.judge(e, p, waiting)
	switch {
	case e.Action == "fail":
		p.failed = true
		if own := p.tests[""]; own != nil {
			t.printf("%s", own.output.String())
		}
		why := ""
		if e.FailedBuild != "" {
			why = "  can't be built"
		}
		t.printf("FAIL  %s  %.1f s%s\n", e.Package, e.Elapsed, why)
		if !told { // TestMain, or a build
			t.fail(e.Package)
		}
	case ran > 0:
		t.printf("ok    %s  %.1f s, %d tests\n", e.Package, e.Elapsed, ran)
	}
	p.tests = nil
}

// judge notes what of a failed package can be run again.
func (t *tally) judge(e event, p *pkg, waiting int) {
	said := func(what string) bool {
		for _, c := range p.tests {
			if c.ended == "fail" && strings.Contains("\n"+c.output.String(), "\n"+what) {
				return true
			}
		}
		return false
	}
	switch {
	case e.Action != "fail":
	case said(dataRace):
		t.other = true
	case said(leftBubble):
		t.failed[e.Package+" .*\n"] = true
	case waiting > 0, said(panicked):
		t.other = true
	}
}

// silent reports whether there are only lines of go test itself.
func silent(output string) bool {
	for line := range strings.Lines(output) {
		if !strings.HasPrefix(line, "=== ") {
			return false
		}
	}
	return true
}

// skipReason returns the last line that the test itself has said.
func skipReason(output string) string {
	reason := "no reason given"
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			reason = strings.TrimSpace(line[len(logged.FindString(line)):])
		}
	}
	return reason
}

// group returns where a test is counted. Integration tests are those of
// packages below integration; the broker's version, if any, is a part of the
// name of a subtest.
func (t *tally) group(pkg, name string) *counts {
	key := unit
	if strings.Contains(pkg+"/", "/integration/") {
		key = integration + ", no version"
		for _, part := range strings.Split(name, "/")[1:] {
			switch part {
			case "4.3", "4.0", "memory-4.3", "memory-4.0":
				key = integration + " on " + part
			}
		}
	}
	if t.groups[key] == nil {
		t.groups[key] = &counts{}
	}
	return t.groups[key]
}

// close prints the sums and returns whether all is well.
func (t *tally) close() bool {
	var sum counts
	for _, c := range t.groups {
		sum.passed += c.passed
		sum.failed += c.failed
		sum.skipped += c.skipped
	}
	// Failures that are no test's count, too: the last line must not look well.
	tests := sum.failed
	sum.failed = len(t.failures)

	t.printf("\n")
	for _, s := range t.skips {
		t.printf("skipped: %s\n", s)
	}
	for _, f := range t.failures {
		t.printf("failed: %s\n", f)
	}
	ran := sum.passed + tests
	if ran == 0 {
		t.printf("no test was executed, which counts as a failure\n")
	}
	for _, name := range slices.Sorted(maps.Keys(t.groups)) {
		c := t.groups[name]
		t.printf("%-32s %5d passed", name, c.passed)
		if c.failed > 0 {
			t.printf(", %d failed", c.failed)
		}
		if c.skipped > 0 {
			t.printf(", %d skipped", c.skipped)
		}
		t.printf("\n")
	}
	t.printf("%d passed, %d failed, %d skipped\n", sum.passed, sum.failed, sum.skipped)
	return sum.failed == 0 && ran > 0
}
