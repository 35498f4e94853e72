package integration

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/internal/proxy"
	"github.com/hopback/hopback/retry"
)

// long says whether the tests run in full size.
func long() bool { return os.Getenv("HOPBACK_LONG") != "" }

// sized is a number for every day, or the one of HOPBACK_LONG.
func sized(everyDay, full int) int {
	if long() {
		return full
	}
	return everyDay
}

// One lane among four is replayed, while the process is killed and the connection is cut.
// None is lost, the other lanes are there in full, each replayed message is handled once or
// more, and begins anew.
func TestReplayOfALaneSurvivesKillsAndCuts(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		n, kills, cuts := sized(4000, 100_000), sized(3, 10), sized(6, 20)
		conn, _ := s.connect(t)
		policy := retry.Policy{MaxRetries: 2, GiveUpAfter: time.Hour, Backoff: retry.Exponential(time.Second, 2)}
		morgue(t, conn, policy, n)
		h := newHandled()
		var old atomic.Int64 // messages that don't begin anew
		consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			if m := d.Message(); retry.Count(m) != 0 || !retry.DeathOf(m).FirstFailure.IsZero() {
				old.Add(1)
			}
			return h.Handle(ctx, d)
		})), client.ConsumerConfig{Concurrency: 8, Prefetch: 200})

		through, err := proxy.New(s.host())
		require.NoError(t, err)
		defer through.Close()
		bin, err := command()
		require.NoError(t, err)
		replay := func() *exec.Cmd {
			c := exec.CommandContext(t.Context(), bin, "dead", "replay", "orders.dead", "--reason", "permanent", "--replay-id", "r1", "--rate", strconv.Itoa(sized(400, 2000)))
			c.Env = append(os.Environ(), "HOPBACK_URL="+s.urlOf(func(u *url.URL) { u.Host = through.Addr() }), "HOPBACK_MANAGEMENT_URL=none")
			return c
		}
		handledMore := func(by int) bool {
			before, _ := h.counts()
			goal := min(before+by, n/4)
			for began := time.Now(); time.Since(began) < patience; time.Sleep(5 * time.Millisecond) {
				if now, _ := h.counts(); now >= goal {
					return now < n/4
				}
			}
			return false
		}
		killed, cut := 0, 0
		step := n / 4 / (kills + cuts + 2)
		for killed < kills {
			c := replay()
			require.NoError(t, c.Start())
			for range cuts/kills + 1 {
				if handledMore(step/2+rand.IntN(step)) && cut < cuts {
					through.Cut()
					cut++
				}
			}
			require.NoError(t, c.Process.Kill())
			_ = c.Wait()
			killed++
		}
		out, err := replay().CombinedOutput()
		require.NoError(t, err, "%s", out)
		poll(t, "all of the lane are handled", func() bool { got, _ := h.counts(); return got == n/4 })
		distinct, twice := h.counts()
		assert.Equal(t, n/4, distinct)
		assert.Zero(t, old.Load(), "each begins anew")
		for body := range h.seen {
			i, _ := strconv.Atoi(body)
			assert.Equal(t, retry.ReasonPermanent, lanes[i%4])
		}
		poll(t, "the other lanes are there", func() bool { return ready(t, conn, "orders.dead") == n*3/4 })
		left := bodies(s.peer(t).take("orders.dead", n*3/4))
		runs := 1
		for i := 1; i < len(left); i++ {
			a, _ := strconv.Atoi(left[i-1])
			b, _ := strconv.Atoi(left[i])
			if b < a-1000 { // the worker had twenty handlers, and so a little disorder
				runs++
			}
		}
		slices.Sort(left)
		assert.Len(t, slices.Compact(left), n*3/4, "each of them once")
		report(t, s, "%d dead, %d kills, %d cuts: none lost, %d replayed, %d of them twice or more; the other lanes in %d runs", n, killed, cut, distinct, twice, runs)
	})
}

