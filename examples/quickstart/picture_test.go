package main

import (
	"bytes"
	"flag"
	"fmt"
	"html"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "draw docs/timeline.svg from a run")

const picturePath = "../../docs/timeline.svg"

// The README's picture shows what a run prints.
func TestPictureShowsARun(t *testing.T) {
	t.Parallel()
	if *update {
		OnBrokers(t, func(t *testing.T, amqpURL string, _ func() []string) {
			var out bytes.Buffer
			require.NoError(t, run(t.Context(), amqpURL, &out))
			if strings.Contains(out.String(), "RabbitMQ 4.3") {
				require.NoError(t, os.WriteFile(picturePath, picture(timelineOf(out.String())), 0o644))
			}
		})
		return
	}
	drawn, err := os.ReadFile(picturePath)
	require.NoError(t, err)
	var lines []string
	for line := range strings.Lines(string(drawn)) {
		if _, text, ok := strings.Cut(line, `xml:space="preserve">`); ok {
			text, _, _ = strings.Cut(text, "</text>")
			lines = append(lines, html.UnescapeString(text))
		}
	}
	for _, want := range []string{
		`o-1 +1 +charged +✓ accepted`,
		`o-3 +4 +2 s → [0-9.]+ s +charged +✓ accepted`,
		`o-4 +4 +2 s → [0-9.]+ s +bank timed out +✗ dead letter: exhausted`,
		`o-7 +1 +handler panicked: no bank +✗ dead letter: panicked`,
		`o-8 +1 +bank is busy for 2 s +↻ retry in 2 s`,
		`8 of 8 orders accounted for in [0-9.]+ s: 4 accepted, 4 dead-lettered, 0 left in queues`,
	} {
		assert.Regexp(t, want, strings.Join(lines, "\n"), "run: go test ./examples/quickstart -run Picture -update")
	}
}

// timelineOf is the part of a run's output that the picture shows: the timeline without
// log lines, and the last line.
func timelineOf(out string) (lines []string) {
	all := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range all[3:] {
		if line == "" && len(lines) > 1 {
			break
		}
		if line != "" && !strings.Contains(line, "level=") {
			lines = append(lines, line)
		}
	}
	return append(lines, "", all[len(all)-1])
}

// picture is text as an SVG that reads in light and dark.
func picture(lines []string) []byte {
	const width, height = 7.85, 19
	columns := 0
	for _, line := range lines {
		columns = max(columns, utf8.RuneCountInString(line))
	}
	var b bytes.Buffer
	w, h := int(width*float64(columns))+32, height*len(lines)+28
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-label="the timeline of the quickstart">`+"\n", w, h, w, h)
	b.WriteString(`<rect width="100%" height="100%" rx="8" fill="#0d1117"/>` + "\n")
	b.WriteString(`<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" fill="#c9d1d9">` + "\n")
	for i, line := range lines {
		colour := ""
		switch {
		case strings.Contains(line, "✓"):
			colour = ` fill="#3fb950"`
		case strings.Contains(line, "↻"):
			colour = ` fill="#d29922"`
		case strings.Contains(line, "✗"):
			colour = ` fill="#f85149"`
		case i == 0:
			colour = ` fill="#8b949e"`
		}
		fmt.Fprintf(&b, `<text x="16" y="%d"%s xml:space="preserve">%s</text>`+"\n", 28+height*i, colour, html.EscapeString(line))
	}
	b.WriteString("</g>\n</svg>\n")
	return b.Bytes()
}
