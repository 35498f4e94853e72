package web

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/operate/desk"
)

// spark is the arrivals of a group as bars. A template makes an SVG of it.
type spark struct {
	Width, Height int
	Bars          string // the data of a path
	Words         string
	// From and To are the ends of the time axis. They are empty if it has one span only.
	From, To string
}

const (
	sparkWidth, sparkHeight = 120, 30 // in a row
	headWidth, headHeight   = 640, 64 // at the head of a page
)

// sparkOf is nil if the arrivals aren't known.
func sparkOf(g desk.Group, width, height int, now time.Time) *spark {
	a := g.Arrivals
	if a == nil {
		return nil
	}
	s := &spark{Width: width, Height: height, Words: arrivalWords(g.Count, a, now)}
	n := len(a.Counts)
	if n == 0 {
		return s
	}
	most := slices.Max(a.Counts)
	bar := min(float64(width)/float64(n)-1, float64(width)/12)
	var path strings.Builder
	for i, count := range a.Counts {
		if count == 0 {
			continue
		}
		x := (float64(width) - bar) / 2
		if n > 1 {
			x = float64(i) * (float64(width) - bar) / float64(n-1)
		}
		// A single message among thousands is seen, too.
		tall := max(float64(count)/float64(most)*float64(height-2), 2)
		fmt.Fprintf(&path, "M%.1f %dv-%.1fh%.1fv%.1fz", x, height-1, tall, bar, tall)
	}
	s.Bars = path.String()
	if n > 1 {
		s.From, s.To = clock(a.From, a.Width, now), clock(a.From.Add(time.Duration(n-1)*a.Width), a.Width, now)
	}
	return s
}

// arrivalWords say what the bars show.
func arrivalWords(all uint64, a *desk.Arrivals, now time.Time) string {
	words := many(all, "message")
	switch n := len(a.Counts); {
	case n == 0 && a.Earlier == 0:
		return words + ", dead-lettered at an unknown time"
	case n == 1:
		words += " " + spanWords(a.From, a.Width, now)
	case n > 1:
		words += " over " + roughly(time.Duration(n)*a.Width)
		most := slices.Max(a.Counts)
		if most > 1 {
			from := a.From.Add(time.Duration(slices.Index(a.Counts, most)) * a.Width)
			words += ", most (" + number(most) + ") " + spanWords(from, a.Width, now)
		}
	}
	if a.Earlier > 0 {
		words += ", " + number(a.Earlier) + " more than a year earlier"
	}
	if a.Unknown > 0 {
		words += ", " + number(a.Unknown) + " at an unknown time"
	}
	return words
}

// spanWords names a span of time.
func spanWords(from time.Time, width time.Duration, now time.Time) string {
	switch {
	case width == time.Second || width == time.Minute:
		return "at " + clock(from, width, now) + " UTC"
	case width == time.Hour:
		return "in the hour from " + clock(from, width, now) + " UTC"
	case width == 24*time.Hour:
		return "on " + clock(from, width, now)
	case width > 24*time.Hour:
		return "in the " + roughly(width) + " from " + clock(from, width, now)
	}
	return "in the " + roughly(width) + " from " + clock(from, width, now) + " UTC"
}

// clock is a time, as exact as a span of that width is.
func clock(t time.Time, width time.Duration, now time.Time) string {
	t, now = t.UTC(), now.UTC()
	day := ""
	switch {
	case t.Year() != now.Year():
		day = t.Format("Jan 2, 2006")
	case t.YearDay() != now.YearDay() || width >= 24*time.Hour:
		day = t.Format("Jan 2")
	}
	switch {
	case width >= 24*time.Hour:
		return day
	case day != "":
		day += ", "
	}
	if width < time.Minute {
		return day + t.Format("15:04:05")
	}
	return day + t.Format("15:04")
}

// roughly is a length of time in one unit.
func roughly(d time.Duration) string {
	switch {
	case d < 2*time.Minute && d%time.Minute != 0:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour && d != time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return number(int(d.Hours()/24)) + " days"
}
