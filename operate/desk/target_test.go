package desk

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTopicMatches(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, key string
		want         bool
	}{
		{"a.b", "a.b", true}, {"a.b", "a.c", false}, {"a.*", "a.b", true}, {"a.*", "a", false}, {"a.*", "a.b.c", false},
		{"#", "", true}, {"#", "a.b.c", true}, {"a.#", "a", true}, {"a.#", "a.b.c", true}, {"a.#", "b", false},
		{"#.c", "a.b.c", true}, {"#.c", "c", true}, {"#.c", "a.b", false}, {"a.#.c", "a.c", true}, {"a.#.c", "a.b.b.c", true},
		{"#.b.#", "a.b.c", true}, {"#.b.#", "a.c", false}, {"*.#.*", "a", false}, {"*.#.*", "a.b", true}, {"", "", true}, {"*", "", true},
		{"#.a.#.b", "a.a.c.b", true}, {"#.a.#.b", "a.a.c.b.c", false}, {"a.#.#", "a", true},
	} {
		assert.Equal(t, c.want, topicMatches(c.pattern, c.key), "%q %q", c.pattern, c.key)
	}
	for _, key := range []string{"", "a", "a.b", "a.b.c.d", "a.b.c.d.e", "..", "*.#"} {
		for _, k := range bindingKeys(key) {
			assert.True(t, topicMatches(k, key), "%q %q", k, key)
		}
	}
}