// A replay that is stopped at any moment loses nothing: what is dead and what is back are
// all that there were.
func TestReplayIsStoppedAtAnyMoment(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		n, stops := sized(1000, 4000), sized(15, 100)
		conn, _ := s.connect(t)
		morgue(t, conn, retry.Policy{}, n)
		d := newDesk(t, s, conn)
		stopped, unsure := 0, uint64(0)
		for range stops {
			ctx, stop := context.WithCancelCause(t.Context())
			enough := errors.New("enough")
			timer := time.AfterFunc(time.Duration(rand.IntN(150))*time.Millisecond, func() { stop(enough) })
			r, err := d.Replay(ctx, desk.ReplayConfig{Queue: "orders.dead", All: true, ID: "r1", Rate: float64(n)})
			timer.Stop()
			stop(nil)
			if err != nil {
				require.ErrorIs(t, err, enough)
				stopped++
			}
			unsure += r.Unsure
			poll(t, "dead + replayed = all", func() bool {
				sum := ready(t, conn, "orders.dead") + ready(t, conn, "orders")
				return sum >= n && sum <= n+int(unsure)
			})
		}
		_, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true, ID: "r1"})
		require.NoError(t, err)
		poll(t, "all are back", func() bool { return ready(t, conn, "orders.dead") == 0 && ready(t, conn, "orders") >= n })
		got := bodies(s.peer(t).take("orders", ready(t, conn, "orders")))
		slices.Sort(got)
		assert.Len(t, slices.Compact(slices.Clone(got)), n)
		report(t, s, "%d stops, %d amid the replay; %d of %d twice", stops, stopped, len(got)-n, n)
	})
}

// A survey and a list of a large queue need little memory here, and leave the queue as it
// was.
func TestLookingAtManyMessagesInBoundedMemory(t *testing.T) {
	if !long() {
		t.Log("with 100,000; HOPBACK_LONG takes 1,000,000")
	}
	forEachBroker(t, func(t *testing.T, s *site) {
		n := sized(100_000, 1_000_000)
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(unlimited("orders.dead")))
		const part = 20_000
		for range n / part {
			load(t, conn, "orders.dead", part, func(i int, m *client.Message) {
				m.Annotations = map[any]any{client.AnnotationError: "order " + strconv.Itoa(i) + " refused", "x-last-death-reason": "rejected", retry.AnnotationQueue: "orders"}
				m.Data = [][]byte{make([]byte, 200)}
			})
		}
		d := newDesk(t, s, conn)
		var peak atomic.Uint64
		watching, over := make(chan struct{}), sync.WaitGroup{}
		over.Go(func() {
			for tick := time.NewTicker(50 * time.Millisecond); ; {
				select {
				case <-watching:
					tick.Stop()
					return
				case <-tick.C:
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					peak.Store(max(peak.Load(), m.HeapInuse))
				}
			}
		})
		began := time.Now()
		survey, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}})
		require.NoError(t, err)
		surveyed := time.Since(began)
		require.Empty(t, survey.Queues[0].Unread)
		assert.EqualValues(t, n, survey.Queues[0].Seen)
		require.Len(t, survey.Groups, 1)
		assert.EqualValues(t, n, survey.Groups[0].Count)
		began = time.Now()
		list, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Count: true, Skip: n / 2})
		require.NoError(t, err)
		listed := time.Since(began)
		assert.EqualValues(t, n, list.Matched)
		close(watching)
		over.Wait()
		poll(t, "all are there", func() bool { return ready(t, conn, "orders.dead") == n })
		assert.Less(t, peak.Load(), uint64(512<<20), "bytes in use, of all tests that run at once")
		report(t, s, "%d messages: survey %v (%.0f a second), list %v (%.0f a second), heap of the process at most %d MiB", n,
			surveyed.Round(time.Millisecond), float64(n)/surveyed.Seconds(), listed.Round(time.Millisecond), float64(n)/listed.Seconds(), peak.Load()>>20)
	})
}
