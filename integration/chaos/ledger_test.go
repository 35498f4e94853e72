package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const testMessages = 2000

// history reports to a ledger what happens to its messages: what should, but for the one
// message that change is given, or all if that is nil.
type history struct {
	t      *testing.T
	ledger *Ledger
	script Script
}

func newHistory(t *testing.T) *history {
	s := Script{Seed: 7}
	return &history{t, NewLedger(s, 0, testMessages), s}
}

// with is the first message, from some on, of a fate.
func (s *history) with(end End, failures int) uint32 {
	for id := range uint32(testMessages) {
		if s.script.Fate(0, id) == (Fate{end, failures}) {
			return id
		}
	}
	require.FailNow(s.t, "no such message")
	return 0
}

// publish reports a message that is accepted.
func (s *history) publish(id uint32) {
	s.ledger.Sending(id)
	s.ledger.Answered(id, AnswerAccepted, 1000+id)
}

// attempts reports attempts from the first to the last given; those at the time
// that is theirs.
func (s *history) attempts(id uint32, first, last int) {
	fate := s.script.Fate(0, id)
	at := 2000 + id
	for k := 1; k <= last; k++ {
		if k > 1 {
			at += uint32(delays[k-2].Milliseconds()) + 5
		}
		w := whatFailed
		if k == fate.Attempts() && fate.End == EndHandled {
			w = whatHandled
		} else if k == fate.Attempts() {
			w = whatDied
		}
		if k >= first {
			s.ledger.attempted(record{id: id, at: at, attempt: uint8(k), what: w})
		}
	}
}

// live reports the whole life of a message as it should be.
func (s *history) live(id uint32) {
	s.publish(id)
	fate := s.script.Fate(0, id)
	s.attempts(id, 1, fate.Attempts())
	if fate.End != EndHandled {
		s.ledger.Dead(id, fate.End, "", fate.Failures, 5000)
	}
}

// all lives all, but those given.
func (s *history) all(but ...uint32) {
	skip := map[uint32]bool{}
	for _, id := range but {
		skip[id] = true
	}
	for id := range uint32(testMessages) {
		if !skip[id] {
			s.live(id)
		}
	}
}

func TestNothingIsWrongWhereNothingIs(t *testing.T) {
	s := newHistory(t)
	s.all()
	v := s.ledger.Check(4)
	assert.Empty(t, v.Violations)
	assert.Empty(t, v.Count)
	assert.Equal(t, Tally{Messages: testMessages, Accepted: testMessages, Handled: v.Handled, Dead: testMessages - v.Handled}, v.Tally)
	assert.InDelta(t, 0.86*testMessages, v.Handled, 0.03*testMessages)
	assert.Equal(t, 500, v.Shares[3].Messages)
	assert.Equal(t, 5*time.Millisecond, v.Late.Max)
	assert.Zero(t, s.ledger.Open())
}

