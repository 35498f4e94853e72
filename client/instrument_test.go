package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// notes is an Instrument that records its calls, and marks what it may mark.
type notes struct {
	mu     sync.Mutex
	all    []*string // what is about one delivery is one entry
	ranges int
	stats  func() instrument.Stats
	// panics has every call panic, once it is noted.
	panics bool
}

func (n *notes) note(format string, args ...any) { n.add(new(string), format, args...) }

// add adds a line to an entry.
func (n *notes) add(to *string, format string, args ...any) {
	n.mu.Lock()
	if *to == "" {
		n.all = append(n.all, to)
	}
	*to += fmt.Sprintf(format, args...) + "\n"
	n.mu.Unlock()
	if n.panics {
		panic("the instrument is out of order")
	}
}

// taken returns the lines that were noted so far, by delivery, and forgets them.
func (n *notes) taken() (lines []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, entry := range n.all {
		lines = append(lines, strings.Split(strings.TrimSuffix(*entry, "\n"), "\n")...)
		*entry = ""
	}
	n.all = nil
	return lines
}

func id(m *client.Message) any { return m.Properties.MessageID }

func (n *notes) Connect(stats func() instrument.Stats) func() {
	n.stats = stats
	n.note("connect")
	return func() { n.note("closed") }
}

func (n *notes) Publish(ctx context.Context, s instrument.Sending) instrument.Publication {
	s.SetProperty("traceparent", "p")
	s.SetAnnotation("x-opt-mark", "a")
	s.SetAnnotation("traceparent", "not an annotation's key")
	s.SetProperty("bad", "\xff")
	n.note("publish %v to %v, by %v", id(s.Message()), s.To(), ctx.Value(caller{}))
	return notedPublication{n, fmt.Sprint("published ", id(s.Message()))}
}

func (n *notes) PublishAll(_ context.Context, to address.Address, count int) instrument.Batch {
	n.note("batch of %d to %v", count, to)
	return notedBatch{notedPublication{n, "batch published"}}
}

func (n *notes) Handle(ctx context.Context, d instrument.Delivery) (context.Context, instrument.Handling) {
	h := &notedHandling{n: n, id: id(d.Message())}
	n.add(&h.notes, "handle %v", h.id)
	return context.WithValue(ctx, caller{}, "the instrument"), h
}

func (n *notes) SettledRange(count int) {
	n.mu.Lock()
	n.ranges += count
	n.mu.Unlock()
	if n.panics {
		panic("the instrument is out of order")
	}
}

type caller struct{}

type notedPublication struct {
	n    *notes
	what string
}

func (p notedPublication) Published(err error) { p.n.note("%s: %v", p.what, err) }

type notedBatch struct{ notedPublication }

func (b notedBatch) Publish(s instrument.Sending) instrument.Publication {
	return b.n.Publish(context.Background(), s)
}

type notedHandling struct {
	n     *notes
	id    any
	notes string
}

func (h *notedHandling) Decided(d instrument.Decision) {
	h.n.add(&h.notes, "%v: decided: %s %s, attempt %d, delay %v of %v: %v", h.id, d.Kind, d.Reason, d.Attempt, d.Delay, d.Wait, d.Err)
}
func (h *notedHandling) Handled(err error) { h.n.add(&h.notes, "%v: handled: %v", h.id, err) }
func (h *notedHandling) Forwarding(s instrument.Sending) {
	s.SetAnnotation("x-opt-attempt", fmt.Sprint(h.id))
	s.SetProperty("copied", "yes")
	h.n.add(&h.notes, "%v: forwarding to %v", h.id, s.To())
}
func (h *notedHandling) Forwarded(err error) { h.n.add(&h.notes, "%v: forwarded: %v", h.id, err) }
func (h *notedHandling) Settling(s instrument.Settlement) map[string]string {
	h.n.add(&h.notes, "%v: settling: %+v", h.id, s)
	return map[string]string{"x-opt-attempt": fmt.Sprint(h.id), client.AnnotationReason: "not the instrument's to say", "bad": "key"}
}
func (h *notedHandling) Settled(err error) { h.n.add(&h.notes, "%v: settled: %v", h.id, err) }

