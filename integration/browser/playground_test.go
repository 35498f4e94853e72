package browser

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The docs have a search that needs no server, load nothing from elsewhere, and fit on a phone, in both schemes.
func TestDocsSite(t *testing.T) {
	c := theChromium(t)
	p, err := thePlayground()
	require.NoError(t, err)
	b := c.tab(t)
	b.size(1200, 900)
	b.open(p.url + "docs/")
	b.until(`!document.getElementById("words").disabled`)
	pages := b.eval(`[...document.querySelectorAll(".pages a")].map((e) => e.href)`).([]any)
	require.Greater(t, len(pages), 20)
	search := func(text string) {
		b.eval(`(() => { const e = document.getElementById("words"); e.value = ` + quoted(t, text) + `; e.dispatchEvent(new Event("input")); })()`)
	}
	search("parking queue")
	b.until(`document.querySelectorAll("#results a").length > 3`)
	search("<img src=x onerror=hacked>")
	b.until(`document.getElementById("found").textContent === "Nothing found"`)
	search("delivery-limit")
	b.until(`document.querySelectorAll("#results a").length > 0`)
	b.click(b.eval(`document.querySelector("#results a").textContent`).(string))
	b.until(loaded + ` && document.getElementById("results").hidden && document.querySelector(".doc").textContent.includes("delivery-limit")`)
	if b.eval(`location.hash`) != "" {
		require.Equal(t, true, b.eval(`document.getElementById(location.hash.slice(1)).getBoundingClientRect().top < innerHeight`))
	}
	for i, page := range pages {
		b.open(page.(string))
		b.scheme([]string{"light", "dark"}[i%2])
		for _, width := range []int{1200, 360} {
			b.size(width, 740)
			assert.LessOrEqual(t, b.eval(`document.documentElement.scrollWidth`), float64(width), page)
		}
		assert.Empty(t, b.eval(poorContrast), page)
		assert.Empty(t, b.eval(`[...document.images].filter((e) => e.complete && e.naturalWidth === 0).map((e) => e.src)`), page)
	}
	b.mu.Lock()
	for _, url := range b.requests {
		assert.True(t, strings.HasPrefix(url, p.url), url)
	}
	b.mu.Unlock()
	b.calm()
}

// checkout is the root of this repository.
var checkout = filepath.Join("..", "..")

// playground is the page, built as make site does, and the command that serves it.
type playground struct {
	folder, command string
	url             string
	built           string // what the build printed
}

var thePlayground = sync.OnceValues(servePlayground)

// servePlayground builds the page and the command, and serves the page until the tests end.
func servePlayground() (*playground, error) {
	folder, err := os.MkdirTemp("", "hopback-playground-")
	if err != nil {
		return nil, err
	}
	p := &playground{folder: filepath.Join(folder, "site"), command: filepath.Join(folder, "hopback")}
	root, err := filepath.Abs(checkout)
	if err != nil {
		return nil, err
	}
	for _, args := range [][]string{
		{"build", "-o", p.command, "./cmd/hopback"},
		{"-C", "integration/tools", "run", "./docsite", "-docs", filepath.Join(root, "docs"), "-o", filepath.Join(p.folder, "docs")},
		{"run", "./operate/playground", "-o", p.folder},
	} {
		c := exec.Command("go", args...)
		c.Dir = root
		if args[0] == "-C" {
			c.Env = append(os.Environ(), "GOWORK=off") // the workspace leaves tools out
		}
		out, err := c.CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		_, p.built, _ = strings.Cut(strings.TrimSpace(string(out)), ": ") // without the folder
	}
	server := exec.Command(p.command, "playground", "--addr", "127.0.0.1:0", "--dir", p.folder, "-o", "json")
	server.Stderr = os.Stderr
	out, err := server.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := server.Start(); err != nil {
		return nil, err
	}
	endPlayground = func() {
		_ = server.Process.Signal(os.Interrupt)
		_ = server.Wait()
		_ = os.RemoveAll(folder)
	}
	var shown struct{ URL string }
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&shown); err != nil {
		return nil, err
	}
	p.url = shown.URL
	return p, nil
}

