package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/textproto"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/desk/web"
	"github.com/hopback/hopback/retry"
)

const deskHelp = `Serve a web page that shows dead letters by group, and each message with its history.
With --write, users can replay and edit messages; with --discard-to, discard them, too.

URL is the broker, as in --url. The HTTP API lists queues and shows rates. Without it,
name the queues with --queue.

hopback prints a link with a secret. Only browsers on this machine that have opened it
can use the page, until the command stops. Treat the link as a password. For other
machines, put a proxy in front that authenticates users and sets a header with the
user's name. --authorize-header names the header: the page refuses requests without
it. The proxy must remove the header from incoming requests, and nobody may be able to
bypass the proxy.

The log on stderr records every action, with the user and the number of messages. ^C
stops replays, and returns all held messages to their queues.

Exit codes:
  0    stopped by ^C or SIGTERM
  2    the address is in use, or the broker can't be reached or refuses the user
  64   the command line is wrong; nothing was served
  130  interrupted before the page was served`

// desking has the flags of desk.
type desking struct {
	listen, header, discardTo string
	write                     bool
	queues                    []string
}

// endPatience limits how long the shutdown waits for held messages to return to their queues.
const endPatience = 30 * time.Second

func (c *command) desk() *cobra.Command {
	var s desking
	cmd := &cobra.Command{
		Use:   "desk [URL]",
		Short: "Serve a web page that shows and replays dead letters",
		Long:  deskHelp,
		Example: `  hopback desk amqp://guest:guest@localhost:5672/
  hopback desk --write --discard-to /var/lib/hopback
  hopback desk --listen 0.0.0.0:8484 --authorize-header X-Forwarded-User`,
		Args: takes(0, 1, "[URL]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if c.url != "" {
					return usage("the URL is set twice, by the argument and by --url; leave one out")
				}
				c.url = args[0]
			}
			return c.deskNow(s)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f := cmd.Flags()
	c.connectionFlags(f)
	c.outputFlag(cmd, "the link")
	f.StringVar(&s.listen, "listen", "127.0.0.1:8484", "`address` to serve the page at")
	f.BoolVar(&s.write, "write", false, "allow replays and edits, and discards with --discard-to (default read-only)")
	f.StringVar(&s.discardTo, "discard-to", "", "allow discards, and write discarded messages to this `folder`")
	f.StringVar(&s.header, "authorize-header", "", "`header` with the user's name, set by a proxy; allows addresses and host names of other machines")
	f.StringArrayVar(&s.queues, "queue", nil, "show only this `queue`; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("queue", c.queueNames())
	f.StringVar(&c.dlqFlags.prefix, "names-prefix", "", "`prefix` of the names in the retry topology, as in retry.names.prefix of its file")
	return cmd
}

var headerName = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")

// deskNow checks flags and the broker before it listens.
func (c *command) deskNow(s desking) error {
	if s.header != "" && !headerName.MatchString(s.header) {
		return usage("--authorize-header is %.80q, which isn't the name of a header; write it as X-Forwarded-User", s.header)
	}
	if s.discardTo != "" && !s.write {
		return usage("--discard-to without --write does nothing; add --write")
	}
	at, local, err := c.resolve("--listen", s.listen)
	if err != nil {
		return err
	}
	if !local && s.header == "" {
		return usage("--listen is %.80q, which other machines can reach, so anybody could read messages; use 127.0.0.1, or put a proxy in front that authenticates users, and name its header with --authorize-header", s.listen)
	}
	b, err := c.broker()
	if err != nil {
		return err
	}
	defer b.close()
	if b.api == nil && len(s.queues) == 0 {
		return usage("hopback can't list queues without the HTTP API: %s; or name them with --queue", b.noAPI)
	}
	if err := b.connect(c.ctx); err != nil {
		return err
	}
	cfg := desk.Config{Names: retry.Names{Prefix: c.dlqFlags.prefix}, Logger: b.logger()}
	if b.api != nil {
		cfg.HTTP = b.api
	}
	d, err := desk.New(b.conn, cfg)
	if err != nil {
		return err
	}
	page, err := web.New(d, web.Config{
		Title: b.shown, Writable: s.write, DiscardDir: s.discardTo, Queues: s.queues, Authorize: authorizer(s.header), User: c.who(), Times: timesOf,
		Logger: slog.New(slog.NewTextHandler(c.stderr.w, nil)),
	})
	if err != nil {
		return err
	}
	l, err := c.listen("--listen", at)
	if err != nil {
		return errors.Join(err, page.Shutdown(context.Background()))
	}
	reads := "The page is read-only"
	if s.write {
		reads = "The page can replay and edit"
		if s.discardTo != "" {
			reads = "The page can replay, edit, and discard"
		}
	}
	at = page.LoginURL("http://" + reached(l) + "/")
	if s.header == "" {
		reads += ", for browsers that have opened this link"
	}
	show := func() error {
		return c.stdout.lines(fmt.Sprintf("The dead letters of %s are at %s . %s. ^C stops it.\n", clean(b.shown), at, reads))
	}
	if c.structured() {
		show = func() error {
			return c.printStructured(map[string]any{"url": at, "writable": s.write})
		}
	}
	if err := show(); err != nil {
		return errors.Join(err, l.Close(), page.Shutdown(context.Background()))
	}
	return c.deskUntilEnd(page, l)
}

// authorizer names the user of a request, or refuses it. Without the header's name it is nil: the
// page then requires its login link.
func authorizer(header string) func(*http.Request, web.Access) (string, error) {
	if header == "" {
		return nil
	}
	name := textproto.CanonicalMIMEHeaderKey(header)
	return func(r *http.Request, _ web.Access) (string, error) {
		values := r.Header[name]
		// One of two is from the proxy, and the other one from somebody else.
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("the request has %d headers %s instead of one, which the proxy must set", len(values), name)
		}
		return values[0], nil
	}
}

// deskUntilEnd serves until a signal, after which it returns nil once all messages are returned.
func (c *command) deskUntilEnd(page *web.Handler, l net.Listener) error {
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: headerPatience, ReadTimeout: time.Minute, WriteTimeout: 5 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(slog.NewTextHandler(c.stderr.w, nil), slog.LevelWarn),
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	var err error
	select {
	case <-c.ctx.Done():
	case err = <-ended:
		err = coded(Unknown, fmt.Errorf("the web server stopped: %w; start hopback desk again", err))
	}
	ctx, cancel := context.WithTimeout(context.Background(), endPatience)
	defer cancel()
	if given := page.Shutdown(ctx); given != nil {
		err = errors.Join(err, coded(Unknown, errors.New("returning the held messages took too long; the broker requeues them when the connection closes")))
	}
	_ = server.Close()
	return err
}

// resolve is the address to listen on, and whether only this machine can reach it.
func (c *command) resolve(flag, value string) (at string, local bool, err error) {
	at, err = c.listenAddress(flag, value, true)
	if err != nil {
		return "", false, err
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return "", false, err
	}
	ip := net.ParseIP(host)
	return at, ip != nil && ip.IsLoopback(), nil
}
