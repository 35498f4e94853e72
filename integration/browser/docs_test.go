package browser

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/printed"
)

// notInPages are the pages with a complete program that has no button.
var notInPages = map[string]string{
	"dead-letters":  "it needs the HTTP API, and dead letters of another program",
	"desk":          "it serves a page",
	"kubernetes":    "it serves HTTP",
	"observability": "it needs OpenTelemetry",
	"operations":    "it serves HTTP",
	"outbox":        "it needs PostgreSQL",
	"performance":   "it measures time, and that of the page is virtual",
	"security":      "it needs certificates",
	"streams":       "the broker in memory has no streams",
}

// openDocs opens a page of the docs in a new tab.
func openDocs(t *testing.T) (*playground, *tab) {
	t.Helper()
	c := theChromium(t)
	p, err := thePlayground()
	require.NoError(t, err)
	b := c.tab(t)
	b.size(1200, 900)
	b.withWorkers()
	b.open(p.url + "docs/")
	b.until(`!document.getElementById("words").disabled`)
	return p, b
}

const (
	printedText = `document.querySelector(".printed").textContent`
	stateText   = `document.querySelector(".printed").previousElementSibling.textContent`
)

// Each program with a button prints what its page shows.
func TestProgramsOfTheDocs(t *testing.T) {
	p, b := openDocs(t)
	for _, page := range b.eval(`[...document.querySelectorAll(".pages a")].map((e) => e.href)`).([]any) {
		b.open(page.(string))
		b.until(`!document.getElementById("words").disabled`)
		name := strings.TrimSuffix(strings.TrimPrefix(page.(string), p.url+"docs/"), ".html")
		complete := b.eval(`[...document.querySelectorAll(".doc pre")].some((e) => e.textContent.startsWith("package main"))`).(bool)
		_, without := notInPages[name]
		require.Equal(t, complete && !without, b.eval(`document.querySelectorAll(".printed").length === 1`), "%s has a button", name)
		if !complete || without {
			continue
		}
		want := b.eval(`(() => { let e = document.querySelector(".printed"); do e = e.nextElementSibling; while (e.tagName !== "PRE" || e.querySelector(".language-sh")); return e.textContent; })()`).(string)
		before, _, interrupted := strings.Cut(want, "^C\n")
		if name == "index" {
			want, interrupted = want+"^C\n", true // README.md shows what it prints, and not how it stops
		}
		b.click("Run")
		if interrupted {
			b.until(fmt.Sprintf(printedText+`.split("\n").length > %d`, strings.Count(before, "\n")))
			b.click("Stop")
		}
		b.until(stateText + ` === "It has ended."`)
		assert.Equal(t, printed.Alike(want), printed.Alike(b.eval(printedText).(string)), name)
	}
	b.calm()
	for _, url := range b.requested() {
		require.True(t, strings.HasPrefix(url, p.url), url)
	}
}

// Nothing of a program is loaded before it is run, and then files of the site. It runs again after it has ended, was interrupted, or
// was stopped because it doesn't care about ^C. All of that works with a keyboard, in both schemes, and on a phone.
func TestAProgramOfTheDocsRunsAgain(t *testing.T) {
	p, b := openDocs(t)
	require.NotContains(t, strings.Join(b.requested(), " "), "wasm")
	loaded := len(b.requested())
	b.eval(`document.activeElement.blur()`)
	for b.eval(`document.activeElement.textContent`) != "Run" {
		b.press("Tab")
	}
	for range 2 {
		b.press("Enter")
		b.until(printedText + `.includes("charged o-1")`)
		require.Equal(t, "Stop", b.eval(`document.activeElement.textContent`))
		b.press("Enter")
		b.until(stateText + ` === "It has ended."`)
		require.True(t, strings.HasSuffix(b.eval(printedText).(string), "charged o-1\n^C\n"))
	}
	requested := b.requested()[loaded:]
	require.Contains(t, requested, p.url+"docs/docs.wasm")
	for _, url := range requested {
		// The page asks for its icon when it has time.
		require.Contains(t, []string{p.url + "icon.svg", p.url + "docs/run.js", p.url + "clock.js", p.url + "wasm_exec.js", p.url + "docs/docs.wasm"}, url)
	}
	for i, width := range []int{360, 320, 1200} {
		b.scheme([]string{"light", "dark"}[i%2])
		b.size(width, 740)
		assert.LessOrEqual(t, b.eval(`document.documentElement.scrollWidth`), float64(width))
		assert.Empty(t, b.eval(poorContrast))
	}

	b.calm()

	// A program that crashes, and one that ignores ^C.
	b.eval(`document.querySelector("[data-program]").dataset.program = "nothing"`)
	b.click("Run")
	b.until(stateText + ` === "It has ended with code 2."`)
	require.Contains(t, b.eval(printedText), "panic: ")
	b.eval(`window.Worker = class { postMessage(text) { this.onmessage({data: {text}}); } terminate() { window.terminated = true; } }`)
	b.click("Run")
	b.click("Stop")
	b.until(stateText + ` === "Stopped." && window.terminated`)
	require.Equal(t, "^C\n", b.eval(printedText))
}
