package schedule

import "time"

// What tests look at.
const (
	Unit   = unit
	Levels = levels
	Keep   = keep

	MaxDelay = maxDelay
)

// Steps is how many units a message waits.
func Steps(d time.Duration) uint64 { return steps(d) }

// Entry is where a message enters the ladder.
func Entry(d time.Duration, queue string) string { return Names{}.entry(d, queue).String() }
