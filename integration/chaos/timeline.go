package chaos

import "time"

// slot is how long the pieces are that a timeline cuts time into, in milliseconds.
const slot = 10

// timeline counts what happened in each slot, to find when nothing did.
type timeline struct {
	slots []counts
	off   bool // nothing is counted: hours would take many slots
}

type counts struct{ attempts, accepted, ended uint32 }

func (t *timeline) add(at uint32, c counts) {
	if t.off {
		return
	}
	i := int(at / slot)
	if i > 10*24*3600*1000/slot {
		return // a torn clock must not exhaust the memory
	}
	for len(t.slots) <= i {
		t.slots = append(t.slots, make([]counts, i+1-len(t.slots)+1000)...)
	}
	s := &t.slots[i]
	s.attempts += c.attempts
	s.accepted += c.accepted
	s.ended += c.ended
}

func (t *timeline) last() (uint32, bool) {
	for i := len(t.slots) - 1; i >= 0; i-- {
		if t.slots[i].attempts > 0 {
			return uint32(i * slot), true
		}
	}
	return 0, false
}

// stalls calls each with every stretch of time in which no handler was called
// though accepted messages hadn't ended.
func (t *timeline) stalls(each func(from uint32, d time.Duration)) {
	open, began := 0, -1
	for i, s := range t.slots {
		if s.attempts > 0 || open <= 0 {
			if began >= 0 {
				each(uint32(began*slot), time.Duration(i-began)*slot*time.Millisecond)
			}
			began = -1
		} else if began < 0 {
			began = i
		}
		open += int(s.accepted) - int(s.ended)
	}
}

// Stall is the longest stretch that began in from to to (milliseconds since the
// run began) in which no handler was called though accepted messages hadn't ended.
func (l *Ledger) Stall(from, to uint32) (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.times.stalls(func(began uint32, d time.Duration) {
		if began >= from && began < to {
			longest = max(longest, d)
		}
	})
	return longest
}
