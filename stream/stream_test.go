package stream

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestBadConfigs(t *testing.T) {
	t.Parallel()
	store := &MemoryStore{}
	long := strings.Repeat("x", maxFilterBytes+1)
	many := make([]string, maxFilters+1)
	for path, c := range map[string]Config{
		"Config.Consumer":                 {Offsets: store},
		"Config.Offsets":                  {Consumer: "c"},
		"Config.Offsets is a nil pointer": {Consumer: "c", Offsets: (*MemoryStore)(nil)},
		"Config.Consumer is too long":     {Consumer: strings.Repeat("c", 256), Offsets: store},
		"Config.Prefetch":                 {Prefetch: -1},
		"Config.SaveEvery":                {SaveEvery: maxSaveEvery + 1},
		"Config.Attempts":                 {Attempts: -1},
		"Config.Backoff(1)":               {Backoff: retry.Delays(0)},
		"Config.GiveUpAfter":              {GiveUpAfter: -1},
		"Config.Rules[0].If":              {Rules: []retry.ErrorRule{{}}},
		"Config.SaveInterval":             {SaveInterval: -1},
		"Config.Grace":                    {Grace: -1},
		"Config.Failed":                   {Failed: "what"},
		"Config.FailedQueue":              {Failed: FailedForward},
		"Config.FailedQueue has no effect with this value of Failed": {Failed: FailedSkip, FailedQueue: "q"},
		"Config.From":                                  {From: At(math.MaxUint64)},
		"Config.From isn't above zero":                 {From: Ago(0)},
		"Config.From isn't a time":                     {From: Since(time.Time{})},
		"Config.Filter.Values[0]":                      {Filter: Filter{Values: []string{""}}},
		"Config.Filter has too many entries":           {Filter: Filter{Values: many}},
		"Config.Filter.MatchUnfiltered":                {Filter: Filter{MatchUnfiltered: true}},
		"Config.Filter.SQL":                            {Filter: Filter{SQL: "a = 1", Properties: map[string]any{"subject": "x"}}},
		"Config.Filter.SQL has":                        {Filter: Filter{SQL: long}},
		"Config.Filter.SQL isn't valid UTF-8":          {Filter: Filter{SQL: "\xff"}},
		`Config.Filter.Properties["Subject"]`:          {Filter: Filter{Properties: map[string]any{"Subject": "x"}}},
		`Config.Filter.Properties["subject"]`:          {Filter: Filter{Properties: map[string]any{"subject": 1}}},
		`Config.Filter.Properties["group-sequence"]`:   {Filter: Filter{Properties: map[string]any{"group-sequence": nil}}},
		`Config.Filter.ApplicationProperties["x"]`:     {Filter: Filter{ApplicationProperties: map[string]any{"x": []int{1}}}},
		`Config.Filter.ApplicationProperties["y"] has`: {Filter: Filter{ApplicationProperties: map[string]any{"y": Prefix(long)}}},
	} {
		_, err := c.withDefaults()
		bad, ok := errors.AsType[*argument.Error](err)
		require.True(t, ok, "%s: %v", path, err)
		for _, words := range strings.SplitN(path, " ", 2) {
			assert.Contains(t, bad.Error(), words)
		}
	}
	c, err := Config{}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, FailedStop, c.Failed)
	c, err = Config{FailedQueue: "q"}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, FailedForward, c.Failed)
}

func TestBadArguments(t *testing.T) {
	t.Parallel()
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
	for name, err := range map[string]error{
		"conn":    Consume(t.Context(), nil, "s", h, Config{}),
		"handler": Consume(t.Context(), &client.Conn{}, "s", nil, Config{}),
		"func":    Consume(t.Context(), &client.Conn{}, "s", client.HandlerFunc(nil), Config{}),
		"stream":  Consume(t.Context(), &client.Conn{}, "\xff", h, Config{}),
		"empty":   Consume(t.Context(), &client.Conn{}, "", h, Config{}),
	} {
		_, ok := errors.AsType[*argument.Error](err)
		assert.True(t, ok, "%s: %v", name, err)
	}
	_, ok := OffsetOf(nil)
	assert.False(t, ok)
	_, ok = OffsetOf(client.NewDelivery("q", &client.Message{Annotations: amqp.Annotations{annotationOffset: int64(-1)}}))
	assert.False(t, ok)
	n, ok := OffsetOf(client.NewDelivery("q", &client.Message{Annotations: amqp.Annotations{annotationOffset: uint64(7)}}))
	assert.True(t, ok)
	assert.Equal(t, uint64(7), n)
}

