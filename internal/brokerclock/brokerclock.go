// Package brokerclock reads the broker's clock together with this host's.
package brokerclock

import (
	"context"
	"time"
)

// quick is how long reading both clocks takes at most, unless the process is interrupted.
const quick = time.Millisecond

// Read returns a time of this host, by own, and the broker's time at that moment, by ask. The
// process may be interrupted between the two readings, for many milliseconds on a busy machine. That
// makes the broker's time too late, never too early. So a message whose delivery time is computed
// from it is never early.
//
// If reading takes long, because ask has to query the broker or because of an interruption, Read tries
// again, by again: ask's last answer, carried forward.
func Read(ctx context.Context, own func() time.Time, ask, again func(context.Context) (time.Time, error)) (at, broker time.Time, err error) {
	const tries = 5
	best := time.Duration(-1)
	for range tries {
		before := own()
		now, err := ask(ctx)
		if err != nil {
			if best >= 0 {
				break // the earlier answer holds
			}
			return time.Time{}, time.Time{}, err
		}
		took := own().Sub(before)
		if best < 0 || took < best {
			best, at, broker = took, before, now
		}
		if took < quick {
			break
		}
		ask = again
	}
	return at, broker, nil
}
