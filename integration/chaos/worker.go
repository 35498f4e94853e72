package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// workerEnv holds the job of a process that is a worker, as JSON.
const workerEnv = "HOPBACK_CHAOS_WORKER"

// job is what a worker has to do.
type job struct {
	URLs        []string      `json:"urls"`
	Queue       string        `json:"queue"`
	Strategy    string        `json:"strategy"`
	Prefix      string        `json:"prefix"`
	Lane        int           `json:"lane"`
	Seed        uint64        `json:"seed"`
	Run         uint64        `json:"run"`
	Began       int64         `json:"began"` // of the run, Unix milliseconds
	Records     string        `json:"records"`
	Concurrency int           `json:"concurrency"`
	Idle        time.Duration `json:"idle"`
}

// RunIfWorker makes this process a worker, if that is what it was started for, and
// doesn't return then. Programs that call [Run] must call it first thing in main, or in
// TestMain: workers are the same program.
func RunIfWorker() {
	text, ok := os.LookupEnv(workerEnv)
	if !ok {
		return
	}
	var j job
	err := json.Unmarshal([]byte(text), &j)
	if err == nil {
		err = j.work()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func policyOf(strategy, prefix string) (retry.Policy, error) {
	p := retry.Policy{MaxRetries: maxRetries, Backoff: retry.Delays(delays[:]...), Worker: "chaos", Names: retry.Names{Prefix: prefix}}
	for _, s := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
		if string(s) == strategy {
			p.Strategy = s
			return p, nil
		}
	}
	return p, fmt.Errorf("no strategy %q", strategy)
}

// clientConfig is how everything here connects.
func clientConfig(urls []string, idle time.Duration, log io.Writer) client.Config {
	return client.Config{
		Endpoints:   urls[1:],
		Reconnect:   client.ReconnectBackoff{Min: 20 * time.Millisecond, Max: time.Second},
		IdleTimeout: idle,
		Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == "stack" {
				return slog.Attr{}
			}
			return a
		}})),
	}
}

var (
	errNotYet = errors.New("not yet")
	errNever  = errors.New("never")
)

func (j job) work() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		// The other end is the run's: when that is gone, nobody wants this any more.
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	file, err := os.OpenFile(j.Records, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	policy, err := policyOf(j.Strategy, j.Prefix)
	if err != nil {
		return err
	}
	handler := retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		return j.handle(ctx, d, file)
	}))
	// Like a supervisor that keeps a worker running: again and again.
	for ctx.Err() == nil {
		if err := j.consume(ctx, handler); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "chaos worker: it doesn't start, trying again:", err)
			time.Sleep(200 * time.Millisecond)
		}
	}
	return file.Close()
}

func (j job) consume(ctx context.Context, h client.Handler) error {
	conn, err := client.Connect(ctx, j.URLs[0], clientConfig(j.URLs, j.Idle, os.Stderr))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	return conn.Consume(ctx, j.Queue, h, client.ConsumerConfig{Concurrency: j.Concurrency, Grace: 10 * time.Second})
}

// handle plays the message's fate. The record is written before it returns.
func (j job) handle(ctx context.Context, d *client.Delivery, file *os.File) error {
	return (Script{Seed: j.Seed}).play(ctx, d, j.Run, j.Lane, func(r record) {
		r.at, r.lane, r.count = uint32(max(0, time.Now().UnixMilli()-j.Began)), uint8(j.Lane), uint8(min(d.DeliveryCount(), 255))
		b := r.encode()
		if _, err := file.Write(b[:]); err != nil {
			fmt.Fprintln(os.Stderr, "chaos worker: a record can't be written:", err)
			os.Exit(4) // before anything is settled
		}
		if r.what == whatForeign {
			fmt.Fprintf(os.Stderr, "chaos worker: a foreign message: %v\n", d.Message().Properties)
		}
	})
}

// play plays the fate of a message that a handler has got. What it does is noted before
// it returns.
func (s Script) play(ctx context.Context, d *client.Delivery, run uint64, lane int, note func(record)) error {
	id, err := readMessage(d.Message(), run, lane)
	if err != nil {
		note(record{what: whatForeign})
		return nil
	}
	attempt := retry.Attempt(ctx)
	if s.Plain { // no middleware counts
		attempt = retry.Count(d.Message()) + 1
	}
	if t := s.Takes(lane, id, attempt); t > 0 {
		select {
		case <-time.After(t):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r := record{id: id, attempt: uint8(min(attempt, 255)), what: whatFailed}
	fate := s.Fate(lane, id)
	if attempt < fate.Attempts() || fate.End == EndExhausted {
		note(r)
		return errNotYet
	}
	if fate.End == EndHandled {
		r.what = whatHandled
		note(r)
		return nil
	}
	r.what = whatDied
	note(r)
	switch fate.End {
	case EndPermanent:
		return retry.Permanent(errNever)
	case EndPanicked:
		panic("as it should")
	default:
		return client.DeadLetter{Reason: reasonDeclined, Err: errNever}
	}
}

const reasonDeclined client.Reason = "declined"

// endOf reads how a dead letter has ended.
func endOf(m *client.Message) (End, string) {
	switch reason := retry.DeadLetterOf(m).Reason; reason {
	case retry.ReasonPermanent:
		return EndPermanent, ""
	case retry.ReasonExhausted:
		return EndExhausted, ""
	case client.ReasonPanicked:
		return EndPanicked, ""
	case reasonDeclined:
		return EndDeclined, ""
	default:
		return EndOther, string(reason)
	}
}