// Each kind of violation is planted alone, and found alone.
func TestPlantedViolationsAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		plant func(s *history) (id uint32)
		kind  ViolationKind
		lost  int
	}{
		"accepted and never seen": {func(s *history) uint32 {
			id := s.with(EndHandled, 0)
			s.publish(id)
			return id
		}, ViolationLost, 1},
		"failed once and gone": {func(s *history) uint32 {
			id := s.with(EndHandled, 2)
			s.publish(id)
			s.attempts(id, 1, 2)
			return id
		}, ViolationStranded, 1},
		"given up and not in the dead-letter queue": {func(s *history) uint32 {
			id := s.with(EndPermanent, 1)
			s.publish(id)
			s.attempts(id, 1, 2)
			return id
		}, ViolationStranded, 1},
		"of unknown outcome, seen, and gone": {func(s *history) uint32 {
			id := s.with(EndHandled, 1)
			s.ledger.Sending(id)
			s.ledger.Answered(id, AnswerUnknown, 1)
			s.attempts(id, 1, 1)
			return id
		}, ViolationStranded, 1},
		"never sent": {func(s *history) uint32 {
			id := s.with(EndHandled, 0)
			s.attempts(id, 1, 1)
			return id
		}, ViolationGhost, 0},
		"never sent, and dead": {func(s *history) uint32 {
			id := s.with(EndPermanent, 0)
			s.ledger.Dead(id, EndPermanent, "", 0, 1)
			return id
		}, ViolationGhost, 0},
		"of another lane": {func(s *history) uint32 {
			s.ledger.attempted(record{id: 1, lane: 3, attempt: 1, what: whatHandled})
			return testMessages
		}, ViolationGhost, 0},
		"an id that doesn't exist": {func(s *history) uint32 {
			s.ledger.attempted(record{id: testMessages, attempt: 1, what: whatHandled})
			return testMessages
		}, ViolationGhost, 0},
		"a dead letter that doesn't exist": {func(s *history) uint32 {
			s.ledger.Dead(testMessages, EndPermanent, "", 0, 1)
			return testMessages
		}, ViolationGhost, 0},
		"changed on its way": {func(s *history) uint32 {
			s.ledger.attempted(record{what: whatForeign})
			return testMessages
		}, ViolationGhost, 0},
		"refused, and there": {func(s *history) uint32 {
			id := s.with(EndHandled, 0)
			s.ledger.Sending(id)
			s.ledger.Answered(id, AnswerRefused, 1)
			s.attempts(id, 1, 1)
			return id
		}, ViolationNotRefused, 0},
		"dead in place of handled": {func(s *history) uint32 {
			id := s.with(EndHandled, 0)
			s.live(id)
			s.ledger.Dead(id, EndPermanent, "", 0, 1)
			return id
		}, ViolationWrongEnd, 0},
		"handled in place of dead": {func(s *history) uint32 {
			id := s.with(EndPermanent, 0)
			s.live(id)
			s.ledger.attempted(record{id: id, attempt: 1, at: 9000, what: whatHandled})
			return id
		}, ViolationWrongEnd, 0},
		"dead for the reason of another": {func(s *history) uint32 {
			id := s.with(EndPermanent, 0)
			s.publish(id)
			s.attempts(id, 1, 1)
			s.ledger.Dead(id, EndPanicked, "", 0, 1)
			return id
		}, ViolationWrongReason, 0},
		"dead for a reason that nobody gave": {func(s *history) uint32 {
			id := s.with(EndPermanent, 0)
			s.live(id)
			s.ledger.Dead(id, EndOther, "delivery_limit", 0, 1)
			return id
		}, ViolationWrongReason, 0},
		"parked though its queue was there": {func(s *history) uint32 {
			id := s.with(EndHandled, 1)
			s.publish(id)
			s.attempts(id, 1, 1)
			s.ledger.Dead(id, EndParked, "", 1, 1)
			return id
		}, ViolationWrongPlace, 0},
		"an attempt left out": {func(s *history) uint32 {
			id := s.with(EndHandled, 2)
			s.publish(id)
			s.attempts(id, 1, 1)
			s.attempts(id, 3, 3)
			return id
		}, ViolationWrongCount, 0},
		"an attempt too many": {func(s *history) uint32 {
			id := s.with(EndHandled, 0)
			s.live(id)
			s.ledger.attempted(record{id: id, attempt: 2, at: 9000, what: whatFailed})
			return id
		}, ViolationWrongCount, 0},
		"dead before its last attempt": {func(s *history) uint32 {
			id := s.with(EndExhausted, maxRetries)
			s.publish(id)
			s.attempts(id, 1, maxRetries)
			s.ledger.Dead(id, EndExhausted, "", maxRetries, 1)
			return id
		}, ViolationWrongCount, 0},
		"dead with another count": {func(s *history) uint32 {
			id := s.with(EndExhausted, maxRetries)
			s.publish(id)
			s.attempts(id, 1, maxRetries+1)
			s.ledger.Dead(id, EndExhausted, "", maxRetries-1, 1)
			return id
		}, ViolationWrongCount, 0},
		"an attempt of a number that can't be": {func(s *history) uint32 {
			s.ledger.attempted(record{id: 0, attempt: maxRetries + 2, what: whatFailed})
			return testMessages
		}, ViolationWrongCount, 0},
		"retried too early": {func(s *history) uint32 {
			id := s.with(EndHandled, 1)
			s.publish(id)
			s.ledger.attempted(record{id: id, attempt: 1, at: 3000, what: whatFailed})
			s.ledger.attempted(record{id: id, attempt: 2, at: 3000 + uint32(delays[0].Milliseconds()) - 3, what: whatHandled})
			return id
		}, ViolationEarly, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newHistory(t)
			id := c.plant(s)
			s.all(id)
			v := s.ledger.Check(1)
			require.Equal(t, map[ViolationKind]int{c.kind: 1}, v.Count, "%v", v.Violations)
			require.Len(t, v.Violations, 1)
			assert.Equal(t, c.kind, v.Violations[0].Kind)
			assert.Equal(t, c.lost, v.Lost)
			assert.Equal(t, c.lost, s.ledger.Open(), "a message that is missing is open, and is waited for")
			if c.lost > 0 {
				assert.Equal(t, []uint32{id}, s.ledger.Missing(9))
			}
		})
	}
}

