package link

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSpareSessionsLeaveRoom(t *testing.T) {
	for limit, want := range map[int]int{64: 4, 8: 4, 5: 2, 2: 1, 1: 1} {
		assert.Equal(t, want, SpareSessions(limit), "%d", limit)
	}
	assert.Equal(t, "n", ConnName("n", 1))
	assert.Len(t, ConnName(strings.Repeat("n", MaxName), 12), MaxName)
}
