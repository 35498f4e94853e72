package client

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/link"
)

func TestSpareSessionsLeaveRoom(t *testing.T) {
	for limit, want := range map[int]int{64: 4, 8: 4, 5: 2, 2: 1, 1: 1} {
		assert.Equal(t, want, link.SpareSessions(limit), "%d", limit)
	}
	assert.Equal(t, "n", link.ConnName("n", 1))
	assert.Len(t, link.ConnName(strings.Repeat("n", link.MaxName), 12), link.MaxName)
}
