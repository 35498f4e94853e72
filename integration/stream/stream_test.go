package stream_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/stream"
)

func readStream(t *testing.T, conn *client.Conn, name string, cfg stream.Config) *suite.Reading {
	t.Helper()
	got := make(chan int, 10_000)
	return suite.HandleStream(t, conn, name, cfg, got, client.JSON(func(_ context.Context, n int) error {
		got <- n
		return nil
	}))
}

func span(first, end int) (all []int) {
	for i := first; i < end; i++ {
		all = append(all, i)
	}
	return all
}

// streamError is what Consume returns at once.
func streamError(t *testing.T, conn *client.Conn, name string, h client.Handler, cfg stream.Config) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	err := stream.Consume(ctx, conn, name, h, cfg)
	require.NoError(t, ctx.Err(), "it didn't return by itself")
	require.Error(t, err)
	return err
}

var noop = client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })

func TestStreamOffsets(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 20)
		for name, c := range map[string]struct {
			from  stream.Offset
			first int
		}{
			"zero": {stream.Offset{}, 0}, "7": {stream.At(7), 7}, "since": {stream.Since(time.Now().Add(-time.Hour)), 0},
			"ago": {stream.Ago(time.Hour), 0}, "ago, a fraction": {stream.Ago(time.Hour + time.Millisecond), 0},
		} {
			r := readStream(t, conn, "log", stream.Config{From: c.from})
			assert.Equal(t, span(c.first, 20), r.Until(19), name)
			require.NoError(t, r.Stop(), name)
		}
		// A chunk is at least one message.
		r := readStream(t, conn, "log", stream.Config{From: stream.Last()})
		got := r.Until(19)
		assert.Equal(t, span(got[0], 20), got)
		require.NoError(t, r.Stop())

		// These begin with what isn't there yet.
		for first, from := range map[int]stream.Offset{20: stream.Next(), 21: stream.Since(time.Now().Add(time.Hour)), 22: stream.At(22)} {
			name := fmt.Sprintf("later-%d", first)
			suite.StreamOf(t, conn, name, 20)
			r := readStream(t, conn, name, stream.Config{From: from})
			r.Attached()
			suite.FillStream(t, conn, name, 20, 25)
			assert.Equal(t, span(max(20, first-first%2), 25), r.Until(24), from)
			require.NoError(t, r.Stop())
		}
	})
}

// Where Next, Last, Since and Ago begin is saved before the first message is handled, also
// while the stream is idle. So the next start misses nothing that was published while no
// consumer ran, and begins with the message at which the first one stopped.
func TestStreamRemembersWhereItBegan(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for name, c := range map[string]struct {
			from   stream.Offset
			before int // messages in the stream when the consumer starts
			first  int // the first that it gets
		}{
			"next":              {stream.Next(), 5, 5},
			"next, empty":       {stream.Next(), 0, 0},
			"last":              {stream.Last(), 5, -1}, // a chunk's beginning
			"last, empty":       {stream.Last(), 0, 0},
			"ago":               {stream.Ago(time.Hour), 5, 0},
			"since, nothing":    {stream.Since(time.Now().Add(time.Hour)), 5, 5},
			"since, all of it":  {stream.Since(time.Now().Add(-time.Hour)), 5, 0},
			"since, and empty":  {stream.Since(time.Now().Add(-time.Hour)), 0, 0},
			"next, and filters": {stream.Next(), 5, 5},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				suite.StreamOf(t, conn, name, c.before)
				store := &stream.MemoryStore{}
				cfg := stream.Config{From: c.from, Consumer: "c", Offsets: store, Attempts: 1}
				if name == "next, and filters" {
					cfg.Filter = stream.Filter{Values: []string{"x"}, MatchUnfiltered: true}
				}
				// Messages that are already there keep the first consumer in its handler.
				wait := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
					_, found, _ := store.Load(ctx, "c", name)
					assert.True(t, found, "a message is handled, and no position is saved")
					<-ctx.Done()
					return ctx.Err()
				})
				held := cfg
				held.Grace = time.Millisecond
				r := suite.HandleStream(t, conn, name, held, nil, wait)
				r.Attached()
				require.NoError(t, r.Stop())
				next, found, err := store.Load(t.Context(), "c", name)
				require.NoError(t, err)
				require.True(t, found)
				if c.first < 0 {
					assert.Less(t, int(next), c.before)
					c.first = int(next)
				}
				require.Equal(t, c.first, int(next))

				// Nobody consumes while these are published. Then the first one fails to the end.
				suite.FillStream(t, conn, name, c.before, 8)
				failed, ok := errors.AsType[*stream.HandlerError](streamError(t, conn, name, client.HandlerFunc(func(context.Context, *client.Delivery) error {
					return errors.New("broken")
				}), cfg))
				require.True(t, ok)
				assert.EqualValues(t, c.first, failed.Offset)
				suite.FillStream(t, conn, name, 8, 10)
				r = readStream(t, conn, name, cfg)
				assert.Equal(t, span(c.first, 10), r.Until(9))
				require.NoError(t, r.Stop())
			})
		}

		// A store that can't keep the position ends it before anything is handled.
		suite.StreamOf(t, conn, "log", 3)
		full, ok := errors.AsType[*stream.SaveError](streamError(t, conn, "log", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			t.Error("a message was handled")
			return nil
		}), stream.Config{From: stream.Last(), Consumer: "c", Offsets: &failing{fail: map[uint64]int{0: 1, 1: 1, 2: 1}}}))
		require.True(t, ok)
		assert.ErrorContains(t, full, "full")
	})
}

