package hopbackotel_test

import (
	"flag"
	"fmt"
	"html"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/retry"
)

var update = flag.Bool("update", false, "write docs/trace.svg")

const pictureFile = "../docs/trace.svg"

// TestPicture draws the spans of TestOrderThatFailsThrice. docs/trace.svg is the result.
func TestPicture(t *testing.T) {
	var drawn string
	synctest.Test(t, func(t *testing.T) {
		drawn = draw(failThreeTimesInMemory(t, "4.3.6", retry.StrategyRepublish, hopbackotel.Config{}))
	})
	if *update {
		require.NoError(t, os.WriteFile(pictureFile, []byte(drawn), 0o644))
	}
	want, err := os.ReadFile(pictureFile)
	require.NoError(t, err)
	require.Equal(t, string(want), drawn, "run: go test ./hopbackotel -run Picture -update")
}

const style = `<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}.dim{fill:#59636e}.small{font-size:11.5px}
rect{fill:#ddf4ff;stroke:#54aeff}.failed{fill:#ffebe9;stroke:#ff8182}.done{fill:#dafbe1;stroke:#4ac26b}.part{fill:#f6f8fa;stroke:#d1d9e0}
path{fill:none;stroke:#818b98}.creation{stroke-dasharray:3 4}.next{stroke-width:1.5}marker path{fill:#818b98;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.dim{fill:#9198a1}rect{fill:#0c2d6b;stroke:#388bfd}.failed{fill:#490202;stroke:#f85149}
.done{fill:#04260f;stroke:#3fb950}.part{fill:#151b23;stroke:#3d444d}path{stroke:#9198a1}marker path{fill:#9198a1}}
</style>
`

// draw makes a picture of a story: the creation at the left, a column for each attempt, in
// it what belongs to it, and the links.
func draw(s history) string {
	const width, column, gap, top = 150, 150, 34, 96
	var b strings.Builder
	children := map[string][]tracetest.SpanStub{}
	var attempts []tracetest.SpanStub
	var creation tracetest.SpanStub
	for _, x := range s.spans {
		switch {
		case strings.HasPrefix(x.Name, "process"):
			attempts = append(attempts, x)
		case x.Name == "publish orders":
			creation = x
		case x.Parent.IsValid():
			children[x.Parent.SpanID().String()] = append(children[x.Parent.SpanID().String()], x)
		}
	}
	began := s.spans[0].StartTime
	w := 20 + (len(attempts)+1)*(column+gap)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d 262" role="img" aria-label="The spans of an order that fails three times">`+"\n%s", w, style)
	b.WriteString(`<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>` + "\n")
	at := func(i int) int { return 20 + i*(column+gap) }
	text := func(x, y int, class, format string, args ...any) {
		fmt.Fprintf(&b, `<text x="%d" y="%d" class="%s">%s</text>`+"\n", x, y, class, html.EscapeString(fmt.Sprintf(format, args...)))
	}
	box := func(x, y, h int, class string) {
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" rx="6" class="%s"/>`+"\n", x, y, width, h, class)
	}
	box(at(0), top, 44, "")
	text(at(0)+10, top+18, "", "%s", creation.Name)
	text(at(0)+10, top+35, "dim small", "created in %s", s.name(creation.Parent))
	for i, x := range attempts {
		left, class := at(i+1), "done"
		if x.Status.Code == codes.Error {
			class = "failed"
		}
		box(left, top, 44, class)
		text(left+10, top+18, "", "%s", x.Name)
		text(left+10, top+35, "dim small", "attempt %s, at %v", of(x, "hopback.attempt"), x.StartTime.Sub(began).Round(time.Millisecond))
		for j, c := range children[x.SpanContext.SpanID().String()] {
			y := top + 56 + j*32
			box(left, y, 26, "part")
			name, _, _ := strings.Cut(c.Name, ":")
			if outcome := of(c, "hopback.outcome"); outcome != "" {
				name = "settle: " + outcome
			}
			text(left+10, y+17, "small", "%s", name)
		}
		for _, l := range x.Links {
			switch l.Attributes[0].Value.AsString() {
			case "creation":
				fmt.Fprintf(&b, `<path class="creation" marker-end="url(#a)" d="M%d %dC%d %d %d %d %d %d"/>`+"\n", left+width/2, top, left+width/2-20, top-26-12*i, at(0)+width/2+20+10*i, top-26-12*i, at(0)+width/2+10*i, top-2)
			case "attempt":
				fmt.Fprintf(&b, `<path class="next" marker-end="url(#a)" d="M%d %dH%d"/>`+"\n", left, top+22, left-gap+2)
			}
		}
		if had := of(x, "hopback.attempt.delay.had"); had != "" {
			text(left+10, 238, "dim small", "asked %s s, had %s s", of(x, "hopback.attempt.delay.asked"), had)
		}
	}
	text(at(0)+10, 238, "dim small", "the previous delays:")
	text(20, 24, "", "An order that fails three times: each attempt is a separate trace, linked to the creation (dashed) and to the previous attempt.")
	b.WriteString("</svg>\n")
	return b.String()
}

// of is an attribute as text; "" if there is none.
func of(x tracetest.SpanStub, key attribute.Key) string {
	for _, kv := range x.Attributes {
		if kv.Key == key {
			return kv.Value.String()
		}
	}
	return ""
}
