// Package attempt repeats requests to the management node.
package attempt

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/backoff"
)

const (
	// Max is how often a request is sent that gets no reply.
	Max = 5
	// InFlight bounds the requests that are in flight at once. RabbitMQ gives a management link a
	// credit of 8, so more than twice that only wait elsewhere.
	InFlight = 16

	longestPause = 20 * time.Millisecond
)

// Pause waits before an attempt, for a random time of up to 20 ms times the attempt. The
// randomness separates processes that conflicted.
func Pause(ctx context.Context, attempt int) {
	backoff.Sleep(ctx, rand.N(longestPause*time.Duration(attempt)))
}

// NotPermitted reports whether err is about a missing permission. RabbitMQ has no status for
// that: it closes the session, so the text is the only sign.
func NotPermitted(err error) bool {
	return err != nil && strings.Contains(err.Error(), "refused for user")
}
