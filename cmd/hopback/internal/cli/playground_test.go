package cli_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// servePlayground runs "hopback playground" until the end of the test, and returns the page's URL.
func servePlayground(t *testing.T, dir string) string {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	out, in := io.Pipe()
	var stderr bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- cli.Run(ctx, cli.IO{
			Args: []string{"playground", "--addr", "127.0.0.1:0", "--dir", dir, "-o", "json"},
			Env:  func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: in, Stderr: &stderr,
		})
		_ = in.Close()
	}()
	t.Cleanup(func() {
		stop()
		_, _ = io.Copy(io.Discard, out)
		assert.Zero(t, <-code, stderr.String())
	})
	var shown struct{ URL string }
	require.NoError(t, json.NewDecoder(out).Decode(&shown))
	return shown.URL
}

func TestPlaygroundServesItsFilesAlone(t *testing.T) {
	t.Parallel()
	outside := t.TempDir()
	dir := filepath.Join(outside, "site")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "docs"), 0o700))
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	_, err := z.Write([]byte("program"))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	for name, text := range map[string]string{"site/index.html": "page", "site/playground.wasm": "program", "site/playground.wasm.gz": compressed.String(), "site/notes.txt": "secret", "site/docs/index.html": "docs", "outside.js": "secret"} {
		require.NoError(t, os.WriteFile(filepath.Join(outside, name), []byte(text), 0o600))
	}
	require.NoError(t, os.Symlink(filepath.Join(outside, "outside.js"), filepath.Join(dir, "link.js")))
	url := servePlayground(t, dir)

	transport := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	ask := func(method, path, encoding string) (int, http.Header, string) {
		r, err := http.NewRequestWithContext(t.Context(), method, url+path, nil)
		require.NoError(t, err)
		r.Header.Set("Accept-Encoding", encoding)
		w, err := transport.RoundTrip(r)
		require.NoError(t, err)
		defer func() { _ = w.Body.Close() }()
		text, err := io.ReadAll(w.Body)
		require.NoError(t, err)
		return w.StatusCode, w.Header, string(text)
	}
	for _, c := range []struct {
		method, path, encoding string
		status                 int
		kind, text             string
	}{
		{"GET", "", "", 200, "text/html; charset=utf-8", "page"},
		{"GET", "docs/", "", 200, "text/html; charset=utf-8", "docs"},
		{"GET", "docs/../docs/index.html", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
		{"GET", "index.html", "gzip", 200, "text/html; charset=utf-8", "page"},
		{"GET", "playground.wasm", "", 200, "application/wasm", "program"},
		{"GET", "playground.wasm", "br, gzip", 200, "application/wasm", compressed.String()},
		{"HEAD", "playground.wasm", "gzip", 200, "application/wasm", ""},
		{"POST", "", "", 405, "text/plain; charset=utf-8", "the page only has files\n"},
		{"GET", "notes.txt", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
		{"GET", "playground.wasm.gz", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
		{"GET", "link.js", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
		{"GET", "%2e%2e/outside.js", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
		{"GET", "..%5coutside.js", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
	} {
		status, header, text := ask(c.method, c.path, c.encoding)
		what := c.method + " " + c.path + " " + c.encoding
		assert.Equal(t, c.status, status, what)
		assert.Equal(t, c.kind, header.Get("Content-Type"), what)
		assert.Equal(t, c.text, text, what)
		assert.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; ", what)
		assert.NotContains(t, header.Get("Content-Security-Policy"), "'unsafe-", what)
		assert.Equal(t, "nosniff", header.Get("X-Content-Type-Options"), what)
	}
}

func TestPlaygroundWithoutItsPageSaysWhatToRun(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		var stdout, stderr bytes.Buffer
		code := cli.Run(t.Context(), cli.IO{Args: []string{"playground", "--dir", dir}, Env: func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr})
		assert.Equal(t, cli.Usage, code)
		assert.Empty(t, stdout.String())
		assert.Equal(t, 1, strings.Count(stderr.String(), "\n"), stderr.String())
		assert.Contains(t, stderr.String(), `run "make site"`)
	}
}
