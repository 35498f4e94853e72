package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
)

// chromium is a headless Chromium that is driven over a pipe, by the DevTools protocol:
// messages of JSON, each with a zero byte behind it.
type chromium struct {
	cmd  *exec.Cmd
	to   *os.File
	mu   sync.Mutex
	last int
	wait map[int]chan reply
	tabs map[string]*tab
	gone chan struct{} // closed when it has ended
}

type reply struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// chromiumPath is where Chromium is. On Debian, root installs it if it is missing and tests may start servers.
var chromiumPath = sync.OnceValues(func() (string, error) {
	for _, name := range []string{os.Getenv("HOPBACK_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil && name != "" {
			return path, nil
		}
	}
	if !rabbitmq.MayStart() {
		return "", errors.New("not installed, and only make test installs it")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	return service.Program(ctx, os.Stderr, "chromium", "chromium")
})

func needsChromium(t *testing.T) {
	t.Helper()
	if _, err := chromiumPath(); err != nil {
		t.Skipf("there is no Chromium (%v); install Debian's package chromium, or name it with HOPBACK_CHROMIUM", err)
	}
}

// running is the Chromium of all tests, since a start takes seconds of CPU. Each tab has a
// separate profile.
var running = sync.OnceValues(startChromium)

func theChromium(t *testing.T) *chromium {
	t.Helper()
	needsChromium(t)
	c, err := running()
	require.NoError(t, err)
	return c
}

func TestMain(m *testing.M) {
	code := m.Run()
	endChromium()
	endPlayground()
	os.Exit(code)
}

// endChromium is set when there is one to end.
var endChromium = func() {}

func startChromium() (*chromium, error) {
	path, err := chromiumPath()
	if err != nil {
		return nil, err
	}
	home, err := os.MkdirTemp("", "hopback-chromium-")
	if err != nil {
		return nil, err
	}
	theirs, to, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	from, answers, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	args := []string{
		"--headless=new", "--remote-debugging-pipe", "--user-data-dir=" + filepath.Join(home, "profile"), "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en", "about:blank",
	}
	if os.Geteuid() == 0 {
		args = append([]string{"--no-sandbox"}, args...) // it refuses to run as root with one
	}
	c := &chromium{cmd: exec.Command(path, args...), to: to, wait: map[int]chan reply{}, tabs: map[string]*tab{}, gone: make(chan struct{})}
	c.cmd.ExtraFiles = []*os.File{theirs, answers}
	c.cmd.Env = append(os.Environ(), "HOME="+home)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	_ = theirs.Close()
	_ = answers.Close()
	go c.read(from)
	endChromium = func() {
		_ = c.write(map[string]any{"id": 1 << 30, "method": "Browser.close"})
		select {
		case <-c.gone:
		case <-time.After(10 * time.Second):
		}
		_ = to.Close()
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
		<-c.gone
		// Its helpers may write to their folder for a moment more.
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end) && os.RemoveAll(home) != nil; {
			time.Sleep(50 * time.Millisecond)
		}
	}
	return c, nil
}

func (c *chromium) read(from *os.File) {
	defer close(c.gone)
	defer func() { _ = from.Close() }()
	r := bufio.NewReaderSize(from, 1<<20)
	for {
		text, err := r.ReadBytes(0)
		if err != nil {
			c.mu.Lock()
			for _, w := range c.wait {
				w <- reply{Error: &struct{ Message string }{"Chromium has ended"}}
			}
			c.wait = map[int]chan reply{}
			c.mu.Unlock()
			return
		}
		var m struct {
			ID        int
			SessionID string
			Method    string
			Params    json.RawMessage
			reply
		}
		if json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m) != nil {
			continue
		}
		c.mu.Lock()
		if w := c.wait[m.ID]; w != nil {
			delete(c.wait, m.ID)
			w <- m.reply
		} else if tab := c.tabs[m.SessionID]; tab != nil {
			tab.event(m.Method, m.Params)
		}
		c.mu.Unlock()
	}
}

func (c *chromium) write(m any) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = c.to.Write(append(text, 0))
	return err
}

