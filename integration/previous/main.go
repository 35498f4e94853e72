// Command previous is a worker that tests run next to the current one on the same queues. It
// is built with the revision of hopback that previous.txt names, so it uses no more of
// hopback than that revision has.
//
//	previous URL apply QUEUE STRATEGY   declares what the worker needs
//	previous URL work QUEUE STRATEGY    handles messages until its input ends
//	previous URL dead QUEUE N           reads N dead letters
//
// It prints a JSON object for each attempt and for each dead letter.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/previous/common"
	"github.com/hopback/hopback/retry"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

var out = struct {
	sync.Mutex
	*json.Encoder
}{Encoder: json.NewEncoder(os.Stdout)}

func notify(v any) {
	out.Lock()
	defer out.Unlock()
	_ = out.Encode(v)
}

func run(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: previous URL apply|work|dead QUEUE STRATEGY|N")
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	conn, err := client.Connect(ctx, args[0], client.Config{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	queue := args[2]
	switch args[1] {
	case "apply":
		topology, err := retry.Topology(common.Policy(args[3], "previous"), declare.QuorumQueue{Name: queue})
		if err != nil {
			return err
		}
		_, err = declare.Apply(ctx, conn.Management(), topology)
		return err
	case "work":
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			cancel()
		}()
		return conn.Consume(ctx, queue, common.Worker(args[3], "previous", func(a common.Attempt) { notify(a) }), client.ConsumerConfig{Prefetch: 1})
	case "dead":
		n, err := strconv.Atoi(args[3])
		if err != nil {
			return err
		}
		return conn.Consume(ctx, queue+".dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if n == 0 {
				return client.Requeue{}
			}
			notify(common.DeadLetterOf(d.Message()))
			if n--; n == 0 {
				cancel()
			}
			return nil
		}), client.ConsumerConfig{Prefetch: 1})
	}
	return fmt.Errorf("there is no %q", args[1])
}