// endPlayground is set when there is one to end.
var endPlayground = func() {}

// openPlayground opens the page in a new tab, and waits for its program.
func openPlayground(t *testing.T) (*playground, *tab) {
	t.Helper()
	c := theChromium(t)
	p, err := thePlayground()
	require.NoError(t, err)
	b := c.tab(t)
	b.size(1200, 900)
	b.open(p.url)
	b.until(`document.body.dataset.ready === "yes" && !document.querySelector("#publish button").disabled`)
	return p, b
}

// speed sets how fast time passes.
func (b *tab) speed(times int) {
	b.t.Helper()
	b.set("speed", strconv.Itoa(times))
}

// set changes a field, as a user does.
func (b *tab) set(id, value string) {
	b.t.Helper()
	b.eval(fmt.Sprintf(`(() => { const e = document.getElementById(%q) || document.querySelector("[name=" + %[1]q + "]"); e.value = %s; e.dispatchEvent(new Event("change", {bubbles: true})); })()`, id, strconv.Quote(value)))
}

// What a user sees first, and how long it takes. The times depend on the machine, so they are printed, and not
// asserted.
func TestPlaygroundsFirstRetry(t *testing.T) {
	c := theChromium(t)
	p, err := thePlayground()
	require.NoError(t, err)
	b := c.tab(t)
	b.size(1200, 900)
	b.do("Network.setCacheDisabled", map[string]any{"cacheDisabled": true}, nil)
	began := time.Now()
	b.do("Page.navigate", map[string]any{"url": p.url}, nil)
	b.until(`document.body && document.body.dataset.ready === "yes"`)
	ready := time.Since(began)
	b.until(`window.hopback.history(0).includes("attempt 2")`)
	retried := time.Since(began)
	picture := b.eval(`new Promise((done) => new PerformanceObserver((list) => { for (const e of list.getEntries()) if (e.name === "first-contentful-paint") done(e.startTime); }).observe({type: "paint", buffered: true}))`)
	figures := fmt.Sprintf("playground: %s; first picture after %.2f s, program ready after %.2f s, first retry after %.2f s; its delay is 10 s, and the page shows 10 s in one", p.built, picture.(float64)/1000, ready.Seconds(), retried.Seconds())
	t.Log(figures)
	if name := os.Getenv("HOPBACK_FIGURES"); name != "" {
		f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		require.NoError(t, err)
		_, err = fmt.Fprintln(f, figures)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	info, err := os.Stat(filepath.Join(p.folder, "playground.wasm.gz"))
	require.NoError(t, err)
	require.LessOrEqual(t, info.Size(), int64(5<<20))
	b.calm()
}

// The page and a Go test come to the same history: see operate/playground/lab_test.go.
func TestPlaygroundsHistoriesAreThoseOfAGoTest(t *testing.T) {
	_, b := openPlayground(t)
	files, err := filepath.Glob(filepath.Join(checkout, "operate", "playground", "testdata", "history", "*.txt"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		cut := strings.LastIndex(name, "-")
		t.Run(name, func(t *testing.T) {
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			b.set("strategy", name[:cut])
			b.set("handler", name[cut+1:])
			b.set("speed", "3600")
			b.click("Start again")
			b.until(`["handled", "dead"].some((id) => document.getElementById(id).textContent === "1") && JSON.parse(window.hopback.history(0)).length > 0`)
			require.Equal(t, string(want), b.eval(`JSON.parse(window.hopback.history(0))`))
		})
	}
	b.calm()
}

// Once it is loaded, the page sends nothing: it doesn't, and it can't.
func TestPlaygroundSendsNothing(t *testing.T) {
	p, b := openPlayground(t)
	b.mu.Lock()
	before := slices.Clone(b.requests)
	b.mu.Unlock()
	require.Contains(t, before, p.url+"playground.wasm")
	for _, url := range before {
		require.True(t, strings.HasPrefix(url, p.url), url)
	}
	b.speed(3600)
	b.click("Publish")
	b.set("number", "10")
	b.click("Publish")
	b.click("Cut the worker")
	b.until(`document.getElementById("handled").textContent === "12"`)
	b.eval(`document.querySelector("[name=definitions]").value = '{"queues": [{"name": "a", "vhost": "/", "durable": true, "auto_delete": false, "arguments": {"x-dead-letter-exchange": "nowhere"}}], "vhosts": [{"name": "/"}], "exchanges": [], "bindings": [], "policies": []}'`)
	b.click("Examine")
	b.until(`document.querySelectorAll(".finding").length > 0`)
	b.click("Download the fixes")
	b.click("Download the report")
	b.calm()

	for _, attempt := range []string{
		`fetch("/index.html").then(() => done("sent"), () => {})`,
		`(() => { const i = new Image(); i.onload = () => done("sent"); i.src = "/icon.svg"; })()`,
		`(() => { const s = document.createElement("script"); s.onload = () => done("sent"); s.src = "/clock.js"; document.body.append(s); })()`,
		`new WebSocket("ws://" + location.host + "/")`,
		`navigator.sendBeacon("/index.html", "x")`,
	} {
		require.Equal(t, "refused", b.eval(`new Promise((done) => { document.addEventListener("securitypolicyviolation", () => done("refused"), {once: true}); `+attempt+`; })`), attempt)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, url := range b.requests[len(before):] {
		// A refused request is reported, too, and has no answer. What the downloads read is in the page itself.
		require.True(t, strings.HasPrefix(url, "blob:") || slices.Contains([]string{p.url + "index.html", p.url + "icon.svg", p.url + "clock.js"}, url), url)
	}
}

// The doctor of the page, and the one of the command, find the same in every definitions file of this repository.
func TestPlaygroundsDoctorAgreesWithTheCommand(t *testing.T) {
	p, b := openPlayground(t)
	var files []string
	for _, pattern := range []string{"operate/doctor/testdata/*.json", "operate/audit/testdata/*.json", "operate/internal/*/testdata/*.json", "operate/internal/*/testdata/*/*.json"} {
		found, err := filepath.Glob(filepath.Join(checkout, filepath.FromSlash(pattern)))
		require.NoError(t, err)
		files = append(files, found...)
	}
	require.Greater(t, len(files), 5)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		c := exec.Command(p.command, "doctor", file, "-o", "json")
		var problem bytes.Buffer
		c.Stderr = &problem
		out, _ := c.Output() // findings are an error
		b.eval(fmt.Sprintf(`window.answer = JSON.parse(window.hopback.doctor(new TextEncoder().encode(%s)))`, quoted(t, string(text))))
		if len(out) == 0 {
			require.Contains(t, problem.String(), b.eval(`window.answer.error`), file)
			continue
		}
		var want, got map[string]any
		require.NoError(t, json.Unmarshal(out, &want), file)
		require.NoError(t, json.Unmarshal([]byte(b.eval(`JSON.stringify(window.answer.report)`).(string)), &got), file)
		for _, report := range []map[string]any{want, got} {
			delete(report, "source") // "definitions", or the file's name
			delete(report, "time")
		}
		require.Equal(t, want, got, file)
	}
	b.calm()
}

func quoted(t *testing.T, text string) string {
	t.Helper()
	out, err := json.Marshal(text)
	require.NoError(t, err)
	return string(out)
}

// What a definitions file or a message contains is shown as text.
func TestPlaygroundShowsTextAsText(t *testing.T) {
	_, b := openPlayground(t)
	const hostile = `<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>`
	name := quoted(t, hostile)
	b.eval(`document.querySelector("[name=definitions]").value = JSON.stringify({queues: [{name: ` + name + `, vhost: "/", durable: true, auto_delete: false, arguments: {"x-dead-letter-exchange": ` + name + `}}], vhosts: [{name: "/"}], exchanges: [], bindings: [], policies: []})`)
	b.click("Examine")
	b.until(`document.getElementById("findings").textContent.includes("onerror")`)
	b.eval(`document.querySelector("[name=body]").value = ` + name)
	b.click("Publish")
	b.set("delays", hostile)
	b.click("Start again")
	b.until(`document.getElementById("problem").textContent.includes("isn't a duration")`)
	require.Equal(t, true, b.eval(`new Promise((done) => { const now = document.getElementById("now").textContent; const again = () => requestAnimationFrame(() => document.getElementById("now").textContent === now ? again() : done(!document.getElementById("problem").hidden)); again(); })`), "it stays")
	require.Equal(t, float64(0), b.eval(`document.querySelectorAll("main img, main script").length`))

	// Neither a huge file nor a broken one stops the page.
	b.eval(`(() => { const d = new DataTransfer(); d.items.add(new File([new Uint8Array((8 << 20) + 1)], "large.json")); document.getElementById("file").files = d.files; document.getElementById("file").dispatchEvent(new Event("change")); })()`)
	b.until(`document.getElementById("verdict").textContent.includes("more than 8 MiB")`)
	b.eval(`document.querySelector("[name=definitions]").value = "{\"queues\": [" + "[".repeat(100000)`)
	b.click("Examine")
	b.until(`document.getElementById("verdict").textContent.startsWith("hopback:")`)
	b.set("delays", "1s")
	b.click("Start again")
	b.until(`document.getElementById("problem").hidden && document.getElementById("handled").textContent === "1"`)
	b.calm()
}

// A message whose handler always fails ends in the dead-letter queue, with its reason, on the picture and in the
// history.
func TestPlaygroundShowsADeadLetter(t *testing.T) {
	_, b := openPlayground(t)
	b.speed(600)
	b.set("handler", "always")
	b.click("Start again")
	b.until(`document.getElementById("dead").textContent === "1"`)
	b.until(`document.getElementById("history").textContent.includes("reason: exhausted; error: the shop doesn't answer")`)
	b.until(`document.getElementById("topology").getAttribute("aria-label").includes("orders.dead: 1")`)
	require.Equal(t, true, b.eval(`document.querySelectorAll("#timeline .bar-dead").length === 1 && document.querySelectorAll("#timeline .mark").length === 3`))
	require.Contains(t, b.eval(`document.getElementById("code").textContent`), `return errors.New("the shop doesn't answer")`)

	// Without a worker messages wait, and an alarm keeps new ones out.
	b.click("Stop the worker")
	b.click("Publish")
	b.until(`document.getElementById("topology").getAttribute("aria-label").includes("orders: 1")`)
	b.click("Raise a memory alarm")
	b.click("Publish")
	b.until(`document.getElementById("open").textContent === "2"`)
	b.click("Clear the memory alarm")
	b.click("Start a worker")
	b.until(`document.getElementById("dead").textContent === "3"`)
	b.calm()
}

// Queues can be deleted, and foreign ones bound. The page shows what the broker and hopback make of that.
func TestPlaygroundsFaults(t *testing.T) {
	_, b := openPlayground(t)
	drawing := func(text string) {
		t.Helper()
		b.until(`document.getElementById("topology").getAttribute("aria-label").includes(` + quoted(t, text) + `)`)
	}
	b.speed(600)
	b.set("handler", "always")
	b.click("Start again")
	b.until(`document.getElementById("dead").textContent === "1"`)
	b.set("exchange", "retry_exchange")
	b.click("Bind a foreign queue")
	drawing("foreign: 0")
	b.click("Publish")
	b.until(`document.getElementById("dead").textContent === "2"`)
	drawing("foreign: 2")
	require.Equal(t, []any{float64(2), float64(1)}, b.eval(`[document.querySelectorAll("#topology .dot").length - 1, document.querySelectorAll("#topology .foreign rect").length]`), "two dead letters, and copies of the second")
	b.until(`document.getElementById("history").textContent.includes("foreign")`)
	b.set("queue", "foreign")
	b.click("Delete the queue")
	b.until(`!document.getElementById("topology").getAttribute("aria-label").includes("foreign")`)

	b.set("queue", "delay_10s")
	b.click("Delete the queue")
	drawing("delay_10s: doesn't exist")
	require.Equal(t, float64(1), b.eval(`document.querySelectorAll("#topology .missing").length`))
	b.click("Publish")
	b.until(`document.getElementById("lines").textContent.includes("unroutable")`)
	drawing("orders: 1")
	b.click("Apply the topology again")
	b.until(`document.getElementById("dead").textContent === "3"`)

	b.set("queue", "orders")
	b.click("Delete the queue")
	drawing("orders: doesn't exist")
	b.click("Publish")
	b.until(`document.getElementById("refused").textContent === "1"`)
	b.click("Import the first definitions")
	drawing("orders: 0")
	b.until(`(() => { document.querySelector("#publish button").click(); return document.getElementById("dead").textContent >= "4"; })()`)
	b.calm()
}

// A handler is chosen or written. What can't be read is refused, with what to write instead.
func TestPlaygroundsScripts(t *testing.T) {
	_, b := openPlayground(t)
	b.speed(3600)
	write := func(text string) {
		b.eval(`(() => { const e = document.querySelector("[name=script]"); e.value = ` + quoted(t, text) + `; for (const kind of ["input", "change"]) e.dispatchEvent(new Event(kind, {bubbles: true})); })()`)
		b.click("Start again")
	}
	write("fail, slow 5s fail, panic")
	require.Equal(t, "", b.eval(`document.querySelector("[name=handler]").value`))
	b.until(`document.getElementById("history").textContent.includes("reason: panicked")`)
	require.Contains(t, b.eval(`document.getElementById("code").textContent`), "case attempt <= 2:\n\t\tselect {\n\t\tcase <-time.After(5 * time.Second):")
	write("panic")
	require.Equal(t, "panics", b.eval(`document.querySelector("[name=handler]").value`))
	write("explode <b>")
	b.until(`document.getElementById("problem").textContent.includes("handler = \"explode <b>\" isn't a step; write the steps")`)
	b.set("handler", "succeeds")
	b.click("Start again")
	b.until(`document.getElementById("problem").hidden && document.getElementById("handled").textContent === "1"`)
	b.calm()
}

// Every strategy gets the same messages, at the same time, and does what it does alone.
func TestPlaygroundsStrategiesSideBySide(t *testing.T) {
	_, b := openPlayground(t)
	b.set("strategy", "all")
	b.set("handler", "always")
	b.speed(3600)
	b.click("Start again")
	for i, strategy := range []string{"republish", "dead-letter", "native"} {
		want, err := os.ReadFile(filepath.Join(checkout, "operate", "playground", "testdata", "history", strategy+"-always.txt"))
		require.NoError(t, err)
		b.until(fmt.Sprintf(`window.hopback.history(%d).includes("is a dead letter")`, i))
		require.Equal(t, string(want), b.eval(fmt.Sprintf(`JSON.parse(window.hopback.history(%d))`, i)))
		b.set("shown", strategy)
		b.until(`document.getElementById("topology").getAttribute("aria-label").includes("orders.dead: 1") && document.getElementById("timeline").textContent.includes("` + strategy + `: 0 handled, 1 dead letters")`)
		b.until(fmt.Sprintf(`document.getElementById("topology").getAttribute("aria-label").includes("delay_10s") === %v`, strategy == "republish"))
	}
	require.Equal(t, float64(9), b.eval(`document.querySelectorAll("#timeline .mark").length`))
	for _, width := range []int{1200, 360, 320} {
		b.size(width, 740)
		b.until(fmt.Sprintf(`new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(document.documentElement.scrollWidth <= %d))))`, width))
	}
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		require.Empty(t, b.eval(poorContrast), scheme)
	}
	b.set("strategy", "native")
	b.click("Start again")
	b.until(`document.getElementById("one").hidden`)
	b.calm()
}

// A run of 10,000 messages, with one strategy and with all: how much memory the tab has, and how long it draws nothing. The memory
// is a size, and has a bound; the time depends on the machine.
func TestPlaygroundWithTenThousandMessages(t *testing.T) {
	for strategy, most := range map[string]int{"republish": 10_000, "all": 3333} {
		t.Run(strategy, func(t *testing.T) {
			p, b := openPlayground(t)
			b.do("Page.addScriptToEvaluateOnNewDocument", map[string]any{"source": `const start = WebAssembly.instantiateStreaming; WebAssembly.instantiateStreaming = async (...from) => { const made = await start(...from); window.program = made.instance; return made; }`}, nil)
			b.open(p.url)
			b.until(`document.body.dataset.ready === "yes"`)
			b.set("strategy", strategy)
			b.speed(3600)
			b.click("Start again")
			b.until(`document.getElementById("handled").textContent === "1"`)
			b.eval(`(() => { let last = document.timeline.currentTime; window.longest = 0; const frame = (now) => { window.longest = Math.max(window.longest, now - last); last = now; requestAnimationFrame(frame); }; requestAnimationFrame(frame); })()`)
			began := time.Now()
			b.set("number", strconv.Itoa(most-1))
			b.click("Publish")
			b.until(fmt.Sprintf(`document.getElementById("handled").textContent === "%d"`, most))
			var heap struct{ UsedSize, EmbedderHeapUsedSize, BackingStorageSize float64 }
			b.do("Runtime.getHeapUsage", nil, &heap)
			program := b.eval(`window.program.exports.mem.buffer.byteLength`).(float64)
			total := heap.UsedSize + heap.EmbedderHeapUsedSize + heap.BackingStorageSize + program
			t.Logf("%d messages, %s: %.0f MB (scripts %.1f, page %.1f, buffers %.1f, program %.1f), done after %.1f s, at most %.0f ms without a frame",
				most, strategy, total/1e6, heap.UsedSize/1e6, heap.EmbedderHeapUsedSize/1e6, heap.BackingStorageSize/1e6, program/1e6, time.Since(began).Seconds(), b.eval("window.longest"))
			require.Less(t, total, 200e6)
			b.set("number", "1")
			b.click("Publish")
			b.until(fmt.Sprintf(`document.getElementById("problem").textContent.includes("the %d messages that a run may have")`, most))
			b.calm()
		})
	}
}

// Everything can be reached and used with a keyboard, has a name, and fits on a phone, in both schemes.
func TestPlaygroundIsAccessible(t *testing.T) {
	_, b := openPlayground(t)
	b.set("strategy", "all") // which has one more control
	b.click("Start again")
	b.until(`!document.getElementById("one").hidden && document.getElementById("selected").value === "1"`)
	b.eval(`document.activeElement.blur()`)
	controls := b.eval(`[...document.querySelectorAll("a, button, input, select, textarea")].filter((e) => e.getClientRects().length > 0 && !e.disabled).length`).(float64)
	reached := map[any]bool{}
	for range int(controls) + 6 { // and what scrolls
		b.press("Tab")
		reached[b.eval(`(() => { const e = document.activeElement; e.dataset.number ||= String(Math.random()); return /^(A|BUTTON|INPUT|SELECT|TEXTAREA)$/.test(e.tagName) ? e.dataset.number : ""; })()`)] = true
	}
	delete(reached, "")
	assert.Len(t, reached, int(controls))
	assert.Empty(t, b.eval(`[...document.querySelectorAll("input, select, textarea")].filter((e) => !e.labels.length).map((e) => e.outerHTML)`))
	assert.Empty(t, b.eval(`[...document.querySelectorAll("svg[role=img]")].filter((e) => !e.getAttribute("aria-label")).map((e) => e.id)`))
	b.eval(`document.querySelector("#publish button").focus()`)
	b.press("Enter")
	b.until(`document.getElementById("selected").value === "2"`)

	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		for _, size := range [][2]int{{1200, 900}, {360, 740}, {320, 600}} {
			b.size(size[0], size[1])
			b.until(`new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))`)
			assert.LessOrEqual(t, b.eval(`document.documentElement.scrollWidth`), float64(size[0]), "%s, %v", scheme, size)
			if name := os.Getenv("HOPBACK_PICTURES"); name != "" {
				require.NoError(t, os.WriteFile(filepath.Join(name, fmt.Sprintf("playground-%s-%d.png", scheme, size[0])), b.picture(), 0o600))
			}
		}
		assert.Empty(t, b.eval(poorContrast), scheme)
	}
	moving := `[...document.querySelectorAll("*")].filter((e) => { const s = getComputedStyle(e); return s.transitionDuration !== "0s" || s.animationName !== "none"; }).length`
	b.until(`document.querySelectorAll(".dot").length > 0 && ` + moving + ` > 0`)
	b.do("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]string{"name": "prefers-reduced-motion", "value": "reduce"}}}, nil)
	b.until(`document.querySelectorAll(".dot").length > 0`)
	assert.Equal(t, float64(0), b.eval(moving))
	b.calm()
}

// poorContrast lists texts whose contrast with their background is less than WCAG's 4.5.
const poorContrast = `(() => {
	const rgb = (c) => (c.match(/[\d.]+/g) || []).map(Number);
	const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
	const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length === 3) return c; } return [255, 255, 255]; };
	return [...document.querySelectorAll("main *, header *, footer *")].filter((e) => !e.closest("svg, [hidden], .sr, option") && !e.disabled && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).filter((e) => {
		const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(behind(e))];
		return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
	}).map((e) => e.tagName + ": " + e.textContent.slice(0, 40));
})()`

// The page has the policy that the command sends, for servers that send none, and nothing inline.
func TestPlaygroundsPolicy(t *testing.T) {
	p, b := openPlayground(t)
	response, err := http.Get(p.url)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	sent := response.Header.Get("Content-Security-Policy")
	own := b.eval(`document.querySelector("meta[http-equiv]").content`).(string)
	require.True(t, strings.HasPrefix(sent, own), "%s\n%s", sent, own)
	require.Contains(t, own, "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; ")
	require.NotContains(t, sent, "'unsafe-")
	require.Equal(t, float64(0), b.eval(`document.querySelectorAll("script:not([src]), style, [onclick], [onerror], [onload]").length`))
}

// The picture in README.md, with -update: one message was handled, and two wait for their retries.
func TestPlaygroundsPicture(t *testing.T) {
	if *update {
		_, b := openPlayground(t)
		b.speed(60)
		b.click("Start again")
		shows := func(states string) {
			b.until(fmt.Sprintf(`document.getElementById("timeline").getAttribute("aria-label").endsWith(%q)`, states))
		}
		shows("Message 1: waits in delay_60s")
		b.click("Publish")
		shows("Message 1: waits in delay_60s. Message 2: waits in delay_60s")
		b.speed(10) // the next two are up to ten seconds apart
		shows("Message 1: handled. Message 2: waits in delay_60s")
		b.click("Publish")
		shows("Message 2: waits in delay_60s. Message 3: waits in delay_10s")
		b.speed(0)
		const place = `(id) => document.querySelector(id).getBoundingClientRect()`
		b.screen(1000, int(b.eval(`(`+place+`)("#timeline").bottom - (`+place+`)(".facts").top + 2`).(float64)), 2)
		for _, scheme := range []string{"light", "dark"} {
			b.scheme(scheme)
			b.until(`new Promise((done) => { scrollTo(0, (` + place + `)(".facts").top + scrollY - 8); requestAnimationFrame(() => requestAnimationFrame(() => done(true))); })`)
			keep(t, "playground-"+scheme+".png", b.picture())
		}
	}
	for _, scheme := range []string{"light", "dark"} {
		info, err := os.Stat(filepath.Join(docs, "playground-"+scheme+".png"))
		require.NoError(t, err, "run go test ./integration/browser -run TestPlaygroundsPicture -update")
		require.Less(t, info.Size(), int64(maxPicture))
	}
}