func TestUnknownMessagesMayComeOrNot(t *testing.T) {
	s := newHistory(t)
	came, gone := s.with(EndHandled, 1), s.with(EndHandled, 2)
	for _, id := range []uint32{came, gone} {
		s.ledger.Sending(id)
		s.ledger.Answered(id, AnswerUnknown, 1)
	}
	s.attempts(came, 1, 2)
	s.all(came, gone)
	v := s.ledger.Check(1)
	assert.Empty(t, v.Violations)
	assert.Equal(t, 2, v.Unknown)
	assert.Zero(t, v.Lost)
}

func TestDuplicatesAreCounted(t *testing.T) {
	s := newHistory(t)
	s.all()
	twice, dead := s.with(EndHandled, 0), s.with(EndPermanent, 0)
	s.attempts(twice, 1, 1)
	s.attempts(twice, 1, 1)
	s.ledger.Dead(dead, EndPermanent, "", 0, 1)
	v := s.ledger.Check(1)
	assert.Empty(t, v.Violations)
	assert.Equal(t, 3, v.Duplicates)
}

// What was accepted before a queue was deleted may be gone with it; what was
// accepted later may not.
func TestADeletedQueueTakesWhatItHeld(t *testing.T) {
	s := newHistory(t)
	before, parked, after := s.with(EndHandled, 0), s.with(EndHandled, 1), s.with(EndHandled, 2)
	s.ledger.Sending(before)
	s.ledger.Answered(before, AnswerAccepted, 4000)
	s.publish(parked)
	s.attempts(parked, 1, 1)
	s.ledger.Dead(parked, EndParked, "", 1, 4100)
	require.Equal(t, 1, s.ledger.Open())
	s.ledger.Deleted(4000)
	require.Zero(t, s.ledger.Open())
	s.ledger.Sending(after)
	s.ledger.Answered(after, AnswerAccepted, 4001)
	s.all(before, parked, after)
	v := s.ledger.Check(1)
	assert.Equal(t, map[ViolationKind]int{ViolationLost: 1}, v.Count, "%v", v.Violations)
	assert.Equal(t, after, v.Violations[0].ID)
	assert.Equal(t, 1, v.Taken)
	assert.Equal(t, 1, v.Parked)
}

func TestManyViolationsAreCountedAndFewKept(t *testing.T) {
	s := newHistory(t)
	for id := range uint32(testMessages) {
		s.publish(id)
	}
	v := s.ledger.Check(3)
	assert.Equal(t, map[ViolationKind]int{ViolationLost: testMessages}, v.Count)
	assert.Equal(t, testMessages, v.Lost)
	assert.Len(t, v.Violations, violationsKept)
}

func TestStallIsWhenNothingIsHandledThoughSomethingIsThere(t *testing.T) {
	s := newHistory(t)
	id, other := s.with(EndHandled, 0), s.with(EndHandled, 1)
	s.ledger.Sending(id)
	s.ledger.Answered(id, AnswerAccepted, 1000)
	s.ledger.attempted(record{id: id, attempt: 1, at: 3500, what: whatHandled})
	// Nothing is there from here to 9000, so that isn't a stall.
	s.ledger.Sending(other)
	s.ledger.Answered(other, AnswerAccepted, 9000)
	s.ledger.attempted(record{id: other, attempt: 1, at: 9100, what: whatFailed})
	s.ledger.attempted(record{id: other, attempt: 2, at: 9900, what: whatHandled})
	assert.InDelta(t, 2500, s.ledger.Stall(0, 20_000).Milliseconds(), 2*slot)
	assert.InDelta(t, 800, s.ledger.Stall(9000, 20_000).Milliseconds(), 2*slot)
	assert.Zero(t, s.ledger.Stall(3600, 8000))
}
