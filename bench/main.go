// Command bench runs hopback and its peers on one broker, in turn, several rounds,
// and shows how they compare. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	url, path            string
	rounds, n            int
	only, peers          *regexp.Regexp
	quick, long, client  bool
	table                bool
	json, svg, pprof     string
	profiles             string
	merge, where         []string
	timeout, eachTimeout time.Duration
}

func main() {
	if childMain() {
		return
	}
	o, err := parse(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	o := options{eachTimeout: 2 * time.Minute}
	f := flag.NewFlagSet("bench", flag.ExitOnError)
	f.StringVar(&o.url, "url", envOr("HOPBACK_BENCH_URL", "amqp://guest:guest@127.0.0.1:5672/"), `the broker; "memory:" or "memory:4.0.5" is a hopbacktest broker that bench runs in another process`)
	f.StringVar(&o.path, "path", pathDirect, `how to reach a broker whose port Docker publishes: "direct" to the container where that is possible, "given" as the URL says, "proxy" through a docker-proxy that bench starts, or "both", directly and through the proxy, one contest after the other`)
	f.IntVar(&o.rounds, "rounds", 0, "rounds; 0 means 7, with -quick 3")
	f.IntVar(&o.n, "n", 0, "messages in a run; 0 means 20,000, with -quick 5,000; slow peers take a part")
	only := f.String("only", "", "run the contests whose names match this regular expression alone")
	peers := f.String("peers", "", "run the contestants whose names match this regular expression alone")
	f.BoolVar(&o.quick, "quick", false, "fewer contests, shorter runs: about two minutes")
	f.BoolVar(&o.client, "client", false, "only what the client's CPU is judged by: the pairs with a limit for it")
	f.BoolVar(&o.table, "table", false, "also print the ratios as a table in Markdown")
	f.StringVar(&o.profiles, "profiles", "", "write a CPU profile of each run's measured stretch into this folder, and show where the CPU goes")
	f.BoolVar(&o.long, "long", false, "also 1,000 queues, and many messages parked in delay")
	f.IntVar(&parkedMessages, "parked", parkedMessages, "how many messages -long parks")
	f.DurationVar(&snapshotFor, "snapshot", snapshotFor, "for how long -long holds an old snapshot while a relay works, all rounds together")
	f.StringVar(&brokerCPU, "broker-cpu", "", "the file with the broker's CPU time, cpuacct.usage or cpu.stat of its container's control group: its CPU a message is shown, too")
	f.StringVar(&o.json, "json", "", "write all results to this file")
	f.StringVar(&o.svg, "svg", "", "draw the ratios to this file")
	f.StringVar(&o.pprof, "pprof", "", "write a CPU profile of everything that runs to this file; use it with -only and -peers")
	f.DurationVar(&o.timeout, "timeout", 0, "stop after this and show what there is; 0 means 45 m, with -quick 5 m, with -long 2 h")
	merge := f.String("merge", "", "run nothing: join what -json wrote into these files, separated by commas, as rounds of one run, and show it")
	where := f.String("where", "", "run nothing: show where the CPU goes in these profiles, separated by commas, all together")
	versions := f.Bool("versions", false, "show the versions of the peers and exit")
	list := f.Bool("list", false, "show the contests and exit")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if *versions {
		for _, m := range moduleVersions() {
			fmt.Println(m)
		}
		os.Exit(0)
	}
	if *list {
		for _, c := range contests() {
			fmt.Printf("%-16s %s\n", c.name, c.title)
		}
		os.Exit(0)
	}
	if *merge != "" {
		o.merge = strings.Split(*merge, ",")
		return o, nil
	}
	if *where != "" {
		o.where = strings.Split(*where, ",")
		return o, nil
	}
	def := func(p *int, full, quick int) {
		if *p == 0 {
			if *p = full; o.quick {
				*p = quick
			}
		}
	}
	def(&o.rounds, 7, 3)
	def(&o.n, 20_000, 5_000)
	if o.rounds < 1 || o.n < 20 {
		return o, errors.New("-rounds must be at least 1, -n at least 20")
	}
	if !slices.Contains([]string{pathDirect, pathGiven, pathProxy, pathBoth}, o.path) {
		return o, fmt.Errorf("-path is %q: it must be direct, given, proxy or both", o.path)
	}
	if o.timeout == 0 {
		switch o.timeout = 45 * time.Minute; {
		case o.long:
			o.timeout = 2 * time.Hour
		case o.quick:
			o.timeout = 5 * time.Minute
		}
	}
	if o.long {
		o.eachTimeout = 30 * time.Minute
	}
	var err, err2 error
	o.only, err = regexp.Compile(*only)
	o.peers, err2 = regexp.Compile(*peers)
	return o, errors.Join(err, err2)
}

func envOr(key, fallback string) string {
	if v := os.Getenv(key); v != "" {
		return v
	}
	return fallback
}

// moduleVersions are those that this program was built with.
func moduleVersions() []string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	all := []string{info.GoVersion}
	for _, m := range info.Deps {
		for _, part := range []string{"hopback", "go-amqp", "amqp-go-client", "amqp091-go", "watermill", "pgx"} {
			if strings.Contains(m.Path, part) {
				v := m.Version
				if m.Replace != nil {
					v = "this checkout"
				}
				all = append(all, m.Path+" "+v)
				break
			}
		}
	}
	return all
}

func run(ctx context.Context, o options) error {
	if len(o.merge) > 0 {
		r, err := mergeReports(o.merge)
		if err != nil {
			return err
		}
		for _, res := range r.Results {
			res.printRatios(os.Stdout, nil)
		}
		r.print(os.Stdout)
		if o.table {
			r.printTable(os.Stdout)
		}
		return r.write(o)
	}
	if len(o.where) > 0 {
		w, err := whereOf(o.where)
		if err != nil {
			return err
		}
		w.print(os.Stdout, 0)
		return nil
	}
	slog.SetDefault(quiet) // the official client logs there
	whole, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	paths, err := choosePaths(whole, o.url, o.path)
	if err != nil {
		return err
	}
	for _, p := range paths {
		if p.end != nil {
			defer p.end() // after the labs are closed
		}
	}
	labs := make([]*lab, len(paths))
	for i, p := range paths {
		if labs[i], err = openLab(whole, p); err != nil {
			return err
		}
		labs[i].rounds = o.rounds
		defer labs[i].close()
	}
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return err
		}
	}
	if o.pprof != "" {
		f, err := os.Create(o.pprof)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	r := newReport(labs, o)
	for _, c := range contests() {
		if !o.only.MatchString(c.name) || o.quick && !c.quick || c.long && !o.long || o.client && !c.judged() || whole.Err() != nil {
			continue
		}
		for _, l := range labs {
			res := r.contest(whole, l, c.over(l.path))
			res.printRatios(os.Stdout, l)
			res.printWhere(os.Stdout)
		}
	}
	r.finish(whole.Err())
	r.print(os.Stdout)
	if o.table {
		r.printTable(os.Stdout)
	}
	return errors.Join(r.write(o), ctx.Err(), r.failure())
}

// settleDown lets what an earlier run left behind end, and collects its garbage, so
// that neither is on the next run's bill.
func settleDown() {
	runtime.GC()
	debug.FreeOSMemory()
}
