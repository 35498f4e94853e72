package fair

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/retry"
)

func TestSlotsAreGivenInTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(3, 1, 2, time.Now())
		got := make(chan int, 100)
		take := func(from int) {
			go func() {
				if s.take(t.Context(), from) {
					got <- from
				}
			}()
			synctest.Wait()
		}
		next := func() int {
			synctest.Wait()
			select {
			case from := <-got:
				return from
			default:
				return -100
			}
		}
		for range 5 {
			take(0)
		}
		take(1)
		assert.Equal(t, []int{0, 0, -100}, []int{next(), next(), next()}, "one slot is in reserve")
		assert.False(t, s.try())
		take(quiet)
		take(quiet)
		assert.Equal(t, []int{quiet, -100}, []int{next(), next()})
		s.give(0, time.Second, 1)
		assert.Equal(t, quiet, next(), "before lanes")
		s.give(0, time.Second, 1)
		assert.NotEqual(t, -100, next(), "a lane, since none has a slot")
		s.give(quiet, time.Millisecond, 1)
		assert.NotEqual(t, -100, next(), "the lanes have one of two")
		s.give(quiet, time.Millisecond, 1)
		assert.Equal(t, -100, next())
		assert.Equal(t, 2, s.bulk)
		assert.Equal(t, 1, s.lanes[1].running, "each lane has its turn")
	})
}

// A waiting message returns to its queue when the consumer stops, and its place is free.
func TestWhoStopsWaitingHoldsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(2, 1, 1, time.Now())
		require.True(t, s.take(t.Context(), 0))
		require.True(t, s.take(t.Context(), quiet))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		assert.False(t, s.take(ctx, quiet))
		assert.False(t, s.take(ctx, 0))
		s.give(0, time.Second, 1)
		s.give(quiet, time.Second, 1)
		assert.Zero(t, s.quiet+s.bulk+len(s.waiting)+len(s.lanes[0].waiting))
	})
}

func TestTheReserveFollowsTheLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(16, 0, 1, time.Now())
		run := func(atOnce int, bulk time.Duration) int {
			for range 600 {
				for range atOnce {
					require.True(t, s.take(t.Context(), quiet))
				}
				require.True(t, s.take(t.Context(), 0))
				time.Sleep(50 * time.Millisecond)
				for range atOnce {
					s.give(quiet, 50*time.Millisecond, 1)
				}
				s.give(0, bulk, 1)
			}
			s.adapt(time.Now())
			return s.reserve
		}
		assert.Equal(t, 8, run(4, 10*time.Second), "4 and two sigma")
		assert.Equal(t, 4, run(4, 10*time.Millisecond), "slots become free soon")
		assert.Equal(t, 1, run(0, time.Second))
		assert.Equal(t, 15, run(14, 10*time.Second), "lanes keep one")
	})
}

func TestWhoIsNoisy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		weights := map[string]int{"heavy": 10}
		all := newTenants(func(name string) int { return weights[name] }, 8, 4)
		// In each second, tenants demand that many seconds of handlers.
		second := func(demands map[string]float64) {
			for range 10 {
				for name, d := range demands {
					x := all.of(name)
					x.mean = d / 10
					all.arrive(x, true, time.Now())
					x.waiting--
				}
				time.Sleep(100 * time.Millisecond)
			}
			all.review(time.Now())
		}
		noisy := func(name string) bool {
			x := all.of(name)
			yes, _ := all.arrive(x, true, time.Now())
			x.waiting--
			return yes
		}
		for range 10 {
			second(map[string]float64{"a": 1, "b": 2, "c": 3})
		}
		for _, name := range []string{"a", "b", "c"} {
			assert.False(t, noisy(name), "%s: there is enough for all", name)
		}
		for range 10 {
			second(map[string]float64{"a": 1, "b": 2, "c": 30})
		}
		assert.Equal(t, []bool{false, false, true}, []bool{noisy("a"), noisy("b"), noisy("c")})
		for range 10 {
			second(map[string]float64{"a": 1, "c": 5, "heavy": 5})
		}
		assert.Equal(t, []bool{false, true, false}, []bool{noisy("a"), noisy("c"), noisy("heavy")}, "by weight")

		x := all.of("burst")
		for range 3 {
			yes, _ := all.arrive(x, true, time.Now())
			assert.False(t, yes)
		}
		yes, _ := all.arrive(x, true, time.Now())
		assert.True(t, yes, "with three in hand")
	})
}

