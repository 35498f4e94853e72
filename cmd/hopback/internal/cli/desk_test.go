package cli_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// safe is a buffer that is written to and read at the same time.
type safe struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *safe) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safe) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// page is a running "hopback desk".
type page struct {
	line, url string
	browser   *http.Client // after it has opened the link
	stderr    *safe
	interrupt func()
	code      chan int
}

var (
	atURL  = regexp.MustCompile(`http://[0-9.:]+/`)
	atLink = regexp.MustCompile(`http://[0-9.:]+/login\?secret=([-_0-9A-Za-z]{43}) `)
)

func servePage(t *testing.T, b *served, args ...string) *page {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &page{stderr: &safe{}, interrupt: cancel, code: make(chan int, 1)}
	r, w := io.Pipe()
	go func() {
		p.code <- cli.Run(ctx, cli.IO{
			Args: append([]string{"desk", b.amqp, "--management-url", b.http, "--listen", "127.0.0.1:0"}, args...),
			Env:  func(name string) string { return map[string]string{"USER": "ada"}[name] }, Stdin: strings.NewReader(""), Stdout: w, Stderr: p.stderr,
		})
		_ = w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		_, _ = io.Copy(io.Discard, r)
	})
	lines := bufio.NewScanner(r)
	require.True(t, lines.Scan(), "it ended: %s", p.stderr)
	p.line = lines.Text()
	p.url = atURL.FindString(p.line)
	require.NotEmpty(t, p.url, p.line)
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	p.browser = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience, Jar: jar}
	if link := atLink.FindStringSubmatch(p.line); link != nil {
		w, err := p.browser.Get(strings.TrimSpace(link[0]))
		require.NoError(t, err)
		_ = w.Body.Close()
		require.Equal(t, p.url, w.Request.URL.String(), "the link leads to the page")
	}
	go func() { _, _ = io.Copy(io.Discard, r) }()
	return p
}

func (p *page) get(t *testing.T, header ...string) (status int, text string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url, nil)
	require.NoError(t, err)
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
			continue
		}
		r.Header.Add(header[i], header[i+1])
	}
	w, err := p.browser.Do(r)
	require.NoError(t, err)
	defer func() { _ = w.Body.Close() }()
	body, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	return w.StatusCode, string(body)
}

func (p *page) end(t *testing.T) int {
	t.Helper()
	p.interrupt()
	select {
	case code := <-p.code:
		return code
	case <-time.After(patience):
		require.Fail(t, "^C doesn't end it")
		return -1
	}
}

// The command prints the page's link in one line. The page answers browsers on this machine that
// have opened the link, is read-only without --write, and ends by ^C.
func TestDeskServesThePage(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	p := servePage(t, b)
	assert.NotContains(t, p.line, "guest", "the password isn't shown")
	assert.Contains(t, p.line, "read-only")
	status, text := p.get(t)
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, text, "ada")
	assert.Contains(t, text, "read-only")
	assert.NotContains(t, text, "guest")
	status, _ = p.get(t, "Host", "evil.example")
	assert.Equal(t, http.StatusForbidden, status)
	status, _ = p.get(t, "X-Forwarded-For", "10.0.0.1")
	assert.Equal(t, http.StatusForbidden, status)
	assert.Contains(t, p.stderr.String(), "hopback desk: refused")
	link := atLink.FindStringSubmatch(p.line)
	require.NotNil(t, link, p.line)
	assert.NotContains(t, p.stderr.String(), link[1], "the log has no secret")
	p.browser.Jar = nil
	status, text = p.get(t)
	assert.Equal(t, http.StatusForbidden, status, "a browser that hasn't opened the link")
	assert.Contains(t, text, "Open the link")
	assert.Equal(t, cli.Done, p.end(t))

	p = servePage(t, b, "--write", "--discard-to", t.TempDir())
	assert.Contains(t, p.line, "replay, edit, and discard")
	_, text = p.get(t)
	assert.NotContains(t, text, "read-only")
	assert.Equal(t, cli.Done, p.end(t))
}

// With a header that a proxy writes, what comes without it is refused, and so is what has
// it twice.
func TestDeskBehindAProxy(t *testing.T) {
	t.Parallel()
	p := servePage(t, serveBroker(t), "--authorize-header", "x-forwarded-user", "--listen", "0.0.0.0:0")
	assert.Nil(t, atLink.FindStringSubmatch(p.line), "the proxy lets people in, and not a link")
	status, text := p.get(t, "X-Forwarded-User", "grace", "Host", "ops.example", "X-Forwarded-For", "10.0.0.1")
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, text, "grace")
	for _, header := range [][]string{{}, {"X-Forwarded-User", ""}, {"X-Forwarded-User", "a", "X-Forwarded-User", "b"}} {
		status, _ = p.get(t, header...)
		assert.Equal(t, http.StatusForbidden, status, header)
	}
	assert.Equal(t, cli.Done, p.end(t))
}

// Wrong flags are refused before the page is served.
func TestDeskRefuses(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	b := serveBroker(t)
	good := []string{"desk", b.amqp, "--management-url", b.http}
	for _, c := range []struct {
		args []string
		code int
		say  string
	}{
		{append(good, "--listen", "0.0.0.0:8484"), cli.Usage, "which other machines can reach"},
		{append(good, "--listen", "[::]:8484"), cli.Usage, "which other machines can reach"},
		{append(good, "--listen", "8484"), cli.Usage, "isn't an address"},
		{append(good, "--listen", taken.Addr().String()), cli.Unknown, "is in use"},
		{append(good, "--authorize-header", "a b"), cli.Usage, "isn't the name of a header"},
		{append(good, "--discard-to", t.TempDir()), cli.Usage, "add --write"},
		{append(good, "--write", "--discard-to", "/no/such/place"), cli.Usage, "isn't a directory"},
		{append(good, "--url", b.amqp), cli.Usage, "set twice"},
		{append(good, "more"), cli.Usage, "has 2 arguments"},
		{[]string{"desk", b.amqp, "--management-url", "none"}, cli.Usage, "--queue"},
		{[]string{"desk", "http://localhost"}, cli.Usage, "isn't an AMQP URL"},
		{[]string{"desk", "amqp://127.0.0.1:1/", "--management-url", b.http}, cli.Unknown, ""},
	} {
		r := world{}.run(c.args...)
		assert.Equal(t, c.code, r.code, "%s: %s", c.args, r.stderr)
		assert.Contains(t, r.stderr, c.say, "%s", c.args)
		assert.Empty(t, r.stdout, "%s", c.args)
	}
	help := world{env: map[string]string{"HOPBACK_URL": "amqp://me:hunter2@h"}}.run("desk", "--help")
	assert.Contains(t, help.stdout, "--authorize-header")
	assert.NotContains(t, help.stdout, "hunter2")
}

// Without the HTTP API the named queues are shown.
func TestDeskWithoutTheHTTPAPI(t *testing.T) {
	t.Parallel()
	b := serveBroker(t)
	p := servePage(t, b, "--management-url", "none", "--queue", "nowhere")
	status, text := p.get(t)
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, text, "nowhere")
	assert.Equal(t, cli.Done, p.end(t))
}