// observe connects to a broker in memory with a work queue "work", and has in follow it.
func observe(t *testing.T, in instrument.Instrument, log *slog.Logger) (*hopbacktest.Broker, *client.Conn) {
	t.Helper()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Instrument: in, Logger: log})
	require.NoError(t, err)
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "other", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	return broker, conn
}

var policy = retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyDeadLetter}

var discard = slog.New(slog.DiscardHandler)

func message(id string) *client.Message {
	m := client.NewMessage([]byte(id))
	m.Properties.MessageID = id
	return m
}

// outcomes are returned by the handler of these tests, by message-id.
var outcomes = map[string]error{
	"accepted":  nil,
	"failed":    client.DeadLetter{Reason: "worthless", Err: errors.New("no")},
	"forwarded": client.Forward{To: address.Queue("other"), Message: message("copy"), Err: errors.New("elsewhere")},
	"released":  client.Requeue{},
	"retried":   errors.New("down"),
}

// TestInstrumentFollowsEachMessage is the order of calls, and what they may change.
func TestInstrumentFollowsEachMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &notes{}
		broker, conn := observe(t, n, discard)
		var seen []any
		released := false
		h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			seen = append(seen, ctx.Value(caller{}), d.Property("traceparent"), d.Annotation("x-opt-mark"), d.Property("bad"))
			if got, ok := client.DeliveryFrom(ctx); !ok || got != d {
				t.Error("the ctx doesn't carry the delivery")
			}
			id := id(d.Message()).(string)
			if id == "released" && released {
				return nil
			}
			released = released || id == "released"
			return outcomes[id]
		})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- conn.Consume(ctx, "work", retry.With(policy)(h), client.ConsumerConfig{}) }()
		p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		require.Equal(t, []string{"connect"}, n.taken())
		for _, c := range []struct {
			id   string
			want []string
		}{
			{"accepted", []string{
				"handle accepted", "accepted: handled: <nil>",
				"accepted: settling: {Kind:accepted Failed:false DeadLetter:false Reason:}", "accepted: settled: <nil>",
			}},
			{"failed", []string{
				"handle failed", "failed: decided: dead-letter worthless, attempt 1, delay 0s of 0s: no", "failed: handled: dead-letter (worthless): no",
				"failed: settling: {Kind:modified Failed:false DeadLetter:true Reason:worthless}", "failed: settled: <nil>",
			}},
			{"forwarded", []string{
				"handle forwarded", "forwarded: handled: forward to /queues/other: elsewhere", "forwarded: forwarding to /queues/other", "forwarded: forwarded: <nil>",
				"forwarded: settling: {Kind:accepted Failed:false DeadLetter:false Reason:}", "forwarded: settled: <nil>",
			}},
			{"released", []string{
				"handle released", "released: handled: requeue",
				"released: settling: {Kind:released Failed:false DeadLetter:false Reason:}", "released: settled: <nil>",
				"handle released", "released: handled: <nil>",
				"released: settling: {Kind:accepted Failed:false DeadLetter:false Reason:}", "released: settled: <nil>",
			}},
			{"retried", []string{
				"handle retried", "retried: decided: retry dead-letter, attempt 1, delay 1s of 1s: down", "retried: handled: modify: down",
				"retried: settling: {Kind:modified Failed:false DeadLetter:true Reason:retry}", "retried: settled: <nil>",
				"handle retried", "retried: decided: dead-letter exhausted, attempt 2, delay 0s of 0s: down", "retried: handled: dead-letter (exhausted): down",
				"retried: settling: {Kind:modified Failed:false DeadLetter:true Reason:exhausted}", "retried: settled: <nil>",
			}},
		} {
			m := message(c.id)
			require.NoError(t, p.Publish(context.WithValue(t.Context(), caller{}, "a test"), m))
			require.Nil(t, m.ApplicationProperties, "the caller's message stays unchanged")
			require.Nil(t, m.Annotations)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			want := append([]string{"publish " + c.id + " to /queues/work, by a test", "published " + c.id + ": <nil>"}, c.want...)
			got := n.taken()
			// The publisher may hear of its message after the consumer has it.
			assert.ElementsMatch(t, want[:2], slices.DeleteFunc(slices.Clone(got), func(s string) bool { return !strings.HasPrefix(s, "publish") }))
			assert.Equal(t, c.want, slices.DeleteFunc(got, func(s string) bool { return strings.HasPrefix(s, "publish") }))
		}
		require.Len(t, seen, 7*4)
		for i := 0; i < len(seen); i += 4 {
			require.Equal(t, []any{"the instrument", "p", "a", nil}, seen[i:i+4])
		}
		dead := broker.Queue("work.dead").Messages()
		require.Len(t, dead, 2)
		require.Equal(t, "failed", dead[0].Annotations["x-opt-attempt"])
		require.Equal(t, "worthless", dead[0].Annotations[client.AnnotationReason], "what decides wins")
		require.NotContains(t, dead[0].Annotations, "bad")
		copies := broker.Queue("other").Messages()
		require.Len(t, copies, 1)
		require.Equal(t, "forwarded", copies[0].Annotations["x-opt-attempt"])
		require.Equal(t, "yes", copies[0].ApplicationProperties["copied"])
		given := outcomes["forwarded"].(client.Forward).Message
		require.Nil(t, given.ApplicationProperties, "the handler's copy stays unchanged")
		require.Equal(t, 7, n.ranges, "settled")

		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
		require.Equal(t, []string{"closed"}, n.taken())
	})
}

