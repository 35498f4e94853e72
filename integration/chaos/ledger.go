package chaos

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Answer is what a publisher knows of a message.
type Answer uint8

// The answers.
const (
	AnswerNotSent  Answer = iota // nobody has tried to send it
	AnswerSending                // on its way
	AnswerAccepted               // the broker has it
	AnswerRefused                // certainly not stored
	AnswerUnknown                // it may be stored
)

// Ledger keeps account of the messages of one lane, in some 30 bytes each. Its
// methods may be called concurrently, and the same thing may be reported twice: messages
// can be handled twice.
//
// Its times are milliseconds since the run began.
type Ledger struct {
	lane   int
	script Script

	mu      sync.Mutex
	answers []Answer
	at      []uint32                 // of the answer, plus one
	seen    []uint8                  // bit k-1: attempt k
	first   [][maxRetries + 1]uint32 // of each attempt, plus one
	dues    map[uint32]uint32        // of messages that were scheduled: when they were due, at the earliest
	calls   []uint8                  // of handlers; 255 is 255 or more
	ends    []uint8                  // bit e: End e
	handled []uint8                  // how often; 255 is 255 or more
	dead    []uint8
	open    int
	// deletions are when the work queue was gone, each time.
	deletions []uint32
	// broken says that queues, exchanges or bindings of the lane were gone for a while:
	// messages may be parked, or dead for want of a delay queue.
	broken bool
	// multiplies says that a queue of others refused retries. Each attempt then left a copy in the delay queue.
	multiplies bool
	// gone are messages that were in a queue when it was deleted.
	gone map[uint32]bool
	// order has the messages of each key in the order in which they were sent, each after the answer
	// to the one before. Nil: no message has a key.
	order map[string][]uint32
	found violations
	times timeline
}

// NewLedger returns one for n messages.
func NewLedger(script Script, lane, n int) *Ledger {
	return &Ledger{
		lane: lane, script: script,
		answers: make([]Answer, n), at: make([]uint32, n), seen: make([]uint8, n), calls: make([]uint8, n), first: make([][maxRetries + 1]uint32, n),
		ends: make([]uint8, n), handled: make([]uint8, n), dead: make([]uint8, n),
	}
}

// Sending notes that a message is about to be sent.
func (l *Ledger) Sending(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers[id] = AnswerSending
}

// Ordered notes that a message is the next one of its key.
func (l *Ledger) Ordered(key string, id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.order == nil {
		l.order = map[string][]uint32{}
	}
	l.order[key] = append(l.order[key], id)
}

// Due notes that a message is about to be scheduled for a time, perhaps not for the first time.
func (l *Ledger) Due(id, at uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dues == nil {
		l.dues = map[uint32]uint32{}
	}
	if was, again := l.dues[id]; !again || at < was {
		l.dues[id] = at
	}
}

func (l *Ledger) due(id uint32) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dues[id]
}

// Answered notes what has become of it.
func (l *Ledger) Answered(id uint32, a Answer, at uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.change(id, func() {
		l.answers[id], l.at[id] = a, at+1
	})
	if a == AnswerAccepted || a == AnswerUnknown && l.ends[id] != 0 {
		l.times.add(at, counts{accepted: 1})
	}
}