func TestStreamFilters(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		// One publication each, so that chunks are small.
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: "log"}}})
		p := suite.Publisher[int](t, conn, address.Queue("log"))
		for i := range 12 {
			suite.Publish(t, p, i, stream.FilterValue([]string{"", "eu", "us"}[i%3]), func(m *client.Message) {
				m.Properties.Subject = new(fmt.Sprintf("&order.%d", i))
				m.Properties.ContentType = new("text/x-number")
				m.ApplicationProperties = map[string]any{"n": int64(i), "region": fmt.Sprintf("region-%d", i%2)}
			})
		}
		suite.Publish(t, p, 99, stream.FilterValue("eu"), func(m *client.Message) {
			m.Properties.Subject = new("end")
			m.Properties.ContentType = new("text/x-number")
			m.ApplicationProperties = map[string]any{"n": int64(99), "region": "end"}
		})
		for name, c := range map[string]struct {
			filter stream.Filter
			want   []int
			since  string // the version, if not 4.0
		}{
			"value":                {stream.Filter{Values: []string{"eu"}}, []int{1, 4, 7, 10, 99}, ""},
			"values":               {stream.Filter{Values: []string{"eu", "us"}}, []int{1, 2, 4, 5, 7, 8, 10, 11, 99}, ""},
			"unfiltered":           {stream.Filter{Values: []string{"eu"}, MatchUnfiltered: true}, []int{0, 1, 3, 4, 6, 7, 9, 10, 99}, ""},
			"a literal ampersand":  {stream.Filter{Properties: map[string]any{"subject": "&order.3"}}, []int{3}, "4.1"},
			"suffix":               {stream.Filter{Properties: map[string]any{"subject": stream.Suffix(".3")}}, []int{3}, "4.1"},
			"prefix and type":      {stream.Filter{Properties: map[string]any{"subject": stream.Prefix("e"), "content-type": "text/x-number"}}, []int{99}, "4.1"},
			"application property": {stream.Filter{ApplicationProperties: map[string]any{"n": 5, "region": stream.Prefix("region-")}}, []int{5}, "4.1"},
			"values and more":      {stream.Filter{Values: []string{"eu"}, ApplicationProperties: map[string]any{"region": "region-1"}}, []int{1, 7}, "4.1"},
			"SQL":                  {stream.Filter{SQL: "n > 9 AND properties.subject LIKE '%order.%'"}, []int{10, 11}, "4.2"},
		} {
			cfg := stream.Config{Filter: c.filter}
			if !s.AtLeast(c.since) {
				refused, ok := errors.AsType[*stream.FilterError](streamError(t, conn, "log", noop, cfg))
				require.True(t, ok, name)
				assert.Equal(t, c.since, refused.Since, name)
				assert.Contains(t, refused.Error(), "needs RabbitMQ "+c.since, name)
				continue
			}
			r := readStream(t, conn, "log", cfg)
			assert.Equal(t, c.want, r.Until(c.want[len(c.want)-1]), name)
			require.NoError(t, r.Stop(), name)
		}
		if s.AtLeast("4.2") {
			refused, ok := errors.AsType[*stream.FilterError](streamError(t, conn, "log", noop, stream.Config{Filter: stream.Filter{SQL: "n > > 3"}}))
			require.True(t, ok)
			assert.Equal(t, "SQL", refused.Filter)
			assert.Empty(t, refused.Since)
		}
	})
}

