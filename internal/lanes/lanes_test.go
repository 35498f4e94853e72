package lanes

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestOneOfAKeyAtATime(t *testing.T) {
	t.Parallel()
	var l Lanes[string, int]
	less := func(a, b int) bool { return a < b }
	assert.True(t, l.Claim("a"))
	assert.True(t, l.Claim("b"))
	assert.False(t, l.Claim("a"))
	for _, v := range []int{3, 1, 4, 2} {
		l.Wait("a", v, less)
	}
	assert.True(t, l.Remove("a", 3))
	assert.False(t, l.Remove("a", 3))
	for _, want := range []int{1, 2, 4} {
		got, ok := l.Leave("a")
		assert.True(t, ok)
		assert.Equal(t, want, got)
	}
	l.Wait("b", 9, nil)
	l.Wait("b", 8, nil)
	waiting := 0
	l.Waiting(func(queue []int) { waiting += len(queue) })
	assert.Equal(t, 2, waiting)
	assert.Equal(t, []int{9, 8}, l.Empty())
	for _, key := range []string{"a", "b"} {
		_, ok := l.Leave(key)
		assert.False(t, ok)
	}
	assert.Zero(t, l.Len())
}