func TestOffsets(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)
	for want, o := range map[string]Offset{"first": {}, "last": Last(), "next": Next(), "61s": Ago(time.Minute + 1)} {
		assert.Equal(t, want, o.value())
	}
	assert.Equal(t, int64(7), At(7).value())
	assert.Equal(t, frames.Timestamp(at.UnixMilli()), Since(at).value())
	assert.Equal(t, []string{"first", "2026-01-02T03:04:05Z", "7", "61s ago"}, []string{Offset{}.String(), Since(at).String(), At(7).String(), Ago(time.Minute + 1).String()})
}

// What an edit changes belongs to the message alone.
func TestFilterValue(t *testing.T) {
	t.Parallel()
	own := amqp.Annotations{"x-opt-mine": "1"}
	m := &client.Message{Annotations: own}
	FilterValue("eu")(m)
	assert.Equal(t, amqp.Annotations{"x-opt-mine": "1", annotationFilterValue: "eu"}, m.Annotations)
	FilterValue("")(m)
	assert.Equal(t, own, m.Annotations)
	assert.Equal(t, amqp.Annotations{"x-opt-mine": "1"}, own)
	empty := &client.Message{}
	FilterValue("eu")(empty)
	assert.True(t, Filter{Values: []string{"us", "eu"}}.matches(empty))
	assert.False(t, Filter{Values: []string{"us"}, MatchUnfiltered: true}.matches(empty))
}

func TestFileStore(t *testing.T) {
	t.Parallel()
	ctx, dir := t.Context(), t.TempDir()
	s := &FileStore{Dir: dir}
	load := func(consumer, stream string) any {
		t.Helper()
		next, found, err := s.Load(ctx, consumer, stream)
		if err != nil || !found {
			return err
		}
		return next
	}
	assert.Nil(t, load("c", "s"))
	require.NoError(t, s.Save(ctx, "c", "s", 7))
	require.NoError(t, s.Save(ctx, "c", "s", 8))
	require.NoError(t, s.Save(ctx, "cs", "", 9)) // not the same name
	require.NoError(t, s.Save(ctx, "../../\x00/c", strings.Repeat("s", 10_000), 10))
	assert.Equal(t, uint64(8), load("c", "s"))
	assert.Equal(t, uint64(9), load("cs", ""))
	assert.Equal(t, uint64(10), load("../../\x00/c", strings.Repeat("s", 10_000)))

	// A crash while the next position is written leaves the old one.
	path, err := s.path("c", "s", fileOffset)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path+".tmp", []byte(`{"consu`), 0o600))
	assert.Equal(t, uint64(8), load("c", "s"))
	require.NoError(t, s.Save(ctx, "c", "s", 11))
	assert.Equal(t, uint64(11), load("c", "s"))

	// What can't be read is no new beginning.
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	assert.ErrorContains(t, load("c", "s").(error), path)
	require.NoError(t, os.WriteFile(path, []byte(`{"consumer":"d","stream":"s","next":3}`), 0o600))
	assert.ErrorContains(t, load("c", "s").(error), `belongs to consumer "d"`)
	require.NoError(t, s.SaveMark(ctx, "c", "s", "2:ab"))
	require.NoError(t, s.Save(ctx, "c", "s", 4))
	m, err := s.LoadMark(ctx, "c", "s")
	require.NoError(t, err)
	assert.Equal(t, "2:ab", m)
	for range 2 {
		require.NoError(t, s.Delete(ctx, "c", "s"))
	}
	assert.Nil(t, load("c", "s"))
	m, err = s.LoadMark(ctx, "c", "s")
	require.NoError(t, err)
	assert.Empty(t, m)
	for _, bad := range []*FileStore{nil, {}, {Dir: filepath.Join(dir, "none")}} {
		require.Error(t, bad.Save(ctx, "c", "s", 1))
		_, _, err := bad.Load(ctx, "c", "s")
		require.Error(t, err)
	}
}

