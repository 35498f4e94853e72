package consume_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/stream"
)

// hidesOutcome has an outcome that only errors.As finds.
type hidesOutcome struct{}

func (hidesOutcome) Error() string { return "see As" }

func (hidesOutcome) As(target any) bool {
	if o, ok := target.(*client.Outcome); ok {
		*o = client.DeadLetter{Reason: "ugly"}
		return true
	}
	return false
}

var errOutcome = errors.New("broken")

// handlerResults are what a handler does at its first call for a message, and what becomes of
// the message: without retry.With, and behind it. "again" is another call of the handler.
var handlerResults = map[string]struct {
	do         func() error
	bare, kept string
}{
	"nil":            {func() error { return nil }, "accepted", "accepted"},
	"an error":       {func() error { return errOutcome }, "again", "again"},
	"panic":          {func() error { panic("ouch") }, "dead panicked: handler panicked: ouch", "dead panicked: handler panicked: ouch"},
	"Goexit":         {func() error { runtime.Goexit(); return nil }, "dead panicked: handler ended its goroutine", "dead panicked: handler ended its goroutine"},
	"Requeue":        {func() error { return client.Requeue{} }, "again", "again"},
	"failed Requeue": {func() error { return client.Requeue{Failed: true} }, "again", "again"},
	"Modify":         {func() error { return client.Modify{} }, "again", "again"},
	"dead Modify":    {func() error { return client.Modify{DeadLetter: true, Annotations: mine} }, "dead : mine", "dead rejected: mine"},
	"DeadLetter":     {func() error { return client.DeadLetter{Reason: "ugly", Err: errOutcome, Annotations: mine} }, "dead ugly: broken mine", "dead ugly: broken mine"},
	"without reason": {func() error { return client.DeadLetter{} }, "dead :", "dead rejected:"},
	"a null in it":   {func() error { return client.DeadLetter{Reason: "ugly", Annotations: map[string]any{"x-opt-mine": nil}} }, "dead ugly:", "dead ugly:"},
	"wrapped":        {func() error { return fmt.Errorf("so: %w", client.DeadLetter{Reason: "ugly", Err: errOutcome}) }, "dead ugly: broken", "dead ugly: broken"},
	"hidden":         {func() error { return hidesOutcome{} }, "dead ugly:", "dead ugly:"},
	"joined":         {func() error { return errors.Join(errOutcome, client.DeadLetter{Reason: "ugly", Err: errOutcome}) }, "dead ugly: broken", "dead ugly: broken"},
	"two joined":     {func() error { return errors.Join(client.DeadLetter{Reason: "first"}, client.Requeue{}) }, "dead first:", "dead first:"},
	"by pointer":     {func() error { return &client.DeadLetter{Reason: "ugly"} }, "dead ugly:", "dead ugly:"},
	"nil pointer":    {func() error { return (*client.DeadLetter)(nil) }, "again", "again"},
	"Forward": {func() error {
		return client.Forward{To: address.Queue("copies"), Message: client.NewMessage([]byte("0"))}
	}, "copied", "copied"},
	"no copy":         {func() error { return client.Forward{} }, "dead unforwardable:", "dead unforwardable:"},
	"no copy, Else":   {func() error { return client.Forward{Else: client.DeadLetter{Reason: "else", Err: errOutcome}} }, "dead else: broken", "dead else: broken"},
	"Permanent":       {func() error { return retry.Permanent(errOutcome) }, "again", "dead permanent: broken"},
	"Discard":         {func() error { return retry.Discard(errOutcome) }, "again", "accepted"},
	"Snooze":          {func() error { return retry.Snooze(10 * time.Millisecond) }, "again", "again"},
	"After":           {func() error { return retry.After(10*time.Millisecond, errOutcome) }, "again", "again"},
	"joined with one": {func() error { return errors.Join(retry.Discard(nil), client.DeadLetter{Reason: "ugly"}) }, "dead ugly:", "dead ugly:"},
}

var mine = map[string]any{"x-opt-mine": "mine"}

// results collects what becomes of the messages of one consumer.
type results struct {
	mu    sync.Mutex
	names []string
	calls map[int]int
	got   map[string]string
}

func newResults() *results {
	return &results{names: slices.Sorted(maps.Keys(handlerResults)), calls: map[int]int{}, got: map[string]string{}}
}

