package web

import (
	"cmp"
	"fmt"
	"html/template"
	"slices"
	"strings"

	"github.com/hopback/hopback/operate/desk"
)

// drawing is the retry topology as boxes and lines. Templates make an SVG of it.
type drawing struct {
	Name          string // its class: wide or narrow
	Width, Height int
	Boxes         []box
	Lines         []stroke
	Heads         []head
	More          string // what isn't drawn
}

// box is a queue, or several.
type box struct {
	X, Y, W, H int
	Kind       string // the role
	Title      string // whole
	Label      string // cut
	Number     string
	Note       string
	Rates      string
	Link       template.URL // a query of the page "messages"; empty for several queues
}

type stroke struct {
	Path, Kind string
}

type head struct {
	Kind, Label string
	X, Y        int
}

// maxLanes bounds the drawing. It shows those with the most dead letters.
const maxLanes = 8

// lane is a work queue with its dead-letter queue. One of them may be missing.
type lane struct {
	work, dead *desk.QueueSurvey
}

// lanesOf finds the dead-letter queue of each work queue by its name, as the retry topology
// forms it.
func lanesOf(queues []desk.QueueSurvey) (lanes []lane, delays, parking []desk.QueueSurvey) {
	var dead []*desk.QueueSurvey
	byName := map[string]*lane{}
	var works []*lane
	for i := range queues {
		switch q := &queues[i]; q.Role {
		case "work":
			l := &lane{work: q}
			works, byName[q.Name] = append(works, l), l
		case "dead-letter":
			dead = append(dead, q)
		case "delay":
			delays = append(delays, *q)
		case "parking":
			parking = append(parking, *q)
		}
	}
	for _, q := range dead {
		// The longest name of a work queue that begins it.
		var owner *lane
		for n := len(q.Name) - 1; n > 0 && owner == nil; n-- {
			owner = byName[q.Name[:n]]
		}
		if owner == nil || owner.dead != nil {
			works = append(works, &lane{dead: q})
			continue
		}
		owner.dead = q
	}
	for _, l := range works {
		lanes = append(lanes, *l)
	}
	slices.SortStableFunc(lanes, func(a, b lane) int {
		return cmp.Or(cmp.Compare(b.deadCount(), a.deadCount()), cmp.Compare(b.workCount(), a.workCount()))
	})
	return lanes, delays, parking
}

func (l lane) deadCount() uint64 {
	if l.dead == nil {
		return 0
	}
	return deadIn(*l.dead)
}

func (l lane) workCount() uint64 {
	if l.work == nil {
		return 0
	}
	return l.work.Messages + l.work.Unacknowledged + l.work.Delayed
}

// boxOf is one queue.
func boxOf(q desk.QueueSurvey, deadLetters int) box {
	b := box{Kind: q.Role, Title: q.Name, Label: fit(q.Name, deadLetters), Number: number(q.Messages), Link: query("in", q.Name)}
	if isDead(q) {
		b.Number = number(deadIn(q))
	}
	var notes []string
	if q.Unacknowledged > 0 {
		notes = append(notes, number(q.Unacknowledged)+" unacked")
	}
	if q.Delayed > 0 {
		notes = append(notes, number(q.Delayed)+" delayed")
	}
	if q.DeadLettering > 0 {
		notes = append(notes, number(q.DeadLettering)+" dead-lettering")
	}
	b.Note = strings.Join(notes, ", ")
	switch in, out := rate(q.In), rate(q.Out); {
	case !q.Counted:
	case in == "0" && out == "0":
		b.Rates = "idle"
	default:
		b.Rates = "in " + in + "/s, out " + out + "/s"
	}
	return b
}

// sumOf is several queues in one box.
func sumOf(all []desk.QueueSurvey, kind, words string, deadLetters int) box {
	if len(all) == 1 {
		return boxOf(all[0], deadLetters)
	}
	sum := desk.QueueSurvey{Role: kind, Name: fmt.Sprintf("%d %s", len(all), words), Counted: true}
	for _, q := range all {
		// Messages in a delay queue wait for their retry, or for the next queue to confirm them.
		sum.Messages += q.Messages
		sum.Unacknowledged += q.Unacknowledged
		sum.Delayed += q.Delayed
		sum.DeadLettering += q.DeadLettering
		sum.In += q.In
		sum.Out += q.Out
		sum.Counted = sum.Counted && q.Counted
	}
	b := boxOf(sum, deadLetters)
	b.Link = ""
	return b
}