// marks sets a property that names the message.
type marks struct{ instrument.None }

func (marks) Publish(_ context.Context, s instrument.Sending) instrument.Publication {
	for _, key := range []string{"mark", "again"} {
		s.SetProperty(key, fmt.Sprint(id(s.Message())))
	}
	return nil
}

// TestInstrumentAddsToEachMessageItsOwn properties, even if others publish at the same time, and regardless of what happens to other messages.
// The caller's see nothing of it afterwards.
func TestInstrumentAddsToEachMessageItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker, conn := observe(t, marks{}, discard)
		p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("other"), client.PublisherConfig{})
		require.NoError(t, err)
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				for i := range 50 {
					given := message(fmt.Sprintf("%d-%d", g, i))
					if i%2 == 0 {
						given.ApplicationProperties = map[string]any{"own": id(given)}
					}
					ctx, cancel := context.WithCancel(t.Context())
					if i%5 == 4 {
						cancel()
					}
					var sent *client.Message
					err := p.Publish(ctx, given, func(m *client.Message) { sent = m })
					cancel()
					if err == nil {
						assert.Equal(t, given.ApplicationProperties, sent.ApplicationProperties)
						assert.NotContains(t, given.ApplicationProperties, "mark")
					}
				}
			})
		}
		wg.Wait()
		stored := broker.Queue("other").Messages()
		require.GreaterOrEqual(t, len(stored), 8*40)
		for _, m := range stored {
			want := map[string]any{"mark": id(m.Message), "again": id(m.Message)}
			if _, ok := m.ApplicationProperties["own"]; ok {
				want["own"] = id(m.Message)
			}
			require.Equal(t, want, m.ApplicationProperties)
		}
		require.NoError(t, conn.Close(t.Context()))
	})
}