// A handler that runs counts by its age, before it returns.
func TestRunningHandlersCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := newTenants(nil, 2, 1)
		x := all.of("slow")
		for range 2 {
			all.arrive(x, true, time.Now())
			all.begin(x, quiet, time.Now())
		}
		assert.Less(t, x.wants(time.Now()), 0.1)
		time.Sleep(10 * time.Second)
		assert.InDelta(t, 2, x.wants(time.Now()), 0.1)
	})
}

// A worker's memory is bounded, regardless of the tenants' names.
func TestAMillionTenantsAreBounded(t *testing.T) {
	if explore.UnderRace {
		t.Skip("one goroutine, and its memory is measured")
	}
	all := newTenants(nil, 16, 4)
	s := newSlots(16, 0, 4, time.Now())
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	long := strings.Repeat("\xff", 10_000)
	for i := range 1_000_000 {
		name := fmt.Sprint("tenant", i)
		if i%1000 == 0 {
			name += long
		}
		x := all.of(name)
		assert.LessOrEqual(t, len(x.name), maxTenant)
		if noisy, shift := all.arrive(x, true, time.Now()); noisy {
			s.shift(shift)
			all.move(x, time.Now())
			continue
		}
		all.leave(x, -1)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	assert.Len(t, all.all, maxTenants)
	assert.Less(t, int64(after.HeapAlloc)-int64(before.HeapAlloc), int64(8<<20))
	all.review(time.Now().Add(time.Hour))
	assert.Empty(t, all.all)
}

func TestATenantIsBoundAfterManyMoves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := newTenants(nil, 8, 4)
		moves := func(x *tenant, pause time.Duration) (n int) {
			for n = 1; n < 200; n++ {
				all.arrive(x, true, time.Now())
				if _, bind := all.move(x, time.Now()); bind {
					return n
				}
				time.Sleep(pause)
			}
			return n
		}
		quick, steady, slow := all.of("quick"), all.of("steady"), all.of("slow")
		assert.Equal(t, shortMoves, moves(quick, time.Millisecond))
		assert.Equal(t, longMoves, moves(steady, 30*time.Millisecond))
		assert.Equal(t, 200, moves(slow, time.Second))
		assert.NotEqual(t, quick.lane, steady.lane, "the calmest lane")
		other := all.of("other")
		for range 200 {
			all.arrive(other, false, time.Now())
			_, bind := all.move(other, time.Now())
			assert.False(t, bind, "its messages don't have its name as their routing key")
		}
	})
}

func TestConfigsAreChecked(t *testing.T) {
	t.Parallel()
	for text, cfg := range map[string]Config{
		"Concurrency": {Concurrency: 1}, "Reserve": {Concurrency: 4, Reserve: 4}, "Grace": {Grace: -1},
		"Retry.MaxRetries": {Retry: retry.Policy{MaxRetries: -5}}, "Retry.Strategy": {Retry: retry.Policy{Strategy: retry.StrategyDeadLetter}},
	} {
		_, err := cfg.withDefaults(Queue{})
		require.ErrorAs(t, err, new(*argument.Error), text)
		assert.ErrorContains(t, err, "Config."+text)
	}
	for text, q := range map[string]Queue{"Lanes": {Name: "q", Lanes: 17}, "Name": {Name: strings.Repeat("n", 300)}, "empty": {}} {
		_, err := q.withDefaults()
		require.ErrorAs(t, err, new(*argument.Error), text)
	}
	for text, q := range map[string]declare.QuorumQueue{"Name": {Name: "q"}, "SingleActiveConsumer": {SingleActiveConsumer: true}} {
		_, err := Queue{Name: "q"}.Topology(retry.Policy{}, q)
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "QuorumQueue."+text)
	}
	_, err := Queue{Name: "q"}.Topology(retry.Policy{Strategy: retry.StrategyDeadLetter}, declare.QuorumQueue{})
	require.ErrorAs(t, err, new(*argument.Error))
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New("unused") })
	require.ErrorAs(t, Consume(t.Context(), nil, Queue{Name: "q"}, h, Config{}), new(*argument.Error))
}

