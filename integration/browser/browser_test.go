// Package browser tests the page of package operate/desk/web in a real browser, a headless
// Chromium, with RabbitMQ 4.3 and with a broker in memory; and what make site builds, the playground and the docs. Without Chromium it is skipped.
package browser

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/desk/web"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/retry"
)

var (
	which  = flag.String("brokers", "all", `"real", "memory", or "all"`)
	update = flag.Bool("update", false, "write the pictures of docs again")
)

// site is a virtual host with a page.
type site struct {
	t       *testing.T
	conn    *client.Conn
	page    string // its URL
	memory  *hopbacktest.Broker
	handled atomic.Int64
}

var quiet = slog.New(slog.DiscardHandler)

// forEachBroker runs a test with RabbitMQ 4.3, and with one in memory.
func forEachBroker(t *testing.T, test func(s *site, c *chromium)) {
	needsChromium(t)
	if *which != "memory" && (rabbitmq.MayStart() || rabbitmq.Given("4.3")) {
		t.Run("4.3", func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			found, err := rabbitmq.Need(ctx, os.Stderr, "4.3")
			require.NoError(t, err)
			b := found[0]
			t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })
			vhost := fmt.Sprintf("browser-%x", time.Now().UnixNano())
			admin(t, b.ManagementURL, http.MethodPut, vhost)
			t.Cleanup(func() { admin(t, b.ManagementURL, http.MethodDelete, vhost) })
			u, err := url.Parse(b.URL)
			require.NoError(t, err)
			u.Path = "/" + vhost
			test(newSite(t, u.String(), b.ManagementURL, vhost, nil), theChromium(t))
		})
	}
	if *which != "real" {
		t.Run("memory", func(t *testing.T) { test(inMemory(t), theChromium(t)) })
	}
}

// inMemory is a site of a broker in memory, for what is about the page alone.
func inMemory(t *testing.T) *site {
	t.Helper()
	return inMemoryAs(t, "")
}

// inMemoryAs is inMemory with a version of RabbitMQ.
func inMemoryAs(t *testing.T, version string) *site {
	t.Helper()
	needsChromium(t)
	b := hopbacktest.Start(t, hopbacktest.Config{MaxEvents: -1, Version: version})
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	return newSite(t, b.URL(), strings.Replace(api.URL, "http://", "http://guest:guest@", 1), "/", b)
}

// admin makes or deletes a virtual host.
func admin(t *testing.T, management, method, vhost string) {
	t.Helper()
	u, err := url.Parse(management)
	require.NoError(t, err)
	u = u.JoinPath("api", "vhosts", vhost)
	r, err := http.NewRequestWithContext(context.Background(), method, u.String(), nil)
	require.NoError(t, err)
	w, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	_ = w.Body.Close()
	require.Less(t, w.StatusCode, 300)
}

