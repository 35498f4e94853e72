// Package brokerclock reads the broker's clock together with this host's.
package brokerclock

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/internal/failure"
)

// AskAgain returns after how long a broker that hasn't told its time should be asked again: soon if the connection was lost, a little
// later if it didn't answer in time, and false if it refuses.
func AskAgain(err error) (after time.Duration, ok bool) {
	switch {
	case errors.Is(err, failure.ErrConnectionLost):
		return time.Second, true // the next question waits for the connection
	case errors.Is(err, failure.ErrOutcomeUnknown), errors.Is(err, failure.ErrNotSent), errors.Is(err, context.DeadlineExceeded):
		return 10 * time.Second, true
	}
	return 0, false
}

// quick is how long reading both clocks takes at most, unless the process is interrupted.
const quick = time.Millisecond

// Reading is one moment by both clocks.
type Reading struct {
	Own    time.Time     // by this host's clock
	Broker time.Time     // by the broker's, or later, by at most Late
	Late   time.Duration // 0 or more
}

// Read reads this host's clock by own, and the broker's by ask. The process may be interrupted between
// the two, for many milliseconds on a busy machine. That makes the broker's time too late, never too
// early. So a message whose delivery time is computed from it is never early. What compares
// such a time with a message's allows for Late.
//
// If reading takes long, because ask has to query the broker or because of an interruption, Read tries
// again, by again: ask's last answer, carried forward.
func Read(ctx context.Context, own func() time.Time, ask, again func(context.Context) (time.Time, error)) (r Reading, err error) {
	const tries = 5
	known := false
	for range tries {
		before := own()
		now, err := ask(ctx)
		if err != nil {
			if known {
				break // the earlier answer holds
			}
			return Reading{}, err
		}
		took := own().Sub(before)
		if !known || took < r.Late {
			known, r = true, Reading{before, now, took}
		}
		if took < quick {
			break
		}
		ask = again
	}
	return r, nil
}
