// Command chaos breaks everything around hopback and counts. See package chaos.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/hopback/hopback/integration/chaos"
)

func main() {
	chaos.RunIfWorker()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx)
	stop()
	os.Exit(code)
}

// setup is a broker to run with.
type setup struct {
	version string
	nodes   int
}

func setupsOf(nodes, versions string) (all []setup, err error) {
	for _, n := range strings.Split(nodes, ",") {
		for _, v := range strings.Split(versions, ",") {
			count := 0
			if _, err := fmt.Sscan(n, &count); err != nil {
				return nil, fmt.Errorf("-nodes %q: use 1, 3 or 1,3", nodes)
			}
			all = append(all, setup{v, count})
		}
	}
	return all, nil
}

func run(ctx context.Context) int {
	var (
		seed       = flag.Uint64("seed", 0, "of the faults and of the messages' fates; the runs after the first take the next ones; 0: by the clock, and printed")
		messages   = flag.Int("messages", 1_000_000, "to publish at least, in all runs together")
		faults     = flag.Int("faults", 208, "to do, in all runs together")
		slice      = flag.Int("slice", 50_000, "messages of one run at most; each has a separate broker")
		kinds      = flag.String("kinds", "all", "of faults, separated by commas")
		versions   = flag.String("versions", "4.3,4.0", "of RabbitMQ")
		nodes      = flag.String("nodes", "1,3", "of the broker")
		strategies = flag.String("strategies", "all", "of retries: republish, dead-letter, native")
		handOver   = flag.Duration("hand-over", 0, "RabbitMQ's dead_letter_worker_publisher_confirm_timeout, which is 180 s by default; 0: 15 s")
		duration   = flag.Duration("duration", 0, "after which no further run begins; 0: none")
		dir        = flag.String("dir", "", "for the history of each run; empty: a temporary one, which stays if something is wrong")
	)
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	setups, err := setupsOf(*nodes, *versions)
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 2
	}
	// Each setup gets as many runs.
	rounds := max(1, (*messages+*slice*len(setups)-1)/(*slice*len(setups)))
	runs := rounds * len(setups)
	began := time.Now()
	var reports []*chaos.Report
	code := 0
	for i := range runs {
		if ctx.Err() != nil || *duration > 0 && time.Since(began) > *duration {
			break
		}
		at := setups[i%len(setups)]
		cfg := chaos.Config{
			Version: at.version, Nodes: at.nodes, Seed: *seed + uint64(i),
			Messages: (*messages + runs - 1) / runs, Faults: (*faults + runs - 1) / runs, HandOver: *handOver, Out: os.Stderr,
		}
		var err error
		if cfg.Kinds, err = chaos.ParseKinds(*kinds, at.nodes); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
			return 2
		}
		if *strategies != "all" {
			cfg.Strategies = strings.Split(*strategies, ",")
		}
		if *dir != "" {
			cfg.Dir = fmt.Sprintf("%s/%d", *dir, cfg.Seed)
		}
		rep, err := chaos.Run(ctx, cfg)
		if err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
			code = 1
			break
		}
		_ = rep.Write(os.Stdout)
		if !rep.Good() {
			code = 1
		}
		reports = append(reports, rep)
	}
	if len(reports) > 1 {
		fmt.Println()
		_ = chaos.WriteTable(os.Stdout, chaos.Sum(reports))
	}
	return code
}