// RabbitMQ 4.0 says that it applies filters that it doesn't know. 4.3 leaves them out of
// its answer. A quorum queue echoes what it ignores.
func TestBrokersEchoFiltersThatTheyIgnore(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 1)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "work"}))
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		echoes := func(queue string) (names []string) {
			raw, err := dedicated.Open(ctx, inside.Of(conn))
			require.NoError(t, err)
			defer func() { _ = raw.Close(ctx) }()
			filter := frames.Map{}
			for key, value := range map[string]any{"rabbitmq:stream-offset-spec": "first", "x:nobody-knows": "x"} {
				filter = append(filter, frames.Entry{Key: frames.Symbol(key), Value: frames.Described{Descriptor: frames.Symbol(key), Value: value}})
			}
			sub, err := raw.Subscribe(ctx, "/queues/"+queue, filter, 1, 16<<20)
			require.NoError(t, err)
			for _, e := range sub.Filter() {
				names = append(names, fmt.Sprint(e.Key))
			}
			slices.Sort(names)
			return names
		}
		all := []string{"rabbitmq:stream-offset-spec", "x:nobody-knows"}
		if s.Newer() {
			all = all[:1]
		}
		assert.Equal(t, all, echoes("log"))
		assert.Equal(t, all, echoes("work"))
	})
}

func TestStreamRefusals(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 1)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "work"}))

		bad, ok := errors.AsType[*argument.Error](streamError(t, conn, "work", noop, stream.Config{}))
		require.True(t, ok)
		assert.Contains(t, bad.Error(), "is a quorum queue")
		several := batch.JSON(batch.Config{}, func(context.Context, []*batch.Item[int]) error { return nil })
		bad, ok = errors.AsType[*argument.Error](streamError(t, conn, "log", several, stream.Config{}))
		require.True(t, ok)
		assert.Contains(t, bad.Error(), "handles them one at a time")
		one := batch.JSON(batch.Config{Size: 1}, func(context.Context, []*batch.Item[int]) error { return retry.Permanent(errors.New("seen")) })
		_, ok = errors.AsType[*stream.HandlerError](streamError(t, conn, "log", one, stream.Config{}))
		require.True(t, ok)
		require.ErrorIs(t, streamError(t, conn, "none", noop, stream.Config{}), client.ErrNotFound)
		require.ErrorIs(t, streamError(t, conn, "log", noop, stream.Config{FailedQueue: "none"}), client.ErrNotFound)

		with := retry.With(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second), Waive: retry.AllGuards()})(noop)
		guard, ok := errors.AsType[*retry.GuardError](streamError(t, conn, "log", with, stream.Config{}))
		require.True(t, ok)
		assert.Equal(t, retry.GuardStrategy, guard.Guard)
		assert.Contains(t, guard.Error(), "it is a stream")

		url := s.User(t, ".*", ".*", "work")
		denied, _ := suite.ConnectTo(t, url)
		require.ErrorIs(t, streamError(t, denied, "log", noop, stream.Config{}), client.ErrUnauthorized)
	})
}