// call sends a command and waits for its reply.
func (c *chromium) call(ctx context.Context, session, method string, params, result any) error {
	w := make(chan reply, 1)
	c.mu.Lock()
	c.last++
	id := c.last
	c.wait[id] = w
	c.mu.Unlock()
	m := map[string]any{"id": id, "method": method}
	if params != nil {
		m["params"] = params
	}
	if session != "" {
		m["sessionId"] = session
	}
	if err := c.write(m); err != nil {
		return err
	}
	select {
	case r := <-w:
		if r.Error != nil {
			return fmt.Errorf("%s: %s", method, r.Error.Message)
		}
		if result != nil {
			return json.Unmarshal(r.Result, result)
		}
		return nil
	case <-ctx.Done():
		return errors.Join(errors.New(method), context.Cause(ctx))
	}
}

// tab is a page of Chromium.
type tab struct {
	t       *testing.T
	c       *chromium
	session string
	profile string

	mu       sync.Mutex
	dialogs  int      // that a script has opened
	requests []string // URLs that the page has asked for
	troubles []string // what the browser complained of
}

// event takes what Chromium reports of a tab. The lock of the chromium is held.
func (b *tab) event(method string, params json.RawMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch method {
	case "Page.javascriptDialogOpening":
		b.dialogs++
		go func() {
			_ = b.c.call(context.Background(), b.session, "Page.handleJavaScriptDialog", map[string]any{"accept": true}, nil)
		}()
	case "Target.attachedToTarget":
		var worker struct{ SessionID string }
		_ = json.Unmarshal(params, &worker) // if it can't be read, the worker waits, and so does the test
		b.c.tabs[worker.SessionID] = b
		go func() {
			for _, method := range []string{"Network.enable", "Log.enable", "Runtime.runIfWaitingForDebugger"} {
				_ = b.c.call(context.Background(), worker.SessionID, method, nil, nil) // it may have ended
			}
		}()
	case "Network.requestWillBeSent":
		var sent struct{ Request struct{ URL string } }
		_ = json.Unmarshal(params, &sent) // if it can't be read, the request still counts
		b.requests = append(b.requests, sent.Request.URL)
	case "Log.entryAdded", "Runtime.exceptionThrown":
		if bytes.Contains(params, []byte("/icon.svg' violates")) {
			return // Chromium asks for a tab's icon when it likes, and may do so after the playground has forbidden all requests
		}
		b.troubles = append(b.troubles, string(params))
	}
}

// watch counts violations of the content security policy on every page.
const watch = `window.violations = []; document.addEventListener("securitypolicyviolation", (e) => window.violations.push(e.violatedDirective + " " + e.sample + e.blockedURI));`

const patience = 60 * time.Second

func (c *chromium) tab(t *testing.T) *tab {
	t.Helper()
	b := &tab{t: t, c: c}
	var profile struct {
		BrowserContextID string `json:"browserContextId"`
	}
	b.do("Target.createBrowserContext", nil, &profile)
	b.profile = profile.BrowserContextID
	t.Cleanup(func() { (&tab{t: t, c: c}).do("Target.disposeBrowserContext", profile, nil) })
	var target struct{ TargetID string }
	b.do("Target.createTarget", map[string]any{"url": "about:blank", "browserContextId": profile.BrowserContextID}, &target)
	var attached struct{ SessionID string }
	b.do("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	c.mu.Lock()
	b.session = attached.SessionID
	c.tabs[b.session] = b
	c.mu.Unlock()
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.do(domain+".enable", nil, nil)
	}
	b.do("Page.addScriptToEvaluateOnNewDocument", map[string]any{"source": watch}, nil)
	return b
}

func (b *tab) do(method string, params, result any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(b.t, b.c.call(ctx, b.session, method, params, result))
}

