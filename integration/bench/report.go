package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// report is all that was measured. Its fields are what -json writes.
type report struct {
	Started  time.Time `json:"started"`
	Took     string    `json:"took"`
	Machine  machine   `json:"machine"`
	Broker   string    `json:"broker"`
	Reached  string    `json:"reached"` // how
	Modules  []string  `json:"modules"`
	Rounds   int       `json:"rounds"`
	Messages int       `json:"messages"`
	Results  []*result `json:"contests"`
	Notes    []string  `json:"notes,omitempty"`

	o options
}

// result is one contest's.
type result struct {
	Name  string `json:"name"`
	Title string `json:"title"`
	// Runs are the metrics of each contestant, by round; a failed run is null.
	Runs   map[string][]metrics `json:"runs"`
	Ratios []ratio              `json:"ratios"`
	Limits []limitResult        `json:"limits,omitempty"`
	Errors []string             `json:"errors,omitempty"`
	Left   []string             `json:"left_running,omitempty"`

	order  []string
	memory bool
}

// ratio compares two contestants, round by round: how many times as fast ours is,
// and the share of CPU a message.
type ratio struct {
	Ours   string  `json:"ours"`
	Peer   string  `json:"peer"`
	Times  *spread `json:"times,omitempty"`
	CPU    *spread `json:"cpu,omitempty"`
	Allocs *spread `json:"more_allocs,omitempty"`

	want pair
	// Targets that were set, and whether the median meets them.
	Targets []target `json:"targets,omitempty"`
}

type target struct {
	What string  `json:"what"`
	Want float64 `json:"want"`
	Got  float64 `json:"got"`
	Met  bool    `json:"met"`
}

type limitResult struct {
	Who    string  `json:"who"`
	Metric string  `json:"metric"`
	Most   float64 `json:"most,omitempty"`
	Least  float64 `json:"least,omitempty"`
	Got    spread  `json:"got"`
	Met    bool    `json:"met"`
}

func newReport(l *lab, o options) *report {
	return &report{
		Started: time.Now(), Machine: peekAround(), Broker: l.broker.Product + " " + l.broker.Version,
		Reached: l.how, Modules: moduleVersions(), Rounds: o.rounds, Messages: o.n, o: o,
	}
}

// contest runs the contestants of c in turn, beginning with another one each round.
func (r *report) contest(ctx context.Context, l *lab, c contest) *result {
	res := &result{Name: c.name, Title: c.title, Runs: map[string][]metrics{}, memory: l.memory}
	r.Results = append(r.Results, res)
	var able []contestant
	all := c.contestants
	if r.o.client {
		all = c.rivals()
	}
	if l.memory && c.real {
		return res
	}
	for _, p := range all {
		if r.o.peers.MatchString(p.name) && !(l.memory && speaks091(p.peer)) {
			able = append(able, p)
			res.order = append(res.order, p.name)
		}
	}
	rounds := r.o.rounds
	if c.maxRounds > 0 {
		rounds = min(rounds, c.maxRounds)
	}
	left := map[string]bool{}
	for round := range rounds {
		for i := range able {
			p := able[(i+round)%len(able)]
			if ctx.Err() != nil {
				continue
			}
			fmt.Fprintf(os.Stderr, "\r%-78.78s", fmt.Sprintf("%s, round %d of %d: %s", c.name, round+1, rounds, p.name))
			settleDown()
			n, before := r.o.n, runtime.NumGoroutine()
			if p.fewer > 0 {
				n = max(n/p.fewer, 20)
			}
			each, cancel := context.WithTimeout(ctx, r.o.eachTimeout)
			m, err := r.profiled(res, l, p, round, func() (metrics, error) { return c.run(each, l, p, n) })
			cancel()
			if err != nil && ctx.Err() == nil {
				res.Errors = append(res.Errors, fmt.Sprintf("round %d, %s: %s", round+1, p.name, oneLine(err)))
			}
			if err != nil {
				m = nil
			}
			res.Runs[p.name] = append(res.Runs[p.name], m)
			if !endedBy(before) {
				left[p.name] = true
			}
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			l.cleanUp(clean)
			cancel()
		}
	}
	fmt.Fprintf(os.Stderr, "\r%78s\r", "")
	for name := range left {
		res.Left = append(res.Left, name)
	}
	slices.Sort(res.Left)
	res.compare(c)
	return res
}

