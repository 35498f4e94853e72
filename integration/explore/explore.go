// Package explore tries everything that can happen, within bounds. A test describes one run of a
// small world as a function that asks for each choice: which message comes next, which worker
// acts, whether there is a crash. [All] calls the function with every sequence of choices, one
// after the other, each from the start. So a run can use the product's own functions, which can't
// be copied, and a failed run is repeated by its choices alone.
//
// It is for tests only.
package explore

import (
	"flag"
	"fmt"
	"strings"
	"time"
)

// full is for more than what everyday tests have time for.
var full = flag.Bool("explore.full", false, "explore larger worlds, for minutes")

// Full reports whether larger worlds are to be explored.
func Full() bool { return *full }

// Run is one run. Its methods are for one goroutine.
type Run struct {
	choices []choice // the first ones are given, the others are 0
	at      int
	given   int
	strays  bool // it isn't the run that was asked for
	lines   []string
	seen    map[string]bool
}

type choice struct{ n, of int }

// Pick returns one of 0 to n-1. It is 0 in the first run, so 0 should be what is usual.
func (r *Run) Pick(n int) int {
	if n < 1 {
		panic(fmt.Sprintf("explore: a choice among %d", n))
	}
	if r.at == len(r.choices) {
		r.choices = append(r.choices, choice{0, n})
	}
	if r.choices[r.at].of != n && r.at < r.given {
		r.strays = true
		r.choices = append(r.choices[:r.at:r.at], choice{0, n})
	}
	r.at++
	return r.choices[r.at-1].n
}

// Happens reports one of two choices; not happening is the usual one.
func (r *Run) Happens() bool { return r.Pick(2) == 1 }

// Say adds a line to what a failed run prints.
func (r *Run) Say(format string, args ...any) {
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

// Seen reports whether another run came to this state. Then this one should end, because what can follow was tried.
// state must return everything that the rest of a run depends on.
func (r *Run) Seen(state func() string) bool {
	if r.at < r.given { // the way there is the way of the run before
		return false
	}
	now := state()
	if r.seen[now] {
		return true
	}
	r.seen[now] = true
	return false
}

// Report is what was explored.
type Report struct {
	Runs, States, Depth int
	// Strayed is how many runs weren't those that were asked for, and were repeated.
	Strayed int
	// Unreached is how many sequences never came again, since they take two goroutines that run in
	// an unusual order.
	Unreached int
	Took      time.Duration
	// Complete says that every sequence of choices was tried, but for those Unreached.
	Complete bool
}

func (r Report) String() string {
	complete := "complete"
	if !r.Complete {
		complete = "not complete"
	}
	s := fmt.Sprintf("%s: %d runs of up to %d choices, %v", complete, r.Runs, r.Depth, r.Took.Round(time.Millisecond))
	if r.States > 0 {
		s = fmt.Sprintf("%s, %d states", s, r.States)
	}
	if r.Strayed > 0 {
		s = fmt.Sprintf("%s, %d repeated, %d sequences not reached again", s, r.Strayed, r.Unreached)
	}
	return s
}

// maxStrays is how often a run is repeated that goes another way than before.
const maxStrays = 100

// All calls run with all sequences of choices, until one fails or there were that many runs. The
// error is that of run, with its lines.
//
// If two goroutines of the product race, or it selects among several channels, a run may go another
// way than its choices lead to. Then it is repeated until it doesn't, at most 100 times. If more than one
// in 50 sequences is given up, run depends on more than its choices, which is an error.
func All(runs int, run func(*Run) error) (Report, error) {
	began := time.Now()
	seen := map[string]bool{}
	var given []choice
	var report Report
	strays := 0
	for report.Runs < runs {
		r := &Run{choices: given, given: len(given), seen: seen}
		err := run(r)
		report.States, report.Depth, report.Took = len(seen), max(report.Depth, r.at), time.Since(began)
		if err != nil {
			return report, fmt.Errorf("after %d runs: %w\n\t%s", report.Runs, err, strings.Join(r.lines, "\n\t"))
		}
		if r.strays || r.at < r.given {
			report.Strayed++
			if strays++; strays <= maxStrays {
				continue
			}
			if report.Unreached++; report.Unreached > 5+report.Runs/50 {
				return report, fmt.Errorf("%d of %d sequences can't be repeated: they depend on more than their choices; the last\n\t%s", report.Unreached, report.Runs, strings.Join(r.lines, "\n\t"))
			}
			strays = 0
			if given = next(given); given == nil {
				report.Complete = true
				break
			}
			continue
		}
		strays = 0
		report.Runs++
		if given = next(r.choices); given == nil {
			report.Complete = true
			break
		}
	}
	return report, nil
}

// next returns the choices of the next run; nil: there is none.
func next(choices []choice) []choice {
	for i := len(choices) - 1; i >= 0; i-- {
		if c := choices[i]; c.n+1 < c.of {
			next := append([]choice{}, choices[:i]...)
			return append(next, choice{c.n + 1, c.of})
		}
	}
	return nil
}