// A consumer continues where it was, even if its connection is lost.
func TestStreamConsumerSurvivesItsConnection(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		suite.StreamOf(t, direct, "log", 2000)
		wire, url := s.Through(t)
		conn, _ := suite.ConnectTo(t, url, suite.Soon)
		got := make(chan int, 10_000)
		handled := 0
		r := suite.HandleStream(t, conn, "log", stream.Config{Prefetch: 50}, got, client.JSON(func(_ context.Context, n int) error {
			if handled++; handled%300 == 0 {
				wire.Cut()
			}
			got <- n
			return nil
		}))
		assert.Equal(t, span(0, 2000), r.Until(1999), "each once, and in order")
		require.NoError(t, r.Stop())

		// Next and Last stay what they were while the connection is lost.
		for name, from := range map[string]stream.Offset{"next": stream.Next(), "last": stream.Last()} {
			suite.StreamOf(t, direct, name, 5)
			r := readStream(t, conn, name, stream.Config{From: from})
			r.Attached()
			wire.Refuse()
			wire.Cut()
			suite.FillStream(t, direct, name, 5, 10)
			require.NoError(t, wire.Admit())
			got := r.Until(9)
			assert.Equal(t, span(got[0], 10), got)
			assert.LessOrEqual(t, got[0], 5, name)
			require.NoError(t, r.Stop())
		}
	})
}

func TestStreamDeleted(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 10)
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		err := stream.Consume(ctx, conn, "log", client.JSON(func(_ context.Context, n int) error {
			if n == 9 {
				_, err := declare.DeleteQueue(ctx, conn.Management(), "log")
				return err
			}
			return nil
		}), stream.Config{})
		require.ErrorIs(t, err, client.ErrNotFound)
		refused, ok := errors.AsType[*client.Error](err)
		require.True(t, ok)
		assert.Equal(t, "log", refused.Target)
	})
}

// A stream that was declared again begins with offset 0. RabbitMQ accepts a consumer from an
// offset that isn't there, and leaves out what comes before it.
func TestStreamPositionBehindTheEnd(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 5)
		store := &stream.MemoryStore{}
		cfg := stream.Config{Consumer: "c", Offsets: store}
		require.NoError(t, store.Save(t.Context(), "c", "log", 5))
		r := readStream(t, conn, "log", cfg) // the very end
		suite.FillStream(t, conn, "log", 5, 6)
		assert.Equal(t, []int{5}, r.Until(5))
		require.NoError(t, r.Stop())

		require.NoError(t, store.Save(t.Context(), "c", "log", 7))
		behind, ok := errors.AsType[*stream.PositionError](streamError(t, conn, "log", noop, cfg))
		require.True(t, ok)
		assert.Equal(t, stream.PositionError{Stream: "log", Consumer: "c", Position: 7, End: 6}, *behind)
	})
}

