package main

import (
	"context"
	"encoding/json"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if childMain() {
		return
	}
	os.Exit(m.Run())
}

// TestEveryContestRuns runs the quick form with a handful of messages. It needs a
// broker: HOPBACK_BENCH_URL names it.
func TestEveryContestRuns(t *testing.T) {
	url := os.Getenv("HOPBACK_BENCH_URL")
	if url == "" {
		t.Fatal("HOPBACK_BENCH_URL must name a broker")
	}
	dir := t.TempDir()
	o := options{
		url: url, rounds: 1, n: 200, quick: true, only: regexp.MustCompile(""), peers: regexp.MustCompile(""),
		json: filepath.Join(dir, "out.json"), timeout: 5 * time.Minute, eachTimeout: time.Minute,
	}
	if err := run(context.Background(), o); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(o.json)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	for _, c := range contests() {
		found := len(c.pairs) == 0 // idle has none
		for _, res := range r.Results {
			found = found || res.Name == c.name && len(res.Ratios) > 0
		}
		if !found {
			t.Errorf("contest %s has no ratio", c.name)
		}
	}
}

func TestRatiosAreTakenRoundByRound(t *testing.T) {
	res := &result{Runs: map[string][]metrics{
		"a": {{rate: 100}, {rate: 10}, nil, {rate: 30}},
		"b": {{rate: 50}, {rate: 10}, {rate: 7}, {rate: 10}},
	}}
	res.compare(contest{pairs: []pair{{ours: "a", peer: "b", faster: 2.5}}})
	if got := *res.Ratios[0].Times; got != (spread{2, 1, 3}) {
		t.Errorf("ratios are %v", got)
	}
	if res.Ratios[0].Targets[0].Met {
		t.Error("a missed target counts as met")
	}
}

// A limit for the CPU is one for the ratio of the medians, of the rounds that both ran.
func TestCPUIsComparedByMedians(t *testing.T) {
	res := &result{Runs: map[string][]metrics{
		"a": {{rate: 1, cpu: 10}, {rate: 1, cpu: 2}, {rate: 1, cpu: 12}, {rate: 1, cpu: 99}},
		"b": {{rate: 1, cpu: 20}, {rate: 1, cpu: 1}, {rate: 1, cpu: 40}, nil},
	}}
	res.compare(contest{pairs: []pair{{ours: "a", peer: "b", cpu: 0.5}}})
	q := res.Ratios[0]
	if *q.CPU != (spread{0.5, 0.3, 2}) || !q.Targets[0].Met {
		t.Errorf("CPU is %v, targets %v", *q.CPU, q.Targets)
	}
}

// What holds for a broker in memory alone says nothing about another.
func TestSomeLimitsAreForMemoryAlone(t *testing.T) {
	c := contest{limits: []limit{{who: "a", metric: rate, least: 10, memory: true}, {who: "a", metric: cpu, most: 1}}}
	runs := map[string][]metrics{"a": {{rate: 9, cpu: 2}}}
	real, memory := &result{Runs: runs}, &result{Runs: runs, memory: true}
	real.compare(c)
	memory.compare(c)
	if len(real.Limits) != 1 || real.Limits[0].Met || len(memory.Limits) != 2 || memory.Limits[0].Met {
		t.Errorf("limits are %v, and in memory %v", real.Limits, memory.Limits)
	}
}

// A broker in memory runs in another process, and ends.
func TestMemoryBrokerRunsInAnotherProcess(t *testing.T) {
	p, err := choosePath("memory:4.0.5")
	if err != nil {
		t.Fatal(err)
	}
	l, err := openLab(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if l.broker.Version != "4.0.5" || !l.memory {
		t.Errorf("it is %v", l.broker)
	}
	l.close()
	p.end()
	if c, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(p.url, "amqp://guest:guest@"), "/")); err == nil {
		c.Close()
		t.Error("it still listens")
	}
}

func TestNothingHasNoMedian(t *testing.T) {
	if !math.IsNaN(spreadOf(nil).Median) {
		t.Error("nothing has a median")
	}
}

func TestTheRatiosFitInto100Columns(t *testing.T) {
	wide := metrics{rate: 123.456, cpu: 98.765, allocs: 151}
	for _, c := range contests() {
		res := &result{Name: c.name, Title: c.title, Runs: map[string][]metrics{}}
		for _, p := range c.contestants {
			res.Runs[p.name] = []metrics{wide}
		}
		res.compare(c)
		var b strings.Builder
		res.printRatios(&b)
		for line := range strings.Lines(b.String()) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > 100 {
				t.Errorf("%d columns: %s", n, line)
			}
		}
	}
}