// wide is the drawing in columns: delay queues, work queues, dead-letter queues, and the parking
// queue.
func wide(queues []desk.QueueSurvey) drawing {
	const w, h, step, top = 210, 74, 92, 30
	lanes, delays, parking := lanesOf(queues)
	d := drawing{Name: "wide", Width: 960, More: leftOut(len(lanes))}
	lanes = lanes[:min(len(lanes), maxLanes)]
	d.Height = top + step*max(len(lanes), 1) - (step - h) + 8
	middle := top + (step*max(len(lanes), 1)-(step-h)-h)/2
	columns := [4]int{2, 251, 500, 748}
	heads := []head{{"work", "work queues", columns[1], 16}, {"dead-letter", "dead-letter queues", columns[2], 16}}
	curve := func(x1, y1, x2, y2 int) string {
		m := (x1 + x2) / 2
		return fmt.Sprintf("M%d %dC%d %d %d %d %d %d", x1, y1, m, y1, m, y2, x2, y2)
	}
	if len(delays) > 0 {
		b := sumOf(delays, "delay", "delay queues", 24)
		b.X, b.Y, b.W, b.H = columns[0], middle, w, h
		d.Boxes = append(d.Boxes, b)
		heads = append(heads, head{"delay", "waiting for a retry", columns[0], 16})
	}
	if len(parking) > 0 {
		b := sumOf(parking, "parking", "parking queues", 24)
		b.X, b.Y, b.W, b.H = columns[3], middle, w, h
		d.Boxes = append(d.Boxes, b)
		heads = append(heads, head{"parking", "original queue unknown", columns[3], 16})
	}
	for i, l := range lanes {
		y := top + i*step
		if l.work != nil {
			b := boxOf(*l.work, 24)
			b.X, b.Y, b.W, b.H = columns[1], y, w, h
			d.Boxes = append(d.Boxes, b)
			if len(delays) > 0 {
				d.Lines = append(d.Lines, stroke{curve(columns[0]+w, middle+h/2, columns[1], y+h/2), "retry"})
			}
		}
		if l.dead != nil {
			b := boxOf(*l.dead, 24)
			b.X, b.Y, b.W, b.H = columns[2], y, w, h
			d.Boxes = append(d.Boxes, b)
			if l.work != nil {
				d.Lines = append(d.Lines, stroke{fmt.Sprintf("M%d %dH%d", columns[1]+w, y+h/2, columns[2]), "death"})
			}
			if len(parking) > 0 {
				d.Lines = append(d.Lines, stroke{curve(columns[2]+w, y+h/2, columns[3], middle+h/2), "park"})
			}
		}
	}
	d.Heads = heads
	return d
}

// narrow is the drawing for a phone: a row for each work queue.
func narrow(queues []desk.QueueSurvey) drawing {
	const w, h, step = 166, 74, 86
	lanes, delays, parking := lanesOf(queues)
	d := drawing{Name: "narrow", Width: 350, More: leftOut(len(lanes))}
	lanes = lanes[:min(len(lanes), maxLanes)]
	y := 0
	if len(delays) > 0 {
		d.Heads = append(d.Heads, head{"delay", "waiting for a retry", 2, y + 14})
		b := sumOf(delays, "delay", "delay queues", 34)
		b.X, b.Y, b.W, b.H = 2, y+22, 346, h
		d.Boxes = append(d.Boxes, b)
		y += 22 + h + 20
		d.Lines = append(d.Lines, stroke{fmt.Sprintf("M%d %dV%d", 130, y-20, y+22), "retry"})
	}
	d.Heads = append(d.Heads, head{"work", "work queues", 2, y + 14}, head{"dead-letter", "dead-letter queues", 182, y + 14})
	y += 22
	for _, l := range lanes {
		if l.work != nil {
			b := boxOf(*l.work, 19)
			b.X, b.Y, b.W, b.H = 2, y, w, h
			d.Boxes = append(d.Boxes, b)
		}
		if l.dead != nil {
			b := boxOf(*l.dead, 19)
			b.X, b.Y, b.W, b.H = 182, y, w, h
			d.Boxes = append(d.Boxes, b)
			if l.work != nil {
				d.Lines = append(d.Lines, stroke{fmt.Sprintf("M%d %dH%d", 2+w, y+h/2, 182), "death"})
			}
		}
		y += step
	}
	if len(parking) > 0 {
		d.Lines = append(d.Lines, stroke{fmt.Sprintf("M%d %dV%d", 265, y-(step-h), y+30), "park"})
		d.Heads = append(d.Heads, head{"parking", "original queue unknown", 2, y + 22})
		b := sumOf(parking, "parking", "parking queues", 34)
		b.X, b.Y, b.W, b.H = 2, y+30, 346, h
		d.Boxes = append(d.Boxes, b)
		y += 30 + step
	}
	d.Height = y
	return d
}

func leftOut(lanes int) string {
	if lanes <= maxLanes {
		return ""
	}
	return fmt.Sprintf("The %d work queues with the most dead letters are shown; %s more are in the table of queues.", maxLanes, number(lanes-maxLanes))
}
