package fifo

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAQueueIsOneWithAnyContent(t *testing.T) {
	t.Parallel()
	var q Queue[int]
	var want []int
	for i := range 100_000 {
		switch {
		case rand.N(1000) < 500+300*(i/1000%2*2-1):
			q.Push(i)
			want = append(want, i)
		case len(want) == 0:
			require.Zero(t, q.Pop())
		case rand.N(10) == 0:
			at := rand.N(len(want))
			q.Remove(at)
			want = slices.Delete(want, at, at+1)
		default:
			require.Equal(t, want[0], q.Pop())
			want = want[1:]
		}
		require.Equal(t, len(want), q.Len())
		if i%100 == 0 {
			require.Equal(t, append([]int{}, want...), append([]int{}, q.All()...))
		}
	}
	for _, v := range want {
		require.Equal(t, v, q.Pop())
	}
	assert.LessOrEqual(t, q.Cap(), keep)
}

// A queue that is never empty doesn't grow, and holds nothing that it has given out.
func TestAQueueThatIsNeverEmptyDoesNotGrow(t *testing.T) {
	t.Parallel()
	for _, waiting := range []int{1, 3, 100} {
		var q Queue[*int]
		for range waiting {
			q.Push(new(int))
		}
		for i := range 100_000 {
			q.Push(new(int))
			if i%3 == 0 {
				q.Remove(q.Len() / 2)
			} else {
				q.Pop()
			}
			require.LessOrEqual(t, q.Cap(), max(4*(waiting+1), 8))
		}
		held := 0
		for _, v := range q.all[:cap(q.all)] {
			if v != nil {
				held++
			}
		}
		assert.Equal(t, waiting, held)
	}
}

func TestALargeQueueThatIsEmptyGivesItsRoomBack(t *testing.T) {
	t.Parallel()
	var q Queue[int]
	for range 100_000 {
		q.Push(1)
	}
	for q.Len() > 0 {
		q.Pop()
	}
	assert.Zero(t, q.Cap())
	for range 100 {
		q.Push(1)
		q.Pop()
	}
	assert.NotZero(t, q.Cap())
}

func TestAQueueInUseAllocatesNothing(t *testing.T) {
	var q Queue[int]
	for range 100 {
		q.Push(1)
	}
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		q.Push(1)
		q.Push(2)
		q.Pop()
		q.Pop()
	}))
}
