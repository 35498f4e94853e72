package schedule

import (
	"bytes"
	"compress/gzip"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A few kilobytes that anybody may send become millions of entries, and cost little.
func TestAForgedCatalogCostsLittle(t *testing.T) {
	for name, text := range map[string]string{
		"many entries":    "[" + strings.Repeat("{},", 5_000_000) + "{}]",
		"a long string":   `[{"name":"` + strings.Repeat("x", 2*maxCatalog) + `"}]`,
		"another type":    `{"a":1}`,
		"a cut list":      `[{"name":"a"},`,
		"a nested list":   strings.Repeat("[", 1_000_000),
		"an endless list": "[" + strings.Repeat(" ", 2*maxCatalog),
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			_, err := z.Write([]byte(text))
			require.NoError(t, err)
			require.NoError(t, z.Close())
			body := b.Bytes()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err = unpack(body)
			runtime.ReadMemStats(&after)
			require.Error(t, err)
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(5*maxCatalog))
		})
	}
	for _, all := range [][]entry{nil, {}, {{Name: "a", Anchor: 1}, {Name: "b", Next: 2}}} {
		b, err := pack(all)
		require.NoError(t, err)
		got, err := unpack(b)
		require.NoError(t, err)
		assert.Len(t, got, len(all))
		assert.Subset(t, all, got)
	}
}

// Times of a forged catalog are asked for a bounded number of times.
func TestForgedTimesCostLittle(t *testing.T) {
	done := time.Now()
	left := 100
	for _, e := range []entry{
		{Anchor: 1, Next: int64(time.Second)}, {Anchor: math.MinInt64, Next: math.MinInt64 + 1}, {Anchor: math.MaxInt64}, {Next: math.MaxInt64}, {Anchor: math.MaxInt64, Next: 1},
	} {
		last, following := e.around(Every(time.Second), done, &left)
		assert.False(t, last.After(done))
		assert.True(t, following.IsZero() || following.After(done))
		e.around(panicking{}, done, &left)
	}
	assert.GreaterOrEqual(t, left, -5)
}

type panicking struct{}

func (panicking) Next(time.Time) time.Time { panic("no") }