// attempted notes an attempt of a handler's.
func (l *Ledger) attempted(r record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.times.add(r.at, counts{attempts: 1})
	if r.what == whatForeign {
		l.found.add(Violation{ViolationGhost, l.lane, r.id, "a handler got a message that nobody has sent, or another than was sent: see the worker's log"})
		return
	}
	if int(r.id) >= len(l.answers) || int(r.lane) != l.lane {
		l.found.add(Violation{ViolationGhost, l.lane, r.id, fmt.Sprintf("a handler got message %d of lane %d, which doesn't exist", r.id, r.lane)})
		return
	}
	if r.attempt < 1 || int(r.attempt) > maxRetries+1 {
		l.found.add(Violation{ViolationWrongCount, l.lane, r.id, fmt.Sprintf("attempt %d", r.attempt)})
		return
	}
	if l.calls[r.id] = min(l.calls[r.id], 254) + 1; l.calls[r.id] == tooManyCalls && !l.multiplies {
		l.found.add(Violation{ViolationWrongCount, l.lane, r.id, fmt.Sprintf("a handler got it %d times, this time as attempt %d", tooManyCalls, r.attempt)})
	}
	ended := false
	l.change(r.id, func() {
		k := r.attempt - 1
		l.seen[r.id] |= 1 << k
		if f := &l.first[r.id][k]; *f == 0 || r.at+1 < *f {
			*f = r.at + 1
		}
		if r.what == whatHandled {
			ended = l.ends[r.id] == 0
			l.ends[r.id] |= 1 << EndHandled
			l.handled[r.id] = min(l.handled[r.id], 254) + 1
		}
	})
	if ended {
		l.ended(r.id, r.at)
	}
}

// Dead notes that a message was found in a dead-letter or parking queue, and how
// often it was retried.
func (l *Ledger) Dead(id uint32, end End, why string, retries int, at uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if int(id) >= len(l.answers) {
		l.found.add(Violation{ViolationGhost, l.lane, id, "a dead letter that doesn't exist"})
		return
	}
	// A guard that has found no delay queue says so in the dead letter.
	if end == EndOther && l.broken && (client.Reason(why) == retry.ReasonNoDelayQueue || client.Reason(why) == client.ReasonUnforwardable) {
		end = EndParked
	}
	if end == EndOther {
		l.found.add(Violation{ViolationWrongReason, l.lane, id, fmt.Sprintf("it is dead for %q", why)})
	}
	if want := l.script.Fate(l.lane, id).Failures; end != EndParked && retries != want {
		l.found.add(Violation{ViolationWrongCount, l.lane, id, fmt.Sprintf("it died (%v) after %d retries, not %d", end, retries, want)})
	}
	ended := l.ends[id] == 0
	l.change(id, func() {
		l.ends[id] |= 1 << end
		l.dead[id] = min(l.dead[id], 254) + 1
	})
	if ended {
		l.ended(id, at)
	}
}

// tooManyCalls is more than redeliveries explain.
const tooManyCalls = 100

// Multiplies says that retries multiply from now on. How many do is pinned by retry's
// TestAForeignQueueThatIsFullMultipliesFewRetries.
func (l *Ledger) Multiplies() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.multiplies = true
}

// Wrong is how much was found to be wrong so far.
func (l *Ledger) Wrong() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.found.count {
		n += k
	}
	return n
}

// ended keeps the timeline's balance: what wasn't known to be accepted now is.
func (l *Ledger) ended(id, at uint32) {
	c := counts{ended: 1}
	if l.answers[id] == AnswerUnknown || l.answers[id] == AnswerRefused {
		c.accepted = 1
	}
	l.times.add(at, c)
}

// Foreign notes something that isn't a message of this lane.
func (l *Ledger) Foreign(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found.add(Violation{ViolationGhost, l.lane, 0, what})
}

// Deleted notes that the work queue was deleted, at a time when it was surely gone:
// what had been accepted before that may have gone with it.
func (l *Ledger) Deleted(at uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.countOpen()
	l.deletions = append(l.deletions, at)
	l.times.add(at, counts{ended: uint32(before - l.countOpen())})
}

// Broken notes that queues, exchanges or bindings of the lane are gone for a while.
func (l *Ledger) Broken() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.broken = true
}

// lastCall is when a handler got the message for its last attempt, or when it was accepted.
func (l *Ledger) lastCall(id uint32) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return ms(max(l.at[id], slices.Max(l.first[id][:])))
}

// forwarding notes that a handler is about to send a copy, perhaps not for the first time.
func (l *Ledger) forwarding(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.answers[id] == AnswerNotSent {
		l.answers[id] = AnswerSending
	}
}

