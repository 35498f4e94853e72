package browser

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// incident publishes dead letters of the last hours, as workers would have left them: a steady
// trickle of one error, a burst of another, and one whose text and properties are hostile.
func (s *site) incident(n int) {
	t := s.t
	t.Helper()
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20}, declare.QuorumQueue{Name: "mails", DeliveryLimit: 20})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	p, err := client.NewPublisher[order](t.Context(), s.conn, address.Queue("orders.dead"), client.PublisherConfig{})
	require.NoError(t, err)
	random, now := rand.New(rand.NewPCG(1, 2)), time.Now()
	all := make([]order, n)
	for i := range all {
		all[i] = order{Order: fmt.Sprintf("o-%04d", i), Note: strings.Repeat("x", random.IntN(900))}
	}
	require.NoError(t, p.PublishAll(t.Context(), all, func(o order, m *client.Message) {
		var i int
		_, _ = fmt.Sscanf(o.Order, "o-%d", &i)
		kind, reason, text := "*url.Error", "exhausted", fmt.Sprintf("reserve stock: dial tcp 10.4.2.%d:8443: i/o timeout", i%250)
		at := now.Add(-time.Duration(random.IntN(180)) * time.Minute)
		tenant := fmt.Sprintf("tenant-%d", i%3)
		switch {
		case i%4 != 0:
			kind, reason, text = "*bank.Declined", "permanent", fmt.Sprintf("bank: order %d: card expired", i)
			at = now.Add(-40*time.Minute + time.Duration(random.NormFloat64()*float64(6*time.Minute)))
		case i == 8:
			kind, reason, text, tenant = hostile, "fraud", hostile, hostile
		}
		m.Properties.MessageID = o.Order
		m.ApplicationProperties = map[string]any{"tenant": tenant, "region": "eu-1", "attempt": int64(i % 5), hostile: "x", "long-name-of-a-property-that-needs-room": "y"}
		m.Annotations = map[any]any{
			annotation.Queue: "orders", annotation.Reason: reason, annotation.Error: text, annotation.Older.ErrorType: kind,
			annotation.Retries: int64(i % 6), annotation.Older.First: at.Add(-time.Minute).UnixMilli(), annotation.Older.Last: at.UnixMilli(),
		}
	}))
}

