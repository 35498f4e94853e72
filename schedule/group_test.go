package schedule_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/schedule"
)

// tally counts the deliveries of each message-id.
type tally struct {
	mu    sync.Mutex
	count map[string]int
	at    map[string]time.Time // when the first one came
}

func newTally() *tally { return &tally{count: map[string]int{}, at: map[string]time.Time{}} }

func (a *tally) Handle(_ context.Context, d *client.Delivery) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	id := d.Message().Properties.MessageID.(string)
	if a.count[id]++; a.count[id] == 1 {
		a.at[id] = time.Now()
	}
	return nil
}

func (a *tally) of(id string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.count[id]
}

func (a *tally) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.count)
}

// perName counts the ids of each name.
func (a *tally) perName() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	per := map[string]int{}
	for id := range a.count {
		name, _, _ := schedule.ParseMessageID(id)
		per[name]++
	}
	return per
}

// clear forgets all, and returns how many ids there were.
func (a *tally) clear() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n = len(a.count)
	clear(a.count)
	clear(a.at)
	return n
}

// recurring is a world with the group "g", whose messages go to the queue "work".
func recurring(t *testing.T, version string) (*world, schedule.Group) {
	t.Helper()
	w := &world{t: t, idle: 12 * time.Hour, broker: hopbacktest.Start(t, hopbacktest.Config{Version: version})}
	w.conn = w.connect()
	topology, err := schedule.GroupTopology(schedule.Names{}, "g")
	require.NoError(t, err)
	topology.Queues = append(topology.Queues, quorum("work"))
	w.apply(topology)
	return w, schedule.Group{Conn: w.conn, Name: "g"}
}

func (w *world) group(g schedule.Group, cfg schedule.RunConfig) (stop func()) {
	return w.run(func(ctx context.Context) error { return g.Run(ctx, cfg) })
}

func every(name string, d time.Duration) schedule.Recurring {
	return schedule.Recurring{Name: name, Times: schedule.Every(d), To: address.Queue("work")}
}

func forEachVersion(t *testing.T, test func(t *testing.T, version string)) {
	for _, version := range []string{"4.0.5", "4.3.6", "4.4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { test(t, version) })
		})
	}
}

func TestEachTimeComesOnceAndNotEarly(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		began := time.Now()
		for n := range 3 {
			w.group(g, schedule.RunConfig{Worker: fmt.Sprint(n), Recurring: []schedule.Recurring{every("minute", time.Minute), every("hour", time.Hour)}})
		}
		time.Sleep(3*time.Hour + time.Minute/2)
		synctest.Wait()
		assert.Equal(t, 183, got.len())
		for at := began.Truncate(time.Minute).Add(time.Minute); at.Before(time.Now()); at = at.Add(time.Minute) {
			id := schedule.MessageID("minute", at)
			require.Equal(t, 1, got.of(id), id)
			late := got.at[id].Sub(at)
			assert.GreaterOrEqual(t, late, time.Duration(0))
			assert.Less(t, late, 50*time.Millisecond)
		}
	})
}

