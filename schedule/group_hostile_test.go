package schedule_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/schedule"
)

// A worker that dies between the publish and the change of the token leaves the time to the next one: the message comes
// twice, with the same message-id, and middleware/dedupe handles it once.
func TestACrashAfterThePublishRepeatsTheMessageID(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, _ := recurring(t, version)
		raw, once := newTally(), newTally()
		handler := dedupe.With(dedupe.Config{})(once)
		w.consume("work", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			_ = raw.Handle(ctx, d)
			return handler.Handle(ctx, d)
		}))
		cfg := schedule.RunConfig{Recurring: []schedule.Recurring{every("m", time.Hour)}}
		first := w.mortal(cfg)
		time.Sleep(time.Second)
		at := time.Now().Truncate(time.Hour).Add(time.Hour)
		release, err := w.broker.Queue("work").HoldConfirms()
		require.NoError(t, err)
		time.Sleep(time.Until(at) + time.Second)
		synctest.Wait()
		id := schedule.MessageID("m", at)
		require.Equal(t, 1, raw.of(id))
		first.kill()
		release()
		second := w.mortal(cfg)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, 2, raw.of(id))
		assert.Equal(t, 1, once.of(id))
		second.cancel()
		<-first.done
		<-second.done
	})
}

// Two versions of a program: the one that was started last publishes, or the one with the higher Version. Neither
// changes it back, and the old one takes over if the new one dies.
func TestTwoVersionsOfAProgram(t *testing.T) {
	t.Parallel()
	for name, newer := range map[string]int64{"by start": 0, "by version": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, g := recurring(t, "4.3.6")
				got := newTally()
				w.consume("work", got)
				// Each message names the version that it is of.
				of := func(version string) func(time.Time) (*client.Message, error) {
					return func(time.Time) (*client.Message, error) { return client.NewMessage([]byte(version)), nil }
				}
				var mu sync.Mutex
				versions := map[string]int{}
				w.apply(declare.Topology{Queues: []declare.Queue{quorum("versions")}})
				w.consume("versions", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					mu.Lock()
					defer mu.Unlock()
					versions[string(d.Message().GetData())]++
					return nil
				}))
				old := schedule.RunConfig{Worker: "old", Recurring: []schedule.Recurring{
					{Name: "kept", Times: schedule.Every(time.Minute), To: address.Queue("versions"), Message: of("old")},
					every("dropped", time.Minute),
				}}
				young := schedule.RunConfig{Worker: "new", Version: newer, Recurring: []schedule.Recurring{
					{Name: "kept", Times: schedule.Every(time.Minute), To: address.Queue("versions"), Message: of("new")},
					every("added", time.Minute),
				}}
				pass := func(d time.Duration) map[string]int {
					got.clear()
					mu.Lock()
					clear(versions)
					mu.Unlock()
					time.Sleep(d)
					synctest.Wait()
					per := got.perName()
					mu.Lock()
					defer mu.Unlock()
					for v, n := range versions {
						per[v] += n
					}
					return per
				}
				stopOld := []func(){w.group(g, old), w.group(g, old)}
				time.Sleep(time.Second)
				assert.Equal(t, map[string]int{"old": 10, "dropped": 10}, pass(10*time.Minute))
				m := w.mortal(young)
				time.Sleep(time.Second)
				assert.Equal(t, map[string]int{"new": 60, "added": 60}, pass(time.Hour))
				l, err := g.List(t.Context(), schedule.ListConfig{})
				require.NoError(t, err)
				assert.Equal(t, newer, l.Version)
				assert.True(t, strings.HasPrefix(l.Worker, "new#"), l.Worker)
				assert.Equal(t, []string{"added", "kept"}, []string{l.Recurring[0].Name, l.Recurring[1].Name})
				m.kill()
				<-m.done
				per := pass(time.Hour)
				assert.Zero(t, per["new"]+per["added"])
				assert.InDelta(t, 58, per["old"], 1, "the last one of those that it missed, and all since")
				m = w.mortal(young)
				time.Sleep(time.Second)
				assert.Equal(t, map[string]int{"new": 60, "added": 60}, pass(time.Hour))
				stopOld[0]()
				stopOld[1]()
				assert.Equal(t, map[string]int{"new": 60, "added": 60}, pass(time.Hour))
				m.cancel()
				<-m.done
			})
		})
	}
}

