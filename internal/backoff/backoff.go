// Package backoff waits between tries. Tries is the one rule for trying again: what was open for a
// second has worked.
package backoff

import (
	"context"
	"iter"
	"math/rand/v2"
	"time"
)

// provenAfter is how long something must have been open to have worked. A pause is there
// so that what fails at once doesn't fail in a busy loop. What was open for a second can't:
// the worst is one try a second. A longer limit would count losses that have nothing to
// do with each other, such as those of a network that fails every few seconds, as failures
// in a row, and a working link would be opened later each time.
const provenAfter = time.Second

// Try is one try of Tries. It is valid until the next.
type Try struct {
	failures int
	up       time.Time // zero: not yet
	proven   bool
}

// Attempt is the number of the try, from 1, since the last one that worked.
func (t *Try) Attempt() int { return t.failures + 1 }

// Up says that the try has succeeded in opening. It has worked if it stays open for a second.
func (t *Try) Up() { t.up = time.Now() }

// Worked says that the try has worked, however long it took.
func (t *Try) Worked() { t.proven = true }

// Tries yields tries until the loop over them ends, or ctx does. The first is made even if
// ctx has ended.
//
// After a try that has worked, the next follows at once, as the first does, and failures
// are counted from 0 again. After any other, pause says how long to wait.
func Tries(ctx context.Context, pause func(failures int) time.Duration) iter.Seq[*Try] {
	return func(yield func(*Try) bool) {
		t := &Try{}
		for yield(t) && ctx.Err() == nil {
			failures := t.failures + 1
			if t.proven || !t.up.IsZero() && time.Since(t.up) >= provenAfter {
				failures = 0
			} else if !Sleep(ctx, pause(t.failures)) {
				return
			}
			*t = Try{failures: failures}
		}
	}
}

// Exponential is a pause that doubles from Min to Max, which are positive.
type Exponential struct{ Min, Max time.Duration }

// Pause is how long to wait after so many failures in a row and one more: random between
// nothing and Min·2ⁿ, at most Max. The jitter keeps many clients from coming back in step.
func (b Exponential) Pause(failures int) time.Duration {
	d := b.Max
	if failures < 32 && b.Min<<failures < b.Max && b.Min<<failures > 0 {
		d = b.Min << failures
	}
	return rand.N(d) + time.Millisecond
}

// Sleep waits for d or the end of ctx, and says whether ctx still lasts.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
