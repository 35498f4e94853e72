package lru

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// model is a Map that is too simple to be wrong: pairs, the last used first.
type model struct {
	size  int
	pairs [][2]int
}

func (m *model) find(key int) int {
	return slices.IndexFunc(m.pairs, func(p [2]int) bool { return p[0] == key })
}

func (m *model) get(key int) (int, bool) {
	i := m.find(key)
	if i < 0 {
		return 0, false
	}
	p := m.pairs[i]
	m.pairs = slices.Insert(slices.Delete(m.pairs, i, i+1), 0, p)
	return p[1], true
}

func (m *model) put(key, value int) {
	m.delete(key)
	m.pairs = slices.Insert(m.pairs, 0, [2]int{key, value})
	m.pairs = m.pairs[:min(len(m.pairs), max(m.size, 1))]
}

func (m *model) delete(key int) {
	if i := m.find(key); i >= 0 {
		m.pairs = slices.Delete(m.pairs, i, i+1)
	}
}

// check plays ops, one per byte, on a Map and on its model.
func check(t *testing.T, size int, ops []byte) {
	t.Helper()
	m, want := New[int, int](size), &model{size: size}
	for i, op := range ops {
		key := int(op >> 2)
		switch op & 3 {
		case 0:
			v, ok := m.Get(key)
			wantV, wantOK := want.get(key)
			require.Equal(t, wantOK, ok, "get %d in step %d", key, i)
			require.Equal(t, wantV, v, "get %d in step %d", key, i)
		case 3:
			m.Delete(key)
			want.delete(key)
		default:
			m.Put(key, i)
			want.put(key, i)
		}
		require.Equal(t, len(want.pairs), m.Len(), "step %d", i)
		require.LessOrEqual(t, m.Len(), max(size, 1))
	}
	// The ring holds the same keys in the same order, in both directions.
	var forward, backward [][2]int
	for e := m.root.next; e != &m.root; e = e.next {
		forward = append(forward, [2]int{e.key, e.value})
	}
	for e := m.root.prev; e != &m.root; e = e.prev {
		backward = append(backward, [2]int{e.key, e.value})
	}
	slices.Reverse(backward)
	require.ElementsMatch(t, want.pairs, forward)
	require.Equal(t, forward, backward)
	if len(want.pairs) > 0 {
		require.Equal(t, want.pairs, forward)
	}
}

func TestMapDoesWhatItsModelDoes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		ops := make([]byte, 300)
		for i := range ops {
			ops[i] = byte(r.Uint32())
		}
		check(t, r.IntN(20), ops)
	}
}

func FuzzMap(f *testing.F) {
	f.Add(2, []byte{1, 5, 0, 9, 4, 7})
	f.Fuzz(func(t *testing.T, size int, ops []byte) {
		if size < -1 || size > 1000 {
			t.Skip("no size that would be asked for")
		}
		check(t, size, ops)
	})
}

func TestMapForgetsWhatWasUsedLeastRecently(t *testing.T) {
	t.Parallel()
	m := New[string, int](2)
	m.Put("a", 1)
	m.Put("b", 2)
	_, _ = m.Get("a")
	m.Put("c", 3)
	_, ok := m.Get("b")
	require.False(t, ok)
	for _, key := range []string{"a", "c"} {
		_, ok := m.Get(key)
		require.True(t, ok, key)
	}
}