// What lies in the group's queues and isn't the token, or isn't the only one, harms nothing. Neither does an operator.
func TestForeignMessagesAndOperatorsHarmNoGroup(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		w.group(g, schedule.RunConfig{Worker: "one", Recurring: []schedule.Recurring{every("m", time.Minute), every("quiet", time.Minute)}})
		w.group(g, schedule.RunConfig{Worker: "two", Recurring: []schedule.Recurring{every("m", time.Minute), every("quiet", time.Minute)}})
		time.Sleep(10 * time.Second)
		ctx := t.Context()
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"quiet"}}))
		time.Sleep(2 * time.Minute)
		p, err := client.NewPublisher[*client.Message](ctx, w.conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		token, requests := schedule.Names{}.TokenQueue("g"), schedule.Names{}.RunQueue("g")
		put := func(queue string, state any, id any) {
			t.Helper()
			m := client.NewMessage([]byte("junk"))
			m.Annotations = map[any]any{}
			if state != nil {
				m.Annotations[annotation.Recurring] = state
			}
			m.Properties = &client.Properties{MessageID: id}
			require.NoError(t, p.Publish(ctx, m, client.PublishTo(address.Queue(queue))))
		}
		all := map[string]bool{}
		works := func(what string) {
			t.Helper()
			got.clear()
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			for id, n := range got.count {
				name, _, _ := schedule.ParseMessageID(id)
				assert.Equal(t, "m", name, what)
				assert.Equal(t, 1, n, what)
				all[id] = true
			}
			assert.InDelta(t, 5, got.len(), 1, what)
			assert.Equal(t, 1, w.ready(token), what)
		}
		before := w.ready(lostQueue)
		junk := []any{nil, int64(7), true, "", "{", "[]", `{"serial":"x"}`, `{"serial":-1}`, `{"serial":9223372036854775807}`, `{"by":"` + strings.Repeat("x", 500) + `"}`, strings.Repeat("x", 100_000)}
		for _, state := range junk {
			put(token, state, "x")
		}
		works("after messages that aren't tokens")
		assert.Equal(t, before+len(junk), w.ready(lostQueue))
		for _, id := range []any{"x", uint64(7), "m@never", "@2026-01-01T00:00:00Z", "m@2001-01-01T00:00:00Z", strings.Repeat("x", 400)} {
			put(requests, nil, id)
		}
		works("after requests that aren't any")
		put(token, `{"serial":0}`, nil)
		works("after an older token")

		ahead := fmt.Sprintf(`{"serial":1000000,"sum":"x","done":%d,"head":1,"next":1}`, time.Now().AddDate(50, 0, 0).UnixNano())
		put(token, ahead, nil)
		time.Sleep(5 * time.Minute) // "quiet" isn't paused in what this one says
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"quiet"}}))
		works("after a forged token")

		for range 3 {
			_, err := declare.Purge(ctx, w.conn.Management(), token)
			require.NoError(t, err)
			works("after a purge")
			_, err = declare.DeleteQueue(ctx, w.conn.Management(), token)
			require.NoError(t, err)
			time.Sleep(10 * time.Second)
			topology, err := schedule.GroupTopology(schedule.Names{}, "g")
			require.NoError(t, err)
			w.apply(topology)
			works("after the queue was deleted and declared again")
		}
		for at := time.Now().Add(-time.Minute).Truncate(time.Minute); at.After(time.Now().Add(-25 * time.Minute)); at = at.Add(-time.Minute) {
			assert.True(t, all[schedule.MessageID("m", at)], at)
		}
	})
}

