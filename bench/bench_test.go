package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestEveryContestRuns runs the quick form with a handful of messages. It needs a
// broker: HOPBACK_BENCH_URL names it.
func TestEveryContestRuns(t *testing.T) {
	url := os.Getenv("HOPBACK_BENCH_URL")
	if url == "" {
		t.Fatal("HOPBACK_BENCH_URL must name a broker")
	}
	dir := t.TempDir()
	o := options{
		url: url, path: pathDirect, rounds: 1, n: 200, quick: true, only: regexp.MustCompile(""), peers: regexp.MustCompile(""),
		json: filepath.Join(dir, "out.json"), svg: filepath.Join(dir, "out.svg"), timeout: 5 * time.Minute, eachTimeout: time.Minute,
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
		if !c.quick {
			continue
		}
		found := false
		for _, res := range r.Results {
			found = found || res.Name == c.name && len(res.Ratios) > 0
		}
		if !found {
			t.Errorf("contest %s has no ratio", c.name)
		}
	}
	f, err := os.Open(o.svg)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := xml.NewDecoder(f); ; {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("the drawing isn't well-formed: %v", err)
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

func TestTimingsTakeTheRightQuantiles(t *testing.T) {
	var all []time.Duration
	for i := range 100 {
		all = append(all, time.Duration(100-i)*time.Millisecond)
	}
	m := timings(all)
	if m[p50] != 50 || m[p99] != 99 || m[worst] != 100 {
		t.Errorf("quantiles are %v", m)
	}
	if !math.IsNaN(spreadOf(nil).Median) {
		t.Error("nothing has a median")
	}
}

func TestTheRatiosFitInto100Columns(t *testing.T) {
	wide := metrics{rate: 123.456, cpu: 98.765, allocs: 151, p50: 123.456, p99: 123.456}
	for _, c := range contests() {
		res := &result{Name: c.name, Title: c.title, Runs: map[string][]metrics{}}
		for _, p := range c.contestants {
			res.Runs[p.name] = []metrics{wide}
		}
		res.compare(c)
		var b strings.Builder
		res.printRatios(&b, nil)
		for line := range strings.Lines(b.String()) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > 100 {
				t.Errorf("%d columns: %s", n, line)
			}
		}
	}
}

func TestMergedRoundsStaySideBySide(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, runs map[string][]metrics) string {
		r := &report{Broker: "RabbitMQ 4.3.6", Took: "1m0s", Notes: []string{"a note"}, Results: []*result{{Name: "publish", Title: "t", Runs: runs}}}
		path := filepath.Join(dir, name)
		if err := r.writeJSON(path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a := write("a", map[string][]metrics{nHop: {{rate: 2}, {rate: 4}}})
	b := write("b", map[string][]metrics{nHop: {{rate: 30}, nil}, nRaw: {{rate: 10}, {rate: 10}}})
	r, err := mergeReports([]string{a, b})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 1 || len(r.Results[0].Runs[nHop]) != 4 || len(r.Results[0].Ratios) != 1 || r.Rounds != 4 || r.Took != "2m0s" || len(r.Notes) != 1 {
		t.Errorf("merged: %+v", r)
	}
	if got := *r.Results[0].Ratios[0].Times; got != (spread{3, 3, 3}) {
		t.Errorf("ratios are %v", got)
	}
}

// The address of a container is found by the port that it publishes.
func TestContainerIsFoundByItsPublishedPort(t *testing.T) {
	const inspected = `[
		{"NetworkSettings": {"Ports": {"80/tcp": null}, "Networks": {"bridge": {"IPAddress": "172.17.0.9"}}}},
		{"NetworkSettings": {"Ports": {"4369/tcp": null, "5672/tcp": [{"HostIp": "127.0.0.1", "HostPort": "24300"}], "15672/tcp": [{"HostPort": "24301"}]},
			"Networks": {"other": {"IPAddress": ""}, "rabbit_default": {"IPAddress": "172.18.0.2"}}}}]`
	for port, want := range map[string]string{"24300": "172.18.0.2:5672", "24301": "172.18.0.2:15672", "5672": "", "80": ""} {
		if got := publisherOf([]byte(inspected), port); got != want {
			t.Errorf("port %s: %q, want %q", port, got, want)
		}
	}
	if got := publisherOf([]byte("no such thing"), "24300"); got != "" {
		t.Error(got)
	}
	if _, err := choosePaths(context.Background(), "amqp://192.0.2.1:5672/", pathBoth); err == nil {
		t.Error("both paths to a machine that isn't this one")
	}
	paths, err := choosePaths(context.Background(), "amqp://u:p@192.0.2.1/", pathDirect)
	if err != nil || len(paths) != 1 || paths[0].how != "at 192.0.2.1:5672" {
		t.Error(paths, err)
	}
}
