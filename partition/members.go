package partition

import (
	"encoding/json"
	"slices"
	"time"
)

// beat is what a worker tells the others: who it is, and what it has. It is the body of a message.
type beat struct {
	Worker string `json:"worker"`
	Born   int64  `json:"born"` // when it started, in ns: one that starts again is another
	N      uint64 `json:"n"`    // counts its beats
	Owns   []int  `json:"owns,omitempty"`
	Line   []int  `json:"line,omitempty"`  // where it is in line
	Asks   bool   `json:"asks,omitempty"`  // it wants to hear from all
	Leave  bool   `json:"leave,omitempty"` // it takes no partition any more
	// Lost are workers that seem to be gone, with the number of their last beat.
	Lost []lost `json:"lost,omitempty"`
	// Drained is the ID of a marker that was reached: see Reshard.
	Drained string `json:"drained,omitempty"`
	// Every is the number of seconds between its beats; 0: 1.
	Every int `json:"every,omitempty"`
}

type lost struct {
	Worker string `json:"worker"`
	N      uint64 `json:"n"`
}

const (
	// beatEvery is the time between a worker's beats, and gone after how long without one it
	// counts as gone. That is seldom what is waited for: the next worker in line notices at once
	// that a partition has lost its owner.
	beatEvery = time.Second
	gone      = 3500 * time.Millisecond
	// maxBeats is how many beats a worker hears in a second. If there are more workers, each sends fewer: otherwise
	// 1,000 of them would receive a million in a second.
	maxBeats = 64
	// maxMembers and maxBeat bound what a hostile sender can do.
	maxMembers = 1000
	maxBeat    = 32 << 10
)

// members is what a worker knows of the others. Its methods take the time as an argument.
type members struct {
	partitions int
	all        map[string]*member
	changed    time.Time // when one has come or gone
}

type member struct {
	beat
	heard time.Time
	// left says that it takes no partition: it has said so, or seems to be gone. One that seemed
	// to be gone comes back with its next beat.
	left bool
}

// name is what the assignment knows a worker by.
func (b *beat) name() string {
	return b.Worker + "/" + time.Unix(0, b.Born).UTC().Format("150405.000000000")
}

// every is the number of seconds between a worker's beats.
func (m *members) every() int { return (len(m.all) + maxBeats) / maxBeats }

// gone is after how long without a beat the worker counts as gone.
func (b *beat) gone() time.Duration { return gone * time.Duration(max(b.Every, 1)) }

func readBeat(body []byte) (b beat, ok bool) {
	if len(body) > maxBeat || json.Unmarshal(body, &b) != nil || b.Worker == "" || len(b.Worker) > maxWorker {
		return b, false
	}
	return b, len(b.Owns) <= maxPartitions && len(b.Line) <= maxPartitions && len(b.Lost) <= maxMembers && b.Every >= 0 && b.Every <= maxMembers/maxBeats+1
}

// hear takes a beat, and reports whether it has changed anything.
func (m *members) hear(b beat, now time.Time) (changed bool) {
	name := b.name()
	was := m.all[name]
	if was == nil {
		if len(m.all) >= maxMembers {
			return false
		}
		was = &member{left: true}
		m.all[name] = was
	} else if b.N <= was.N {
		return false
	}
	if was.left != b.Leave {
		m.changed = now
		changed = true
	}
	changed = changed || !slices.Equal(was.Owns, b.Owns)
	was.beat, was.heard, was.left = b, now, b.Leave
	for _, l := range b.Lost {
		changed = m.lose(l, now) || changed
	}
	return changed
}

// lose takes out a worker that seems to be gone, unless it was heard of since.
func (m *members) lose(l lost, now time.Time) bool {
	w := m.all[l.Worker]
	if w == nil || w.N > l.N || w.left && w.Owns == nil {
		return false
	}
	w.left, w.Owns, m.changed = true, nil, now
	return true
}

// expire takes out those that weren't heard for too long.
func (m *members) expire(now time.Time) (changed bool) {
	for name, w := range m.all {
		switch age := now.Sub(w.heard); {
		case age > 2*w.gone():
			if !w.left || w.Owns != nil { // this process was suspended for a while
				m.changed, changed = now, true
			}
			delete(m.all, name)
		case age > w.gone() && (!w.left || w.Owns != nil):
			w.left, w.Owns, m.changed, changed = true, nil, now, true
		}
	}
	return changed
}

// claims returns the other worker that says that it has the partition; nil if there is none.
func (m *members) claims(p int, self string) *member {
	for name, w := range m.all {
		if name != self && slices.Contains(w.Owns, p) {
			return w
		}
	}
	return nil
}

// inLine says whether the worker of that name is in line for the partition.
func (m *members) inLine(p int, name string) bool {
	w := m.all[name]
	return w != nil && !w.left && slices.Contains(w.Line, p)
}

// has is what each worker has. own is what this one has, if it takes any.
func (m *members) has(self string, own []int, leaving bool) map[string][]int {
	has := make(map[string][]int, len(m.all)+1)
	for name, w := range m.all {
		if !w.left && name != self {
			has[name] = w.Owns
		}
	}
	if !leaving {
		has[self] = own
	}
	return has
}