// A worker that doesn't find the token creates it from memory. If that was in the hands of another one, there are two, and
// the one with the higher serial may lack what Pause has changed in the other. Pause has returned, so that counts.
func TestAPauseSurvivesAnotherToken(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		for _, name := range []string{"one", "two"} {
			w.group(g, schedule.RunConfig{Worker: name, Recurring: []schedule.Recurring{every("m", time.Minute), every("quiet", time.Minute)}})
		}
		time.Sleep(10 * time.Second)
		ctx := t.Context()
		p, err := client.NewPublisher[*client.Message](ctx, w.conn, address.Queue(schedule.Names{}.TokenQueue("g")), client.PublisherConfig{})
		require.NoError(t, err)
		token := func() *client.Message {
			all := w.broker.Queue(schedule.Names{}.TokenQueue("g")).Messages()
			require.Len(t, all, 1)
			return client.Copy(all[0].Message)
		}
		names := schedule.PauseConfig{Names: []string{"quiet"}}
		for _, more := range []int64{100, 0, -1} { // than the serial that the token has after the edit
			for _, paused := range []bool{true, false} {
				time.Sleep(5 * time.Minute)
				before := token()
				if paused {
					require.NoError(t, g.Pause(ctx, names))
				} else {
					require.NoError(t, g.Resume(ctx, "quiet"))
				}
				var state map[string]json.RawMessage
				require.NoError(t, json.Unmarshal([]byte(before.Annotations[annotation.Recurring].(string)), &state))
				serial, err := strconv.ParseInt(string(state["serial"]), 10, 64)
				require.NoError(t, err)
				state["serial"] = json.RawMessage(strconv.FormatInt(serial+1+more, 10))
				text, err := json.Marshal(state)
				require.NoError(t, err)
				before.Annotations[annotation.Recurring] = string(text)
				require.NoError(t, p.Publish(ctx, before))
				time.Sleep(2 * time.Minute)
				got.clear()
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				want := 10
				if paused {
					want = 0
				}
				assert.Equal(t, want, got.perName()["quiet"], "serial %+d, paused %v", more, paused)
				assert.Equal(t, 10, got.perName()["m"])
				token()
			}
		}
	})
}

func TestGroupRefusesBadInput(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		ok := every("a", time.Minute)
		bad := func(change func(*schedule.Recurring)) schedule.RunConfig {
			r := ok
			change(&r)
			return schedule.RunConfig{Recurring: []schedule.Recurring{r}}
		}
		for path, cfg := range map[string]schedule.RunConfig{
			"RunConfig.Recurring[1].Name":   {Recurring: []schedule.Recurring{ok, ok}},
			"RunConfig.Recurring[0].Name":   bad(func(r *schedule.Recurring) { r.Name = "a@b" }),
			"RunConfig.Recurring[0].Times":  bad(func(r *schedule.Recurring) { r.Times = schedule.Every(time.Millisecond) }),
			"RunConfig.Recurring[0].To":     bad(func(r *schedule.Recurring) { r.To = address.Address{} }),
			"RunConfig.Recurring[0].Missed": bad(func(r *schedule.Recurring) { r.Missed = "some" }),
			"RunConfig.Recurring":           {Recurring: make([]schedule.Recurring, 20_001)},
			"RunConfig.Worker":              {Worker: strings.Repeat("x", 101)},
		} {
			var e *argument.Error
			require.ErrorAs(t, g.Run(t.Context(), cfg), &e, path)
			assert.Equal(t, path, e.Path.String())
		}
		var e *argument.Error
		require.ErrorAs(t, schedule.Group{Name: "x"}.Run(t.Context(), schedule.RunConfig{}), &e)
		require.ErrorAs(t, schedule.Group{Conn: w.conn}.Run(t.Context(), schedule.RunConfig{}), &e)
		require.ErrorIs(t, schedule.Group{Conn: w.conn, Name: "unknown"}.Run(t.Context(), schedule.RunConfig{}), client.ErrNotFound)
		_, err := schedule.GroupTopology(schedule.Names{}, strings.Repeat("x", 101))
		require.ErrorAs(t, err, &e)
		for range 2000 { // the state is bounded
			if err = g.Pause(t.Context(), schedule.PauseConfig{Names: []string{"unknown"}}); err != nil {
				break
			}
		}
		require.Error(t, err)
	})
}

// A name that is cut to its limit within a character stays the worker's own: it isn't taken for another worker, whose
// times the others leave some seconds.
func TestAWorkersNameIsCutBetweenCharacters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		got := newTally()
		w.consume("work", got)
		w.group(g, schedule.RunConfig{Worker: "x" + strings.Repeat("é", 49), Recurring: []schedule.Recurring{every("m", time.Minute)}})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		require.InDelta(t, 10, got.len(), 1)
		for id, at := range got.at {
			_, due, _ := schedule.ParseMessageID(id)
			assert.Less(t, at.Sub(due), time.Second)
		}
	})
}

