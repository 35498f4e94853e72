package client

import (
	"time"

	"github.com/hopback/hopback/internal/link"
)

// ReconnectBackoff is a pause that doubles from Min to Max, with full jitter: each
// pause is random between 0 and that value. Zero means the defaults: 100 ms and 10 s.
type ReconnectBackoff struct {
	Min, Max time.Duration
}

func (b ReconnectBackoff) pause(failures int) time.Duration { return link.Backoff(b).Pause(failures) }
