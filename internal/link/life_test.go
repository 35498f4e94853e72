package link

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// RabbitMQ's open has half of its setting heartbeat as idle-time-out.
func TestAnAnswerIsAwaitedForLessThanHeartbeat(t *testing.T) {
	for _, test := range []struct{ idle, heartbeat, want time.Duration }{
		{30 * time.Second, time.Minute, 30 * time.Second},
		{10 * time.Minute, time.Minute, 40 * time.Second},
		{30 * time.Second, 15 * time.Second, 10 * time.Second},
		{30 * time.Second, time.Second, 2 * time.Second},
		{2 * time.Second, time.Second, 2 * time.Second},
		{10 * time.Minute, 0, 10 * time.Minute},
	} {
		assert.Equal(t, test.want, patience(test.idle, test.heartbeat/2), test)
	}
}
