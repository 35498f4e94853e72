package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

const playgroundHelp = `Serve a web page with RabbitMQ in the browser: publish messages, watch them fail, wait,
come back, and end up in a dead-letter queue; and examine a definitions file as hopback
doctor does. Everything runs in the browser: the page is a folder of static files, and
sends nothing anywhere.

"make site" builds the folder in a checkout of hopback. Any server of static files can
serve it; this one compresses it, and sets a strict content security policy.

Exit codes:
  0    stopped by ^C or SIGTERM
  2    the address is in use, or needs more rights
  64   the command line is wrong, or the folder has no page; nothing was served`

// sitePolicy is the content security policy of the page. The page tightens it once it is loaded.
const sitePolicy = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func (c *command) playground() *cobra.Command {
	var listen, dir string
	cmd := &cobra.Command{
		Use:   "playground",
		Short: "Serve a web page with RabbitMQ in the browser: see retries, examine definitions",
		Long:  playgroundHelp,
		Example: `  make site && hopback playground
  hopback playground --addr 127.0.0.1:8485 --dir public`,
		Args:              takes(0, 0, ""),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(*cobra.Command, []string) error { return c.playgroundNow(listen, dir) },
	}
	f := cmd.Flags()
	f.StringVar(&listen, "addr", "127.0.0.1:0", "`address` to serve the page at; with port 0, the system chooses one")
	f.StringVar(&dir, "dir", filepath.Join("bin", "site"), "`folder` of the page")
	_ = cmd.MarkFlagDirname("dir")
	c.outputFlag(cmd, "the URL")
	return cmd
}

func (c *command) playgroundNow(listen, dir string) error {
	at, _, err := c.resolve("--addr", listen)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err == nil {
		defer func() { _ = root.Close() }()
		_, err = root.Stat("playground.wasm")
	}
	if err != nil {
		return usage("--dir: the page isn't in %s; run \"make site\" in a checkout of hopback, or name its folder with --dir", clean(dir))
	}
	l, err := c.listen("--addr", at)
	if err != nil {
		return err
	}
	url := "http://" + reached(l) + "/"
	if c.structured() {
		err = c.printStructured(map[string]any{"url": url})
	} else {
		err = c.stdout.lines(fmt.Sprintf("The playground is at %s . ^C stops it.\n", url))
	}
	if err != nil {
		return errors.Join(err, l.Close())
	}
	server := &http.Server{Handler: site(root.FS()), ReadHeaderTimeout: headerPatience}
	context.AfterFunc(c.ctx, func() { _ = server.Close() })
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("the server stopped: %w", err)
	}
	return nil
}

// siteTypes are the types of the page's files. Nothing else is served.
var siteTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png", ".json": "application/json", ".wasm": "application/wasm",
}

// site serves the files of the page. If a file has a compressed copy next to it,
// browsers get that.
func site(files fs.FS) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", sitePolicy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		header.Set("Cache-Control", "no-cache")
		name := strings.TrimPrefix(r.URL.Path, "/")
		if name == "" || strings.HasSuffix(name, "/") {
			name += "index.html"
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			header.Set("Allow", "GET, HEAD")
			http.Error(w, "the page only has files", http.StatusMethodNotAllowed)
			return
		}
		kind := siteTypes[path.Ext(name)]
		text, err := fs.ReadFile(files, name) // which refuses paths that lead elsewhere
		if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
			if compressed, problem := fs.ReadFile(files, name+".gz"); problem == nil {
				text, err = compressed, nil
				header.Set("Content-Encoding", "gzip")
			}
		}
		if kind == "" || err != nil {
			http.NotFound(w, r)
			return
		}
		header.Set("Vary", "Accept-Encoding")
		header.Set("Content-Type", kind)
		header.Set("Content-Length", strconv.Itoa(len(text)))
		if r.Method == http.MethodGet {
			_, _ = w.Write(text)
		}
	})
}