// However much is paused, workers can still write their part of the state, and Pause says when it is too much. A forged
// state that leaves no room isn't a token.
func TestAFullStateIsStillWritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		got := newTally()
		w.consume("work", got)
		cfg := schedule.RunConfig{Worker: "a", Recurring: []schedule.Recurring{every("m", time.Minute)}}
		for n := range 200 {
			cfg.Recurring = append(cfg.Recurring, every(fmt.Sprintf("p%03d", n), 24*time.Hour))
		}
		stop := w.group(g, cfg)
		time.Sleep(10 * time.Second)
		var err error
		for n := 0; err == nil && n < 200; n++ {
			err = g.Pause(t.Context(), schedule.PauseConfig{Names: []string{fmt.Sprintf("p%03d", n)}, Why: strings.Repeat("<", 100)})
		}
		require.ErrorContains(t, err, "resume messages")
		stop()
		cfg.Worker = strings.Repeat("<", 90) // six bytes each in JSON
		w.group(g, cfg)
		time.Sleep(time.Minute)
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.InDelta(t, 10, got.perName()["m"], 1)
		for id := range got.at {
			assert.Equal(t, 1, got.of(id), id)
		}
		before := w.ready(lostQueue)
		p, err := client.NewPublisher[*client.Message](t.Context(), w.conn, address.Queue(schedule.Names{}.TokenQueue("g")), client.PublisherConfig{})
		require.NoError(t, err)
		forged := client.NewMessage([]byte("x"))
		forged.Annotations = map[any]any{annotation.Recurring: `{"serial":1000000,"sum":"x","holds":[{"why":"` + strings.Repeat("x", 15<<10) + `"}]}`}
		require.NoError(t, p.Publish(t.Context(), forged))
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.InDelta(t, 10, got.perName()["m"], 1)
		assert.Equal(t, before+1, w.ready(lostQueue))
	})
}

// Large messages are made and published a few at a time.
func TestLargeMessagesArePublishedAFewAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, g := recurring(t, "4.3.6")
		var made, most int
		large := every("m", time.Second)
		large.Missed = schedule.MissedAll
		large.Message = func(time.Time) (*client.Message, error) {
			made++
			most = max(most, made-w.broker.Queue("work").Counts().Messages)
			return client.NewMessage(make([]byte, 1<<20)), nil
		}
		stop := w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{large}})
		time.Sleep(10 * time.Second)
		stop()
		time.Sleep(40 * time.Second)
		stop = w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{large}})
		time.Sleep(10 * time.Second)
		stop()
		assert.Greater(t, made, 50, "the missed ones, too")
		assert.LessOrEqual(t, most, 4)
	})
}

// The broker's clock is two hours behind this host's, and the broker doesn't tell its time at first. Nothing is published by this
// clock before it has told it.
func TestNoRecurringMessageIsEarlyWhileTheBrokersTimeIsUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const behind = 2 * time.Hour
		w, g := recurring(t, "4.3.6")
		w.broker.StepClock(-behind)
		got := newTally()
		w.consume("work", got)
		g.Conn = w.connect()
		w.broker.DelayAnswers(6 * time.Second) // longer than a question waits
		w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{every("m", time.Minute)}})
		time.Sleep(5 * time.Minute)
		w.broker.DelayAnswers(0)
		time.Sleep(15 * time.Minute)
		synctest.Wait()
		require.Greater(t, got.len(), 10)
		for id, at := range got.at {
			_, due, _ := schedule.ParseMessageID(id)
			assert.GreaterOrEqual(t, at.Add(-behind).Sub(due), time.Duration(0), id)
		}
	})
}