func TestPauseResumeRemoveAndRunNow(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		ctx := t.Context()
		_, err := g.List(ctx, schedule.ListConfig{})
		require.ErrorIs(t, err, client.ErrNotFound)
		cfg := schedule.RunConfig{Worker: "w", Recurring: []schedule.Recurring{every("a", time.Minute), every("b", time.Minute)}}
		cfg.Recurring[0].Missed = schedule.MissedAll
		stop := w.group(g, cfg)
		pass := func(d time.Duration) int {
			got.clear()
			time.Sleep(d)
			synctest.Wait()
			return got.len()
		}
		time.Sleep(time.Second)
		assert.Equal(t, 10, pass(5*time.Minute))
		require.Error(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"unknown"}}))
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"a"}, By: "ada", Why: "maintenance"}))
		assert.Equal(t, 5, pass(5*time.Minute))
		l, err := g.List(ctx, schedule.ListConfig{})
		require.NoError(t, err)
		require.Len(t, l.Recurring, 2)
		require.NotNil(t, l.Recurring[0].Paused)
		assert.Equal(t, "ada: maintenance", l.Recurring[0].Paused.By+": "+l.Recurring[0].Paused.Why)
		assert.Nil(t, l.Recurring[1].Paused)
		assert.Equal(t, "every 1m0s", l.Recurring[0].Spec)

		// A pause outlasts everything, and times in it aren't missed ones.
		stop()
		w.broker.Kill()
		w.broker.Restart()
		time.Sleep(10 * time.Minute)
		require.NoError(t, g.Resume(ctx, "a"))
		got.clear()
		stop = w.group(g, cfg)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, 1, got.len(), "the last time of b")
		assert.Equal(t, 10, pass(5*time.Minute))

		id, err := g.RunNow(ctx, "a")
		require.NoError(t, err)
		synctest.Wait()
		assert.Equal(t, 1, got.of(id))
		require.NoError(t, g.Remove(ctx, "a"))
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{For: 2 * time.Minute}))
		assert.Equal(t, 3, pass(5*time.Minute), "b, after its group's pause of 2 minutes")
		l, err = g.List(ctx, schedule.ListConfig{})
		require.NoError(t, err)
		assert.True(t, l.Recurring[0].Removed)
		require.NoError(t, g.Resume(ctx, "a"))
		assert.Equal(t, 10, pass(5*time.Minute))
		stop()
	})
}

// List knows the last and the next times of messages if it knows their Spec, and if the worker has the same times.
func TestListKnowsTheLastTimes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		other := every("other", 10*time.Minute)
		other.Spec = "every 7m"
		time.Sleep(time.Second)
		stop := w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{every("minute", time.Minute), every("day", 24*time.Hour), every("second", time.Second), other}})
		time.Sleep(70*time.Minute + 3*time.Second) // after the worker has written down the times
		synctest.Wait()
		times := func(spec string) schedule.Times {
			d, err := time.ParseDuration(spec[len("every "):])
			assert.NoError(t, err)
			return schedule.Every(d)
		}
		check := func() {
			t.Helper()
			l, err := g.List(t.Context(), schedule.ListConfig{Times: times})
			require.NoError(t, err)
			of := map[string]schedule.RecurringState{}
			for _, r := range l.Recurring {
				of[r.Name] = r
			}
			for name, d := range map[string]time.Duration{"minute": time.Minute, "second": time.Second} {
				assert.Equal(t, l.Done.Truncate(d), of[name].Last, name)
				assert.Equal(t, l.Done.Truncate(d).Add(d), of[name].Next, name)
			}
			assert.Zero(t, of["day"].Last, "there was none yet")
			assert.Equal(t, l.Done.Truncate(24*time.Hour).Add(24*time.Hour), of["day"].Next)
			assert.Zero(t, of["other"].Last, "its times aren't those of its Spec")
			assert.True(t, of["other"].Next.Equal(of["other"].Next.Truncate(10*time.Minute)), "%v is none of its times", of["other"].Next)
		}
		check()
		stop()
		time.Sleep(48 * time.Hour)
		check()
		l, err := g.List(t.Context(), schedule.ListConfig{Select: func(r schedule.RecurringState) bool { return r.Name == "day" }})
		require.NoError(t, err)
		require.Len(t, l.Recurring, 1)
		assert.Zero(t, l.Recurring[0].Last)
	})
}

func TestMissedTimes(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		cfg := schedule.RunConfig{}
		for _, m := range []schedule.Missed{schedule.MissedOne, schedule.MissedSkip, schedule.MissedAll} {
			r := every(string(m), 10*time.Minute)
			r.Missed = m
			cfg.Recurring = append(cfg.Recurring, r)
		}
		second := every("second", time.Second)
		second.Missed = schedule.MissedAll
		cfg.Recurring = append(cfg.Recurring, second)
		stop := w.group(g, cfg)
		time.Sleep(1300 * time.Millisecond) // it stops, and starts again, between two seconds
		stop()
		synctest.Wait()
		began := time.Now()
		got.clear()
		time.Sleep(59 * time.Minute)
		w.group(g, cfg)
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		per := map[string]int{}
		for id, n := range got.count {
			name, at, ok := schedule.ParseMessageID(id)
			require.True(t, ok)
			assert.Equal(t, 1, n, id)
			assert.True(t, at.After(began.Add(-time.Second)))
			per[name]++
		}
		assert.Equal(t, map[string]int{"one": 1, "all": 5, "second": 1000}, per)
	})
}

