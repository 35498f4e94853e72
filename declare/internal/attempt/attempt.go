// Package attempt says how requests to the management node are repeated.
package attempt

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/link"
)

const (
	// Max is how often a request is sent that gets no reply.
	Max = 5
	// InFlight bounds the requests that are under way at once. RabbitMQ gives a
	// management link a credit of 8, so more than twice that only waits elsewhere.
	InFlight = 16

	longestPause = 20 * time.Millisecond
)

// Pause waits before an attempt, for a random time of up to 20 ms times the attempt.
// Processes that got into each other's way don't meet again.
func Pause(ctx context.Context, attempt int) {
	link.Pause(ctx, rand.N(longestPause*time.Duration(attempt)))
}

// NotPermitted reports whether err says that the user lacks a permission. RabbitMQ
// has no status for that: it ends the session, so the words are all there is.
func NotPermitted(err error) bool {
	return err != nil && strings.Contains(err.Error(), "refused for user")
}