// There are two tokens for a time. One is older by many edits, like one that a worker makes from what it knew while
// another one holds the token for half a minute. Each is edited while the other one is out of sight. When they meet,
// the last edit of each name counts.
func TestAPauseSurvivesEditsOfAnotherToken(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		w.group(g, schedule.RunConfig{Worker: "one", Recurring: []schedule.Recurring{every("m", time.Minute), every("a", time.Minute), every("b", time.Minute)}})
		time.Sleep(10 * time.Second)
		ctx := t.Context()
		queue := w.broker.Queue(schedule.Names{}.TokenQueue("g"))
		p, err := client.NewPublisher[*client.Message](ctx, w.conn, address.Queue(queue.Name()), client.PublisherConfig{})
		require.NoError(t, err)
		token := func() *client.Message {
			all := queue.Messages()
			require.Len(t, all, 1)
			return client.Copy(all[0].Message)
		}
		only := func(m *client.Message) {
			require.NoError(t, queue.Empty())
			require.NoError(t, p.Publish(ctx, m))
		}
		names := func(all ...string) schedule.PauseConfig { return schedule.PauseConfig{Names: all} }
		old := token()
		require.NoError(t, g.Pause(ctx, names("a")))
		require.NoError(t, g.Pause(ctx, names("b")))
		require.NoError(t, g.Resume(ctx, "b"))
		for range 10 { // more than a token remembers
			require.NoError(t, g.Pause(ctx, names("m")))
			require.NoError(t, g.Resume(ctx, "m"))
		}
		one := token()
		time.Sleep(time.Second)
		only(old)
		require.NoError(t, g.Pause(ctx, names("b")))
		require.NoError(t, p.Publish(ctx, one))
		time.Sleep(time.Minute)
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Equal(t, map[string]int{"m": 10}, got.perName(), "a is paused in one token, b later in the other one")

		two := token()
		require.NoError(t, g.Resume(ctx, "a"))
		time.Sleep(30 * time.Minute)
		require.NoError(t, p.Publish(ctx, two))
		time.Sleep(time.Minute)
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Equal(t, map[string]int{"m": 10, "a": 10}, got.perName(), "a token from before that a was resumed comes back")
		token()
	})
}

// A worker that has seen two tokens dies before it has returned the one that it keeps.
func TestAPauseSurvivesAWorkerThatSawTwoTokens(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		cfg := schedule.RunConfig{Recurring: []schedule.Recurring{every("m", time.Minute), every("quiet", time.Minute)}}
		mortal := w.mortal(cfg)
		time.Sleep(10 * time.Second)
		ctx := t.Context()
		queue := w.broker.Queue(schedule.Names{}.TokenQueue("g"))
		p, err := client.NewPublisher[*client.Message](ctx, w.conn, address.Queue(queue.Name()), client.PublisherConfig{})
		require.NoError(t, err)
		all := queue.Messages()
		require.Len(t, all, 1)
		newer := client.Copy(all[0].Message)
		var state map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(newer.Annotations[annotation.Recurring].(string)), &state))
		state["serial"] = json.RawMessage("1000")
		text, err := json.Marshal(state)
		require.NoError(t, err)
		newer.Annotations[annotation.Recurring] = string(text)
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{Names: []string{"quiet"}}))
		require.NoError(t, p.Publish(ctx, newer))
		answer, err := w.broker.Queue("work").HoldConfirms()
		require.NoError(t, err)
		time.Sleep(time.Minute + 5*time.Second)
		defer mortal.kill()
		require.Equal(t, 2, queue.Counts().Unacknowledged, "the worker holds both while its message isn't confirmed")
		mortal.kill()
		<-mortal.done
		answer()
		w.group(g, cfg)
		time.Sleep(time.Minute)
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Equal(t, map[string]int{"m": 10}, got.perName())
		assert.Len(t, queue.Messages(), 1)
	})
}

// A forged token that is full of pauses doesn't keep workers from writing what they must.
func TestAForgedTokenFullOfPausesStopsNobody(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{every("m", time.Minute)}})
		time.Sleep(10 * time.Second)
		ctx := t.Context()
		queue := w.broker.Queue(schedule.Names{}.TokenQueue("g"))
		p, err := client.NewPublisher[*client.Message](ctx, w.conn, address.Queue(queue.Name()), client.PublisherConfig{})
		require.NoError(t, err)
		for n := range 3 {
			all := queue.Messages()
			require.Len(t, all, 1)
			forged := client.Copy(all[0].Message)
			var holds []map[string]any
			for i := range 150 {
				holds = append(holds, map[string]any{"name": fmt.Sprintf("%d-%d", n, i), "since": 1, "edited": int64(math.MaxInt64), "why": "x"})
			}
			text, err := json.Marshal(map[string]any{"serial": 0, "sum": "x", "holds": holds})
			require.NoError(t, err)
			forged.Annotations[annotation.Recurring] = string(text)
			require.NoError(t, p.Publish(ctx, forged))
			time.Sleep(2 * time.Minute)
		}
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Equal(t, map[string]int{"m": 10}, got.perName())
		require.NoError(t, g.Pause(ctx, schedule.PauseConfig{}))
		time.Sleep(time.Minute)
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Empty(t, got.perName())
		assert.Len(t, queue.Messages(), 1)
	})
}