// forwarded notes what a handler knows of a copy, unless another one was accepted.
func (l *Ledger) forwarded(id uint32, a Answer, at uint32) {
	l.mu.Lock()
	accepted := l.answers[id] == AnswerAccepted
	l.mu.Unlock()
	if !accepted {
		l.Answered(id, a, at)
	}
}

// Gone notes that the message was in a queue that was deleted.
func (l *Ledger) Gone(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if int(id) >= len(l.answers) {
		return
	}
	l.change(id, func() {
		if l.gone == nil {
			l.gone = map[uint32]bool{}
		}
		l.gone[id] = true
	})
}

// change keeps count of the open messages around f.
func (l *Ledger) change(id uint32, f func()) {
	if l.isOpen(id) {
		l.open--
	}
	f()
	if l.isOpen(id) {
		l.open++
	}
}

// isOpen says that the message is certainly somewhere, and hasn't ended.
func (l *Ledger) isOpen(id uint32) bool {
	return (l.answers[id] == AnswerAccepted || l.seen[id] != 0) && l.ends[id] == 0 && !l.taken(id)
}

// taken says that the message may have gone with a deleted queue.
func (l *Ledger) taken(id uint32) bool {
	if l.gone[id] {
		return true
	}
	if len(l.deletions) == 0 || l.at[id] == 0 {
		return false
	}
	return l.at[id]-1 <= l.deletions[len(l.deletions)-1]
}

// Open is how many messages are certainly somewhere and haven't ended.
func (l *Ledger) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.deletions) == 0 {
		return l.open
	}
	return l.countOpen()
}

func (l *Ledger) countOpen() (n int) {
	for id := range l.answers {
		if l.isOpen(uint32(id)) {
			n++
		}
	}
	return n
}

// Missing are up to n of those.
func (l *Ledger) Missing(n int) []uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []uint32
	for id := range l.answers {
		if len(ids) < n && l.isOpen(uint32(id)) {
			ids = append(ids, uint32(id))
		}
	}
	return ids
}

// LastAttempt is when a handler was last called, and whether one was.
func (l *Ledger) LastAttempt() (at uint32, any bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.times.last()
}

// ViolationKind is what is wrong with a message.
type ViolationKind string

// What can be wrong.
const (
	ViolationLost        ViolationKind = "lost"         // accepted, and no handler has ever seen it
	ViolationStranded    ViolationKind = "stranded"     // a handler has seen it, and it is neither handled nor dead
	ViolationGhost       ViolationKind = "ghost"        // it came, and nobody has sent it, or not so
	ViolationNotRefused  ViolationKind = "not refused"  // it came, although the publisher learned that it certainly isn't stored
	ViolationWrongEnd    ViolationKind = "wrong end"    // whatHandled in place of dead, or dead in place of handled
	ViolationWrongReason ViolationKind = "wrong reason" // dead for another reason than it should be
	ViolationWrongPlace  ViolationKind = "wrong place"  // parked, though its queue was never gone
	ViolationWrongCount  ViolationKind = "wrong count"  // an attempt was left out, or there was one too many
	ViolationEarly       ViolationKind = "early"        // retried before its delay was over
	ViolationOrder       ViolationKind = "order"        // begun before an earlier message of its key was completed
	ViolationStuck       ViolationKind = "stuck"        // not a message: nothing moved for longer than the run waits
	ViolationLeft        ViolationKind = "left"         // not a message: a queue isn't empty at the end
)

// Violation is something that must not be.
type Violation struct {
	Kind   ViolationKind `json:"kind"`
	Lane   int           `json:"lane"`
	ID     uint32        `json:"id"`
	Detail string        `json:"detail"`
}

func (v Violation) String() string {
	return fmt.Sprintf("%s: lane %d, message %d: %s", v.Kind, v.Lane, v.ID, v.Detail)
}

// violations keeps the first ones of each kind, and counts all.
type violations struct {
	list  []Violation
	count map[ViolationKind]int
}

const violationsKept = 50

func (v *violations) add(x Violation) {
	if v.count == nil {
		v.count = map[ViolationKind]int{}
	}
	if v.count[x.Kind]++; v.count[x.Kind] <= violationsKept {
		v.list = append(v.list, x)
	}
}

