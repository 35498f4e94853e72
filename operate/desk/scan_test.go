package desk

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
)

func TestLockNamesAreNamesOfQueues(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "orders.dead.hopback-scan", lockName("orders.dead"))
	for _, long := range []string{strings.Repeat("a", 255), strings.Repeat("ü", 127), strings.Repeat("語", 85)} {
		name := lockName(long)
		assert.LessOrEqual(t, len(name), maxQueueName)
		assert.True(t, utf8.ValidString(name))
		assert.True(t, strings.HasSuffix(name, lockSuffix))
	}
	assert.NotEqual(t, lockName(strings.Repeat("a", 255)), lockName(strings.Repeat("a", 254)+"b"))
}
