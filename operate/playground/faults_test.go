package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// show returns what the page shows, a second later.
func show(l *lab) state {
	time.Sleep(time.Second)
	return l.state("1", shownMessages)
}

// drawn returns the drawing's node of a name, or nil.
func drawn(s state, name string) *node {
	for _, n := range s.Drawing.Nodes {
		if n.ID == name {
			return &n
		}
	}
	return nil
}

// What is in a work queue when it is deleted is lost, what returns to it later is parked, and the publisher gets an error. A
// worker that runs waits; one that starts says what is missing, and ends. Applied again, or imported, the topology works
// as before.
func TestDeletingTheWorkQueue(t *testing.T) {
	t.Parallel()
	for _, strategy := range strategies {
		for _, repair := range []string{"apply", "import"} {
			inLab(t, scenario(strategy, "always"), func(t *testing.T, l *lab) {
				require.NoError(t, l.send("delayed", 1))
				time.Sleep(time.Second)
				lost, parked := 0, 1
				if strategy == retry.StrategyNative { // it delays in the queue itself
					lost, parked = 1, 0
				}
				if repair == "import" {
					l.act("stop", "")
					time.Sleep(time.Second)
					require.NoError(t, l.send("in the queue", 1))
					lost++
					time.Sleep(time.Second)
				}
				l.act("delete", workQueue)
				s := show(l)
				assert.True(t, drawn(s, workQueue).Missing)
				assert.NotContains(t, s.Counts, workQueue)
				assert.Equal(t, lost, s.States["lost"])
				require.NoError(t, l.send("nowhere", 1))
				assert.Equal(t, 1, show(l).States["refused"])
				time.Sleep(20 * time.Second)
				s = show(l)
				assert.Equal(t, parked, s.Counts[parkingQueue])
				assert.Equal(t, parked > 0, drawn(s, parkingQueue) != nil)
				assert.Equal(t, repair == "apply", s.Worker)
				if repair == "apply" {
					assert.Contains(t, strings.Join(s.Lines, "\n"), "consuming failed; trying again")
				} else {
					l.act("start", "")
					s = show(l)
					assert.False(t, s.Worker)
					assert.Contains(t, strings.Join(s.Lines, "\n"), "the worker has stopped")
				}

				l.act(repair, "")
				assert.False(t, drawn(show(l), workQueue).Missing)
				l.act("start", "")
				require.NoError(t, l.broker.Queue(workQueue).Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Consumers > 0 }))
				require.NoError(t, l.send("after", 1))
				settled(t, l)
				s = show(l)
				assert.Equal(t, []int{1, 1, parked}, []int{s.States["dead"], s.Counts[deadQueue], s.Counts[parkingQueue]}, l.history())
			})
		}
	}
}

// Without a delay queue, Republish keeps the original until the queue is back, and dead-lettering gives up the
// message at once.
func TestDeletingADelayQueue(t *testing.T) {
	t.Parallel()
	for strategy, queue := range map[retry.Strategy]string{retry.StrategyRepublish: "delay_10s", retry.StrategyDeadLetter: "hold_10s"} {
		inLab(t, scenario(strategy, "fails"), func(t *testing.T, l *lab) {
			l.act("delete", queue)
			assert.True(t, drawn(show(l), queue).Missing)
			require.NoError(t, l.send("a", 1))
			time.Sleep(5 * time.Second)
			s := show(l)
			if strategy == retry.StrategyRepublish {
				assert.Equal(t, map[string]int{workQueue: 1}, s.Counts)
				assert.Contains(t, strings.Join(s.Lines, "\n"), "the original is kept")
				time.Sleep(time.Minute) // and is handled again after a while; each result comes after its delivery
				assert.Regexp(t, `delivered[^\n]+\n[^\n]+failed[^\n]+\n[^\n]+returned[^\n]+\n[^\n]+delivered[^\n]+\n[^\n]+failed[^\n]+\n$`, l.history())
			} else {
				assert.Equal(t, 1, s.States["dead"])
				assert.Contains(t, l.history(), "reason: no-delay-queue")
			}
			l.act("import", "")
			assert.False(t, drawn(show(l), queue).Missing)
			require.NoError(t, l.send("b", 1))
			settled(t, l)
			s = show(l)
			assert.Equal(t, map[retry.Strategy]int{retry.StrategyRepublish: 2, retry.StrategyDeadLetter: 1}[strategy], s.States["handled"], l.history())
			assert.Zero(t, s.States["lost"])
		})
	}
}

// A foreign queue gets copies, which change nothing for the messages themselves.
func TestBindingAForeignQueue(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		strategy retry.Strategy
		exchange string
		copies   int // of a message that is retried twice
	}{
		{retry.StrategyRepublish, retryExchange, 2}, {retry.StrategyRepublish, requeueExchange, 2}, {retry.StrategyRepublish, deadExchange, 1},
		{retry.StrategyDeadLetter, deadExchange, 3}, {retry.StrategyDeadLetter, returnExchange, 2}, {retry.StrategyNative, deadExchange, 1},
	} {
		inLab(t, scenario(c.strategy, "always"), func(t *testing.T, l *lab) {
			assert.Nil(t, drawn(show(l), foreignQueue))
			l.act("bind", c.exchange)
			l.act("bind", c.exchange)
			s := show(l)
			require.NotNil(t, drawn(s, foreignQueue))
			assert.Equal(t, "foreign", drawn(s, foreignQueue).Role)
			assert.Contains(t, s.Drawing.Edges, edge{c.exchange, foreignQueue, "foreign"})
			require.NoError(t, l.send("a", 2))
			settled(t, l)
			s = show(l)
			assert.Equal(t, map[string]int{deadQueue: 2, foreignQueue: 2 * c.copies}, s.Counts, c.exchange)
			assert.Equal(t, []string{"1", "2"}, s.Dots[foreignQueue])
			assert.Equal(t, []string{"1", "2"}, s.Dots[deadQueue])
			assert.Equal(t, 2, s.States["dead"])
			l.act("delete", foreignQueue)
			s = show(l)
			assert.Nil(t, drawn(s, foreignQueue))
			assert.Equal(t, map[string]int{deadQueue: 2}, s.Counts)
			assert.Equal(t, []any{2, 0}, []any{s.States["dead"], s.States["lost"]}, "only the copies are gone")
		})
	}
}

// What can't be done is logged.
func TestAFaultThatFails(t *testing.T) {
	t.Parallel()
	inLab(t, scenario(retry.StrategyRepublish, "fails"), func(t *testing.T, l *lab) {
		l.act("bind", "nowhere")
		l.act("unknown", "")
		assert.Contains(t, strings.Join(show(l).Lines, "\n"), "can't bind")
		for range 3 * maxLines {
			l.logger.Error(strings.Repeat("x", 1<<14) + "\xff")
		}
		s := show(l)
		require.Len(t, s.Lines, maxLines)
		assert.Less(t, len(s.Lines[0]), 1100)
	})
}
