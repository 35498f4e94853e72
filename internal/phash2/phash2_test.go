package phash2

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// The values are from erlang:phash2/1 of a RabbitMQ 4.3.6.
func TestStringsHaveErlangsHashes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		list []string
		want uint32
	}{
		{nil, 113427502},
		{[]string{""}, 38220213},
		{[]string{"a"}, 53691870},
		{[]string{"customer-42"}, 113787224},
		{[]string{"customer-421"}, 129791289},
		{[]string{"customer-4212"}, 106675242},
		{[]string{"é"}, 61451803},
		{[]string{"a", "b"}, 3094894},
		{[]string{"a", "", "b"}, 74072289},
		{[]string{strings.Repeat("abcdefgh", 40)}, 68776802},
		{[]string{strings.Repeat("\xff", 24)}, 122857477},
	} {
		assert.Equal(t, c.want, Strings(c.list...), "%.20q", c.list)
	}
}

func FuzzStrings(f *testing.F) {
	f.Add("a", "b")
	f.Fuzz(func(t *testing.T, a, b string) {
		assert.Less(t, Strings(a, b), uint32(Range))
	})
}
