package schedule_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/schedule"
)

// mortal is a process with a worker of a group.
type mortal struct {
	dead   atomic.Bool
	mu     sync.Mutex
	conns  []net.Conn
	cancel context.CancelFunc
	done   chan struct{}
}

func (m *mortal) dial(b *hopbacktest.Broker) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if m.dead.Load() {
			return nil, errors.New("the process is dead")
		}
		c, err := b.Dial(ctx, network, address)
		if err == nil {
			m.mu.Lock()
			m.conns = append(m.conns, c)
			m.mu.Unlock()
		}
		return c, err
	}
}

func (w *world) mortal(cfg schedule.RunConfig) *mortal {
	ctx, cancel := context.WithCancel(context.Background())
	m := &mortal{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(m.done)
		conn, err := client.Connect(ctx, w.broker.URL(), client.Config{Dial: m.dial(w.broker), IdleTimeout: w.idle, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return
		}
		g := schedule.Group{Conn: conn, Name: "g"}
		if err := g.Run(ctx, cfg); err != nil && !m.dead.Load() {
			w.t.Error(err)
		}
		_ = conn.Close(context.Background())
	}()
	return m
}

// kill is a kill -9: what isn't written yet never is.
func (m *mortal) kill() {
	m.dead.Store(true)
	m.mu.Lock()
	for _, c := range m.conns {
		_ = c.Close()
	}
	m.mu.Unlock()
	m.cancel()
}

// offset are the multiples of every, moved by offset.
type offset struct{ every, offset time.Duration }

func (o offset) Next(t time.Time) time.Time {
	return t.Add(-o.offset).Truncate(o.every).Add(o.every + o.offset)
}

// relative are times that follow from the one before alone.
type relative time.Duration

func (d relative) Next(t time.Time) time.Time { return t.Add(time.Duration(d)) }

// Processes die, and clocks are set, and each message comes once for each of its times. HOPBACK_LONG=1 makes it 10,000
// messages, 100 workers killed, and 20 restarts of the broker.
func TestRecurringMessagesSurviveAStorm(t *testing.T) {
	t.Parallel()
	messages, kills, restarts, hours := 400, 12, 3, 4
	if explore.UnderRace {
		messages, kills, hours = 100, 6, 2
	}
	if os.Getenv("HOPBACK_LONG") != "" {
		messages, kills, restarts, hours = 10_000, 100, 20, 24
	}
	for _, version := range []string{"4.0.5", "4.3.6", "4.4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			synctest.Test(t, func(t *testing.T) { storm(t, version, messages, kills, restarts, hours) })
			fmt.Printf("REPORT %s: %d messages, %d kills, %d restarts: it took %v\n", t.Name(), messages, kills, restarts, time.Since(began).Round(time.Millisecond))
		})
	}
}

func storm(t *testing.T, version string, messages, kills, restarts, hours int) {
	w, _ := recurring(t, version)
	random := rand.New(rand.NewPCG(3, 5))
	var cfg schedule.RunConfig
	byName := map[string]schedule.Times{}
	for n := range messages {
		r := schedule.Recurring{Name: fmt.Sprint("m", n), To: address.Queue("work"), Missed: schedule.MissedAll}
		r.Times = offset{time.Hour, time.Duration(random.IntN(360)) * 10 * time.Second}
		if n%100 == 0 {
			r.Times = relative(17 * time.Minute)
		}
		byName[r.Name] = r.Times
		cfg.Recurring = append(cfg.Recurring, r)
	}
	once := newTally()
	var step atomic.Int64 // by which the broker's clock is ahead, or was in the last 10 minutes
	early := 0
	w.consume("work", dedupe.With(dedupe.Config{TTL: 100 * time.Hour, Size: 10_000_000})(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		_, at, ok := schedule.ParseMessageID(d.Message().Properties.MessageID.(string))
		if !ok || at.After(time.Now().Add(time.Duration(step.Load()))) {
			early++
		}
		return once.Handle(ctx, d)
	})))
	workers := make([]*mortal, 4)
	for n := range workers {
		workers[n] = w.mortal(cfg)
	}
	time.Sleep(time.Minute)
	start := time.Now()
	once.clear()
	span := time.Duration(hours) * time.Hour
	type event struct {
		at time.Duration
		do func()
	}
	var events []event
	all := workers
	for range kills {
		n := random.IntN(len(workers))
		events = append(events, event{time.Duration(random.Int64N(int64(span))), func() {
			workers[n].kill()
			workers[n] = w.mortal(cfg)
			all = append(all, workers[n])
		}})
	}
	for range restarts {
		events = append(events, event{time.Duration(random.Int64N(int64(span))), func() {
			w.broker.Kill()
			time.Sleep(time.Duration(random.Int64N(int64(5 * time.Minute))))
			w.broker.Restart()
		}})
	}
	for i, by := range []time.Duration{time.Hour, -time.Hour, -time.Hour, time.Hour} {
		events = append(events, event{span * time.Duration(i+1) / 6, func() {
			w.broker.StepClock(by)
			if by < 0 {
				time.Sleep(11 * time.Minute) // workers may not have noticed before
			}
			step.Add(int64(by))
		}})
	}
	slices.SortFunc(events, func(a, b event) int { return int(a.at - b.at) })
	for _, e := range events {
		time.Sleep(max(0, e.at-time.Since(start)))
		e.do()
	}
	time.Sleep(max(0, span-time.Since(start)) + 2*time.Hour) // for what was put off, and until the clock is no longer behind
	synctest.Wait()
	end := time.Now()
	for _, m := range workers {
		m.cancel()
	}
	for _, m := range all {
		<-m.done
	}
	assert.Zero(t, early)
	for id, n := range once.count {
		require.Equal(t, 1, n, id)
	}
	missing, total := 0, 0
	times := map[string][]time.Time{}
	for id := range once.count {
		name, at, _ := schedule.ParseMessageID(id)
		times[name] = append(times[name], at)
	}
	for name, is := range byName {
		slices.SortFunc(times[name], time.Time.Compare)
		if d, ok := is.(relative); ok {
			for i, at := range times[name] {
				if i > 0 && at.Sub(times[name][i-1]) != time.Duration(d) {
					missing++
				}
			}
			total += len(times[name])
			assert.InDelta(t, int(end.Sub(start)/time.Duration(d)), len(times[name]), 1)
			continue
		}
		for at := is.Next(start); at.Before(end.Add(-time.Minute)); at = is.Next(at) {
			if total++; once.count[schedule.MessageID(name, at)] == 0 {
				missing++
			}
		}
	}
	assert.Zero(t, missing, "of %d", total)
}
