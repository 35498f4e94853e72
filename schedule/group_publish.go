package schedule

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
)

// turn is what one item has to publish in a visit.
type turn struct {
	i      *item
	was    time.Time // its next time before
	anchor time.Time
	times  []time.Time
	failed error
}

// publish publishes what is due, and returns the earliest time for which that failed; zero: none.
func (r *runner) publish(ctx context.Context, s state, now time.Time) (failed time.Time) {
	var turns []*turn
	for len(r.waiting) > 0 && !r.waiting[0].due().After(now) {
		i := r.waiting[0]
		t := &turn{i: i, was: i.next, anchor: i.anchor}
		i.again = time.Time{}
		all, n := r.advance(i, now, mostAtOnce)
		skipped := n - len(all)
		for _, at := range r.wanted(i, all, now) {
			if !s.holds(i.Name, at) {
				t.times = append(t.times, at)
			}
		}
		if skipped > 0 && i.Missed == MissedAll {
			r.log.Warn("hopback: a recurring message isn't published for all the times that it missed", "group", r.g.Name, "name", i.Name, "skipped", skipped)
		}
		if len(t.times) > 0 {
			turns = append(turns, t)
		} else {
			i.tries = 0
		}
	}
	r.send(ctx, turns)
	for _, t := range turns {
		if t.failed == nil {
			t.i.tries = 0
			continue
		}
		if r.refused(t, now) && (failed.IsZero() || t.was.Before(failed)) {
			failed = t.was
		}
	}
	// What failed in an earlier visit, and isn't due again yet.
	for _, i := range r.waiting {
		if !i.again.IsZero() && i.next.Before(now) && (failed.IsZero() || i.next.Before(failed)) {
			failed = i.next
		}
	}
	return failed
}

// refused has a turn published again later, unless it failed for too long.
func (r *runner) refused(t *turn, now time.Time) bool {
	first := t.times[0]
	if now.Sub(first) > refusedFor && t.i.tries > 0 {
		r.log.Error("hopback: a recurring message wasn't accepted for an hour; its times until now are dropped", "group", r.g.Name, "name", t.i.Name, "first", first.UTC(), "error", t.failed)
		t.i.tries = 0
		return false
	}
	if t.i.tries == 0 {
		r.log.Error("hopback: a recurring message wasn't accepted; trying again", "group", r.g.Name, "name", t.i.Name, "time", first.UTC(), "error", t.failed)
	}
	t.i.again = now.Add(min(time.Second<<min(t.i.tries, 10), retryPause))
	if errors.Is(t.failed, errAlarm) {
		t.i.again = now.Add(alarmPause)
	}
	t.i.tries++
	t.i.anchor = t.anchor
	r.set(t.i, t.was, nil)
	return true
}

// wanted leaves out missed times by the item's rule.
func (r *runner) wanted(i *item, all []time.Time, now time.Time) []time.Time {
	late := 0
	for late < len(all) && now.Sub(all[late]) > onTime {
		late++
	}
	if late == 0 {
		return all
	}
	kept := all
	switch i.Missed {
	case MissedAll:
		return all
	case MissedSkip:
		kept = all[late:]
	default:
		if kept = all[late:]; len(kept) == 0 {
			kept = all[late-1:]
		}
	}
	if n := len(all) - len(kept); n > 0 {
		r.log.Warn("hopback: a recurring message has missed times", "group", r.g.Name, "name", i.Name, "missed", late, "skipped", n, "first", all[0].UTC())
	}
	return kept
}

// message makes the message of an item for a time.
func (r Recurring) message(id string, at time.Time) (m *client.Message, err error) {
	defer func() {
		if v := recover(); v != nil {
			m, err = nil, fmt.Errorf("Recurring.Message panicked: %v", v)
		}
	}()
	if r.Message == nil {
		m = client.NewMessage([]byte{})
	} else if m, err = r.Message(at); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errors.New("Recurring.Message returned nil")
	}
	p := client.Properties{}
	if m.Properties != nil {
		p = *m.Properties
	}
	p.MessageID = id
	m = new(*m)
	m.Properties = &p
	client.PublishTo(r.To)(m)
	return m, client.Validate(m)
}

// send publishes all turns, and sets their errors.
func (r *runner) send(ctx context.Context, turns []*turn) {
	var batch []*client.Message
	var of []*turn
	bytes := 0
	flush := func() {
		if len(batch) == 0 {
			return
		}
		ctx, end := r.sending(ctx)
		defer end()
		err := r.p.PublishAll(ctx, batch)
		if b, ok := errors.AsType[*client.BatchError](err); ok {
			for _, f := range b.Failed {
				of[f.Index].failed = orAlarm(ctx, f.Err)
			}
		} else if err != nil {
			for _, t := range of {
				t.failed = orAlarm(ctx, err)
			}
		}
		clear(batch)
		batch, of, bytes = batch[:0], of[:0], 0
	}
	for _, t := range turns {
		for _, at := range t.times {
			m, err := t.i.message(MessageID(t.i.Name, at), at)
			if err != nil {
				t.failed = err
				break
			}
			for _, part := range m.Data {
				bytes += len(part)
			}
			if batch, of = append(batch, m), append(of, t); len(batch) == publishBatch || bytes >= publishBytes {
				flush()
			}
		}
	}
	flush()
}

// catalog lists the items.
func (r *runner) catalog() []entry {
	all := make([]entry, 0, len(r.all))
	for _, i := range r.all {
		e := entry{Name: i.Name, Spec: i.spec(), To: i.To.String(), Missed: i.Missed, Sum: i.sum, Anchor: i.anchor.UnixNano()}
		if !i.next.IsZero() {
			e.Next = i.next.UnixNano()
		}
		all = append(all, e)
	}
	return all
}