// A stream is deleted, declared again, and grows past the position. Each store notices, at the start and
// while a consumer runs, and nothing is skipped.
func TestAPositionBelongsToOneStream(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		again := func(n int) {
			t.Helper()
			_, err := declare.DeleteQueue(t.Context(), direct.Management(), "log")
			require.NoError(t, err)
			suite.StreamOf(t, direct, "log", n)
		}
		for name, store := range map[string]stream.OffsetStore{"memory": &stream.MemoryStore{}, "file": &stream.FileStore{Dir: t.TempDir()}} {
			again(54)
			cfg := stream.Config{Consumer: "c", Offsets: store}
			r := readStream(t, direct, "log", cfg)
			assert.Equal(t, span(0, 54), r.Until(53))
			require.NoError(t, r.Stop())
			suite.FillStream(t, direct, "log", 54, 60)
			r = readStream(t, direct, "log", cfg)
			assert.Equal(t, span(54, 60), r.Until(59), "the same stream")
			require.NoError(t, r.Stop())

			again(105)
			other, ok := errors.AsType[*stream.PositionError](streamError(t, direct, "log", noop, cfg))
			require.True(t, ok, name)
			assert.Equal(t, stream.PositionError{Stream: "log", Consumer: "c", Position: 60, End: 105, Replaced: true}, *other)
			next, found, err := store.Load(t.Context(), "c", "log")
			require.NoError(t, err)
			assert.True(t, found)
			assert.Equal(t, uint64(60), next, "the position is kept")
		}

		// A consumer that has no connection at that time.
		again(10)
		wire, url := s.Through(t)
		conn, _ := suite.ConnectTo(t, url, suite.Soon)
		got, ended := make(chan int, 1000), make(chan error, 1)
		go func() {
			ended <- stream.Consume(t.Context(), conn, "log", client.JSON(func(_ context.Context, n int) error {
				got <- n
				return nil
			}), stream.Config{})
		}()
		for n := range 10 {
			assert.Equal(t, n, suite.Await(t, got, "a message"))
		}
		wire.Refuse()
		wire.Cut()
		again(20)
		require.NoError(t, wire.Admit())
		other, ok := errors.AsType[*stream.PositionError](suite.Await(t, ended, "the end"))
		require.True(t, ok)
		assert.True(t, other.Replaced)
		assert.Empty(t, got)
	})
}

// Retention removes whole segments, also those that a live consumer has yet to read.
// RabbitMQ continues after them silently, and the consumer logs what is missing.
func TestStreamRetentionUnderALiveConsumer(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: "log", MaxLengthBytes: 200_000, MaxSegmentSize: 50_000}}})
		p := suite.Publisher[[]byte](t, conn, address.Queue("log"))
		body := make([]byte, 10_000)
		// oldest is the offset of the oldest message.
		oldest := func() (offset uint64) {
			failed, ok := errors.AsType[*stream.HandlerError](streamError(t, conn, "log", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				return retry.Permanent(errors.New("seen"))
			}), stream.Config{}))
			require.True(t, ok)
			return failed.Offset
		}
		suite.Publish(t, p, body)
		entered, release := make(chan uint64, 1000), make(chan struct{})
		// The next connection after the consumer's own is refused: the look at the cause tries again.
		var refuse atomic.Int64
		reader, _ := s.Connect(t, func(c *client.Config) {
			c.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				if refuse.Add(-1) == 0 {
					return nil, errors.New("not now")
				}
				return new(net.Dialer).DialContext(ctx, network, address)
			}
		})
		r := suite.HandleStream(t, reader, "log", stream.Config{Prefetch: 1}, nil, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			n, _ := stream.OffsetOf(d)
			entered <- n
			<-release
			return nil
		}))
		assert.Zero(t, suite.Await(t, entered, "the first"))
		refuse.Store(1)
		published := uint64(1)
		suite.Poll(t, "retention removes what the consumer has yet to read", func() bool {
			for range 20 {
				suite.Publish(t, p, body)
				published++
			}
			return oldest() > 20
		})
		close(release)
		next, missing := uint64(1), []string{}
		for next < published {
			n := suite.Await(t, entered, "the next")
			if n > next {
				missing = append(missing, fmt.Sprintf("from=%d to=%d", next, n-1))
			}
			next = n + 1
		}
		require.NotEmpty(t, missing, "the consumer got everything: the test shows nothing")
		suite.Poll(t, "the cause is found while messages are delivered", func() bool { return len(r.Log.With("retention removed messages")) > 0 })
		assert.Contains(t, r.Log.With("retention removed messages")[0], missing[0])
		assert.Negative(t, refuse.Load(), "it tried twice")
		require.NoError(t, r.Stop())
	})
}