// The lanes share the main queue's dead-letter queue, whose exchange others can't bind away.
func TestTopologyOfLanes(t *testing.T) {
	t.Parallel()
	top, err := Queue{Name: "q", Lanes: 2}.Topology(retry.Policy{ReplayByMove: true}, declare.QuorumQueue{})
	require.NoError(t, err)
	var names []string
	for _, q := range top.Queues {
		q := q.(declare.QuorumQueue)
		names = append(names, q.Name)
		if strings.HasPrefix(q.Name, "q.bulk.") {
			assert.Equal(t, declare.DeadLetterTarget{Exchange: "dead_letter_exchange", RoutingKey: "q"}, q.DeadLetter)
			assert.Equal(t, map[string]any{argLanes: int64(2)}, q.Arguments)
		}
	}
	assert.Contains(t, names, "q.dead")
	assert.NotContains(t, names, "q.bulk.0.dead")
	sorted, replayed := 0, 0
	for _, b := range top.Bindings {
		if strings.HasPrefix(fmt.Sprint(b.Headers["x-last-death-queue"]), "q.bulk.") {
			sorted++
		}
		if b.Source == "replay_exchange" && strings.HasPrefix(b.Queue, "q.bulk.") {
			replayed++
		}
	}
	assert.Equal(t, []int{2, 2}, []int{sorted, replayed})
}

// A tenant becomes noisy while its first messages have slots, but their handlers haven't begun. Others may have
// begun before them, so all slots would be used.
func TestWhatBeginsLateUsesNoReserve(t *testing.T) {
	t.Parallel()
	for _, before := range []int{0, 1, 3} {
		synctest.Test(t, func(t *testing.T) {
			all, s := newTenants(nil, 4, 1), newSlots(4, 1, 1, time.Now())
			x := all.of("noisy")
			for range busy {
				noisy, _ := all.arrive(x, true, time.Now())
				assert.False(t, noisy)
			}
			for range before {
				noisy, shift := all.arrive(x, true, time.Now())
				assert.True(t, noisy)
				assert.Zero(t, shift)
				require.True(t, s.try())
				require.True(t, all.begin(x, s.stay(), time.Now()))
			}
			noisy, _ := all.arrive(x, true, time.Now())
			assert.True(t, noisy)
			demoted := 0
			for range busy {
				require.True(t, s.take(t.Context(), quiet))
				require.False(t, all.begin(x, quiet, time.Now()), "it is noisy by now")
				if s.demote() {
					demoted++
					require.True(t, all.begin(x, s.stay(), time.Now()))
				}
			}
			assert.Equal(t, []int{0, 3}, []int{s.quiet, s.bulk})
			assert.Equal(t, 3-before, demoted)
			assert.False(t, s.try(), "one is in reserve")
			for range 3 {
				s.give(all.end(x, s.stay(), time.Now(), time.Now()), 0, 1)
			}
			assert.Zero(t, s.quiet+s.bulk+x.held+x.shifted+x.running+x.serving)
		})
	}
}

// A tenant has quiet slots when its first messages come from a lane, to which another worker has moved them.
func TestATenantSeenInALaneUsesNoReserve(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all, s := newTenants(nil, 4, 1), newSlots(4, 1, 1, time.Now())
		x := all.of("noisy")
		for range 2 {
			noisy, _ := all.arrive(x, true, time.Now())
			assert.False(t, noisy)
			require.True(t, s.take(t.Context(), quiet))
			require.True(t, all.begin(x, quiet, time.Now()))
		}
		took := 0
		for range 3 {
			s.shift(all.enter(x, 0, true, time.Now()))
			if stop, cancel := context.WithTimeout(t.Context(), time.Second); s.take(stop, 0) {
				require.True(t, all.begin(x, 0, time.Now()))
				took++
				cancel()
			} else {
				all.leave(x, 0)
				cancel()
			}
		}
		assert.Equal(t, 1, took)
		assert.Equal(t, []int{0, 3}, []int{s.quiet, s.bulk})
		time.Sleep(2 * episode) // nothing is known of it but what the lane's handler has
		noisy, _ := all.arrive(x, true, time.Now())
		assert.True(t, noisy)
		assert.False(t, s.try())
	})
}
