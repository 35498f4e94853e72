package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
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
	took   float64 // seconds, without what it was paused
	paused bool    // until it may run next to others
	racing bool    // its output is a report of the race detector
}

// pkg is a package whose tests have begun.
type pkg struct {
	tests map[string]*test // by name; "" is the package itself
	ended bool
	last  time.Time // of an event
}

// The groups in which tests are counted.
const (
	unit        = "unit tests"
	integration = "integration tests"
)

// tally counts the tests of all streams. Its methods may be called concurrently, but for
// those with a comment that says otherwise.
type tally struct {
	mu       sync.Mutex // a package's lines stay together
	out      io.Writer
	groups   map[string]*counts
	failures []string
	skips    []string
	times    []string // lines of the table of times
}

// stream is what one "go test -json" prints. It is used with the tally's lock held.
type stream struct {
	*tally
	packages map[string]*pkg
	tests    int
	failed   bool // which has been counted
}

func newTally(out io.Writer) *tally { return &tally{out: out, groups: map[string]*counts{}} }

func (t *tally) printf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.say(format, args...)
}

// say is printf, called with the lock held.
func (t *tally) say(format string, args ...any) { _, _ = fmt.Fprintf(t.out, format, args...) }

// fail notes a failure that is no test's.
func (t *tally) fail(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures = append(t.failures, what)
}

// fail notes a failure.
func (s *stream) fail(what string) {
	s.failed = true
	s.failures = append(s.failures, what)
}

// read reads one stream to its end and reports whether all is well in it.
func (t *tally) read(in io.Reader) (well bool) {
	s := &stream{tally: t, packages: map[string]*pkg{}}
	r := bufio.NewReader(in)
	for {
		line, err := r.ReadBytes('\n')
		t.mu.Lock()
		s.line(bytes.TrimSpace(line))
		if err != nil {
			s.end(err)
			t.mu.Unlock()
			return !s.failed
		}
		t.mu.Unlock()
	}
}

func (s *stream) line(text []byte) {
	var e event
	switch {
	case len(text) == 0:
	case text[0] != '{':
		s.say("%s\n", text) // the go command speaking
	case json.Unmarshal(text, &e) != nil:
		s.fail("the output of go test breaks off: " + string(text))
	default:
		s.event(e)
	}
}

func (s *stream) end(err error) {
	if err != io.EOF {
		s.fail("the output of go test can't be read: " + err.Error())
	}
	for _, name := range slices.Sorted(maps.Keys(s.packages)) {
		if p := s.packages[name]; !p.ended {
			s.say("%s never ended\n", name)
			s.endPackage(event{Action: "fail", Package: name}, p)
		}
	}
	if s.tests == 0 && !s.failed {
		s.fail("no test was executed in " + cmp.Or(strings.Join(slices.Sorted(maps.Keys(s.packages)), " "), "any package"))
	}
}

func (s *stream) event(e event) {
	switch e.Action {
	case "build-output":
		s.say("%s", e.Output)
		return
	case "build-fail":
		return // a package's failure follows, which is counted
	}
	p := s.packages[e.Package]
	if p == nil {
		p = &pkg{tests: map[string]*test{}}
		s.packages[e.Package] = p
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
		s.output(c, e.Output)
	case "pass", "fail", "skip":
		c.ended, c.took = e.Action, e.Elapsed
		if e.Test == "" {
			s.endPackage(e, p)
		}
	}
}

// raceEnd is the last line of a report of the race detector.
const raceEnd = "=================="

// logged is what t.Log puts before a line.
var logged = regexp.MustCompile(`^\s*(\S+\.go:\d+: )?`)

