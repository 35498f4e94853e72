// Package clockstep makes times as a host reads them whose wall clock was set while a
// process ran. It is for tests.
package clockstep

import (
	"time"
	"unsafe"
)

// layout is how package time stores a time with a monotonic reading: a bit that says so,
// seconds since 1885 in 33 bits and nanoseconds in 30, and the reading. The test of Step
// fails if that changes.
type layout struct {
	wall uint64
	mono int64
	loc  *time.Location
}

const hasMonotonic = 1 << 63

var since1885 = time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC).Unix()

// Step returns t, which must come from time.Now, with another wall clock reading, later by
// by. Its monotonic reading stays, as it does when the host's clock is set. In a
// testing/synctest bubble, where times have no monotonic reading, it gets one.
func Step(t time.Time, by time.Duration) time.Time {
	mono := t.UnixNano()
	if l := (*layout)(unsafe.Pointer(&t)); l.wall&hasMonotonic != 0 {
		mono = l.mono
	}
	t = t.Round(0).Add(by)
	l := (*layout)(unsafe.Pointer(&t))
	l.wall = hasMonotonic | uint64(t.Unix()-since1885)<<30 | uint64(t.Nanosecond())
	l.mono = mono
	return t
}
