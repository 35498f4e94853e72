package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/operate/doctor"
)

// maxDefinitions bounds a definitions file in the page. The command has no such bound.
const maxDefinitions = 8 << 20

// diagnosis is what the page shows of a report. Texts are plain: the page shows them as text.
type diagnosis struct {
	Report     doctor.Report `json:"report"`
	Groups     []group       `json:"groups"`
	Frameworks []string      `json:"frameworks"`
	Total      string        `json:"total"`
	// Text is the report as hopback doctor prints it, and Fixes the file with the fixes.
	Text  string `json:"text"`
	Fixes string `json:"fixes"`
}

// group is what one rule found.
type group struct {
	Severity string  `json:"severity"`
	Rule     string  `json:"rule"`
	Count    int     `json:"count"`
	Places   []place `json:"places"`
	Happens  string  `json:"happens"`
	Remedy   string  `json:"remedy"`
	Fix      string  `json:"fix"`
	Docs     string  `json:"docs"`
}

type place struct {
	Text string   `json:"text"`
	Path []string `json:"path"`
}

// shownPlaces is how many places of a rule the page shows. The downloads have more.
const shownPlaces = 20

// diagnose examines a definitions document as hopback doctor does. If it is malformed, or too
// large, the error is an *argument.Error.
func diagnose(ctx context.Context, text []byte) (diagnosis, error) {
	if len(text) > maxDefinitions {
		return diagnosis{}, argument.New("definitions", nil, fmt.Sprintf("has more than %d MiB", maxDefinitions>>20), "run hopback doctor on the file")
	}
	r, err := doctor.FromDefinitions(ctx, bytes.NewReader(text), doctor.Options{})
	if err != nil {
		return diagnosis{}, err
	}
	d := diagnosis{Report: r, Groups: []group{}, Frameworks: []string{}, Text: r.String()}
	for _, f := range r.Frameworks {
		line := f.Name + ": " + f.Because + "."
		if f.Cure != "" {
			line += " " + f.Cure
		}
		d.Frameworks = append(d.Frameworks, line)
	}
	var fixes strings.Builder
	fmt.Fprintf(&fixes, "# What hopback doctor suggests. Names in capitals are for you to replace. Read each command before you run it.\n")
	for _, g := range r.Groups {
		x := group{Severity: g.Severity, Rule: g.Rule.ID, Count: g.Count, Happens: g.Rule.Happens, Remedy: g.Rule.Remedy, Fix: g.Rule.Fix, Docs: g.Rule.Docs}
		fmt.Fprintf(&fixes, "\n# %s: %s (%d)\n", g.Severity, g.Rule.ID, g.Count)
		for i, f := range g.Findings {
			text := fmt.Sprintf("%s: %s.", f.Resource, f.Problem)
			if f.VHost != "" && f.VHost != "/" {
				text = fmt.Sprintf("%s in %q: %s.", f.Resource, f.VHost, f.Problem)
			}
			if i < shownPlaces {
				x.Places = append(x.Places, place{text, f.Path})
			}
			fmt.Fprintf(&fixes, "#   %s\n", oneLine(text))
		}
		fmt.Fprintf(&fixes, "# Fix: %s.\n", oneLine(g.Rule.Remedy))
		if g.Rule.Fix != "" {
			fmt.Fprintf(&fixes, "%s\n", g.Rule.Fix)
		}
		d.Groups = append(d.Groups, x)
	}
	d.Fixes = fixes.String()
	lines := strings.Split(strings.TrimSpace(d.Text), "\n")
	d.Total = lines[0] + ". " + lines[len(lines)-1]
	return d, nil
}

// oneLine keeps a name of a definitions file in its comment.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