// fits fails the test if the page is wider than a screen, has nameless elements or pale texts:
// light, dark, and on a phone.
func (b *tab) fits(name string) {
	b.t.Helper()
	for _, width := range []int{1280, 720, 390, 320} {
		b.size(width, 900)
		b.until("window.innerWidth === " + fmt.Sprint(width))
		assert.LessOrEqual(b.t, b.eval("document.documentElement.scrollWidth"), float64(width), "%s at %d: %v", name, width, b.eval(wider))
		assert.Empty(b.t, b.eval(nameless), name)
		for _, scheme := range []string{"light", "dark"} {
			b.scheme(scheme)
			assert.Empty(b.t, b.eval(pale), "%s, %s, %d", name, scheme, width)
			if dir := os.Getenv("SHOTS"); dir != "" && width != 720 && width != 320 {
				require.NoError(b.t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d-%s.png", name, width, scheme)), b.picture(), 0o644))
			}
		}
	}
	b.scheme("light")
	b.size(1120, 820)
	b.calm()
}

// groupTexts are the first cells of a table's rows, as far as they are seen.
const groupTexts = `[...document.querySelectorAll("table.groups tbody th a")].map((e) => e.textContent)`

// The overview has each group's arrivals as bars that are seen, and that words describe. Its
// groups are sorted by a click, and a whole group's dry run starts from its row.
func TestAGroupsRow(t *testing.T) {
	forEachBroker(t, func(s *site, c *chromium) {
		s.incident(240)
		b := c.tab(s.t)
		b.size(1120, 820)
		b.open(s.page)
		b.sees("bank: order #: card expired")
		b.until(`document.querySelectorAll("table.groups tbody svg.spark[role=img]").length === 3`)
		assert.Regexp(s.t, `^180 messages over \d+ min, most \(\d+\) (?:at|in the \d+ (?:s|min) from) (?:\w{3} \d+, )?\d\d:\d\d UTC$`, b.eval(`document.querySelector("svg.spark").getAttribute("aria-label")`))
		for _, width := range []int{1120, 390} {
			b.size(width, 820)
			for _, scheme := range []string{"light", "dark"} {
				b.scheme(scheme)
				assert.Equal(s.t, true, b.eval(`[...document.querySelectorAll("svg.spark")].every((e) => e.getBoundingClientRect().width >= 100 && e.getBoundingClientRect().height >= 25 && e.querySelector(".bars").getBBox().height > 10 && getComputedStyle(e.querySelector(".bars")).fill !== "rgb(0, 0, 0)")`), "%d, %s", width, scheme)
			}
		}
		b.scheme("light")
		b.size(1120, 820)
		b.fits("incident")

		first := func() any { return b.eval(groupTexts + "[0]") }
		assert.Equal(s.t, "bank: order #: card expired", first())
		b.follow("Messages")
		assert.Contains(s.t, first(), "</pre>", "the smallest first")
		assert.Equal(s.t, "ascending", b.eval(`document.querySelector("th[aria-sort]").getAttribute("aria-sort")`))
		b.follow("Oldest")
		assert.Contains(s.t, first(), "reserve stock")
		b.size(390, 820) // the head of the table isn't seen on a phone
		b.follow("Messages")
		assert.Equal(s.t, "bank: order #: card expired", first())
		b.follow("Replay… bank")
		b.sees("180 of 240 messages would be replayed")
		b.sees(`the group "bank: order #: card expired"`)
		b.calm()
	})
}

// The list of messages has columns of application properties, can be sorted, and says what is
// sorted. The choice stays from page to page, in a search and in a run's way back.
func TestAListOfMessages(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.incident(240)
	b := c.tab(t)
	b.size(1120, 820)
	b.open(s.page)
	b.follow("bank: order")
	b.sees("The whole group")
	b.until(`document.querySelectorAll("figure svg.spark[role=img]").length === 1`)
	b.fits("group")
	b.eval(`document.querySelector("details.columns summary").click()`)
	b.fits("columns-open")
	b.click("tenant")
	b.click("attempt")
	b.follow("Show columns")
	b.until(`[...document.querySelectorAll("thead th.prop")].map((e) => e.textContent).join() === "attempt,tenant" || [...document.querySelectorAll("thead th.prop")].map((e) => e.textContent).join() === "tenant,attempt"`)
	assert.Regexp(t, `tenant-\d`, b.eval(`[...document.querySelectorAll("tbody tr:first-child td.prop")].map((e) => e.textContent).join()`))
	b.follow("Size")
	b.sees("Sorted by size, the largest first: only the 50 messages on this page.")
	b.fits("columns")
	b.follow("Next")
	b.sees("Sorted by size")
	b.until(`document.querySelectorAll("thead th.prop").length === 2`)
	b.follow("Queue order")
	b.until(`document.querySelectorAll("thead th.prop").length === 2 && !document.querySelector("p.sorted")`)
	b.follow("Replay all…")
	b.sees("would be replayed")
	b.follow("Cancel")
	b.until(`document.querySelectorAll("thead th.prop").length === 2`)

	// The reasons have counts, in the whole queue.
	b.open(s.page + "messages?in=orders.dead&column=tenant")
	b.sees("The whole queue")
	assert.Equal(t, "any,permanent (180),exhausted (59),fraud (1)", b.eval(`[...document.querySelectorAll("select[name=reason] option")].map((e) => e.textContent).join()`))
	b.eval(`document.querySelector("select[name=reason]").value = "fraud"`)
	b.follow("Search")
	b.until(`document.querySelectorAll("table.messages tbody tr").length === 1`)
	b.sees("<script>window.hacked=1;alert(1)</script>")
	b.fits("hostile")
	b.calm()
}

// The overview reports alarms and queues without consumers, and no longer when they are over.
func TestTheBannerOfTheOverview(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.incident(8)
	p, err := client.NewPublisher[order](t.Context(), s.conn, address.Queue("mails"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), order{Order: "m-1"}))
	b := c.tab(t)
	b.size(1120, 820)
	b.open(s.page)
	b.sees("No consumers: mails (1 message waiting).")
	b.eval("window.same = true")
	s.memory.SetMemoryAlarm(true)
	b.sees("The broker has a memory alarm on ")
	b.fits("alarm")
	s.memory.SetMemoryAlarm(false)
	b.until(`!document.body.innerText.includes("memory alarm")`)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(ctx, "mails", client.JSON(func(context.Context, order) error { return nil }), client.ConsumerConfig{})
	}()
	b.until(`!document.body.innerText.includes("No consumers")`)
	assert.Equal(t, true, b.eval("window.same"), "the page wasn't loaded again")
	stop()
	require.NoError(t, <-ended)
	b.calm()
}
