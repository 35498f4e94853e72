package main

import (
	"context"
	"encoding/json"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/hopback/hopback/client"
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
		url: url, path: pathDirect, rounds: 1, n: 200, quick: true, only: regexp.MustCompile(""), peers: regexp.MustCompile(""),
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

func TestCPUIsSortedByStack(t *testing.T) {
	const hop = "github.com/hopback/hopback/"
	for want, stacks := range map[string][][]string{
		kNetwork: {{"syscall.Syscall", "syscall.write", "internal/poll.(*FD).Write", "net.(*conn).Write", hop + "client.(*x).y"}},
		kWakeups: {{"runtime.futex", "runtime.notewakeup", "runtime.wakep", "runtime.ready", "runtime.goready.func1", "runtime.systemstack", "runtime.goready", "runtime.send", "runtime.chansend", hop + "client.f"},
			{"runtime.memmove", "runtime.selectgo", "github.com/Azure/go-amqp.(*Session).mux"}, {"runtime.findRunnable", "runtime.schedule", "runtime.park_m", "runtime.mcall"}},
		kCodec: {{"runtime.memmove", "github.com/Azure/go-amqp/internal/encoding.WriteBinary", "github.com/Azure/go-amqp.(*Sender).send"}, {hop + "internal/frames.(*Reader).Read"}},
		kEngine: {{"runtime.memmove", "github.com/Azure/go-amqp.(*Session).mux"}, {"github.com/rabbitmq/amqp091-go.(*Channel).dispatch"},
			{hop + "internal/amqp.(*Sender).Send"}},
		kHopback:  {{"runtime.mapaccess1", hop + "client.(*publisher).publish"}, {hop + "retry.(*decorator).Handle", "main.f"}},
		kAlloc:    {{"runtime.nextFreeFast", "runtime.mallocgc", hop + "client.f"}},
		kGC:       {{"runtime.scanobject", "runtime.gcDrain", "runtime.gcBgMarkWorker"}, {"runtime.scanobject", "runtime.gcAssistAlloc", "runtime.mallocgc", hop + "client.f"}},
		kBench:    {{"main.(*meter).tick", hop + "client.(*consumer).handle"}, {hop + "bench.(*meter).tick"}},
		kUnplaced: {{"reflect.Value.Len"}},
	} {
		for _, stack := range stacks {
			if got := kindOf(stack); got != want {
				t.Errorf("%v is %q, want %q", stack, got, want)
			}
		}
	}
}

// Where Docker is installed, its proxy can stand in front of any broker. It ends with the path.
func TestProxyStandsInFrontOfTheBroker(t *testing.T) {
	paths, err := choosePaths(t.Context(), "memory:", pathBoth)
	if _, missing := exec.LookPath("docker-proxy"); err != nil && missing != nil {
		t.Skip("docker-proxy isn't installed")
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) != 2 || paths[0].behind || !paths[1].behind || paths[0].url == paths[1].url {
		t.Fatalf("paths are %+v", paths)
	}
	l, err := openLab(t.Context(), paths[1])
	if err != nil {
		t.Fatal(err)
	}
	l.close()
	paths[1].end()
	for _, p := range paths {
		if _, err := client.Connect(t.Context(), p.url, client.Config{Logger: quiet}); err == nil {
			t.Errorf("something still answers %s", p.how)
		}
	}
}

// A broker in memory runs in another process, and ends.
func TestMemoryBrokerRunsInAnotherProcess(t *testing.T) {
	paths, err := choosePaths(t.Context(), "memory:4.0.5", pathDirect)
	if err != nil {
		t.Fatal(err)
	}
	l, err := openLab(t.Context(), paths[0])
	if err != nil {
		t.Fatal(err)
	}
	if l.broker.Version != "4.0.5" || !l.memory {
		t.Errorf("it is %v", l.broker)
	}
	l.close()
	paths[0].end()
	if c, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(paths[0].url, "amqp://guest:guest@"), "/")); err == nil {
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
	paths, err := choosePaths(context.Background(), "amqp://u:p@192.0.2.1/", pathDirect)
	if err != nil || len(paths) != 1 || paths[0].how != "at 192.0.2.1:5672" {
		t.Error(paths, err)
	}
}