// slowStore answers on demand.
type slowStore struct {
	MemoryStore
	begun  chan uint64
	answer chan error
}

func (s *slowStore) Save(ctx context.Context, consumer, stream string, next uint64) error {
	s.begun <- next
	select {
	case err := <-s.answer:
		if err != nil {
			return err
		}
		return s.MemoryStore.Save(ctx, consumer, stream, next)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// The position is saved behind so many messages, or so much time; at most twice as many
// are unsaved.
func TestSaver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slowStore{begun: make(chan uint64, 100), answer: make(chan error, 100)}
		cfg, err := Config{Consumer: "c", Offsets: store, SaveEvery: 10, Logger: slog.New(slog.DiscardHandler)}.withDefaults()
		require.NoError(t, err)
		s := newSaver("s", cfg)
		saved := func() uint64 {
			next, _, _ := store.Load(t.Context(), "c", "s")
			return next
		}
		began := time.Now()
		s.handled(t.Context(), 1, mark{})
		store.answer <- nil
		assert.Equal(t, uint64(1), <-store.begun)
		assert.Equal(t, time.Second, time.Since(began), "SaveInterval")
		synctest.Wait()

		var handled uint64 = 1
		go func() {
			for range 25 {
				handled++
				s.handled(t.Context(), handled, mark{})
			}
		}()
		synctest.Wait()
		assert.LessOrEqual(t, <-store.begun, uint64(21))
		synctest.Wait()
		assert.Equal(t, uint64(21), handled, "20 are unsaved")
		assert.Equal(t, uint64(1), saved())

		store.answer <- errors.New("full") // and it waits on
		store.answer <- errors.New("full")
		synctest.Wait()
		assert.Equal(t, uint64(21), handled)
		time.Sleep(time.Second)
		assert.Len(t, store.begun, 2, "two more attempts, with back-off")
		store.answer <- nil
		synctest.Wait()
		assert.Equal(t, uint64(26), handled)
		assert.Equal(t, uint64(21), saved())

		store.answer <- nil
		require.NoError(t, s.close())
		assert.Equal(t, uint64(26), saved(), "at the end")
		s.handled(t.Context(), 27, mark{})
		store.answer <- errors.New("full")
		failed, ok := errors.AsType[*SaveError](s.close())
		require.True(t, ok)
		assert.Contains(t, failed.Error(), "full")
	})
}

// unavailable is a store that isn't there.
type unavailable struct{ MemoryStore }

func (*unavailable) Save(context.Context, string, string, uint64) error {
	return errors.New("unavailable")
}

func TestAStoreThatFailsForADayIsFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		cfg, err := Config{Consumer: "c", Offsets: &unavailable{}, Logger: slog.New(slog.NewTextHandler(&log, nil))}.withDefaults()
		require.NoError(t, err)
		s := newSaver("s", cfg)
		s.handled(t.Context(), 1, mark{})
		time.Sleep(24 * time.Hour)
		require.Error(t, s.close())
		n := strings.Count(log.String(), "saving a stream consumer's position failed")
		assert.GreaterOrEqual(t, n, 24)
		assert.Less(t, n, 35)
	})
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	cfg, err := Config{Attempts: 3, Backoff: retry.Delays(time.Second, time.Minute)}.withDefaults()
	require.NoError(t, err)
	k := &consumer{cfg: cfg, log: slog.New(slog.DiscardHandler)}
	broken := errors.New("broken")
	own := map[string]any{"x-opt-mine": "1"}
	copied := client.Forward{To: address.Queue("q"), Message: client.NewMessage(nil)}
	for name, c := range map[string]struct {
		err     error
		attempt int
		want    verdict
	}{
		"first":           {broken, 1, verdict{counts: true, pause: time.Second}},
		"second":          {broken, 2, verdict{counts: true, pause: time.Minute}},
		"last":            {broken, 3, verdict{do: doGiveUp, reason: retry.ReasonExhausted, text: "broken"}},
		"permanent":       {retry.Permanent(broken), 1, verdict{do: doGiveUp, reason: retry.ReasonPermanent, text: "broken"}},
		"discard":         {retry.Discard(broken), 1, verdict{do: doNothing}},
		"after":           {retry.After(time.Hour, broken), 1, verdict{counts: true, pause: time.Hour}},
		"after, the last": {retry.After(time.Hour, broken), 3, verdict{do: doGiveUp, reason: retry.ReasonExhausted, text: "broken"}},
		"snooze":          {retry.Snooze(time.Hour), 3, verdict{pause: time.Hour}},
		"requeue":         {client.Requeue{}, 3, verdict{pause: time.Second}},
		"requeue, failed": {client.Requeue{Failed: true}, 1, verdict{counts: true, pause: time.Second}},
		"dead letter":     {client.DeadLetter{Reason: "ugly", Err: broken, Annotations: own}, 1, verdict{do: doGiveUp, reason: "ugly", text: "broken", annotations: own}},
		"no reason":       {client.DeadLetter{}, 1, verdict{do: doGiveUp, reason: retry.ReasonRejected}},
		"null":            {client.DeadLetter{Reason: "ugly", Annotations: map[string]any{"x-opt-mine": nil}}, 1, verdict{do: doGiveUp, reason: "ugly"}},
		"modify":          {client.Modify{Annotations: own}, 3, verdict{pause: time.Second}},
		"modify, failed":  {client.Modify{Failed: true}, 1, verdict{counts: true, pause: time.Second}},
		"modify, dead":    {client.Modify{DeadLetter: true, Annotations: own, Err: broken}, 1, verdict{do: doGiveUp, reason: retry.ReasonRejected, text: "broken", annotations: own}},
		"forward":         {copied, 3, verdict{do: doForward, forward: copied}},
		"bad forward":     {client.Forward{}, 1, verdict{do: doGiveUp, reason: client.ReasonUnforwardable}},
		"else":            {client.Forward{Else: client.Requeue{}}, 3, verdict{pause: time.Second}},
		"park":            {client.Park{Token: "payment", Until: time.Now().Add(time.Hour), Annotations: own}, 1, verdict{do: doGiveUp, reason: client.ReasonUnparkable, annotations: own}},
		"nil pointer":     {(*client.DeadLetter)(nil), 1, verdict{counts: true, pause: time.Second}},
	} {
		got := k.judge(&failure{err: c.err, attempts: c.attempt})
		if name == "bad forward" || name == "park" {
			assert.NotEmpty(t, got.text)
			got.text = ""
		}
		assert.Equal(t, c.want, got, name)
	}
}

