package desk

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
)

// fakeQueue is a queue as RabbitMQ treats it in scans: returned messages are in front, and newly
// returned ones go behind them. A message is its number.
type fakeQueue struct {
	back, main []*fakeMessage
}

type fakeMessage struct {
	number  int
	returns uint64
	died    time.Time
}

func (q *fakeQueue) all() []*fakeMessage {
	return append(append([]*fakeMessage(nil), q.back...), q.main...)
}

// hold gets the first n messages, and returns them in the order of give.
func (q *fakeQueue) hold(n int, give func([]*fakeMessage) []*fakeMessage) {
	held := q.all()[:n]
	rest := q.back[min(n, len(q.back)):]
	q.main = q.main[max(n-len(q.back), 0):]
	q.back = append(append([]*fakeMessage(nil), rest...), give(held)...)
	for _, m := range held {
		m.returns++
	}
}

// scan reads the whole queue, or up to where it is out of order, and returns the messages.
func (q *fakeQueue) scan() (turned bool) {
	var t turn
	n := 0
	for _, m := range q.all() {
		if t.found && t.over {
			break
		}
		t.see(uint32(n), m.deadLetter())
		n++
	}
	q.hold(n, func(held []*fakeMessage) []*fakeMessage {
		if !t.found {
			return held
		}
		end := len(held)
		if t.over {
			end = int(t.end)
		}
		out := append([]*fakeMessage(nil), held[t.cut:end]...)
		out = append(out, held[:t.cut]...)
		return append(out, held[end:]...)
	})
	return t.found
}

func (m *fakeMessage) deadLetter() *deadLetter {
	l := &deadLetter{m: &client.Message{}}
	if m.returns > 0 {
		l.annotations = frames.Map{{Key: frames.Symbol("x-acquired-count"), Value: m.returns}}
	}
	if !m.died.IsZero() {
		l.annotations = append(l.annotations, frames.Entry{Key: frames.Symbol("x-opt-deaths"), Value: frames.Array{Elements: []any{
			frames.Map{{Key: frames.Symbol("last-time"), Value: frames.Timestamp(m.died.UnixMilli())}},
		}}})
		l.m.Annotations = map[any]any{annotation.Deaths: historyOf(l.annotations)}
	}
	return l
}

// However many scans are lost, and wherever, the next one restores the order.
func TestLostWalksAreTurnedBack(t *testing.T) {
	t.Parallel()
	for name, died := range map[string]func(i int) time.Time{
		"a death each millisecond": func(i int) time.Time { return time.UnixMilli(int64(1000 + i)) },
		"many at once":             func(i int) time.Time { return time.UnixMilli(int64(1000 + i/7)) },
		"all at once":              func(int) time.Time { return time.UnixMilli(1000) },
		"no deaths":                func(int) time.Time { return time.Time{} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 300 {
				q := &fakeQueue{}
				n := 1 + rand.IntN(60)
				for i := range n {
					q.main = append(q.main, &fakeMessage{number: i, died: died(i)})
				}
				same := func(held []*fakeMessage) []*fakeMessage { return held }
				for range 20 {
					// A scan holds all or some of the returned messages, or, if they are in order,
					// more than these.
					most := len(q.back)
					if inOrder(q.back) {
						most = n
					}
					if most > 0 {
						q.hold(rand.IntN(most+1), same)
					}
					if rand.IntN(3) == 0 {
						scanned(t, q)
					}
				}
				scanned(t, q)
			}
		})
	}
}

func inOrder(ms []*fakeMessage) bool {
	for i := 1; i < len(ms); i++ {
		if ms[i].number < ms[i-1].number {
			return false
		}
	}
	return true
}

func scanned(t *testing.T, q *fakeQueue) {
	t.Helper()
	before := inOrder(q.all())
	turned := q.scan()
	assert.Equal(t, !before, turned)
	require.True(t, inOrder(q.all()))
	assert.False(t, q.scan(), "it is in order now")
}

// Messages that bring a count from their previous queue, or that were dead-lettered out of
// order, keep their order.
func TestWhatWasNotLostIsNotTurned(t *testing.T) {
	t.Parallel()
	at := func(ms int64) time.Time { return time.UnixMilli(ms) }
	for name, ms := range map[string][]*fakeMessage{
		"counts of the queue before": {{0, 2, at(1)}, {1, 1, at(2)}, {2, 21, at(3)}, {3, 1, at(4)}, {4, 21, at(5)}},
		"died out of order":          {{0, 2, at(1)}, {1, 2, at(3)}, {2, 2, at(2)}, {3, 1, at(4)}},
		"one":                        {{0, 2, at(1)}},
		"none returned":              {{0, 0, at(3)}, {1, 0, at(1)}},
		"some without a death":       {{0, 1, at(1)}, {1, 2, time.Time{}}, {2, 1, at(2)}},
	} {
		var u turn
		for i, m := range ms {
			u.see(uint32(i), m.deadLetter())
		}
		assert.False(t, u.found, name)
	}
}
