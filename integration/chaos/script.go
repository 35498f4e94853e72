package chaos

import (
	"fmt"
	"time"
)

// maxRetries of every policy in a run, and the delay before each retry.
const maxRetries = 3

var delays = [maxRetries]time.Duration{50 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond}

// End is how a message ends.
type End uint8

// The ends that a message can have.
const (
	EndNowhere   End = iota // not yet, or lost
	EndHandled              // its handler has succeeded
	EndPermanent            // dead-lettered: a permanent error
	EndExhausted            // dead-lettered: the retries are used up
	EndPanicked             // dead-lettered: its handler panicked
	EndDeclined             // dead-lettered by the handler itself, with its reason
	EndParked               // in the parking queue
	EndOther                // dead-lettered for any other reason
)

var endNames = [...]string{"nowhere", "handled", "permanent", "exhausted", "panicked", "declined", "parked", "other"}

func (e End) String() string {
	if int(e) < len(endNames) {
		return endNames[e]
	}
	return fmt.Sprintf("end %d", uint8(e))
}

// Fate is what is to become of a message: its handler fails Failures times, and
// at the attempt after that it ends. An Exhausted message fails then, too.
type Fate struct {
	End      End
	Failures int
}

// Attempts is how many attempts the message has, if none is repeated.
func (f Fate) Attempts() int { return f.Failures + 1 }

// Script is what handlers and publishers do with each message: a pure function of
// the seed.
type Script struct {
	Seed uint64
	// Delays before each retry. Zero: delays.
	Delays [maxRetries]time.Duration
	// Plain handlers succeed or fail, and know nothing else: all other messages are exhausted.
	Plain bool
}

// delay is that before retry k+1.
func (s Script) delay(k int) time.Duration {
	if s.Delays[k] > 0 {
		return s.Delays[k]
	}
	return delays[k]
}

// dice are random bits for one message, the same each time.
func (s Script) dice(lane int, id uint32, salt uint64) uint64 {
	x := s.Seed ^ uint64(lane+1)*0x9e3779b97f4a7c15 ^ uint64(id)*0xbf58476d1ce4e5b9 ^ salt*0x94d049bb133111eb
	for range 2 { // splitmix64
		x += 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}

// Fate of a message: of a hundred, 70 are handled at once, 16 after retries, 4 are
// exhausted, 5 permanent, 3 panic and 2 are declined, those after up to three
// failures.
func (s Script) Fate(lane int, id uint32) Fate {
	f := s.fate(lane, id)
	if s.Plain && f.End != EndHandled {
		return Fate{EndExhausted, maxRetries}
	}
	return f
}

func (s Script) fate(lane int, id uint32) Fate {
	d := s.dice(lane, id, 1)
	later := int(d>>32) % (maxRetries + 1)
	switch p := d % 100; {
	case p < 70:
		return Fate{EndHandled, 0}
	case p < 86:
		return Fate{EndHandled, 1 + int(d>>32)%maxRetries}
	case p < 90:
		return Fate{EndExhausted, maxRetries}
	case p < 95:
		return Fate{EndPermanent, later}
	case p < 98:
		return Fate{EndPanicked, later}
	}
	return Fate{EndDeclined, later}
}

// Takes is how long the handler works on one attempt: one in sixteen up to 20 ms,
// the others no time.
func (s Script) Takes(lane int, id uint32, attempt int) time.Duration {
	d := s.dice(lane, id, 2+uint64(attempt))
	if d%16 != 0 {
		return 0
	}
	return time.Duration(d>>32%20000) * time.Microsecond
}

// Size of the body in bytes: mostly 64 to 575, and one in 1,024 up to 192 KiB,
// which takes several frames.
func (s Script) Size(lane int, id uint32) int {
	d := s.dice(lane, id, 100)
	if d%1024 == 0 {
		return 64 + int(d>>32%(192<<10))
	}
	return 64 + int(d>>32%512)
}

// Impatient says that the publisher waits for the answer for 20 ms only, as one in
// 64 does.
func (s Script) Impatient(lane int, id uint32) bool { return s.dice(lane, id, 101)%64 == 0 }

// Insists says that the publisher sends again when it doesn't know what has become
// of the message, or that it wasn't taken. One in four leaves it at that.
func (s Script) Insists(lane int, id uint32) bool { return s.dice(lane, id, 102)%4 != 0 }