// While a worker holds the token, as it does in an alarm, nobody says that the group is missing.
func TestATokenThatIsHeldIsNotMissing(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		w.consume("work", newTally())
		stop := w.group(g, schedule.RunConfig{Recurring: []schedule.Recurring{every("m", time.Minute)}})
		time.Sleep(10 * time.Second)
		stop() // it would create another token
		queue := w.broker.Queue(schedule.Names{}.TokenQueue("g"))
		other := w.connect()
		sess, release, err := inside.Of(other).OpenSession(t.Context())
		require.NoError(t, err)
		defer release()
		l, err := sess.Receiver(t.Context(), "/queues/"+queue.Name(), link.ReceiverOptions{})
		require.NoError(t, err)
		require.NoError(t, l.IssueCredit(1))
		held, err := l.Receive(t.Context())
		require.NoError(t, err)
		for name, call := range map[string]func() error{
			"pause":   func() error { return g.Pause(t.Context(), schedule.PauseConfig{}) },
			"list":    func() error { _, err := g.List(t.Context(), schedule.ListConfig{}); return err },
			"run now": func() error { _, err := g.RunNow(t.Context(), "m"); return err },
		} {
			began := time.Now()
			err := call()
			require.ErrorIs(t, err, client.ErrNotSent, name)
			assert.NotErrorIs(t, err, client.ErrNotFound, name)
			assert.Less(t, time.Since(began), 45*time.Second, name)
		}
		require.NoError(t, l.Settle(held.ID, link.Disposition{Kind: link.DispositionReleased}))
		require.NoError(t, g.Pause(t.Context(), schedule.PauseConfig{}))
	})
}

// In an alarm nobody keeps the token: it can be edited, there is never a second one, and the messages come soon after it.
func TestAnAlarmKeepsNoTokenInHand(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		for _, name := range []string{"one", "two", "three"} {
			w.group(g, schedule.RunConfig{Worker: name, Recurring: []schedule.Recurring{every("m", time.Minute), every("quiet", time.Minute)}})
		}
		time.Sleep(10 * time.Second)
		queue := w.broker.Queue(schedule.Names{}.TokenQueue("g"))
		pause := func() error { return g.Pause(t.Context(), schedule.PauseConfig{Names: []string{"quiet"}}) }
		resume := func() error { return g.Resume(t.Context(), "quiet") }
		w.broker.SetMemoryAlarm(true)
		for range 4 { // after ten minutes the broker's time would have to be read again, which can't be done in an alarm
			time.Sleep(55 * time.Second)
			require.NoError(t, pause())
			require.NoError(t, resume())
			assert.LessOrEqual(t, queue.Counts().Ready+queue.Counts().Unacknowledged, 1)
		}
		require.NoError(t, pause())
		got.clear()
		w.broker.SetMemoryAlarm(false)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		assert.Positive(t, got.perName()["m"])
		got.clear()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Equal(t, map[string]int{"m": 10}, got.perName())
		assert.Len(t, queue.Messages(), 1)
	})
}

// A worker that has last looked while a message was paused doesn't bring the pause back, however long ago that was.
func TestAResumedMessageStaysResumed(t *testing.T) {
	t.Parallel()
	forEachVersion(t, func(t *testing.T, version string) {
		w, g := recurring(t, version)
		got := newTally()
		w.consume("work", got)
		for _, name := range []string{"one", "two", "three"} {
			w.group(g, schedule.RunConfig{Worker: name, Recurring: []schedule.Recurring{every("m", 24*time.Hour)}})
		}
		time.Sleep(25 * time.Hour)
		rounds := 3
		if explore.UnderRace { // which takes minutes of CPU for each
			rounds = 1
		}
		for range rounds {
			require.NoError(t, g.Pause(t.Context(), schedule.PauseConfig{}))
			require.NoError(t, g.Pause(t.Context(), schedule.PauseConfig{Names: []string{"m"}}))
			got.clear()
			time.Sleep(48 * time.Hour)
			synctest.Wait()
			assert.Zero(t, got.len())
			require.NoError(t, g.Resume(t.Context()))
			require.NoError(t, g.Resume(t.Context(), "m"))
			time.Sleep(5 * 24 * time.Hour)
			synctest.Wait()
			assert.Equal(t, 5, got.len())
		}
	})
}