// Rules and GiveUpAfter decide as they do for retry.With.
func TestPolicyInPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ugly, down, old := errors.New("ugly"), errors.New("down"), errors.New("old")
		soon := retry.Delays(time.Second)
		cfg, err := Config{Attempts: 3, Backoff: soon, GiveUpAfter: time.Minute, Rules: []retry.ErrorRule{
			{If: retry.On(ugly), Do: retry.ActionDeadLetter}, {If: retry.On(old), Do: retry.ActionDiscard},
			{If: retry.On(down), Do: retry.ActionRetryUncounted, Backoff: retry.Delays(10 * time.Second)},
			{If: func(err error) bool { return err.Error() == "panics" && err.(interface{ Never() }) != nil }},
		}}.withDefaults()
		require.NoError(t, err)
		k := &consumer{cfg: cfg, log: slog.New(slog.DiscardHandler)}
		assert.Equal(t, verdict{do: doGiveUp, reason: retry.ReasonPermanent, text: "ugly"}, k.judge(&failure{err: ugly, attempts: 1}))
		assert.Equal(t, verdict{do: doNothing}, k.judge(&failure{err: old, attempts: 1}))
		assert.Equal(t, client.ReasonPanicked, k.judge(&failure{err: errors.New("panics"), attempts: 1}).reason)

		f := &failure{err: down, attempts: 1}
		for range 6 {
			assert.Equal(t, verdict{pause: 10 * time.Second}, k.judge(f), "it uses up no attempt")
			time.Sleep(10 * time.Second)
		}
		v := k.judge(f)
		assert.Equal(t, retry.ReasonExhausted, v.reason)
		assert.Equal(t, "dead-lettered 1m0s after the first failure: down", v.text)
		f.err = retry.Snooze(time.Second)
		assert.Equal(t, retry.ReasonExhausted, k.judge(f).reason, "it has failed before")
		assert.Equal(t, verdict{pause: time.Hour}, k.judge(&failure{err: retry.Snooze(time.Hour), attempts: 1}))

		many, err := Config{Attempts: 1 << 30, Backoff: soon}.withDefaults()
		require.NoError(t, err)
		k.cfg = many
		assert.Equal(t, verdict{counts: true, pause: time.Second}, k.judge(&failure{err: down, attempts: 1<<30 - 1}))
		assert.Equal(t, retry.ReasonExhausted, k.judge(&failure{err: down, attempts: 1 << 30}).reason)
	})
}

// Nothing that a message holds makes decoding it panic, or end the process.
func TestUnreadableMessages(t *testing.T) {
	t.Parallel()
	deep := []byte("\x00\x53\x77")
	for range 100_000 {
		deep = append(deep, 0xc0, 0xff, 0x01)
	}
	for _, payload := range [][]byte{nil, {}, {0}, []byte("rubbish"), deep} {
		m, err := decode(payload)
		_, ok := offsetIn(m)
		assert.False(t, ok)
		if len(payload) > 0 {
			require.Error(t, err)
			assert.Equal(t, payload, m.GetData())
		}
		_, ok = offsetOfEncoded(payload)
		assert.False(t, ok)
	}
}

// A mark survives its text, and hostile texts are no marks. It doesn't depend on what brokers change.
func TestMarks(t *testing.T) {
	t.Parallel()
	encoded := func(m *frames.Message) []byte {
		b, err := m.Append(nil)
		require.NoError(t, err)
		return b
	}
	message := func(body string, annotations frames.Map) []byte {
		return encoded(&frames.Message{Annotations: annotations, Properties: &frames.Properties{MessageID: "1"}, Body: append([]byte{0, 0x53, 0x75, 0xa0, byte(len(body))}, body...)})
	}
	m := markOf(7, message("a", frames.Map{{Key: frames.Symbol("x-stream-offset"), Value: int64(7)}}))
	assert.Equal(t, m, readMark(m.String()))
	assert.LessOrEqual(t, len(mark{maxOffset, 1<<64 - 1, true}.String()), 64)
	assert.Equal(t, m, markOf(7, message("a", nil)), "annotations are the broker's")
	assert.NotEqual(t, m, markOf(7, message("b", nil)))
	assert.NotEqual(t, m, markOf(8, message("a", nil)))
	assert.Empty(t, mark{}.String())
	for _, bad := range []string{"", "7", "7:", ":ab", "-1:ab", "99999999999999999999:ab", "x:y"} {
		assert.Equal(t, mark{}, readMark(bad), "%q", bad)
	}
	for _, hostile := range [][]byte{nil, {0}, {0, 0x53}, []byte("rubbish")} {
		assert.True(t, markOf(1, hostile).known)
	}
}

// A host's clock that is set back delays by no more than the limit that a silence is noticed.
func TestASilenceIsNoticedAfterTheClockWasSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &consumer{}
		s := k.listen(t.Context())
		defer s.stop()
		k.counts.delivered.Store(time.Now().Add(time.Hour).UnixNano()) // by the clock before
		began := time.Now()
		<-s.ctx.Done()
		assert.ErrorIs(t, context.Cause(s.ctx), errQuiet)
		assert.Less(t, time.Since(began), 2*silenceLimit)
	})
}
