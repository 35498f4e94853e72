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

	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/desk/web"
	"github.com/hopback/hopback/retry"
)

const deskHelp = `Serve a page that shows dead letters by group, and single messages with their way. With
--write it replays and edits them, and with --discard-to it discards them, too.

URL names the broker; --url and HOPBACK_URL do the same. The HTTP API lists queues and
shows rates; where it can't be guessed, give --management-url, or name queues with
--queue.

Only this machine can reach the page, and whoever uses the machine may use it. Others
may reach it only behind a proxy that logs people in and says who they are: with
--authorize-header the page asks for that header in every request, and refuses what
comes without. The proxy has to remove the header from what it is sent, and nobody may
reach the page past the proxy.

Every action is logged to stderr, with who, what and how many. ^C stops replays, and
gives back all messages that are held.

Exit codes:
  0    ended by ^C or SIGTERM
  2    it can't listen, or the broker can't be reached or refuses the user
  64   the command line is wrong; nothing was served
  130  interrupted before the page was served`

// desking is what the flags of desk say.
type desking struct {
	listen, header, discardTo string
	write                     bool
	queues                    []string
}

// endPatience is how long held messages may take to be given back in the end.
const endPatience = 30 * time.Second

func (c *command) desk() *cobra.Command {
	var s desking
	cmd := &cobra.Command{
		Use:   "desk [URL]",
		Short: "Serve a page that shows and replays dead letters",
		Long:  deskHelp,
		Example: `  hopback desk amqp://guest:guest@localhost:5672/
  hopback desk --write --discard-to /var/lib/hopback
  hopback desk --listen 0.0.0.0:8484 --authorize-header X-Forwarded-User`,
		Args: takes(0, 1, "[URL]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if c.url != "" {
					return usage("the URL is given twice; leave out --url")
				}
				c.url = args[0]
			}
			return c.deskNow(s)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f := cmd.Flags()
	c.connectionFlags(f)
	f.StringVar(&s.listen, "listen", "127.0.0.1:8484", "`address` to serve the page at")
	f.BoolVar(&s.write, "write", false, "allow replays, edits and discards; without it the page is read-only")
	f.StringVar(&s.discardTo, "discard-to", "", "`directory` that discarded messages are written to; without it nothing can be discarded")
	f.StringVar(&s.header, "authorize-header", "", "`header` in which a proxy says who asks; it allows other addresses, and other host names")
	f.StringArrayVar(&s.queues, "queue", nil, "show, read and change only this `queue`; may be repeated")
	f.StringVar(&c.dlqFlags.prefix, "names-prefix", "", "`prefix` of the retry topology's names")
	return cmd
}

var headerName = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")

// deskNow checks everything that can be wrong before a port is taken.
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
		return usage("--listen is %.80q, which other machines can reach, and anybody there could read messages; use 127.0.0.1, or put a proxy in front that logs people in, and name its header with --authorize-header", s.listen)
	}
	b, err := c.broker()
	if err != nil {
		return err
	}
	defer b.close()
	if b.api == nil && len(s.queues) == 0 {
		return usage("queues can't be listed without the HTTP API: %s; or name them with --queue", b.noAPI)
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
		Title: b.shown, Writable: s.write, DiscardDir: s.discardTo, Queues: s.queues, Authorize: c.authorizer(s),
		Logger: slog.New(slog.NewTextHandler(c.stderr.w, nil)),
	})
	if err != nil {
		return err
	}
	l, err := c.listen("--listen", at)
	if err != nil {
		return errors.Join(err, page.Shutdown(context.Background()))
	}
	reads := "It is read-only"
	if s.write {
		reads = "It may replay and edit"
		if s.discardTo != "" {
			reads = "It may replay, edit and discard"
		}
	}
	if err := c.stdout.lines(fmt.Sprintf("The dead letters of %s are at http://%s/ . %s. ^C ends it.\n", clean(b.shown), reached(l), reads)); err != nil {
		return errors.Join(err, l.Close(), page.Shutdown(context.Background()))
	}
	return c.deskUntilEnd(page, l)
}

// authorizer is who may use the page.
func (c *command) authorizer(s desking) func(*http.Request, web.Access) (string, error) {
	if s.header == "" {
		who := c.who()
		return func(r *http.Request, a web.Access) (string, error) {
			local, err := web.Loopback(r, a)
			if err == nil && who != "" {
				local = who
			}
			return local, err
		}
	}
	name := textproto.CanonicalMIMEHeaderKey(s.header)
	return func(r *http.Request, _ web.Access) (string, error) {
		values := r.Header[name]
		// Of two, the proxy has written one, and somebody else the other.
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("the request has %d headers %s, and one is needed, which the proxy writes", len(values), name)
		}
		return values[0], nil
	}
}

// deskUntilEnd returns nil when a signal comes. It returns when all is given back.
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
		err = coded(Unknown, fmt.Errorf("the page is served no longer: %w", err))
	}
	ctx, cancel := context.WithTimeout(context.Background(), endPatience)
	defer cancel()
	if given := page.Shutdown(ctx); given != nil {
		err = errors.Join(err, coded(Unknown, errors.New("held messages weren't given back in time; the broker puts them back when the connection ends")))
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
