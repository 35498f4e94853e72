package schedule

import (
	"errors"
	"fmt"
	"time"
)

// Times are the times of a recurring message. Next returns the first one after t, or the zero time if
// there is none. The schedules of github.com/robfig/cron/v3 are Times.
//
// Next is called with the time that it returned last, or with the one at which the recurring message was
// added, in [Recurring].Location. It must return the same for the same t, in every process. It is called
// by one goroutine at a time.
type Times interface {
	Next(t time.Time) time.Time
}

// Every returns the times that are multiples of d since the year 1, UTC: Every(time.Hour) is each full
// hour. d is at least a second, or [Group.Run] refuses it.
func Every(d time.Duration) Times { return every(d) }

type every time.Duration

func (d every) Next(t time.Time) time.Time {
	if time.Duration(d) < time.Second {
		return time.Time{}
	}
	return t.Truncate(time.Duration(d)).Add(time.Duration(d))
}

func (d every) String() string { return "every " + time.Duration(d).String() }

var errStuck = errors.New("Next returned a time that isn't after its argument")

// next calls Next, and refuses what would make a busy loop. It is zero if there is no time.
func next(t Times, after time.Time) (at time.Time, err error) {
	defer func() {
		if r := recover(); r != nil {
			at, err = time.Time{}, fmt.Errorf("Next panicked: %v", r)
		}
	}()
	at = t.Next(after)
	if !at.IsZero() && !at.After(after) {
		return time.Time{}, fmt.Errorf("%w: %v after %v", errStuck, at, after)
	}
	if at.Year() > maxYear {
		return time.Time{}, nil
	}
	return at, nil
}

// maxYear keeps times within an int64 of nanoseconds.
const maxYear = 2200

// timesOf are the times of t in (after, until], at most the last most of them, and how many there were. last is
// the last one, or after. left is how often Next may be called; cut says that it wasn't enough, so that
// the times between last and until aren't known.
func timesOf(t Times, first, until time.Time, most int, left *int) (all []time.Time, n int, following time.Time, cut bool, err error) {
	at := first
	for !at.IsZero() && !at.After(until) {
		if len(all) == 2*most {
			all = append(all[:0], all[most:]...)
		}
		all = append(all, at)
		n++
		if *left--; *left < 0 {
			return all[max(0, len(all)-most):], n, time.Time{}, true, nil
		}
		if at, err = next(t, at); err != nil {
			return all[max(0, len(all)-most):], n, time.Time{}, false, err
		}
	}
	return all[max(0, len(all)-most):], n, at, false, nil
}
