// Package show has the code that the examples share: it connects, prints, stops if the broker
// doesn't answer any more, and cleans up. Everything that an example shows is in the example.
package show

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

const (
	// limit is the timeout of an example. It takes seconds; a busy machine may need more.
	limit = 90 * time.Second
	// tidying is the timeout for deleting the queues and exchanges and closing the connection.
	tidying = 30 * time.Second
	// rest is for RabbitMQ 4.0. It may never answer a session that starts a few milliseconds
	// after another one has ended. And its at-least-once dead-lettering may stop permanently,
	// for all queues, if a queue is deleted while it is still being declared.
	rest = 100 * time.Millisecond
)

// Main runs an example on the broker at HOPBACK_URL. Default: the broker on this machine. The
// last line of the output says what the example has proven. If it has proven nothing, the exit
// code is 1.
func Main(example func(*Stage)) {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	proven, err := run(ctx, url, os.Stdout, example)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "NOT PROVEN:", err)
		os.Exit(1)
	}
	fmt.Println("PROVEN: " + proven)
}

func run(ctx context.Context, url string, out io.Writer, example func(*Stage)) (proven string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took longer than %v", limit))
	defer cancel()
	s := &Stage{URL: url, out: out, start: time.Now()}
	s.Ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)
	if s.Conn, err = client.Connect(ctx, url, client.Config{Name: "hopback-example", Logger: s.logger()}); err != nil {
		return "", err
	}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			err = r.err
		default:
			panic(r)
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidying)
		defer cancel()
		err = errors.Join(err, s.tidy(ctx), s.Conn.Close(ctx))
	}()
	s.Say("RabbitMQ %s", s.Conn.Broker().Version)
	example(s)
	if s.proven == "" {
		return "", errors.New("the example stopped without a proof")
	}
	return s.proven, nil
}

// Stage runs an example. Its methods stop the example if something goes wrong, so call them only
// on the example's main goroutine. Handlers can call Say.
type Stage struct {
	// Ctx ends if the example is interrupted, takes too long, or has a consumer that fails.
	Ctx  context.Context
	Conn *client.Conn
	// URL is the broker that Conn is connected to.
	URL string

	cancel   context.CancelCauseFunc
	start    time.Time
	proven   string
	declared []declare.Topology
	stops    []func()

	mu  sync.Mutex
	out io.Writer
}

// failure is the value with which a Stage's methods panic.
type failure struct{ err error }

// Act prints a heading.
func (s *Stage) Act(title string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "\n%s\n", title)
}

// Say prints a line with the time.
func (s *Stage) Say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "%7.3f  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}

// Check stops the example if err isn't nil.
func (s *Stage) Check(err error) {
	if err == nil {
		return
	}
	if why := context.Cause(s.Ctx); why != nil {
		err = errors.Join(err, why)
	}
	panic(failure{err})
}

// Want stops the example without a proof unless ok is true. format is the claim.
func (s *Stage) Want(so bool, format string, args ...any) {
	if !so {
		s.Check(fmt.Errorf("this isn't true: "+format, args...))
	}
}

// Proven sets the last line of the output: what the example has proven.
func (s *Stage) Proven(format string, args ...any) { s.proven = fmt.Sprintf(format, args...) }

// Must returns v, or stops the example if err isn't nil.
func Must[T any](v T, err error) T {
	if err != nil {
		panic(failure{err})
	}
	return v
}

// Next receives a value from c, or stops the example if none comes.
func Next[T any](s *Stage, c <-chan T, what string) T {
	select {
	case v := <-c:
		return v
	case <-s.Ctx.Done():
		panic(failure{fmt.Errorf("waiting for %s: %w", what, context.Cause(s.Ctx))})
	}
}

// Declare declares t, and deletes it at the end. First it deletes what an earlier run may have
// left.
func (s *Stage) Declare(t declare.Topology) {
	s.declared = append(s.declared, t)
	// An interrupted example still waits for the broker, and then deletes.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Ctx), tidying)
	defer cancel()
	_, err := declare.Delete(ctx, s.Conn.Management(), t)
	s.Check(err)
	_, err = declare.Apply(ctx, s.Conn.Management(), t)
	s.Check(err)
	s.Check(context.Cause(s.Ctx))
	s.Say("declared: %d queues, %d exchanges, %d bindings", len(t.Queues), len(t.Exchanges), len(t.Bindings))
}

// Send publishes messages, and waits until the broker has confirmed each.
func (s *Stage) Send(to address.Address, messages ...*client.Message) {
	p := Must(client.NewPublisher[*client.Message](s.Ctx, s.Conn, to, client.PublisherConfig{})) // closed with Conn
	for _, m := range messages {
		s.Check(p.Publish(s.Ctx, m))
	}
}

// Consume runs Conn.Consume in the background, until stop is called or the example ends.
func (s *Stage) Consume(queue string, h client.Handler, cfg client.ConsumerConfig) (stop func()) {
	ctx, cancel := context.WithCancel(s.Ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Conn.Consume(ctx, queue, h, cfg); err != nil {
			s.cancel(fmt.Errorf("consuming %s: %w", queue, err))
		}
	}()
	stop = func() {
		cancel()
		<-done
		s.rest()
	}
	s.stops = append(s.stops, stop)
	return stop
}

// Take consumes n messages from the queue, one at a time, and calls look for each.
func (s *Stage) Take(queue string, n int, peek func(*client.Message)) {
	taken := make(chan struct{})
	left := n
	stop := s.Consume(queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		if left == 0 {
			return client.Requeue{}
		}
		peek(d.Message())
		if left--; left == 0 {
			close(taken)
		}
		return nil
	}), client.ConsumerConfig{Prefetch: 1})
	Next(s, taken, fmt.Sprintf("%d messages in %s", n, queue))
	stop()
}

// Holds waits until the queue has n ready messages. The broker updates this count shortly after
// it has confirmed a message.
func (s *Stage) Holds(queue string, n int) {
	for {
		info, err := declare.Inspect(s.Ctx, s.Conn.Management(), queue)
		if err == nil && info.Messages == uint64(n) {
			return
		}
		s.Check(err)
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.Ctx.Done():
			s.Want(false, "the queue %s has %d ready messages: it has %d", queue, n, info.Messages)
		}
	}
}

// tidy stops the consumers and deletes what was declared.
func (s *Stage) tidy(ctx context.Context) error {
	for _, stop := range s.stops {
		stop()
	}
	s.rest()
	var errs []error
	for _, t := range s.declared {
		_, err := declare.Delete(ctx, s.Conn.Management(), t)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (s *Stage) rest() {
	if !s.Conn.Broker().AtLeast(4, 3) {
		time.Sleep(rest)
	}
}

// logger prints the client's warnings and errors. Failed attempts aren't printed: the examples
// print their attempts themselves.
func (s *Stage) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(logWriter{s}, &slog.HandlerOptions{
		Level: slog.LevelWarn,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
}

type logWriter struct{ s *Stage }

func (w logWriter) Write(b []byte) (int, error) {
	w.s.Say("log: %s", bytes.TrimSpace(b))
	return len(b), nil
}