func newSite(t *testing.T, amqp, management, vhost string, memory *hopbacktest.Broker) *site {
	t.Helper()
	s := &site{t: t, memory: memory}
	cfg := client.Config{Logger: quiet, Name: "billing-7c9f"}
	if memory != nil {
		cfg.Dial = memory.Dial
	}
	conn, err := client.Connect(t.Context(), amqp, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	s.conn = conn
	api, err := httpapi.New(management, vhost, httpapi.Config{})
	require.NoError(t, err)
	d, err := desk.New(conn, desk.Config{HTTP: api, Logger: quiet})
	require.NoError(t, err)
	handler, err := web.New(d, web.Config{
		Title: "shop, RabbitMQ 4.3", Writable: true, DiscardDir: t.TempDir(), Logger: quiet,
		Authorize: func(*http.Request, web.Access) (string, error) { return "ada", nil },
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/ops/dead/", http.StripPrefix("/ops/dead", handler))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		server.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(t, handler.Shutdown(ctx))
	})
	s.page = server.URL + "/ops/dead/"
	return s
}

type order struct {
	Order string  `json:"order"`
	Total float64 `json:"total"`
	Note  string  `json:"note,omitempty"`
}

// hostile is a note and an error that would run a script, if any page let them.
const hostile = `</pre></textarea><script>window.hacked=1;alert(1)</script><img src=x onerror="window.hacked=1;alert(1)"><svg onload=alert(1)>`

type bankError struct{ text string }

func (e *bankError) Error() string { return e.text }

var policy = retry.Policy{MaxRetries: 1, Backoff: retry.Exponential(10*time.Millisecond, 2), GiveUpAfter: time.Hour}

// deadOrders are 189 of the bug, 25 of the bank, 10 of the stock, and the fraud.
const deadOrders = 225

// shop has orders die: most of a bug, some of a bank, and one of a fraud, whose text is
// in the message and in its error.
func (s *site) shop(fraud string) {
	t := s.t
	t.Helper()
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20}, declare.QuorumQueue{Name: "mails", DeliveryLimit: 20}, declare.QuorumQueue{Name: "invoices", DeliveryLimit: 20})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	const n = 300 // every fourth is handled
	all := make([]order, n)
	for i := range all {
		all[i] = order{Order: fmt.Sprintf("o-%d", 4000+i), Total: float64(i%90) + .99}
	}
	all[7].Note = fraud
	publish := func(queue string, orders []order) {
		p, err := client.NewPublisher[order](t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.PublishAll(t.Context(), orders, func(o order, m *client.Message) {
			m.Properties.MessageID = o.Order
			m.ApplicationProperties = map[string]any{"shop": "berlin", "attempt": int64(1)}
		}))
	}
	publish("orders", all)
	publish("mails", all[:12])
	broken := s.work(func(o order) error {
		var i int
		_, _ = fmt.Sscanf(o.Order, "o-%d", &i)
		switch {
		case o.Note != "":
			return client.DeadLetter{Reason: "fraud", Err: errors.New(fraud)}
		case i%12 == 0:
			return retry.Permanent(&bankError{fmt.Sprintf("bank: order %s: card expired", o.Order)})
		case i%30 == 1:
			return fmt.Errorf("post https://stock.internal:8443/reserve: dial tcp 10.4.2.%d:8443: i/o timeout", i%250)
		case i%4 != 2:
			panic("assignment to entry in nil map")
		}
		return nil
	})
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		deadLetters, err := declare.Inspect(t.Context(), s.conn.Management(), "orders.dead")
		require.NoError(t, err)
		waiting, err := declare.Inspect(t.Context(), s.conn.Management(), "orders")
		require.NoError(t, err)
		if deadLetters.Messages == deadOrders && waiting.Messages == 0 {
			break
		}
		require.True(t, time.Now().Before(end), "%d are dead, %d wait", deadLetters.Messages, waiting.Messages)
	}
	broken()
}

// work consumes orders.
func (s *site) work(handle func(order) error) (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(ctx, "orders", retry.With(policy)(client.JSON(func(_ context.Context, o order) error {
			err := handle(o)
			if err == nil {
				s.handled.Add(1)
			}
			return err
		})), client.ConsumerConfig{})
	}()
	return func() {
		cancel()
		assert.NoError(s.t, <-ended)
	}
}

// A person with a browser finds a group, shows one of its messages, replays it, and it is
// handled. Then all of the group is replayed, with the progress shown, and stopped.
func TestSomebodyReplaysAGroup(t *testing.T) {
	forEachBroker(t, func(s *site, c *chromium) {
		s.shop(hostile)
		fixed := s.work(func(order) error { return nil })
		defer fixed()
		before := s.handled.Load()
		b := c.tab(s.t)
		b.size(1120, 820)
		b.open(s.page)
		b.sees("handler panicked: assignment to entry in nil map")
		b.sees("bank: order #: card expired")
		b.until(`document.querySelectorAll("svg.draw.wide .box").length >= 5`)
		b.calm()
		b.follow("handler panicked")
		b.sees("The whole group")
		b.follow("o-4003")
		b.sees("dead-lettered")
		b.until(`!document.body.innerText.includes("\"total\"")`)
		b.follow("Show the body")
		b.sees(`"total": 3.99`)
		b.calm()
		b.follow("Replay…")
		b.sees("1 of 225 messages would be replayed")
		b.follow("Replay 1 now")
		b.sees("1 message was replayed")
		require.Eventually(s.t, func() bool { return s.handled.Load() == before+1 }, patience, 10*time.Millisecond)
		b.calm()

		// Two messages of a page are selected.
		b.follow("Back to the messages")
		b.until(loaded + ` && [...document.querySelectorAll("[data-needs-selection]")].every((e) => e.disabled)`)
		b.click("Select o-4004")
		b.click("Select o-4005")
		b.until(`document.querySelector("[data-selected]").textContent === "(2)"`)
		b.follow("Replay selected…")
		b.sees("2 of 224 messages would be replayed")
		b.follow("Replay 2 now")
		b.sees("2 messages were replayed")

		// All of the group, slowly. The page shows how far it is without being loaded again.
		b.open(s.page)
		b.follow("handler panicked")
		b.follow("Replay all…")
		b.sees("186 of 222 messages would be replayed")
		b.eval(`document.querySelector("[name=rate]").value = "30"`)
		b.follow("Replay 186 now")
		b.eval("window.same = true")
		b.until(`Number(document.querySelector(".run .lead b").textContent) > 10`)
		b.until(`document.querySelector("progress").value > 0`)
		assert.Equal(s.t, true, b.eval("window.same"), "the page wasn't loaded again")
		b.click("Stop")
		b.sees("Stopped. Messages that")
		b.follow("Resume")
		b.until(`document.querySelector(".run .lead b") && Number(document.querySelector(".run .lead b").textContent) > 10`)
		b.calm()
		b.click("Stop")
		b.sees("Stopped. Messages that")
		b.calm()
	})
}

