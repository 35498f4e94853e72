package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A message that begins before an earlier one of its key was completed is out of order; where nobody
// knows whether the earlier one was stored in time, it isn't.
func TestOrderByKeyIsChecked(t *testing.T) {
	for name, c := range map[string]struct {
		answer Answer
		gone   bool
		second uint32 // when the second message begins
		wrong  int
	}{
		"in order":                  {AnswerAccepted, false, 30_000, 0},
		"out of order":              {AnswerAccepted, false, 2_000, 1},
		"nobody knows of the first": {AnswerUnknown, false, 2_000, 0},
		"the first was purged":      {AnswerAccepted, true, 2_000, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			fails, works := s.with(EndHandled, 1), s.with(EndHandled, 0)
			for _, id := range []uint32{fails, works} {
				l.ledger.Ordered("k", id)
				l.ledger.Sending(id)
			}
			l.ledger.Answered(fails, c.answer, 1_000)
			l.ledger.Answered(works, AnswerAccepted, 1_100)
			l.ledger.attempted(record{id: fails, attempt: 1, at: 1_200, what: whatFailed})
			l.ledger.attempted(record{id: fails, attempt: 2, at: 20_000, what: whatHandled})
			l.ledger.attempted(record{id: works, attempt: 1, at: c.second, what: whatHandled})
			if c.gone {
				l.ledger.Gone(fails)
			}
			assert.Equal(t, c.wrong, l.ledger.Check(1).Count[ViolationOrder])
		})
	}
}

func TestAMessageThatIsHandledTwiceInPeaceHasMultiplied(t *testing.T) {
	for name, c := range map[string]struct {
		accepted time.Duration
		times    int
		wrong    int
	}{
		"once":                            {10 * time.Minute, 1, 0},
		"twice":                           {10 * time.Minute, 2, 1},
		"twice, and something was broken": {time.Minute, 2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			id := s.with(EndHandled, 0)
			for range c.times {
				l.ledger.attempted(record{id: id, attempt: 1, at: uint32((c.accepted + time.Second).Milliseconds()), what: whatHandled})
			}
			s.waits[0][id] = wait{c.accepted, c.accepted, c.accepted + time.Second}
			s.checkWaits(l)
			assert.Equal(t, c.wrong, s.trouble.count[Multiplied])
		})
	}
}

// What was accepted before an alarm has to be handled during it, once workers are back.
func TestWhatIsOwedDuringAnAlarm(t *testing.T) {
	for name, c := range map[string]struct {
		accepted, handled time.Duration
		wrong             int
	}{
		"in time":           {time.Minute, 2 * time.Minute, 0},
		"after the alarm":   {time.Minute, 4 * time.Minute, 1},
		"accepted after it": {3 * time.Minute, 4 * time.Minute, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			s.quiet = nil
			s.owed = []owed{{0, span{30 * time.Second, 2 * time.Minute}, 3 * time.Minute}}
			s.waits[0][s.with(EndHandled, 0)] = wait{c.accepted, c.accepted, c.handled}
			s.checkWaits(l)
			assert.Equal(t, c.wrong, s.trouble.count[Starved], "%v", s.trouble.list)
		})
	}
}

func TestMessagesThatNobodyCanReadAreCounted(t *testing.T) {
	s, _ := counted()
	s.lanes = nil
	s.unread.Store(3)
	s.unreadGone.Store(3)
	s.sweep()
	assert.Zero(t, s.trouble.count[ViolationLost])
	s.unread.Add(1)
	s.sweep()
	assert.Equal(t, 1, s.trouble.count[ViolationLost])
}
