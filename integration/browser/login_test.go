package browser

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/desk/web"
	"github.com/hopback/hopback/operate/httpapi"
)

// lines collects what a page logs, and the requests that reach it.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// unguarded is a page without Config.Authorize, on a broker in memory.
func unguarded(t *testing.T, log io.Writer) (page string, handler *web.Handler, server *httptest.Server) {
	t.Helper()
	b := hopbacktest.Start(t, hopbacktest.Config{MaxEvents: -1})
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Logger: quiet, Dial: b.Dial})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders.dead", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	reader, err := httpapi.New(strings.Replace(api.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	require.NoError(t, err)
	d, err := desk.New(conn, desk.Config{HTTP: reader, Logger: quiet})
	require.NoError(t, err)
	handler, err = web.New(d, web.Config{Title: "the secret shop", Writable: true, Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(log, "%s %s referer=%q forwarded=%q\n", r.Method, r.URL.Path, r.Referer(), r.Header["X-Forwarded-For"])
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		server.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(t, handler.Shutdown(ctx))
	})
	return server.URL + "/", handler, server
}

// A stock nginx sends the desk's own address as Host and no header that names the client. So
// its requests look like those of this machine, and only the login link tells them apart.
func TestNginxInFrontOfADeskLetsNobodyIn(t *testing.T) {
	t.Parallel()
	var log lines
	page, handler, _ := unguarded(t, &log)
	nginx, err := service.Nginx(t.Context(), os.Stderr, strings.TrimSuffix(page, "/"))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, nginx.Close()) })
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	stranger := &http.Client{Jar: jar, Timeout: patience}
	get := func(path string) (int, string) {
		w, err := stranger.Get(nginx.URL + path)
		require.NoError(t, err)
		defer func() { _ = w.Body.Close() }()
		text, err := io.ReadAll(w.Body)
		require.NoError(t, err)
		return w.StatusCode, string(text)
	}
	for _, path := range []string{"/", "/runs", "/messages?in=orders.dead", "/download?in=orders.dead&id=x", "/partitions", "/login", "/login?secret=", "/login?secret=" + strings.Repeat("A", 43), "/"} {
		status, text := get(path)
		assert.Equal(t, http.StatusForbidden, status, path)
		assert.False(t, strings.Contains(text, "secret shop"), "%s: a refusal doesn't name the broker", path)
	}
	assert.Contains(t, log.String(), "forwarded=[]", "nginx adds no header")

	// A person with the link gets in, and the secret of the link is logged nowhere.
	link := handler.LoginURL(page)
	secret := link[strings.LastIndexByte(link, '=')+1:]
	require.Len(t, secret, 43)
	// Go's client sends a Referer with a redirect, and ignores the answer's policy.
	c := &http.Client{Timeout: patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	c.Jar, err = cookiejar.New(nil)
	require.NoError(t, err)
	for i, path := range []string{link, page} {
		w, err := c.Get(path)
		require.NoError(t, err)
		_ = w.Body.Close()
		assert.Equal(t, []int{http.StatusSeeOther, http.StatusOK}[i], w.StatusCode)
	}
	assert.NotContains(t, log.String(), secret)
	status, _ := get("/")
	assert.Equal(t, http.StatusForbidden, status, "somebody else's login lets nobody in through nginx")
	passed, err := os.ReadFile(filepath.Join(nginx.Dir, "access.log"))
	require.NoError(t, err)
	assert.NotContains(t, string(passed), secret)
}

// A browser that opens the link of the terminal is in, stays in while it follows links, and
// shows the secret neither in its address nor to the server that it asks next.
func TestTheLinkOfTheTerminalOpensTheDesk(t *testing.T) {
	c := theChromium(t)
	var log lines
	page, handler, _ := unguarded(t, &log)
	b := c.tab(t)
	b.open(page)
	b.sees("Open the link")
	link := handler.LoginURL(page)
	b.open(link)
	b.sees("orders.dead")
	b.until(`location.search === "" && !document.referrer.includes("secret") && document.cookie === ""`)
	b.follow("Runs")
	b.sees("Runs")
	b.open(page + "messages?in=orders.dead")
	b.sees("orders.dead")
	assert.NotContains(t, log.String(), link[strings.LastIndexByte(link, '=')+1:])
}