// Tally counts messages.
type Tally struct {
	Messages   int `json:"messages"`
	Accepted   int `json:"accepted"`
	Refused    int `json:"refused"`
	Unknown    int `json:"unknown"`
	Handled    int `json:"handled"`
	Dead       int `json:"dead"` // the parked included
	Parked     int `json:"parked"`
	Duplicates int `json:"duplicates"` // handled, or found dead, once more than once
	Taken      int `json:"taken"`      // gone with a queue that was deleted
	Lost       int `json:"lost"`       // ViolationLost and Stranded
}

func (t *Tally) add(o Tally) {
	t.Messages += o.Messages
	t.Accepted += o.Accepted
	t.Refused += o.Refused
	t.Unknown += o.Unknown
	t.Handled += o.Handled
	t.Dead += o.Dead
	t.Parked += o.Parked
	t.Duplicates += o.Duplicates
	t.Taken += o.Taken
	t.Lost += o.Lost
}

// Verdict is what a Ledger has to say at the end.
type Verdict struct {
	Tally
	// Shares are the tallies of consecutive, equal shares of the messages.
	Shares []Tally
	// Violations are the first of each kind; Count has all.
	Violations []Violation
	Count      map[ViolationKind]int
	// Late is by how much retries came after their delay.
	Late Spread
}

// Spread is of a number of durations.
type Spread struct {
	N   int           `json:"n"`
	P50 time.Duration `json:"p50_ns"`
	P99 time.Duration `json:"p99_ns"`
	Max time.Duration `json:"max_ns"`
}

// earlyTolerance is for times that are cut to milliseconds, twice.
const earlyTolerance = 2

// Check says what has become of the messages, in shares equal parts. It is to be
// called when all queues are empty.
func (l *Ledger) Check(shares int) Verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := Verdict{Shares: make([]Tally, shares)}
	found := violations{list: slices.Clone(l.found.list), count: map[ViolationKind]int{}}
	for k, n := range l.found.count {
		found.count[k] = n
	}
	var late []uint32
	size := max(1, (len(l.answers)+shares-1)/max(shares, 1))
	for id := range l.answers {
		late = l.checkOne(uint32(id), &v.Shares[id/size], &found, late)
	}
	for _, s := range v.Shares {
		v.add(s)
	}
	l.checkOrder(&found)
	v.Violations, v.Count = found.list, found.count
	if len(late) > 0 {
		slices.Sort(late)
		ms := func(i int) time.Duration { return time.Duration(late[i]) * time.Millisecond }
		v.Late = Spread{N: len(late), P50: ms(len(late) / 2), P99: ms(len(late) * 99 / 100), Max: ms(len(late) - 1)}
	}
	return v
}