// TestInstrumentFollowsABatch: values that can't be sent are followed as others are.
func TestInstrumentFollowsABatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &notes{}
		_, conn := observe(t, n, discard)
		p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		n.taken()
		bad := message("bad")
		bad.Annotations = map[any]any{"no x": 1}
		err = p.PublishAll(t.Context(), []*client.Message{message("a"), bad, nil, message("b")}, func(v, m *client.Message) {
			if v != nil && id(v) != "b" {
				client.PublishTo(address.Queue("work"))(m)
			}
		})
		require.Error(t, err)
		got := n.taken()
		require.Equal(t, "batch of 4 to (no address)", got[0])
		require.Contains(t, got[len(got)-1], "batch published: hopback: publish: 3 of 4 messages were not accepted")
		require.Contains(t, got, "publish a to /queues/work, by <nil>")
		require.Contains(t, got, "published a: <nil>")
		require.Contains(t, got, "publish b to (no address), by <nil>")
		require.Len(t, got, 8, "%q", got) // the nil message isn't sent
		require.NoError(t, conn.Close(t.Context()))
	})
}

// TestInstrumentThatPanics hurts nobody.
func TestInstrumentThatPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		n := &notes{panics: true}
		broker, conn := observe(t, n, slog.New(slog.NewTextHandler(&locked{w: &log}, nil)))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		released := false
		h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			id := id(d.Message()).(string)
			if id == "released" && released {
				return nil
			}
			released = released || id == "released"
			return outcomes[id]
		})
		go func() { ended <- conn.Consume(ctx, "work", retry.With(policy)(h), client.ConsumerConfig{}) }()
		p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		for id := range outcomes {
			require.NoError(t, p.Publish(t.Context(), message(id)))
		}
		require.NoError(t, p.PublishAll(t.Context(), []*client.Message{message("accepted")}))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Zero(t, broker.Queue("work").Counts().Messages)
		require.Equal(t, 2, broker.Queue("work.dead").Counts().Messages)
		require.Equal(t, 1, broker.Queue("other").Counts().Messages)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
		for _, call := range []string{"Connect", "Publish", "PublishAll", "Handle", "SettledRange"} {
			require.Contains(t, log.String(), `Config.Instrument panicked" call=`+call+" ")
		}
	})
}

// locked is a writer for several goroutines.
type locked struct {
	mu sync.Mutex
	w  *strings.Builder
}

func (l *locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// handlingPanics is an Instrument whose Handling panics, and not the Instrument itself.
type handlingPanics struct {
	instrument.None
	n *notes
}

func (p handlingPanics) Publish(context.Context, instrument.Sending) instrument.Publication {
	return notedPublication{p.n, "published"}
}
func (p handlingPanics) PublishAll(context.Context, address.Address, int) instrument.Batch {
	return notedBatch{notedPublication{p.n, "batch"}}
}
func (p handlingPanics) Handle(context.Context, instrument.Delivery) (context.Context, instrument.Handling) {
	return nil, &notedHandling{n: p.n, id: "any"}
}

// TestHandlingThatPanics hurts nobody either, and a nil ctx counts as the one given.
func TestHandlingThatPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &notes{panics: true}
		broker, conn := observe(t, handlingPanics{n: n}, discard)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			if ctx.Err() != nil {
				return nil
			}
			return outcomes[id(d.Message()).(string)]
		})
		go func() { ended <- conn.Consume(ctx, "work", retry.With(policy)(h), client.ConsumerConfig{}) }()
		p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.PublishAll(t.Context(), []*client.Message{message("accepted"), message("failed"), message("forwarded")}))
		require.NoError(t, p.Publish(t.Context(), message("retried")))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Zero(t, broker.Queue("work").Counts().Messages)
		require.Equal(t, 2, broker.Queue("work.dead").Counts().Messages)
		require.Equal(t, 1, broker.Queue("other").Counts().Messages)
		all := strings.Join(n.taken(), "\n")
		for _, call := range []string{"published", "batch", "decided", "handled", "forwarding", "forwarded", "settling", "settled"} {
			require.Contains(t, all, call)
		}
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
	})
}

