package browser

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
)

// openMessage opens the page of a message that failed five times.
func (b *tab) openMessage(s *site) {
	b.t.Helper()
	b.size(1120, 820)
	b.open(s.page)
	b.follow("charge card")
	b.sees("The whole group")
	b.follow("order-48")
	b.sees("Attempt 5 failed in orders")
}

// The page of a message has its history as a table, with the time between two events and the
// delay after an attempt, on wide and on narrow screens.
func TestTheHistoryOfAMessage(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.busy()
	b := c.tab(t)
	b.openMessage(s)
	rows := b.eval(`[...document.querySelectorAll("table.history tbody tr")].map((e) => e.innerText.replace(/\s+/g, " ").trim())`).([]any)
	require.Len(t, rows, 8)
	for i, want := range []string{
		`^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Created$`, `^– Published to exchange shop, routing key order.created$`,
		`1.2 s Attempt 1 failed in orders charge card: HTTP 503 Service Unavailable 5 s$`, ` 7 s Attempt 2 failed in orders .* 30 s$`, ` 32 s Attempt 3 .* 3 min$`,
		` 3 min 2 s Attempt 4 .* 15 min$`, `15 min [12] s Attempt 5 failed in orders exhausted charge card: Post .* context deadline exceeded$`, `Dead-lettered from orders rejected$`,
	} {
		assert.Regexp(t, want, rows[i])
	}
	b.follow("Show the body")
	b.sees(`"lines"`)
	b.fits("message")
	// On a phone each row is a card: the event comes first, its time and delay have names.
	b.size(390, 900)
	assert.Equal(t, true, b.eval(`(() => { const row = document.querySelector("table.history tr.failure"); const top = (q) => row.querySelector(q).getBoundingClientRect().top; return top("th") < top(".at"); })()`))
	assert.Equal(t, `"Next delay "`, b.eval(`getComputedStyle(document.querySelector("table.history td[data-label='Next delay']"), "::before").content`))
	b.size(1120, 820)

	// What destroys something is red and apart.
	red := `(() => { const b = document.querySelector("button.danger"), all = [...document.querySelectorAll(".why button, .why a.button")]; return getComputedStyle(b).color !== getComputedStyle(all[0]).color && b.getBoundingClientRect().left - all[1].getBoundingClientRect().right > 100; })()`
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		assert.Equal(t, true, b.eval(red), scheme)
	}
	b.follow("Discard…")
	b.sees("1 of 215 messages would be discarded")
	b.fits("discard")
	b.follow("Cancel")
	b.sees("Discard all…")
	b.fits("group-discard")
}

// The copy buttons appear with the script, copy what they say, and report it.
func TestCopyButtons(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.busy()
	b := c.tab(t)
	b.openMessage(s)
	b.do("Browser.grantPermissions", map[string]any{"permissions": []string{"clipboardReadWrite", "clipboardSanitizedWrite"}, "browserContextId": b.profile}, nil)
	b.follow("Show the body")
	b.sees(`"lines"`)
	for _, name := range []string{"ID", "message-id", "error", "body"} {
		want := b.eval(`document.getElementById(document.querySelector("[aria-label='Copy the ` + name + `']").dataset.copy).textContent`).(string)
		require.NotEmpty(t, want)
		b.click("Copy the " + name)
		b.until(`document.getElementById("copied").textContent === "Copied the ` + name + `"`)
		assert.Equal(t, "Copied", b.eval(`document.querySelector("[aria-label='Copy the `+name+`']").textContent`))
		assert.Equal(t, want, b.eval("navigator.clipboard.readText()"))
	}
	b.until(`[...document.querySelectorAll(".copy")].every((e) => e.textContent === "Copy") && document.getElementById("copied").textContent === ""`)
	// A page that isn't served over TLS has no clipboard to write to.
	b.eval(`Object.defineProperty(navigator, "clipboard", { value: undefined })`)
	b.click("Copy the ID")
	b.until(`document.getElementById("copied").textContent === "Copied the ID"`)
	assert.Equal(t, "Copy the ID", b.eval(`document.activeElement.getAttribute("aria-label")`), "the focus stays")
	assert.Equal(t, float64(0), b.eval(`document.querySelectorAll(".clip").length`))
	b.calm()

	b.do("Emulation.setScriptExecutionDisabled", map[string]any{"value": true}, nil)
	b.do("Page.reload", nil, nil)
	b.until(loaded + ` && document.querySelectorAll(".copy").length === 4`)
	assert.Equal(t, true, b.eval(`[...document.querySelectorAll(".copy")].every((e) => e.getClientRects().length === 0)`), "without the script they do nothing")
	b.do("Emulation.setScriptExecutionDisabled", map[string]any{"value": false}, nil)
}

