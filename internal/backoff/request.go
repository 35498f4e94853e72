package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// For requests to the management node.
const (
	// MaxRequests is how often a request is sent that gets no reply.
	MaxRequests = 5
	// RequestsInFlight bounds the requests that are in flight at once. RabbitMQ gives a management link a
	// credit of 8, so more than twice that only wait elsewhere.
	RequestsInFlight = 16

	longestPause = 20 * time.Millisecond
)

// PauseRequest waits before an attempt, for a random time of up to 20 ms times the attempt. The
// randomness separates processes that conflicted.
func PauseRequest(ctx context.Context, attempt int) {
	Sleep(ctx, rand.N(longestPause*time.Duration(attempt)))
}
