package web

import (
	"fmt"
	"strings"
	"time"

	"github.com/hopback/hopback/operate/desk"
)

// historyRow is an event in the history of a message, for people.
type historyRow struct {
	At    time.Time
	Class string // for the style sheet
	What  string
	Where string // a queue
	Tag   string // a reason
	Text  string // what the message brings: an error, or where it was published to
	Note  string
	Delay string // before the next attempt
	After string // since the last event with a known time
}

// historyView is the history of a message, oldest first.
type historyView struct {
	Rows []historyRow
	// Summary counts the attempts since the message was published or last replayed.
	Summary string
}

// historyOf makes rows of a message's history. Its sender can have written all of it, so the
// times may be in any order.
func historyOf(m *desk.DeadLetter) (view historyView) {
	var last, first, end time.Time
	attempts := uint64(0)
	for _, e := range m.History {
		r := historyRow{At: e.At, Where: e.Queue, Tag: e.Reason, Text: e.Text}
		if e.Delay > 0 {
			r.Delay = span(e.Delay)
		}
		if !e.At.IsZero() {
			if !last.IsZero() {
				r.After = since(last, e.At)
			}
			last = e.At
		}
		if e.Count > 1 {
			r.Note = number(e.Count) + " times"
			if !e.Since.IsZero() {
				r.Note += " since " + when(e.Since)
			}
		}
		switch e.Kind {
		case "created":
			r.What = "Created"
		case "published":
			r.What, r.Text = "Published to "+publishedTo(m.Exchange, m.RoutingKey), ""
		case "first failure", "failure", "last failure":
			attempts, r = failure(e, attempts, r)
			if !e.At.IsZero() {
				if end = e.At; first.IsZero() {
					first = e.At
				}
			}
		case "replayed":
			r.Class, r.What, r.Text = "replayed", "Replayed", ""
			if id, by, _ := strings.Cut(e.Text, " "); id+by != "" {
				r.Text = strings.TrimSpace("as " + id)
				if by != "" {
					r.Note = "by " + by
				}
			}
			attempts, first, end = 0, time.Time{}, time.Time{}
		default:
			r.Class, r.What = "dead-lettered", "Dead-lettered from"
			if e.Reason == "expired" && e.Queue != m.Queue && e.Kind == "dead-lettered" {
				r.Class, r.What = "waited", "Waited in"
			}
		}
		view.Rows = append(view.Rows, r)
	}
	if attempts > 0 {
		view.Summary = many(attempts, "attempt")
		if d := end.Sub(first); d > 0 && attempts > 1 {
			view.Summary += " over " + span(d)
		}
	}
	return view
}

// failure is the row of a failed attempt, or of attempts that the message doesn't list.
func failure(e desk.HistoryEvent, before uint64, r historyRow) (attempts uint64, _ historyRow) {
	r.Class = "failure"
	if e.Kind == "failure" && e.At.IsZero() {
		attempts = before + max(e.Count, 1)
		r.Class, r.Text = "missing", ""
		r.What = fmt.Sprintf("Attempts %s to %s failed", number(before+1), number(attempts))
		if e.Count <= 1 {
			r.What = fmt.Sprintf("Attempt %s failed", number(attempts))
		}
		if e.Queue != "" {
			r.What += " in"
		}
		r.Note = "Not listed. A message keeps its newest attempts and drops the oldest."
		return attempts, r
	}
	attempts = before + 1
	r.What = fmt.Sprintf("Attempt %s failed in", number(attempts))
	if e.Queue == "" {
		r.What = fmt.Sprintf("Attempt %s failed", number(attempts))
	}
	return attempts, r
}

// publishedTo is an address for people.
func publishedTo(exchange, key string) string {
	switch {
	case exchange == "":
		return "queue " + key
	case key == "":
		return "exchange " + exchange
	}
	return "exchange " + exchange + ", routing key " + key
}

// since is the time between two events. Workers and brokers have different clocks, and some
// brokers write whole seconds.
func since(before, at time.Time) string {
	switch d := at.Sub(before); {
	case d <= -time.Second:
		return "clocks differ"
	case d < 0:
		return "0 s"
	default:
		return span(d)
	}
}

// span is a duration in at most two units.
func span(d time.Duration) string {
	const day = 24 * time.Hour
	two := func(big int64, bigUnit string, small int64, smallUnit string) string {
		if small == 0 {
			return fmt.Sprintf("%s %s", number(uint64(big)), bigUnit)
		}
		return fmt.Sprintf("%s %s %d %s", number(uint64(big)), bigUnit, small, smallUnit)
	}
	switch {
	case d < time.Millisecond:
		return "0 s"
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Truncate(100*time.Millisecond).Seconds()), ".0") + " s"
	case d < time.Hour:
		return two(int64(d/time.Minute), "min", int64(d%time.Minute/time.Second), "s")
	case d < day:
		return two(int64(d/time.Hour), "h", int64(d%time.Hour/time.Minute), "min")
	}
	return two(int64(d/day), "d", int64(d%day/time.Hour), "h")
}