// After a replay the next page has a notice with a link to the run, which a reload removes. A
// page that is open gets it without being loaded again.
func TestNoticesAfterAReplay(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.busy()
	b := c.tab(t)
	b.openMessage(s)
	b.follow("Replay…")
	b.sees("1 of 215 messages would be replayed")
	b.follow("Replay 1 now")
	b.sees("1 message was replayed")
	b.follow("Back to the messages")
	b.sees("Replayed 1 message to orders.")
	b.fits("notice")
	b.follow("Show the run")
	b.sees("1 message was replayed")
	b.follow("Overview")
	b.sees("Dead letters by group")
	assert.NotContains(t, b.eval("document.body.innerText"), "Replayed 1 message")

	b.follow("charge card")
	b.follow("Replay all…")
	b.sees("147 of 214 messages would be replayed")
	b.eval(`document.querySelector("[name=rate]").value = "40"`)
	b.follow("Replay 147 now")
	b.follow("Overview")
	b.sees(" is running.")
	b.eval("window.same = true")
	b.sees("Replayed 147 messages to orders.")
	assert.Equal(t, true, b.eval("window.same"), "the page wasn't loaded again")
	assert.Equal(t, "status", b.eval(`document.querySelector("#notices").getAttribute("role")`))
	assert.Equal(t, float64(2), b.eval(`document.querySelectorAll("#notices .note").length`))
	b.click("Dismiss")
	b.until(`document.querySelectorAll("#notices .note").length === 1`)
	b.do("Page.reload", nil, nil)
	b.until(loaded + ` && document.querySelectorAll("#notices .note").length === 0`)
	assert.False(t, strings.Contains(b.eval("document.body.innerText").(string), "Replayed 147"))
	b.calm()
}

// A queue that isn't read because of a side effect has a page that names it, and what to do.
func TestReadingHasSideEffects(t *testing.T) {
	s, c := inMemoryAs(t, "4.0.5"), theChromium(t)
	s.shop("fraud")
	b := c.tab(t)
	b.size(1120, 820)
	b.open(s.page + "messages?in=orders")
	b.sees("Reading this queue has side effects")
	b.sees("Nothing has been read.")
	b.sees("delivery-limit")
	b.mu.Lock()
	b.troubles = nil // the browser logs the status 409
	b.mu.Unlock()
	b.fits("side-effects")
	b.follow("Accept and read")
	b.sees("The queue is empty")
	b.calm()
}

// The history of a message that was replayed and failed again, the page of an edit, and the list of
// runs.
func TestOtherPagesFit(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.shop("fraud")
	b := c.tab(t)
	b.goTo(s, "overview")
	b.follow("post https")
	b.sees("The whole group")
	b.follow("o-4")
	b.sees("Attempt 2 failed")
	b.fits("retried")
	b.follow("Edit…")
	b.until(`document.querySelector("textarea[name=body]").value.includes("total")`)
	b.fits("edit")
	b.eval(`document.querySelector("[name=set]").value = "fixed=true"`)
	b.follow("Save and replay")
	b.sees("1 message was replayed")
	b.fits("run")
	b.follow("Runs")
	b.sees("Replayed the edited message to orders.")
	b.fits("runs")
	worker := s.work(func(order) error { return errors.New("still broken") })
	require.NoError(t, s.memory.Queue("orders.dead").Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Ready == deadOrders }))
	worker()
	b.open(s.page + "messages?in=orders.dead&text=still&again=1")
	b.follow("o-4")
	b.sees("as replay-")
	b.sees("by ada")
	b.fits("replayed")
	b.calm()
}
