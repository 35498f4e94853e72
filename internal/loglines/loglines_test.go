package loglines

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// output is a buffer that timers write to.
type output struct {
	mu sync.Mutex
	bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.Buffer.Write(b)
}

// limited returns a logger through Repeats, and what reads its lines.
func limited(t *testing.T) (log *slog.Logger, r *Repeats, lines func() []map[string]any) {
	var out output
	r = NewRepeats(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return slog.New(r), r, func() (all []map[string]any) {
		out.mu.Lock()
		defer out.mu.Unlock()
		for line := range strings.Lines(out.String()) {
			var l map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &l))
			all = append(all, l)
		}
		out.Reset()
		return all
	}
}

func sum(lines []map[string]any) (n int) {
	for _, l := range lines {
		if more, ok := l[attrMore].(float64); ok {
			n += int(more)
		} else {
			n++
		}
	}
	return n
}

// 5,000 failures in a second are two lines: the first, and one with the number of the others.
func TestRepeatsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, _, lines := limited(t)
		log = log.With("queue", "orders")
		for i := range 5000 {
			log.Info("an attempt failed", "message_id", fmt.Sprint("o-", i), "attempt", 1+i%3, "error", fmt.Errorf("order %d: the bank timed out after %v", i, time.Duration(i)))
			time.Sleep(time.Second / 5000)
		}
		first := lines()
		require.Len(t, first, 1)
		assert.Equal(t, "o-0", first[0]["message_id"])
		assert.Equal(t, "order 0: the bank timed out after 0s", first[0]["error"])
		time.Sleep(RepeatsEvery)
		rest := lines()
		require.Len(t, rest, 1)
		delete(rest[0], "time")
		assert.Equal(t, map[string]any{
			"level": "INFO", "msg": "an attempt failed", "queue": "orders", "error": "order 4999: the bank timed out after 4.999µs",
			"more": 4999., "in": float64(RepeatsEvery),
		}, rest[0], "without what differs")

		time.Sleep(RepeatsEvery)
		assert.Empty(t, lines(), "nothing has happened")
		log.Info("an attempt failed", "message_id", "late", "error", errors.New("order 7: the bank timed out after 3s"))
		assert.Len(t, lines(), 1, "after a quiet time the first is written again")
	})
}

// A kind that continues has one line every 10 s.
func TestRepeatsThatContinue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, r, lines := limited(t)
		began := time.Now()
		for range 3500 { // 35 s
			log.Warn("a message is dead-lettered", "message_id", "m", "reason", "exhausted", "error", errors.New("failed"))
			time.Sleep(10 * time.Millisecond)
		}
		r.Flush()
		all := lines()
		assert.Len(t, all, 5)
		assert.Equal(t, 3500, sum(all))
		for i, l := range all {
			at, err := time.Parse(time.RFC3339Nano, l["time"].(string))
			require.NoError(t, err)
			assert.Equal(t, min(time.Duration(i)*RepeatsEvery, 35*time.Second), at.Sub(began))
		}
		assert.EqualValues(t, 5*time.Second, all[4]["in"], "a flush comes before the time is over")
		r.Flush()
		time.Sleep(time.Minute)
		assert.Empty(t, lines(), "a count is written once")
	})
}

// What differs in cause, reason, queue, level, or message is of another kind.
func TestKindsOfRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, r, lines := limited(t)
		defer r.Flush()
		a, b := log.With("queue", "a"), log.With("queue", "b")
		for range 2 {
			a.Info("x", "message_id", 1, "error", errors.New(`"Ann" isn't known`))
			a.Info("x", "message_id", 2, "error", errors.New("`Bob and Eve` isn't known"))
			a.Info("x", "message_id", 3, "error", errors.New("the bank is closed"))
			a.Info("x", "message_id", 4, "reason", "exhausted")
			a.Info("x", "message_id", 4, "reason", "permanent")
			a.Warn("x", "message_id", 4, "reason", "permanent")
			a.Info("y", "message_id", 4)
			b.Info("y", "message_id", 4)
			log.Info("y", "queue", "c", "message_id", 4)
			log.Info("y", "offset", 4)
		}
		assert.Len(t, lines(), 9)
		for range 3 {
			log.Info("the connection is lost")
			log.Debug("x", "message_id", 1)
			log.WithGroup("g").Info("x", "message_id", 1)
		}
		assert.Len(t, lines(), 9, "not about one message, or written for somebody who wants each")
	})
}

// However many errors there are, the number of lines is bounded, and none is lost.
func TestKindsOfRepeatsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, r, lines := limited(t)
		for i := range 5000 {
			word := strings.Map(func(c rune) rune { return c - '0' + 'a' }, fmt.Sprint(i))
			log.Info("an attempt failed", "message_id", i, "error", errors.New("unknown "+word))
		}
		r.Flush()
		all := lines()
		assert.Len(t, all, maxKinds+2)
		assert.Equal(t, 5000, sum(all))
		assert.NotContains(t, all[len(all)-1], "error", "they have none in common")
	})
}

// panics is an error whose text can't be read.
type panics struct{}

func (panics) Error() string { panic("no text") }

// An error that panics, and a text that isn't UTF-8, cost nothing.
func TestRepeatsWithBadErrors(t *testing.T) {
	log, r, lines := limited(t)
	for range 2 {
		log.Info("x", "message_id", 1, "error", panics{})
		log.Info("x", "message_id", 1, "error", strings.Repeat("\xff\"", 1000))
	}
	r.Flush()
	assert.Len(t, lines(), 4)
}

// Lines from many goroutines are counted, also while others flush.
func TestRepeatsFromManyGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, r, lines := limited(t)
		for range 10 {
			go func() {
				for range 1000 {
					log.InfoContext(context.Background(), "x", "message_id", 1)
				}
			}()
			go r.Flush()
		}
		synctest.Wait()
		r.Flush()
		assert.Equal(t, 10_000, sum(lines()))
	})
}

// An outage that lasts is worth a line after 0, 1, 2, 4, ... minutes, and once an hour later on.
func TestLinesOfAnOutage(t *testing.T) {
	var o Outage
	began := time.Now()
	var due []time.Duration
	for at := time.Duration(0); at < 5*time.Hour; at += 7 * time.Second {
		if o.Due(began.Add(at)) {
			due = append(due, at.Truncate(time.Minute))
		}
	}
	assert.Equal(t, []time.Duration{0, 1, 2, 4, 8, 16, 32, 64, 124, 184, 244}, scaled(due))
	o = Outage{}
	assert.Equal(t, slog.LevelWarn, o.Level(began), "another outage")
	assert.Equal(t, slog.LevelDebug, o.Level(began.Add(59*time.Second)))
}

func scaled(all []time.Duration) []time.Duration {
	for i := range all {
		all[i] /= time.Minute
	}
	return all
}
