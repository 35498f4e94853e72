package desk

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// checked returns what was counted, after comparing it with the times.
func checked(t *testing.T, limit time.Time, times ...time.Time) Arrivals {
	t.Helper()
	var a arrivals
	for _, at := range times {
		a.add(at, limit)
		require.LessOrEqual(t, len(a.counts), maxSpans)
	}
	r := *a.result()
	require.Equal(t, r, *a.result(), "it can be asked for again")
	sum := r.Earlier + r.Unknown
	for _, n := range r.Counts {
		sum += n
	}
	require.EqualValues(t, len(times), sum, "each message is counted once")
	require.LessOrEqual(t, len(r.Counts), maxSpans)
	if len(r.Counts) == 0 {
		assert.Zero(t, r.Width)
		assert.True(t, r.From.IsZero())
		return r
	}
	assert.NotZero(t, r.Counts[0])
	assert.NotZero(t, r.Counts[len(r.Counts)-1])
	again := make([]uint64, len(r.Counts))
	var earlier, unknown uint64
	for _, at := range times {
		switch i := int(floorDiv(at.Unix()-r.From.Unix(), int64(r.Width/time.Second))); {
		case at.IsZero() || at.After(limit):
			unknown++
		case i < 0:
			earlier++
		case assert.Less(t, i, len(again), "%s is after the last span", at):
			again[i]++
		}
	}
	assert.Equal(t, again, r.Counts)
	assert.Equal(t, earlier, r.Earlier)
	assert.Equal(t, unknown, r.Unknown)
	return r
}

func TestArrivals(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 23, 14, 5, 7, 0, time.UTC)
	limit := now.Add(clockSkew)
	every := func(n int, step time.Duration) (all []time.Time) {
		for i := range n {
			all = append(all, now.Add(-time.Duration(i)*step))
		}
		return all
	}
	assert.Equal(t, Arrivals{Counts: nil, Unknown: 2}, checked(t, limit, time.Time{}, time.Time{}), "no time is known")
	assert.Equal(t, Arrivals{From: now, Width: time.Second, Counts: []uint64{1}}, checked(t, limit, now), "one message")
	same := checked(t, limit, slices.Repeat([]time.Time{now}, 100_000)...)
	assert.Equal(t, Arrivals{From: now, Width: time.Second, Counts: []uint64{100_000}}, same, "all at the same time")
	assert.Equal(t, []uint64{1, 0, 0, 1}, checked(t, limit, now, now.Add(3*time.Second)).Counts)
	assert.Equal(t, time.Second, checked(t, limit, every(60, time.Second)...).Width, "as many spans as there may be")
	assert.Equal(t, 5*time.Second, checked(t, limit, every(61, time.Second)...).Width)
	hours := checked(t, limit, every(100_000, 108*time.Millisecond)...) // three hours
	assert.Equal(t, 5*time.Minute, hours.Width)
	assert.Equal(t, time.Date(2026, 11, 23, 11, 5, 0, 0, time.UTC), hours.From, "spans begin at round times")
	assert.Equal(t, 7*24*time.Hour, checked(t, limit, now, now.AddDate(-1, 0, 0)).Width)

	// Forged times, and wrong clocks.
	future := checked(t, limit, now, limit, limit.Add(time.Nanosecond), time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC))
	assert.EqualValues(t, 2, future.Unknown)
	assert.Equal(t, 5*time.Minute, future.Width, "they don't squeeze the others together")
	for _, old := range []time.Time{time.Unix(0, 1), time.Unix(-1, 0), time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(-1<<60, 0)} {
		first, last := checked(t, limit, old, now), checked(t, limit, now, old)
		assert.EqualValues(t, 1, first.Earlier, old)
		assert.Equal(t, first, last, "the order doesn't matter")
		assert.Equal(t, Arrivals{From: now, Width: time.Second, Counts: []uint64{1}, Earlier: 1}, first, "it doesn't squeeze the others together")
	}
	assert.NotPanics(t, func() { checked(t, time.Unix(1<<60, 0), time.Unix(1<<60, 0), now, time.Unix(-1<<60, 0)) })

	// The newest one pushes out what is too old.
	assert.EqualValues(t, 1, checked(t, limit, now.AddDate(-2, 0, 0), now.AddDate(-1, 0, 0), now).Earlier)
	assert.EqualValues(t, 2, checked(t, limit, now.AddDate(-4, 0, 0), now.AddDate(-3, 0, 0), now).Earlier)

	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		var times []time.Time
		span := time.Duration(1) << (20 + random.IntN(43)) // a millisecond to 290 years
		for range 1 + random.IntN(200) {
			switch random.IntN(20) {
			case 0:
				times = append(times, time.Time{})
			case 1:
				times = append(times, now.Add(time.Duration(random.Int64N(1<<62))))
			default:
				times = append(times, now.Add(-time.Duration(random.Int64N(int64(span)))))
			}
		}
		one := checked(t, limit, times...)
		random.Shuffle(len(times), func(i, j int) { times[i], times[j] = times[j], times[i] })
		other := checked(t, limit, times...)
		assert.Equal(t, one.Earlier == 0, other.Earlier == 0)
		if one.Earlier == 0 {
			assert.Equal(t, one, other, "the order doesn't matter")
		}
	}
}

// Groups have their own arrivals, and a survey that begins again counts from the start.
func TestGroupsHaveArrivals(t *testing.T) {
	t.Parallel()
	groups := newTally(1)
	for i := range 100 {
		groups.add(open(sampleDeadLetter(t, died.Add(time.Duration(i)*time.Minute))), "")
	}
	all, others := groups.top(10)
	require.Len(t, all, 1)
	assert.Zero(t, others)
	require.NotNil(t, all[0].Arrivals)
	assert.Equal(t, 5*time.Minute, all[0].Arrivals.Width)
	var sum uint64
	for _, n := range all[0].Arrivals.Counts {
		sum += n
	}
	assert.Equal(t, all[0].Count, sum)
	last := all[0].Arrivals.From.Add(time.Duration(len(all[0].Arrivals.Counts)) * all[0].Arrivals.Width)
	assert.False(t, all[0].Newest.After(last), fmt.Sprint(all[0].Newest, last))
	assert.False(t, all[0].Oldest.Before(all[0].Arrivals.From))
}

func BenchmarkArrivals(b *testing.B) {
	var a arrivals
	limit := time.Now()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		a.add(limit.Add(-time.Duration(i)*time.Millisecond), limit)
	}
}