// handle is the handler of all consumers.
func (r *results) handle(n int) error {
	r.mu.Lock()
	r.calls[n]++
	again := r.calls[n] > 1
	if again {
		r.got[r.names[n]] = "again"
	}
	r.mu.Unlock()
	if again {
		return nil
	}
	return handlerResults[r.names[n]].do()
}

// dead is the handler of the dead-letter queue.
func (r *results) dead(ctx context.Context, n int) error {
	d, _ := client.DeliveryFrom(ctx)
	word := func(key string) string {
		text, _ := d.Annotation(key).(string)
		return text
	}
	words := []string{"dead", word(client.AnnotationReason) + ":", word(client.AnnotationError), word("x-opt-mine")}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got[r.names[n]] = strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), " ")
	return nil
}

// check waits until all that isn't accepted was seen.
func (r *results) check(t *testing.T, of string, want func(name string) string) {
	t.Helper()
	settled := func(name string) bool { w := want(name); return w == "accepted" || w == "copied" || r.got[name] != "" }
	suite.Poll(t, of, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.calls) == len(r.names) && !slices.ContainsFunc(r.names, func(name string) bool { return !settled(name) })
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, name := range r.names {
		w := want(name)
		if w == "accepted" || w == "copied" {
			assert.Equal(t, 1, r.calls[i], "%s, %s", of, name)
			w = ""
		}
		if name == "no copy" {
			assert.True(t, strings.HasPrefix(r.got[name], w), "%s, %s: %s", of, name, r.got[name])
			continue
		}
		assert.Equal(t, w, r.got[name], "%s, %s", of, name)
	}
}

var resultsPolicy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(10 * time.Millisecond)}

// A handler's result means the same to a consumer and to a batch, and the same behind
// retry.With. A panic of a batch isn't known to be one message's fault.
func TestHandlersResultsMeanTheSame(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		kinds := []string{"bare", "bare-batch", "kept", "kept-batch"}
		var queues []declare.QuorumQueue
		for _, kind := range kinds {
			queues = append(queues, declare.QuorumQueue{Name: kind, DeliveryLimit: 20})
		}
		suite.ApplyRetry(t, conn, resultsPolicy, queues...)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "copies"}))
		for _, kind := range kinds {
			r := newResults()
			h := client.JSON(func(_ context.Context, n int) error { return r.handle(n) })
			batched := strings.HasSuffix(kind, "batch")
			if batched {
				h = batch.JSON(batch.Config{Size: 1}, func(_ context.Context, items []*batch.Item[int]) error { return r.handle(items[0].Value) })
			}
			if strings.HasPrefix(kind, "kept") {
				h = retry.With(resultsPolicy)(h)
			}
			publishNumbers(t, conn, kind, len(r.names))
			suite.Consume(t, conn, kind, h, client.ConsumerConfig{Concurrency: 1, NoIsolation: true})
			suite.Consume(t, conn, kind+".dead", client.JSON(r.dead), client.ConsumerConfig{})
			r.check(t, kind, func(name string) string {
				switch c := handlerResults[name]; {
				case batched && (name == "panic" || name == "Goexit"):
					return "again"
				case strings.HasPrefix(kind, "kept"):
					return c.kept
				default:
					return c.bare
				}
			})
		}
		suite.Poll(t, "each copy is there", func() bool { return suite.Ready(t, conn, "copies") == len(kinds) })
	})
}

// A stream plays the part of retry.With, and of the dead-letter exchange.
func TestStreamHandlersResultsMeanTheSame(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		r := newResults()
		suite.StreamOf(t, conn, "log", len(r.names))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "log.failed"}))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "copies"}))
		h := client.JSON(func(_ context.Context, n int) error { return r.handle(n) })
		reading := suite.HandleStream(t, conn, "log", stream.Config{Attempts: 4, Backoff: resultsPolicy.Backoff, FailedQueue: "log.failed"}, nil, h)
		suite.Consume(t, conn, "log.failed", client.JSON(r.dead), client.ConsumerConfig{})
		r.check(t, "stream", func(name string) string { return handlerResults[name].kept })
		suite.Poll(t, "the copy is there", func() bool { return suite.Ready(t, conn, "copies") == 1 })
		assert.NoError(t, reading.Stop())
	})
}