func TestStreamFailures(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 10)
		soon := retry.Delays(time.Millisecond)
		store := &stream.MemoryStore{}
		calls := map[int]int{}
		failing := func(outcome error) client.Handler {
			clear(calls)
			return client.JSON(func(_ context.Context, n int) error {
				if calls[n]++; n == 4 {
					return outcome
				}
				return nil
			})
		}
		broken := errors.New("broken")
		position := func() uint64 {
			next, _, _ := store.Load(t.Context(), "c", "log")
			return next
		}
		for name, c := range map[string]struct {
			err    error
			calls  int
			reason client.Reason
		}{
			"any": {broken, 3, retry.ReasonExhausted}, "permanent": {retry.Permanent(broken), 1, retry.ReasonPermanent},
			"dead letter": {client.DeadLetter{Reason: "ugly", Err: broken}, 1, "ugly"},
		} {
			_ = store.Delete(t.Context(), "c", "log")
			failed, ok := errors.AsType[*stream.HandlerError](streamError(t, conn, "log", failing(c.err), stream.Config{Attempts: 3, Backoff: soon, Consumer: "c", Offsets: store}))
			require.True(t, ok, name)
			assert.Equal(t, stream.HandlerError{Stream: "log", Offset: 4, Attempts: c.calls, Reason: c.reason, Err: c.err}, *failed, name)
			assert.Equal(t, c.calls, calls[4], name)
			assert.Equal(t, uint64(4), position(), "the next begins with it")
			assert.Zero(t, calls[5], name)
		}

		// A copy goes to a quorum queue, where it is retried.
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "log.failed"})
		got := make(chan int, 100)
		r := suite.HandleStream(t, conn, "log", stream.Config{Attempts: 2, Backoff: soon, Consumer: "c", Offsets: store, FailedQueue: "log.failed"}, got, client.JSON(func(_ context.Context, n int) error {
			if got <- n; n == 5 {
				panic("ouch")
			}
			return map[bool]error{true: broken}[n == 4]
		}))
		assert.Equal(t, []int{4, 4, 5, 6, 7, 8, 9}, r.Until(9))
		require.NoError(t, r.Stop())
		assert.Equal(t, uint64(10), position())
		type copied struct {
			n, attempt     int
			offset, reason any
		}
		copies := make(chan copied, 10)
		suite.Consume(t, conn, "log.failed", retry.With(policy)(client.JSON(func(ctx context.Context, n int) error {
			d, _ := client.DeliveryFrom(ctx)
			if retry.Attempt(ctx) == 1 {
				return broken
			}
			copies <- copied{n, retry.Attempt(ctx), d.Annotation(annotation.Offset), d.Annotation(annotation.Stream)}
			return nil
		})), client.ConsumerConfig{})
		all := []copied{suite.Await(t, copies, "a copy"), suite.Await(t, copies, "another")}
		assert.ElementsMatch(t, []copied{{4, 2, int64(4), "log"}, {5, 2, int64(5), "log"}}, all)
	})
}

// The saved position at each point at which a process can end, if each is saved: see
// docs/streams.md. A position that can't be saved blocks what follows.
func TestStreamPositions(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", 6)
		store := &failing{fail: map[uint64]int{3: 2}}
		position := func() int {
			next, _, _ := store.Load(t.Context(), "c", "log")
			return int(next)
		}
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "failed"}))
		got := make(chan int, 100)
		r := suite.HandleStream(t, conn, "log", stream.Config{Consumer: "c", Offsets: store, SaveEvery: 1, Attempts: 1, FailedQueue: "failed"}, got, client.JSON(func(_ context.Context, n int) error {
			assert.Equal(t, n, position(), "before and in the handler")
			if n == 4 {
				return errors.New("broken")
			}
			if n == 5 {
				assert.EqualValues(t, 1, suite.Ready(t, conn, "failed"), "the copy is confirmed before its position is saved")
			}
			got <- n
			return nil
		}))
		assert.Equal(t, []int{0, 1, 2, 3, 5}, r.Until(5))
		require.NoError(t, r.Stop())
		assert.Equal(t, 6, position(), "behind the last")
		assert.Equal(t, []uint64{1, 2, 3, 3, 3, 4, 5, 6}, store.asked)
	})
}

// failing is a store whose Save fails so many times for a position.
type failing struct {
	stream.MemoryStore
	fail  map[uint64]int
	asked []uint64
}