// TestStatsCountWhatIsUnderWay with a consumer that works, one whose forwards stall, and a
// publisher that waits.
func TestStatsCountWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n, began := &notes{}, time.Now()
		broker, conn := observe(t, n, discard)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		finish := make(chan struct{})
		go func() {
			ended <- conn.Consume(ctx, "work", client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				<-finish
				return nil
			}), client.ConsumerConfig{Concurrency: 2, Prefetch: 10})
		}()
		go func() {
			ended <- conn.Consume(ctx, "other", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				return client.Forward{To: address.Queue("missing"), Message: client.Copy(d.Message())}
			}), client.ConsumerConfig{Prefetch: 7})
		}()
		work, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		any, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		for range 20 {
			require.NoError(t, work.Publish(t.Context(), message("a")))
		}
		require.NoError(t, any.Publish(t.Context(), message("b"), client.PublishTo(address.Queue("other"))))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		release := broker.HoldAnswers()
		published := make(chan error, 1)
		go func() {
			published <- any.Publish(t.Context(), message("c"), client.PublishTo(address.Queue("work.dead")))
		}()
		synctest.Wait()

		s := n.stats()
		require.Equal(t, conn.Stats(), s)
		require.Equal(t, 1, s.Connections)
		require.GreaterOrEqual(t, s.Sessions, 4, "two consumers, two publishers, and the management")
		require.Len(t, s.Consumers, 2)
		other, own := s.Consumers[0], s.Consumers[1]
		require.ErrorIs(t, other.StalledErr, client.ErrNotFound)
		require.Equal(t, instrument.ConsumerStats{
			Queue: "other", Up: true, Window: 7, Unsettled: 1, Concurrency: 1, Forwarding: 1, Stalled: 1,
			Since: other.Since, Delivered: other.Delivered, StalledSince: other.StalledSince, StalledErr: other.StalledErr,
		}, other)
		require.Equal(t, instrument.ConsumerStats{
			Queue: "work", Up: true, Window: 10, Unsettled: 10, Ready: 8, Handling: 2, Concurrency: 2,
			Since: own.Since, Delivered: own.Delivered, Oldest: own.Oldest, Newest: own.Newest,
		}, own)
		for _, at := range []time.Time{other.Since, other.StalledSince, own.Since, own.Oldest, own.Newest, own.Delivered} {
			require.WithinRange(t, at, began, began.Add(5*time.Second))
		}
		require.Equal(t, []instrument.PublisherStats{{Unconfirmed: 1}, {To: address.Queue("work")}}, s.Publishers)
		require.Zero(t, s.Blocked)
		release()
		require.NoError(t, <-published)
		synctest.Wait()
		require.Zero(t, conn.Stats().Publishers[0].Unconfirmed+conn.Stats().Publishers[1].Unconfirmed)

		broker.SetDiskAlarm(true)
		time.Sleep(3 * time.Second)
		s = conn.Stats()
		require.Equal(t, 1, s.BlockedNow)
		require.InDelta(t, 3, s.Blocked.Seconds(), 0.5)
		broker.SetDiskAlarm(false)
		time.Sleep(time.Hour)
		s = conn.Stats()
		require.Zero(t, s.BlockedNow)
		require.InDelta(t, 3, s.Blocked.Seconds(), 0.5)
		for _, c := range broker.Connections() {
			c.Cut()
		}
		time.Sleep(time.Minute)
		s = conn.Stats()
		require.Equal(t, []uint64{1, 1}, []uint64{s.Lost, s.Rebuilt})
		require.InDelta(t, 3, s.Blocked.Seconds(), 0.5, "it is kept when the connection ends")

		close(finish)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
		s = conn.Stats()
		require.Empty(t, s.Consumers)
		require.Empty(t, s.Publishers)
		require.Zero(t, s.Connections+s.Sessions)
	})
}