// Pages for the pictures, and for the looks that every page has to pass.
var pages = []string{"overview", "group", "message", "plan", "edit", "queue", "runs"}

// goTo opens one of the pages.
func (b *tab) goTo(s *site, page string) {
	b.t.Helper()
	b.open(s.page)
	b.sees("handler panicked")
	switch page {
	case "overview":
		return
	case "runs":
		b.follow("Runs")
		return
	case "queue":
		b.open(s.page + "messages?in=orders.dead")
		b.sees("The whole queue")
		return
	}
	b.follow("handler panicked")
	if page == "group" {
		return
	}
	if page == "plan" {
		b.follow("Replay all…")
		b.sees("would be replayed")
		return
	}
	b.follow("o-40")
	if page == "edit" {
		b.follow("Edit…")
		b.until(`document.querySelector("textarea[name=body]").value.includes("total")`)
		return
	}
	b.follow("Show the body")
	b.sees(`"total"`)
}

// Each page is as narrow as the screen, has names for what can be used and heads for its
// tables, and enough contrast, in light and dark.
func TestEveryPageCanBeUsed(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.shop(hostile)
	b := c.tab(t)
	for _, page := range pages {
		b.size(1120, 820)
		b.goTo(s, page)
		for _, width := range []int{1280, 720, 390, 320} {
			b.size(width, 820)
			b.until("window.innerWidth === " + fmt.Sprint(width))
			assert.LessOrEqual(t, b.eval("document.documentElement.scrollWidth"), float64(width), "%s at %d: %v", page, width, b.eval(wider))
		}
		assert.Empty(t, b.eval(nameless), page)
		for _, scheme := range []string{"light", "dark"} {
			b.scheme(scheme)
			assert.Empty(t, b.eval(pale), "%s, %s", page, scheme)
		}
		b.calm()
	}
}

// The pictures of the documents, with -update.
func TestPictures(t *testing.T) {
	if !*update {
		for _, name := range []string{"overview", "group", "message", "replay", "phone"} {
			for _, scheme := range []string{"light", "dark"} {
				info, err := os.Stat(filepath.Join(docs, "desk", name+"-"+scheme+".png"))
				require.NoError(t, err, "run go test ./integration/browser -run TestPictures -update")
				assert.Less(t, info.Size(), int64(maxPicture))
			}
		}
		return
	}
	s, c := inMemory(t), theChromium(t)
	s.busy()
	b := c.tab(t)
	shot := func(name string, width, height int) {
		b.screen(width, height, 2)
		for _, scheme := range []string{"light", "dark"} {
			b.scheme(scheme)
			keep(t, filepath.Join("desk", name+"-"+scheme+".png"), b.picture())
		}
		b.scheme("light")
		b.size(1120, 820)
	}
	b.size(1120, 820)
	b.open(s.page)
	b.sees("context deadline exceeded")
	shot("phone", 390, 844)
	shot("overview", 1120, 965)
	b.follow("charge card")
	b.sees("The whole group")
	b.eval(`document.querySelector("details.columns summary").click()`)
	b.click("shop")
	b.click("tenant")
	b.follow("Show columns")
	shot("group", 1120, 760)
	b.follow("order-48")
	b.sees("Attempt 5 failed")
	b.follow("Show the body")
	b.sees(`"lines"`)
	b.eval("scrollTo(0, 0)")
	shot("message", 1120, 1000)
	b.follow("its group")
	b.follow("Replay all…")
	b.sees("would be replayed")
	b.eval(`document.querySelector("[name=rate]").value = "30"`)
	b.follow("Replay 148 now")
	b.until(`Number(document.querySelector(".run .lead b").textContent) > 60`)
	shot("replay", 1120, 480)
}

// wider are the elements that reach beyond the screen.
const wider = `[...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className + " " + e.textContent.slice(0, 40)).slice(0, 5)`

// nameless is what a person who can't see the page can't use.
const nameless = `[
	...[...document.querySelectorAll("a, button")].filter((e) => !(e.getAttribute("aria-label") || e.textContent).trim()),
	...[...document.querySelectorAll("input:not([type=hidden]), select, textarea")].filter((e) => !e.labels.length && !e.getAttribute("aria-label")),
	...[...document.querySelectorAll("table")].filter((e) => !e.caption),
	...[...document.querySelectorAll("svg:not([aria-hidden])")].filter((e) => !e.getAttribute("aria-label")),
	...[...document.querySelectorAll("progress")].filter((e) => !e.getAttribute("aria-label")),
	...(document.querySelectorAll("h1").length === 1 && document.querySelectorAll("main").length === 1 && document.documentElement.lang ? [] : [document.body]),
].map((e) => e.outerHTML.slice(0, 200))`