func (l *Ledger) checkOne(id uint32, t *Tally, found *violations, late []uint32) []uint32 {
	bad := func(k ViolationKind, format string, args ...any) {
		found.add(Violation{k, l.lane, id, fmt.Sprintf(format, args...)})
	}
	fate, seen, ends := l.script.Fate(l.lane, id), l.seen[id], l.ends[id]
	came := seen != 0 || ends != 0
	switch l.answers[id] {
	case AnswerNotSent:
		if came {
			bad(ViolationGhost, "it came, and nobody has sent it")
		}
		return late
	case AnswerRefused:
		t.Refused++
		if came {
			bad(ViolationNotRefused, "the publisher was told that it isn't stored, and it came")
		}
	case AnswerAccepted:
		t.Accepted++
	default:
		t.Unknown++
	}
	t.Messages++

	if ends == 0 && (l.answers[id] == AnswerAccepted || seen != 0) {
		switch {
		case l.taken(id):
			t.Taken++
		case seen == 0:
			t.Lost++
			bad(ViolationLost, "accepted at %v, to be %v, and never seen", ms(l.at[id]), fate.End)
		default:
			t.Lost++
			bad(ViolationStranded, "%d attempts of %d, the last at %v, to be %v, and no end", bits.OnesCount8(seen), fate.Attempts(), ms(slices.Max(l.first[id][:])), fate.End)
		}
	}
	if l.handled[id] > 0 {
		t.Handled++
	}
	if l.dead[id] > 0 {
		t.Dead++
	}
	if n := int(l.handled[id]) + int(l.dead[id]); n > 1 {
		t.Duplicates += n - 1
	}
	for e := EndHandled; e <= EndOther; e++ {
		if ends&(1<<e) == 0 || e == fate.End {
			continue
		}
		switch {
		case e == EndParked:
			t.Parked++
			if len(l.deletions) == 0 && !l.broken {
				bad(ViolationWrongPlace, "it is parked, and should be %v", fate.End)
			}
		case e == EndHandled || fate.End == EndHandled:
			bad(ViolationWrongEnd, "it is %v, and should be %v", e, fate.End)
		case e != EndOther: // which was reported already
			bad(ViolationWrongReason, "it is dead as %v, and should be as %v", e, fate.End)
		}
	}
	if seen&(seen+1) != 0 {
		bad(ViolationWrongCount, "attempts seen: %04b, one is left out", seen)
	}
	if n := bits.Len8(seen); n > fate.Attempts() {
		bad(ViolationWrongCount, "attempt %d, and it should end with %d", n, fate.Attempts())
	}
	if ends&^(1<<EndParked) != 0 && seen&(1<<fate.Failures) == 0 {
		bad(ViolationWrongCount, "it ended before attempt %d", fate.Attempts())
	}
	return l.checkDelays(id, bad, late)
}

// checkOrder looks for messages that came to a handler before an earlier one of their key was completed.
func (l *Ledger) checkOrder(found *violations) {
	for key, ids := range l.order {
		var completed, by uint32
		for _, id := range ids {
			began := uint32(0)
			for _, at := range l.first[id] {
				if at != 0 && (began == 0 || at < began) {
					began = at
				}
			}
			if began != 0 && began < completed {
				found.add(Violation{ViolationOrder, l.lane, id, fmt.Sprintf("key %s: it began at %v, and message %d, which was accepted before it was sent, was completed at %v", key, ms(began), by, ms(completed))})
			}
			if l.answers[id] != AnswerAccepted || l.gone[id] {
				continue // it may be anywhere in the order
			}
			if at := l.first[id][l.script.Fate(l.lane, id).Failures]; at > completed {
				completed, by = at, id
			}
		}
	}
}

// checkDelays appends to late by how many milliseconds each attempt was late.
func (l *Ledger) checkDelays(id uint32, bad func(ViolationKind, string, ...any), late []uint32) []uint32 {
	if came, due := l.first[id][0], l.dues[id]; came != 0 && came+earlyTolerance < due {
		bad(ViolationEarly, "scheduled for %v, and it came at %v", ms(due), ms(came-1))
	}
	for k := range maxRetries {
		a, b := l.first[id][k], l.first[id][k+1]
		if a == 0 || b == 0 {
			continue
		}
		switch due := a + uint32(l.script.delay(k).Milliseconds()); {
		case b+earlyTolerance < due && l.broken && l.isADelay(b-a):
			// A guard has found that its delay queue loses messages, so it waited in another.
		case b+earlyTolerance < due:
			bad(ViolationEarly, "attempt %d came %v after attempt %d at %v, and was to wait for %v", k+2, time.Duration(int64(b)-int64(a))*time.Millisecond, k+1, ms(a-1), l.script.delay(k))
		case b > due:
			late = append(late, b-due)
		default:
			late = append(late, 0)
		}
	}
	return late
}

// isADelay says whether a message that came back after so many milliseconds has waited
// for one of the policy's delays.
func (l *Ledger) isADelay(waited uint32) bool {
	for k := range maxRetries {
		if d := uint32(l.script.delay(k).Milliseconds()); d <= waited+earlyTolerance && waited <= d+earlyTolerance {
			return true
		}
	}
	return false
}

func ms(at uint32) time.Duration { return time.Duration(at) * time.Millisecond }