// profiled has the run's profile written, with -profiles.
func (r *report) profiled(res *result, l *lab, p contestant, round int, run func() (metrics, error)) (metrics, error) {
	if r.o.profiles == "" {
		return run()
	}
	name := profileName(r.o.profiles, res.Name, p.name, round+1)
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	l.profile = f
	defer func() { l.profile = nil }()
	m, err := run()
	// Contests that measure durations have no stretch to profile.
	if size, statErr := f.Seek(0, io.SeekEnd); err != nil || statErr != nil || size == 0 {
		return m, errors.Join(err, os.Remove(name))
	}
	return m, nil
}

var unfit = regexp.MustCompile(`[^a-zA-Z0-9.]+`)

// profileName is the file for one run's profile.
func profileName(dir, contest, contestant string, round int) string {
	clean := func(s string) string { return strings.Trim(unfit.ReplaceAllString(s, "-"), "-") }
	return filepath.Join(dir, fmt.Sprintf("%s_%s_%d.pprof", clean(contest), clean(contestant), round))
}

// oneLine is an error's text without line breaks, cut where nobody reads on.
func oneLine(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return strings.ToValidUTF8(text, "")
}

// endedBy waits for the goroutines of a run to end, and says whether they did.
func endedBy(before int) bool {
	for range 100 {
		if runtime.NumGoroutine() <= before {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func (res *result) compare(c contest) {
	for _, p := range c.pairs {
		a, b := res.Runs[p.ours], res.Runs[p.peer]
		v := over(a, b, rate, divide)
		if len(v) == 0 {
			continue
		}
		q := ratio{Ours: p.ours, Peer: p.peer, Times: ptr(spreadOf(v)), want: p}
		if v := over(a, b, cpu, divide); len(v) > 0 {
			// Limits are for the ratio of the medians. How far it can be relied on is seen
			// by the rounds' own.
			q.CPU = ptr(spreadOf(v))
			q.CPU.Median = spreadOf(shared(a, b, cpu)).Median / spreadOf(shared(b, a, cpu)).Median
			q.Allocs = ptr(spreadOf(over(a, b, allocs, func(x, y float64) float64 { return x - y })))
		}
		if p.faster > 0 {
			q.Targets = append(q.Targets, target{"times as fast, at least", p.faster, q.Times.Median, q.Times.Median >= p.faster})
		}
		if p.cpu > 0 && q.CPU != nil {
			q.Targets = append(q.Targets, target{"CPU a message, at most", p.cpu, q.CPU.Median, q.CPU.Median <= p.cpu})
		}
		if p.allocs > 0 && q.Allocs != nil {
			q.Targets = append(q.Targets, target{"more allocations, at most", p.allocs, q.Allocs.Median, math.Round(q.Allocs.Median) <= p.allocs})
		}
		res.Ratios = append(res.Ratios, q)
	}
	for _, x := range c.limits {
		if v := column(res.Runs[x.who], x.metric); len(v) > 0 && (res.memory || !x.memory) {
			s := spreadOf(v)
			met := (x.most == 0 || s.Median <= x.most) && s.Median >= x.least
			res.Limits = append(res.Limits, limitResult{x.who, x.metric, x.most, x.least, s, met})
		}
	}
}

func ptr[T any](v T) *T { return &v }

func divide(a, b float64) float64 { return a / b }

// over pairs the rounds of a and b.
func over(a, b []metrics, key string, f func(a, b float64) float64) []float64 {
	var out []float64
	for i := range min(len(a), len(b)) {
		x, ok := a[i][key]
		y, ok2 := b[i][key]
		if ok && ok2 && (y != 0 || key == allocs) {
			out = append(out, f(x, y))
		}
	}
	return out
}

// shared are the values of a in the rounds that b has, too.
func shared(a, b []metrics, key string) []float64 {
	return over(a, b, key, func(x, _ float64) float64 { return x })
}

func column(runs []metrics, key string) []float64 {
	var out []float64
	for _, m := range runs {
		if v, ok := m[key]; ok {
			out = append(out, v)
		}
	}
	return out
}

func (r *report) finish(err error) {
	r.Took = time.Since(r.Started).Round(time.Second).String()
	r.Machine.LoadAtEnd = loadAverage()
	if err != nil {
		r.note("The time was over, or it was interrupted: what is missing wasn't run.")
	}
	if r.Machine.LoadAtStart > 0.3*float64(r.Machine.Cores) {
		r.note("The machine was busy at the start (load %.1f on %d cores): figures are low, and a ratio is worth no more than its spread.", r.Machine.LoadAtStart, r.Machine.Cores)
	}
	if r.Messages < 20*inFlight {
		r.note("%d messages per run are few compared with up to %d in flight: the start and the end of a run distort the result.", r.Messages, inFlight)
	}
	var bound []string
	for _, res := range r.Results {
		for _, name := range res.order {
			if v := column(res.Runs[name], cores); len(v) > 0 && !slices.Contains(bound, res.Name) && spreadOf(v).Median < 0.5 {
				bound = append(bound, res.Name)
			}
		}
		if len(res.Left) > 0 {
			r.note("%s: goroutines were left running a second after it had closed: %s.", res.Name, strings.Join(res.Left, ", "))
		}
	}
	if len(bound) > 0 {
		r.note("Where a contestant kept less than half a core busy, it waited for the broker, and faster clients can't show it. Such there were in: %s.", strings.Join(bound, ", "))
	}
}

func (r *report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// failure is the error for runs that failed.
func (r *report) failure() error {
	n := 0
	for _, res := range r.Results {
		n += len(res.Errors)
	}
	if n > 0 {
		return fmt.Errorf("%d runs failed", n)
	}
	return nil
}

func (s spread) times() string {
	return fmt.Sprintf("%s (%s-%s)", short(s.Median), short(s.Min), short(s.Max))
}

func short(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1000:
		return fmt.Sprintf("%.0fk", v/1000)
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func mark(met bool) string {
	if met {
		return "ok"
	}
	return "NO"
}

func (res *result) printRatios(w io.Writer) {
	if len(res.Ratios)+len(res.Limits)+len(res.Errors) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s: %s\n", res.Name, res.Title)
	if len(res.Ratios) > 0 {
		fmt.Fprintf(w, "  %-34s %-26s %-26s %s\n", "", "times as fast", "times the CPU", "allocs")
	}
	for _, q := range res.Ratios {
		name := strings.TrimPrefix(q.Ours, "hopback ") + " / " + q.Peer
		cell := func(s *spread, op string, want float64, met bool) string {
			if s == nil {
				return ""
			}
			if want == 0 {
				return s.times()
			}
			return fmt.Sprintf("%s %s%s %s", s.times(), op, strconv.FormatFloat(want, 'g', -1, 64), mark(met))
		}
		line := fmt.Sprintf("  %-34s %-26s %-26s", name, cell(q.Times, ">=", q.want.faster, q.Times.Median >= q.want.faster),
			cell(q.CPU, "<=", q.want.cpu, q.CPU != nil && q.CPU.Median <= q.want.cpu))
		if q.Allocs != nil {
			line += fmt.Sprintf(" %+.0f", q.Allocs.Median)
			if q.want.allocs > 0 {
				line += fmt.Sprintf(" <=%.0f %s", q.want.allocs, mark(math.Round(q.Allocs.Median) <= q.want.allocs))
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	for _, x := range res.Limits {
		want := "<=" + short(x.Most)
		if x.Most == 0 {
			want = ">=" + short(x.Least)
		}
		fmt.Fprintf(w, "  %-34s %s %s (%s-%s) %s, target %s %s\n", x.Who, x.Metric, short(x.Got.Median), short(x.Got.Min), short(x.Got.Max), unit(x.Metric), want, mark(x.Met))
	}
	for _, e := range res.Errors {
		fmt.Fprintf(w, "%s\n", wrap("  FAILED "+e, 98))
	}
}

func unit(metric string) string {
	switch metric {
	case rss:
		return "MiB"
	case held:
		return "kB"
	}
	return ""
}

// print shows the figures, and what to think of them.
func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\nFigures (median of rounds, least-most). They are this machine's: only ratios carry over.\n")
	for _, res := range r.Results {
		fmt.Fprintf(w, "\n%s\n", res.Name)
		for _, name := range res.order {
			runs := res.Runs[name]
			if v := column(runs, rate); len(v) > 0 {
				s := spreadOf(v)
				line := fmt.Sprintf("  %-24s %9s msg/s (%s-%s)", name, thousands(s.Median), thousands(s.Min), thousands(s.Max))
				if c := column(runs, cpu); len(c) > 0 {
					line = fmt.Sprintf("%-62s %6.1f us CPU %5.0f allocs %5.2f cores", line, spreadOf(c).Median,
						spreadOf(column(runs, allocs)).Median, spreadOf(column(runs, cores)).Median)
				}
				fmt.Fprintln(w, line)
			}
			if v := column(runs, quietP99); len(v) > 0 {
				line := fmt.Sprintf("  %-24s quiet tenants wait %.1f ms (p50), %.1f ms (p99)", name, spreadOf(column(runs, quietP50)).Median, spreadOf(v).Median)
				if d := column(runs, drained); len(d) > 0 {
					line += fmt.Sprintf("; once the burst is published %.1f ms (p99)", spreadOf(d).Median)
				}
				if x := column(runs, left); len(x) > 0 {
					line += fmt.Sprintf("; the noisy use %.0f %% of the slots left", 100*spreadOf(x).Median)
				}
				if b := column(runs, atBroker); len(b) > 0 {
					line += fmt.Sprintf("; the broker takes %.0f us CPU", spreadOf(b).Median)
				}
				fmt.Fprintln(w, line)
			}
			if v := column(runs, held); len(v) > 0 {
				fmt.Fprintf(w, "  %-24s %.2f goroutines and %.1f kB a consumer; %.1f MiB the whole process\n", name,
					spreadOf(column(runs, goroutines)).Median, spreadOf(v).Median, spreadOf(column(runs, rss)).Median)
			}
		}
	}
	m := r.Machine
	fmt.Fprintf(w, "\nMachine: %s, %d cores, %s/%s; load %.1f at the start, %.1f at the end\n", m.Model, m.Cores, runtime.GOOS, runtime.GOARCH, m.LoadAtStart, m.LoadAtEnd)
	fmt.Fprintf(w, "Broker: %s, on the same machine as the client, reached %s; %d rounds (fewer where runs are long), %d messages a run, took %s\n", r.Broker, r.Reached, r.Rounds, r.Messages, r.Took)
	fmt.Fprintf(w, "Ratios are taken within a round, where the contestants ran right after each other.\n")
	for _, n := range r.Notes {
		fmt.Fprintln(w, wrap("Note: "+n, 98))
	}
}

func thousands(v float64) string {
	if v >= 1000 {
		return fmt.Sprintf("%.1fk", v/1000)
	}
	return fmt.Sprintf("%.0f", v)
}

func wrap(s string, width int) string {
	var b strings.Builder
	col := 0
	for i, word := range strings.Fields(s) {
		switch {
		case i > 0 && col+1+len(word) > width:
			b.WriteString("\n  ")
			col = 2
		case i > 0:
			b.WriteByte(' ')
			col++
		}
		b.WriteString(word)
		col += len(word)
	}
	return b.String()
}

func (r *report) writeJSON(path string) error {
	for _, res := range r.Results {
		for _, q := range res.Ratios {
			for _, s := range []*spread{q.Times, q.CPU, q.Allocs} {
				if s != nil && (math.IsNaN(s.Median) || math.IsInf(s.Median, 0)) {
					return errors.New("a ratio isn't a number: was anything measured?")
				}
			}
		}
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
