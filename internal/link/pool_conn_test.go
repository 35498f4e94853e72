package link

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSpareSessionsLeaveRoom(t *testing.T) {
	for limit, want := range map[int]int{64: 4, 8: 4, 5: 2, 2: 1, 1: 1} {
		assert.Equal(t, want, spareSessions(limit), "%d", limit)
	}
	assert.Equal(t, "n", connName("n", 1))
	assert.Len(t, connName(strings.Repeat("n", MaxName), 12), MaxName)
}
