package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
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

// A recurring message comes once for each of its times, unless somebody has paused it or destroyed it.
func TestRecurringMessagesAreJudged(t *testing.T) {
	const all, skip = "x-all", "x-skip"
	for name, c := range map[string]struct {
		change func(g *simRecurring, id func(name string, at time.Duration) string, at func(time.Duration) time.Time)
		kind   ViolationKind
	}{
		"all came": {func(*simRecurring, func(string, time.Duration) string, func(time.Duration) time.Time) {}, ""},
		"one is missing": {func(g *simRecurring, id func(string, time.Duration) string, _ func(time.Duration) time.Time) {
			delete(g.seen, id(skip, 30*time.Minute))
		}, ViolationLost},
		"one is missing, from a time when something was broken": {func(g *simRecurring, id func(string, time.Duration) string, _ func(time.Duration) time.Time) {
			delete(g.seen, id(all, 10*time.Minute))
		}, ViolationLost},
		"one is skipped, from a time when something was broken": {func(g *simRecurring, id func(string, time.Duration) string, _ func(time.Duration) time.Time) {
			delete(g.seen, id(skip, 10*time.Minute))
		}, ""},
		"one was destroyed": {func(g *simRecurring, id func(string, time.Duration) string, _ func(time.Duration) time.Time) {
			delete(g.seen, id(all, 30*time.Minute))
			g.gone[id(all, 30*time.Minute)] = true
		}, ""},
		"one is missing, and the token was destroyed": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			delete(g.seen, id(all, 30*time.Minute))
			g.losses = append(g.losses, at(31*time.Minute))
		}, ""},
		"one is missing, and was paused": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			delete(g.seen, id(all, 30*time.Minute))
			g.pauses = append(g.pauses, &hold{all, at(25 * time.Minute), at(26 * time.Minute), at(34 * time.Minute), at(35 * time.Minute)})
		}, ""},
		"one is missing, and another one was paused": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			delete(g.seen, id(all, 30*time.Minute))
			delete(g.seen, id(skip, 30*time.Minute))
			g.pauses = append(g.pauses, &hold{skip, at(25 * time.Minute), at(26 * time.Minute), at(34 * time.Minute), at(35 * time.Minute)})
		}, ViolationLost},
		"one came in a pause of the group": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			delete(g.seen, id(skip, 30*time.Minute))
			g.pauses = append(g.pauses, &hold{"", at(25 * time.Minute), at(26 * time.Minute), at(34 * time.Minute), at(35 * time.Minute)})
		}, Recurred},
		"one came in what may have been a pause": {func(g *simRecurring, _ func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.pauses = append(g.pauses, &hold{"", at(25 * time.Minute), time.Time{}, at(34 * time.Minute), at(35 * time.Minute)})
		}, ""},
		"one came twice": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.seen[id(all, 30*time.Minute)] = sighting{at(30 * time.Minute), 2}
		}, Multiplied},
		"one came twice, and something was broken": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.seen[id(all, 10*time.Minute)] = sighting{at(10 * time.Minute), 2}
		}, ""},
		"one was early": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.seen[id(all, 30*time.Minute)] = sighting{at(30*time.Minute - time.Millisecond), 1}
		}, ViolationEarly},
		"one was late": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.seen[id(all, 30*time.Minute)] = sighting{at(31 * time.Minute), 1}
		}, Starved},
		"one has another time": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.seen[id(all, 33*time.Minute)] = sighting{at(33 * time.Minute), 1}
		}, Recurred},
		"one was run": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.ran[id(all, 33*time.Minute)] = at(33 * time.Minute)
			g.seen[id(all, 33*time.Minute)] = sighting{at(33 * time.Minute), 1}
		}, ""},
		"one was to be run": {func(g *simRecurring, id func(string, time.Duration) string, at func(time.Duration) time.Time) {
			g.ran[id(all, 33*time.Minute)] = at(33 * time.Minute)
		}, ViolationLost},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			s.began, s.quiet = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), []span{{15 * time.Minute, time.Hour}}
			at := func(d time.Duration) time.Time { return s.began.Add(d) }
			id := func(name string, d time.Duration) string { return schedule.MessageID(name, at(d)) }
			g := newRecurring("x", []schedule.Recurring{
				{Name: all, Times: schedule.Every(10 * time.Minute), Missed: schedule.MissedAll},
				{Name: skip, Times: schedule.Every(10 * time.Minute), Missed: schedule.MissedSkip},
			})
			g.from = s.began
			for d := 10 * time.Minute; d < time.Hour; d += 10 * time.Minute {
				g.seen[id(all, d)], g.seen[id(skip, d)] = sighting{at(d), 1}, sighting{at(d), 1}
			}
			l.recurring = &simGroups{groups: []*simRecurring{g}}
			c.change(g, id, at)
			s.checkRecurring(l, at(55*time.Minute))
			want := map[ViolationKind]int{}
			if c.kind != "" {
				want[c.kind] = 1
			}
			got := s.trouble.count
			if got == nil {
				got = map[ViolationKind]int{}
			}
			assert.Equal(t, want, got, "%v", s.trouble.list)
		})
	}
	assert.Equal(t, []int{1, 0, 1}, []int{tokens(0), tokens(1), tokens(2)})
}

// One tenant never has all slots, and all together have no more than there are.
func TestSlotsAreJudged(t *testing.T) {
	for name, c := range map[string]struct {
		begin []string
		wrong int
	}{
		"shared":          {[]string{"a", "a", "a", "b"}, 0},
		"all for one":     {[]string{"a", "a", "a", "a"}, 1},
		"one that is not": {[]string{"a", "a", "a", "b", "c"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			l.policies = []retry.Policy{{}}
			s.makeFair(l)
			l.fair.cfg.Concurrency = 4
			h := &sharing{w: &simWorker{lane: l}, of: map[string]int{}}
			for _, tenant := range c.begin {
				h.begin(tenant)
			}
			assert.Equal(t, c.wrong, s.trouble.count[Unfair], "%v", s.trouble.list)
			for _, tenant := range c.begin {
				h.end(tenant)
			}
			assert.Empty(t, h.of)
		})
	}
}