// pale are the texts with less contrast than WCAG asks for at level AA.
const pale = `(() => {
	const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
	const rgba = (c) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
	const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
	const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
	const ground = (e) => { let all = []; for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); all.push(c); if (c[3] === 1) break; } let g = [255, 255, 255, 1]; for (const c of all.reverse()) g = over(c, g); return g; };
	const bad = [];
	for (const e of document.querySelectorAll("body *:not(script):not(option):not(svg *)")) {
		if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length || e.disabled) continue;
		const style = getComputedStyle(e);
		const g = ground(e), f = over(rgba(style.color), g);
		const [a, b] = [light(f), light(g)].sort((x, y) => y - x);
		const large = parseFloat(style.fontSize) >= 24 || parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700;
		if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) bad.push(e.tagName + "." + e.className + " " + e.textContent.trim().slice(0, 30) + " " + ((a + 0.05) / (b + 0.05)).toFixed(2));
	}
	return [...new Set(bad)].slice(0, 10);
})()`

// The page is used without a mouse, with the focus seen.
func TestByTheKeyboard(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.shop(hostile)
	b := c.tab(t)
	b.size(1120, 820)
	b.open(s.page)
	b.sees("handler panicked")
	b.press("Tab")
	assert.Equal(t, "Skip to the content", b.eval("document.activeElement.textContent"))
	assert.Equal(t, true, b.eval(`document.activeElement.getBoundingClientRect().left >= 0`), "it is seen when it has the focus")
	b.press("Enter")
	b.until(`document.activeElement.id === "main"`)
	for range 30 {
		b.press("Tab")
		assert.Equal(t, true, b.eval(`document.activeElement === document.body || document.activeElement.matches(":focus-visible")`))
		if text, _ := b.eval("document.activeElement.textContent").(string); strings.HasPrefix(text, "handler panicked") {
			break
		}
	}
	assert.Contains(t, b.eval("document.activeElement.textContent"), "handler panicked")
	assert.NotEqual(t, "none", b.eval(`getComputedStyle(document.activeElement).outlineStyle`))
	b.press("Enter")
	b.sees("The whole group")
	b.press("/")
	b.until(`document.activeElement.name === "find"`)
	assert.Empty(t, b.eval("document.activeElement.value"), "the key itself isn't typed")
	for _, key := range "o-4003" {
		b.press(string(key))
	}
	assert.Equal(t, "o-4003", b.eval("document.activeElement.value"), "no key leads away from a field")
	b.press("Enter")
	b.until(loaded + ` && document.querySelectorAll("table.messages tbody tr").length === 1`)
	b.press("o")
	b.sees("Topology")
	b.press("r")
	b.sees("No runs yet")
	b.calm()
}

// What messages bring is text wherever it is shown. If it weren't, the policy of the page
// would keep it from running.
func TestNoScriptOfAMessageRuns(t *testing.T) {
	s, c := inMemory(t), theChromium(t)
	s.shop(hostile)
	b := c.tab(t)
	b.size(1120, 820)
	b.open(s.page)
	b.sees("<script>window.hacked=#;alert(#)</script>")
	b.calm()
	b.follow("</pre></textarea>")
	b.follow("o-4007")
	b.sees(`<img src=x onerror="window.hacked=1;alert(1)">`)
	b.calm()
	b.follow("Show the body")
	b.sees(`</textarea>`)
	b.calm()
	b.follow("Edit…")
	b.until(`document.querySelector("textarea[name=body]").value.includes("window.hacked")`)
	b.calm()
	b.follow("Save and replay")
	b.sees("the edit changes nothing")
	b.calm()

	b.eval(`document.body.insertAdjacentHTML("beforeend", '<img src=x onerror="window.hacked=1"><iframe srcdoc="<script>parent.hacked=1</script>"></iframe><a id=bad href="javascript:window.hacked=1">x</a><style>*{display:none}</style>')`)
	b.eval(`(() => { const s = document.createElement("script"); s.textContent = "window.hacked=1"; document.body.append(s); document.getElementById("bad").click(); })()`)
	b.until("window.violations.length >= 4")
	assert.Equal(t, "undefined", b.eval("typeof window.hacked"))
	answer, err := b.try(`fetch("http://127.0.0.1:1/", {mode: "no-cors"})`)
	assert.Error(t, err, "%v", answer)
}
