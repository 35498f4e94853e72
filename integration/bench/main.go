// Command bench runs hopback and its peers on one broker, in turn, several rounds,
// and shows how they compare. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"
)

type options struct {
	url                  string
	rounds, n            int
	only, peers          *regexp.Regexp
	quick, client        bool
	json                 string
	profiles             string
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
	f.IntVar(&o.rounds, "rounds", 0, "rounds; 0 means 7, with -quick 3")
	f.IntVar(&o.n, "n", 0, "messages in a run; 0 means 20,000, with -quick 5,000; slow peers take a part")
	only := f.String("only", "", "run the contests whose names match this regular expression alone")
	peers := f.String("peers", "", "run the contestants whose names match this regular expression alone")
	f.BoolVar(&o.quick, "quick", false, "shorter runs: about two minutes")
	f.BoolVar(&o.client, "client", false, "only what the client's CPU is judged by: the pairs with a limit for it")
	f.StringVar(&o.profiles, "profiles", "", "write a CPU profile of each run's measured stretch into this folder, for go tool pprof")
	f.StringVar(&o.json, "json", "", "write all results to this file")
	f.DurationVar(&o.timeout, "timeout", 0, "stop after this and show what there is; 0 means 45 m, with -quick 5 m")
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
	if o.timeout == 0 {
		if o.timeout = 45 * time.Minute; o.quick {
			o.timeout = 5 * time.Minute
		}
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
		for _, part := range []string{"hopback", "go-amqp", "amqp091-go"} {
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
	whole, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	p, err := choosePath(o.url)
	if err != nil {
		return err
	}
	if p.end != nil {
		defer p.end() // after the lab is closed
	}
	l, err := openLab(whole, p)
	if err != nil {
		return err
	}
	defer l.close()
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return err
		}
	}
	r := newReport(l, o)
	for _, c := range contests() {
		if !o.only.MatchString(c.name) || o.client && len(c.rivals()) == 0 || whole.Err() != nil {
			continue
		}
		r.contest(whole, l, c).printRatios(os.Stdout)
	}
	r.finish(whole.Err())
	r.print(os.Stdout)
	if o.json != "" {
		err = r.writeJSON(o.json)
	}
	return errors.Join(err, ctx.Err(), r.failure())
}

// settleDown lets what an earlier run left behind end, and collects its garbage, so
// that neither is on the next run's bill.
func settleDown() {
	runtime.GC()
	debug.FreeOSMemory()
}
