package consume

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFifoIsOneWithAnyContent(t *testing.T) {
	var q fifo[int]
	var want []int
	for i := range 100_000 {
		if rand.N(1000) < 500+300*(i/1000%2*2-1) {
			q.push(i)
			want = append(want, i)
		} else if len(want) > 0 {
			require.False(t, q.empty())
			require.Equal(t, want[0], q.pop())
			want = want[1:]
		} else {
			require.True(t, q.empty())
			require.Zero(t, q.pop())
		}
	}
	for _, v := range want {
		require.Equal(t, v, q.pop())
	}
	for range 100 {
		q.push(1)
		q.pop()
	}
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		q.push(1)
		q.push(2)
		q.pop()
		q.pop()
	}))
	assert.LessOrEqual(t, cap(q.all), 4096)
}