// output keeps what a test says, and passes reports on.
func (s *stream) output(c *test, text string) {
	c.output.WriteString(text)
	c.line += text
	for {
		line, rest, whole := strings.Cut(c.line, "\n")
		if !whole {
			return
		}
		c.line = rest
		if report := line[len(logged.FindString(line)):]; strings.HasPrefix(report, "REPORT ") {
			s.say("%s\n", report)
		}
		// The race detector's report stands in the output of any test that runs, maybe one that passes.
		c.racing = c.racing && line != raceEnd || line == "WARNING: DATA RACE"
		if c.racing {
			s.say("%s\n", line)
		}
	}
}

// endPackage counts the tests of a package, which can only be done now that
// it is known which of them have subtests.
func (s *stream) endPackage(e event, p *pkg) {
	p.ended = true
	names := slices.Sorted(maps.Keys(p.tests))
	ran, notified, waiting := 0, false, 0
	for _, name := range names {
		c := p.tests[name]
		if name == "" {
			continue
		}
		unended := ""
		if c.ended == "" { // the process has crashed
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
			notified = true
			if !below("") {
				ran++
				waiting++
				s.group(e.Package, name).add("fail")
			}
			continue
		}
		if c.ended == "fail" {
			notified = true
			if unended == "" || !silent(c.output.String()) {
				s.say("\n%s %s:\n%s", e.Package, name, c.output.String())
			}
		}
		if below("") && (c.ended != "fail" || below("fail")) {
			continue
		}
		ran++
		s.group(e.Package, name).add(c.ended)
		s.times = append(s.times, fmt.Sprintf("%8.2f\t%s\t%s\t%s\n", c.took, c.ended, e.Package, name))
		switch c.ended {
		case "fail":
			s.fail(e.Package + " " + name + unended)
		case "skip":
			s.skips = append(s.skips, fmt.Sprintf("%s %s: %s", e.Package, name, skipReason(c.output.String())))
		}
	}
	if waiting > 0 {
		s.fail(fmt.Sprintf("%s: %d tests had not had their turn", e.Package, waiting))
	}
	switch {
	case e.Action == "fail":
		if own := p.tests[""]; own != nil {
			s.say("%s", own.output.String())
		}
		why := ""
		if e.FailedBuild != "" {
			why = "  can't be built"
		}
		s.say("FAIL  %s  %.1f s%s\n", e.Package, e.Elapsed, why)
		if !notified { // TestMain, or a build
			s.fail(e.Package)
		}
	case ran > 0:
		s.say("ok    %s  %.1f s, %d tests\n", e.Package, e.Elapsed, ran)
	}
	s.tests += ran
	p.tests = nil
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

// group, called with the lock held, returns where a test is counted. Integration tests are those of
// packages below integration; the broker's version, if any, is a part of the
// name of a subtest.
func (t *tally) group(pkg, name string) *counts {
	key := unit
	if strings.Contains(pkg+"/", "/integration/") {
		key = integration + ", no version"
		for _, part := range strings.Split(name, "/")[1:] {
			switch part {
			case "4.4", "4.3", "4.2", "4.1", "4.0", "memory-4.4", "memory-4.3", "memory-4.0":
				key = integration + " on " + part
			}
		}
	}
	if t.groups[key] == nil {
		t.groups[key] = &counts{}
	}
	return t.groups[key]
}

// table returns a line for each test that was counted, the slowest first: seconds, how it ended, package, test.
func (t *tally) table() string {
	slices.SortStableFunc(t.times, func(a, b string) int { return strings.Compare(b, a) })
	return strings.Join(t.times, "")
}

// close prints the sums and returns whether all is well. All streams have ended.
func (t *tally) close() bool {
	var sum counts
	for _, c := range t.groups {
		sum.passed += c.passed
		sum.skipped += c.skipped
	}
	// Failures that are no test's count, too: the last line must not look well.
	sum.failed = len(t.failures)

	t.printf("\n")
	for _, skip := range t.skips {
		t.printf("skipped: %s\n", skip)
	}
	for _, f := range t.failures {
		t.printf("failed: %s\n", f)
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
	return sum.failed == 0
}
