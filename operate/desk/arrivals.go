package desk

import (
	"slices"
	"time"
)

// Arrivals counts the messages of a Group by the time at which they were dead-lettered. Counts
// has one entry for each span of Width. The first span begins at From. The first and the
// last entry aren't zero. There are at most 60 entries: Width grows with the time that the
// messages span, from 1 second to 7 days. It is in nanoseconds in JSON.
type Arrivals struct {
	From   time.Time     `json:"from,omitzero"`
	Width  time.Duration `json:"width,omitempty"`
	Counts []uint64      `json:"counts,omitempty"`
	// Earlier counts messages that were dead-lettered more than about 14 months before the newest
	// one: 60 spans of 7 days don't reach back to them.
	Earlier uint64 `json:"earlier,omitempty"`
	// Unknown counts messages that have no time, or one that is more than an hour in the future:
	// such a time was forged, or comes from a wrong clock.
	Unknown uint64 `json:"unknown,omitempty"`
}

const (
	// maxSpans bounds Arrivals.Counts, and with it the memory of a survey.
	maxSpans = 60
	// clockSkew is how far ahead of this process's clock the broker's may be.
	clockSkew = time.Hour
)

// spanWidths are the widths of Arrivals, in seconds. Each divides the next one, so that whole
// spans are merged when the width grows.
var spanWidths = []int64{1, 5, 15, 60, 5 * 60, 15 * 60, 60 * 60, 4 * 60 * 60, 12 * 60 * 60, 24 * 60 * 60, 7 * 24 * 60 * 60}

// arrivals collects Arrivals, in bounded memory.
type arrivals struct {
	width            int   // an index of spanWidths
	first            int64 // the number of the first span since 1970
	counts           []uint64
	earlier, unknown uint64
}

// add counts a message that was dead-lettered at that time. Times after the limit are unknown.
func (a *arrivals) add(at, limit time.Time) {
	if at.IsZero() || at.After(limit) {
		a.unknown++
		return
	}
	seconds := at.Unix()
	for {
		if len(a.counts) == 0 {
			a.first = floorDiv(seconds, spanWidths[a.width])
			a.counts = append(a.counts, 1)
			return
		}
		width := spanWidths[a.width]
		span, last := floorDiv(seconds, width), a.first+int64(len(a.counts))-1
		widest := spanWidths[len(spanWidths)-1]
		oldest, newest := floorDiv(a.first*width, widest), floorDiv(last*width, widest)
		switch at := floorDiv(seconds, widest); {
		case max(span, last)-min(span, a.first) < maxSpans:
			a.count(span)
			return
		case newest-at >= maxSpans:
			a.earlier++
			return
		case at-oldest >= maxSpans:
			a.drop(at)
		default:
			a.widen()
		}
	}
}

// drop makes room for a newer span of the widest width. newest is the number of that span.
func (a *arrivals) drop(newest int64) {
	factor := spanWidths[len(spanWidths)-1] / spanWidths[a.width]
	from := (newest - maxSpans + 1) * factor
	n := min(from-a.first, int64(len(a.counts)))
	for _, c := range a.counts[:n] {
		a.earlier += c
	}
	for n < int64(len(a.counts)) && a.counts[n] == 0 {
		n++
	}
	if a.first += n; n == int64(len(a.counts)) {
		a.width = 0
	}
	a.counts = slices.Delete(a.counts, 0, int(n))
}

// count counts a message in a span that is near enough to the others.
func (a *arrivals) count(span int64) {
	if span < a.first {
		a.counts = slices.Insert(a.counts, 0, make([]uint64, a.first-span)...)
		a.first = span
	}
	if missing := span - a.first - int64(len(a.counts)) + 1; missing > 0 {
		a.counts = append(a.counts, make([]uint64, missing)...)
	}
	a.counts[span-a.first]++
}

// widen merges the spans into those of the next width.
func (a *arrivals) widen() {
	factor := spanWidths[a.width+1] / spanWidths[a.width]
	a.width++
	old, first := a.counts, a.first
	a.first = floorDiv(first, factor)
	a.counts = make([]uint64, floorDiv(first+int64(len(old))-1, factor)-a.first+1, maxSpans)
	for i, n := range old {
		a.counts[floorDiv(first+int64(i), factor)-a.first] += n
	}
}

// result returns what was counted.
func (a *arrivals) result() *Arrivals {
	r := &Arrivals{Counts: slices.Clone(a.counts), Earlier: a.earlier, Unknown: a.unknown}
	if len(r.Counts) > 0 {
		width := spanWidths[a.width]
		r.From, r.Width = time.Unix(a.first*width, 0).UTC(), time.Duration(width)*time.Second
	}
	return r
}

// floorDiv rounds down, also below zero.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}