func (f *failing) Save(ctx context.Context, consumer, name string, next uint64) error {
	f.asked = append(f.asked, next)
	if f.fail[next]--; f.fail[next] >= 0 {
		return errors.New("full")
	}
	return f.MemoryStore.Save(ctx, consumer, name, next)
}

// follower counts what an Instrument sees of handlers.
type follower struct {
	instrument.None
	handled chan error
}

func (f *follower) Handle(ctx context.Context, d instrument.Delivery) (context.Context, instrument.Handling) {
	return context.WithValue(ctx, followed{}, d.Queue()), followedHandling{f: f}
}

type followed struct{}

type followedHandling struct {
	instrument.Handling
	f *follower
}

func (h followedHandling) Handled(err error) { h.f.handled <- err }

// A consumer of a stream is in its connection's Stats and in the service's health, and an
// Instrument follows its handler.
func TestStreamConsumerIsObserved(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		suite.StreamOf(t, direct, "log", 3)
		wire, url := s.Through(t)
		f := &follower{handled: make(chan error, 100)}
		conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.Instrument = f })
		entered, release := make(chan any, 10), make(chan error)
		began := time.Now()
		r := suite.HandleStream(t, conn, "log", stream.Config{Backoff: retry.Delays(time.Millisecond)}, nil, client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			entered <- ctx.Value(followed{})
			return <-release
		}))
		assert.Equal(t, "log", suite.Await(t, entered, "the handler"), "the Instrument's ctx")
		all := conn.Stats().Consumers
		require.Len(t, all, 1)
		c := all[0]
		assert.True(t, c.Up && c.Queue == "log" && c.Handling == 1 && c.Concurrency == 1 && c.Window == 1000 && c.Unsettled == 1+c.Ready, "%+v", c)
		assert.True(t, c.Oldest.After(began) && c.Oldest.Equal(c.Newest) && !c.Delivered.Before(began), "%+v", c)
		report, err := health.Check(health.Config{StuckAfter: time.Nanosecond}, conn)
		require.NoError(t, err)
		assert.Equal(t, "stuck", report.Problems[0].Kind)

		broken := errors.New("broken")
		release <- broken
		assert.ErrorIs(t, suite.Await(t, f.handled, "the first attempt"), broken)
		suite.Await(t, entered, "the second attempt")
		wire.Refuse()
		wire.Cut()
		release <- nil
		assert.NoError(t, suite.Await(t, f.handled, "the second attempt"))
		suite.Poll(t, "it is down", func() bool {
			all := conn.Stats().Consumers
			if len(all) == 1 && all[0].Handling == 1 { // what has come before is handled
				release <- nil
			}
			return len(all) == 1 && !all[0].Up && all[0].Err != nil && all[0].Handling == 0
		})
		report, err = health.Check(health.Config{}, conn)
		require.NoError(t, err)
		assert.False(t, report.Progress)
		require.NoError(t, wire.Admit())
		suite.Poll(t, "it is up again", func() bool { all := conn.Stats().Consumers; return len(all) == 1 && all[0].Up && all[0].Err == nil })
		require.NoError(t, r.Stop())
		assert.Empty(t, conn.Stats().Consumers)
	})
}

// A publisher can write the annotation in which RabbitMQ reports a message's offset. RabbitMQ
// overwrites it, so no message is skipped for it.
func TestAForgedOffsetSkipsNothing(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		forged := []any{int64(0), int64(1), int64(1000), uint64(1000), "first", int64(-1), true}
		suite.StreamOf(t, conn, "log", 3*len(forged), func(n int, m *client.Message) {
			if n%3 == 1 {
				m.Annotations = map[any]any{"x-stream-offset": forged[n/3]}
			}
		})
		for _, first := range []int{0, 10} {
			r := readStream(t, conn, "log", stream.Config{From: stream.At(uint64(first))})
			assert.Equal(t, span(first, 3*len(forged)), r.Until(3*len(forged)-1))
			require.NoError(t, r.Stop())
		}
	})
}