// What can't be used is refused, or stops alone.
func TestTimesThatCantBeUsed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		got := newTally()
		w.consume("work", got)
		limit := time.Now().Add(10 * time.Minute)
		after := func(what func(time.Time) time.Time) schedule.Times {
			return timesFunc(func(t time.Time) time.Time {
				if t.After(limit) && t.Year() < 2020 { // Run tries a time of 2026
					return what(t)
				}
				return t.Truncate(time.Minute).Add(time.Minute)
			})
		}
		bad := map[string]func(time.Time) time.Time{
			"stuck": func(t time.Time) time.Time { return t },
			"past":  func(t time.Time) time.Time { return t.Add(-time.Hour) },
			"panic": func(time.Time) time.Time { panic("no") },
		}
		for name, what := range bad {
			err := g.Run(t.Context(), schedule.RunConfig{Recurring: []schedule.Recurring{{Name: name, Times: timesFunc(what), To: address.Queue("work")}}})
			require.ErrorContains(t, err, "Times can't be used", name)
		}
		bad["zero"] = func(time.Time) time.Time { return time.Time{} }
		cfg := schedule.RunConfig{Recurring: []schedule.Recurring{every("good", time.Minute)}}
		for name, what := range bad {
			cfg.Recurring = append(cfg.Recurring, schedule.Recurring{Name: name, Times: after(what), To: address.Queue("work")})
		}
		w.group(g, cfg)
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		per := got.perName()
		assert.InDelta(t, 30, per["good"], 1)
		for name := range bad {
			assert.InDelta(t, 11, per[name], 1, name)
		}
	})
}

type timesFunc func(time.Time) time.Time

func (f timesFunc) Next(t time.Time) time.Time { return f(t) }

// Nothing is sent while nothing is due, and nobody looks at ten thousand messages in a loop.
func TestIdleGroupsSendNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		var cfg schedule.RunConfig
		var calls atomic.Int64
		for n := range 10_000 {
			cfg.Recurring = append(cfg.Recurring, schedule.Recurring{Name: fmt.Sprint(n), To: address.Queue("work"), Times: timesFunc(func(t time.Time) time.Time {
				calls.Add(1)
				return schedule.Every(24 * time.Hour).Next(t)
			})})
		}
		w.group(g, cfg)
		w.group(g, cfg)
		time.Sleep(20 * time.Minute) // until consumers ask rarely whether their queue is empty
		frames := func() (n int) {
			for _, c := range w.broker.Connections() {
				n += c.Frames(hopbacktest.DirectionFromClient) + c.Frames(hopbacktest.DirectionToClient)
			}
			return n
		}
		synctest.Wait()
		most, called := 0, calls.Load()
		for range 20 {
			before := frames()
			time.Sleep(time.Minute)
			synctest.Wait()
			most = max(most, frames()-before)
		}
		assert.Equal(t, called, calls.Load())
		assert.LessOrEqual(t, most, 60)
		t.Log("frames in a minute, at most:", most)
	})
}

// What a target refuses doesn't delay the others, and is published once it is accepted.
func TestARefusedMessageBlocksNoOther(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		lost := every("lost", time.Minute)
		lost.To, lost.Missed = address.Queue("later"), schedule.MissedAll
		w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{every("good", time.Minute), lost}})
		time.Sleep(30*time.Minute + time.Second)
		synctest.Wait()
		assert.InDelta(t, 30, got.len(), 1)
		w.apply(declare.Topology{Queues: []declare.Queue{quorum("later")}})
		late := newTally()
		w.consume("later", late)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.InDelta(t, 31, late.len(), 1)
		for id, n := range got.count {
			assert.Equal(t, 1, n, id)
		}
	})
}