// withWorkers adds what the page's workers request, and the browser's complaints about them, to those of the page.
func (b *tab) withWorkers() {
	b.t.Helper()
	b.do("Target.setAutoAttach", map[string]any{"autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true}, nil)
}

// requested are the URLs so far.
func (b *tab) requested() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

// size makes the page as large as a screen of that size would.
func (b *tab) size(width, height int) {
	b.t.Helper()
	b.screen(width, height, 1)
}

// screen is size with a number of pixels for each of CSS's, in both directions.
func (b *tab) screen(width, height, pixels int) {
	b.t.Helper()
	b.do("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": pixels, "mobile": width < 600}, nil)
}

// scheme is light or dark.
func (b *tab) scheme(name string) {
	b.t.Helper()
	b.do("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]string{"name": "prefers-color-scheme", "value": name}}}, nil)
}

// eval returns the value of an expression.
func (b *tab) eval(expression string) any {
	b.t.Helper()
	value, err := b.try(expression)
	require.NoError(b.t, err, expression)
	return value
}

func (b *tab) try(expression string) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out struct {
		Result           struct{ Value any }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	err := b.c.call(ctx, b.session, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	if err == nil && out.ExceptionDetails != nil {
		err = errors.New(out.ExceptionDetails.Text + " " + out.ExceptionDetails.Exception.Description)
	}
	return out.Result.Value, err
}

// until waits for an expression to be true. A page that is being left may answer nothing.
func (b *tab) until(expression string) {
	b.t.Helper()
	end := time.Now().Add(patience)
	for {
		value, err := b.try(expression)
		if err == nil && value == true {
			return
		}
		if time.Now().After(end) {
			text, _ := b.try("location.href + '\\n' + document.body.innerText")
			require.Fail(b.t, "not in time: "+expression, "%v\n%v", err, text)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// sees waits for a text on the page.
func (b *tab) sees(text string) {
	b.t.Helper()
	b.until(loaded + " && document.body.innerText.includes(" + strconv.Quote(text) + ")")
}

const loaded = `document.readyState === "complete"`

func (b *tab) open(url string) {
	b.t.Helper()
	b.do("Page.navigate", map[string]any{"url": url}, nil)
	b.until(loaded + " && location.href !== 'about:blank'")
}

// click clicks at the middle of the link, button or box with that text.
func (b *tab) click(text string) {
	b.t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll("a, button, label.check, input[type=checkbox]")].find((e) => (e.getAttribute("aria-label") || e.textContent).trim().startsWith(%s) && e.getClientRects().length > 0 && !e.disabled)`, strconv.Quote(text))
	b.until(loaded + " && !!" + find)
	b.eval("document.__here = true")
	at := b.eval(`(() => { const e = ` + find + `; e.scrollIntoView({block: "center"}); const r = e.getClientRects()[0]; return [r.left + r.width / 2, r.top + r.height / 2]; })()`).([]any)
	for _, kind := range []string{"mousePressed", "mouseReleased"} {
		b.do("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1}, nil)
	}
}

// follow clicks, and waits for the next page.
func (b *tab) follow(text string) {
	b.t.Helper()
	b.click(text)
	b.until("!document.__here && " + loaded)
}

// press presses a key.
func (b *tab) press(key string) {
	b.t.Helper()
	code := map[string]int{"Tab": 9, "Enter": 13}[key]
	text := key
	switch key {
	case "Tab":
		text = ""
	case "Enter":
		text = "\r"
	}
	b.do("Input.dispatchKeyEvent", map[string]any{"type": "keyDown", "key": key, "text": text, "windowsVirtualKeyCode": code}, nil)
	b.do("Input.dispatchKeyEvent", map[string]any{"type": "keyUp", "key": key, "windowsVirtualKeyCode": code}, nil)
}

// picture is a PNG of what is on the screen.
func (b *tab) picture() []byte {
	b.t.Helper()
	var out struct{ Data string }
	b.do("Page.captureScreenshot", map[string]any{"format": "png"}, &out)
	text, err := base64.StdEncoding.DecodeString(out.Data)
	require.NoError(b.t, err)
	return text
}

// calm fails the test if a script of somebody else ran, or the browser complained.
func (b *tab) calm() {
	b.t.Helper()
	b.mu.Lock()
	dialogs, troubles := b.dialogs, strings.Join(b.troubles, "\n")
	b.mu.Unlock()
	require.Zero(b.t, dialogs)
	require.Empty(b.t, troubles)
	require.Empty(b.t, b.eval("window.violations"))
	require.Equal(b.t, "undefined", b.eval("typeof window.hacked"))
}

// docs is where the pictures are.
var docs = filepath.Join("..", "..", "docs")
