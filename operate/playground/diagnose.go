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
	Report doctor.Report `json:"report"`
	// Text is the report as hopback doctor prints it, and Fixes the file with the fixes.
	Text  string `json:"text"`
	Fixes string `json:"fixes"`
}

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
	var fixes strings.Builder
	fmt.Fprintf(&fixes, "# What hopback doctor suggests. Names in capitals are for you to replace. Read each command before you run it.\n")
	for _, g := range r.Groups {
		fmt.Fprintf(&fixes, "\n# %s: %s (%d)\n", g.Severity, g.Rule.ID, g.Count)
		for _, f := range g.Findings {
			in := ""
			if f.VHost != "" && f.VHost != "/" {
				in = fmt.Sprintf(" in %q", f.VHost)
			}
			fmt.Fprintf(&fixes, "#   %s\n", oneLine(fmt.Sprintf("%s%s: %s.", f.Resource, in, f.Problem)))
		}
		fmt.Fprintf(&fixes, "# Fix: %s.\n", oneLine(g.Rule.Remedy))
		if g.Rule.Fix != "" {
			fmt.Fprintf(&fixes, "%s\n", g.Rule.Fix)
		}
	}
	return diagnosis{r, r.String(), fixes.String()}, nil
}

// oneLine keeps a name of a definitions file in its comment.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
