package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// headerPatience is how long a client of the HTTP API may take to send its header.
const headerPatience = 10 * time.Second

const serveHelp = `Run a RabbitMQ in memory, for tests and development. It serves AMQP 1.0 to any client,
and RabbitMQ's HTTP API. It stores nothing: when it stops, all queues and messages are
gone. Never run it in production.

User and password are guest. Only this machine can reach it, unless --allow-remote is
set. With port 0, the system chooses a port.

--topology is a topology file, or RabbitMQ's definitions in JSON; - is stdin. hopback
applies it before clients can connect.

Exit codes:
  0    stopped by ^C or SIGTERM
  1    the broker refused the topology
  2    it can't listen: the port is in use, or needs more rights
  64   the command line or the file is wrong; nothing was served
  130  interrupted before clients could connect`

// serving has the flags of broker.
type serving struct {
	amqp, http, version, topology string
	remote                        bool
}

func (c *command) serve() *cobra.Command {
	var s serving
	cmd := &cobra.Command{
		Use:   "broker",
		Short: "Run a RabbitMQ in memory, for tests and development",
		Long:  serveHelp,
		Example: `  hopback broker
  hopback broker --topology topology.yaml --rabbitmq-version 4.0.5
  hopback broker --amqp 127.0.0.1:0 --http none`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage("%s takes no argument, not %.80q; name a file with --topology", cmd.CommandPath(), args[0])
			}
			return nil
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(*cobra.Command, []string) error { return c.serveNow(s) },
	}
	f := cmd.Flags()
	f.StringVar(&s.amqp, "amqp", "127.0.0.1:5672", "`address` to serve AMQP at")
	f.StringVar(&s.http, "http", "127.0.0.1:15672", "`address` to serve the HTTP API at, or none")
	f.StringVar(&s.version, "rabbitmq-version", "4.3.6", "the `version` to behave as: 4.3.6 or 4.0.5")
	f.StringVar(&s.topology, "topology", "", "`file` of a topology to apply first")
	f.StringVar(&c.vhost, "vhost", "", "`name` of a virtual host to create, for the topology and the URL (default that of definitions, or /)")
	f.BoolVar(&s.remote, "allow-remote", false, "allow addresses that other machines can reach: anybody can log in as guest")
	c.outputFlag(cmd, "the URLs")
	_ = cmd.RegisterFlagCompletionFunc("topology", func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return completeFiles(cmd, args, "")
	})
	_ = cmd.RegisterFlagCompletionFunc("rabbitmq-version", cobra.FixedCompletions([]string{"4.3.6", "4.0.5"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// serveNow checks the flags before it listens, and applies the topology before it serves
// clients.
func (c *command) serveNow(s serving) error {
	if s.version != "4.3.6" && s.version != "4.0.5" {
		return usage("--rabbitmq-version is %.80q; it can be 4.3.6 or 4.0.5", s.version)
	}
	amqpAt, err := c.listenAddress("--amqp", s.amqp, s.remote)
	if err != nil {
		return err
	}
	var httpAt string
	if s.http != noManagement {
		if httpAt, err = c.listenAddress("--http", s.http, s.remote); err != nil {
			return err
		}
	}
	var in input
	if s.topology != "" {
		if in, err = c.load(s.topology, ""); err != nil {
			return err
		}
		if err := in.topology.Validate(); err != nil {
			return coded(Usage, fmt.Errorf("%s: %w", in.name, err))
		}
	}
	vhost := c.vhost
	if vhost == "" {
		vhost = in.vhost
	}
	if vhost == "" {
		vhost = "/"
	}

	broker, err := hopbacktest.New(hopbacktest.Config{Version: s.version, MaxEvents: -1})
	if err != nil {
		return err
	}
	defer broker.Close()
	if vhost != "/" {
		broker.AddVHost(vhost)
	}
	applied, err := c.applyTo(broker, vhost, in)
	if err != nil {
		return err
	}
	amqpListener, err := c.listen("--amqp", amqpAt)
	if err != nil {
		return err
	}
	defer func() { _ = amqpListener.Close() }()
	var httpListener net.Listener
	if httpAt != "" {
		if httpListener, err = c.listen("--http", httpAt); err != nil {
			return err
		}
		defer func() { _ = httpListener.Close() }()
	}
	if c.interrupted() {
		return c.ctx.Err()
	}

	path, raw := "/", ""
	if vhost != "/" {
		path, raw = "/"+vhost, "/"+url.PathEscape(vhost)
	}
	served := servedBroker{Version: broker.Version(), Applied: applied}
	served.AMQP = (&url.URL{Scheme: "amqp", User: url.UserPassword("guest", "guest"), Host: reached(amqpListener), Path: path, RawPath: raw}).String()
	if httpListener != nil {
		served.HTTP = (&url.URL{Scheme: "http", User: url.UserPassword("guest", "guest"), Host: reached(httpListener), Path: "/"}).String()
	}
	if err := c.printServed(served, s, in); err != nil {
		return err
	}
	return c.serveUntilEnd(broker, amqpListener, httpListener)
}

// servedBroker is what "hopback broker" prints.
type servedBroker struct {
	Version string `json:"version"`
	AMQP    string `json:"amqp"`
	HTTP    string `json:"http,omitempty"`
	Applied int    `json:"applied,omitempty"`
}

func (c *command) printServed(served servedBroker, s serving, in input) error {
	if c.structured() {
		return c.printStructured(served)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "A RabbitMQ %s in memory, for tests and development. It stores nothing.\n", served.Version)
	fmt.Fprintf(&b, "AMQP      %s\n", served.AMQP)
	if served.HTTP != "" {
		fmt.Fprintf(&b, "HTTP API  %s\n", served.HTTP)
	}
	if s.topology != "" {
		fmt.Fprintf(&b, "applied   %s: %s\n", clean(in.name), count(served.Applied, "resource"))
	}
	b.WriteString("^C stops it.\n")
	return c.stdout.lines(b.String())
}

// serveUntilEnd serves until a signal, after which it returns nil once everything is closed.
func (c *command) serveUntilEnd(broker *hopbacktest.Broker, amqpListener, httpListener net.Listener) error {
	serving := 1
	ended := make(chan error, 2)
	go func() { ended <- fmt.Errorf("the AMQP server stopped: %w", broker.Serve(amqpListener)) }()
	api := &http.Server{Handler: broker.HTTPHandler(), ReadHeaderTimeout: headerPatience}
	if httpListener != nil {
		serving++
		go func() { ended <- fmt.Errorf("the HTTP API stopped: %w", api.Serve(httpListener)) }()
	}
	var err error
	select {
	case <-c.ctx.Done():
	case err = <-ended:
		serving--
	}
	_ = api.Close()
	broker.Close()
	for range serving {
		<-ended
	}
	return err
}

// applyTo applies the topology over a connection in memory.
func (c *command) applyTo(broker *hopbacktest.Broker, vhost string, in input) (resources int, err error) {
	t := in.topology
	resources = len(t.Exchanges) + len(t.Queues) + len(t.Bindings)
	if resources == 0 {
		return 0, nil
	}
	u, err := url.Parse(broker.URL())
	if err != nil {
		return 0, err
	}
	if vhost != "/" {
		u.Path, u.RawPath = "/"+vhost, "/"+url.PathEscape(vhost)
	}
	conn, err := client.Connect(c.ctx, u.String(), client.Config{Dial: broker.Dial})
	if err != nil {
		return 0, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), closePatience)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := declare.Apply(c.ctx, conn.Management(), t); err != nil {
		return 0, fmt.Errorf("RabbitMQ %[2]s refused the topology of %[1]s: %[3]w", in.name, broker.Version(), err)
	}
	return resources, nil
}

// listenAddress is the address to listen on. It resolves names, so that the address that is
// checked is the one that is used.
func (c *command) listenAddress(flag, value string, remote bool) (string, error) {
	host, port, err := net.SplitHostPort(value)
	if err != nil {
		return "", usage("%s is %.80q, which isn't an address; write it as 127.0.0.1:5672", flag, value)
	}
	if _, err := net.LookupPort("tcp", port); err != nil || port == "" {
		return "", usage("%s has the port %.80q; a port is a number from 0 to 65535", flag, port)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	found, err := net.DefaultResolver.LookupIPAddr(c.ctx, host)
	if err != nil || len(found) == 0 {
		return "", usage("%s has the unknown host %.80q; write it as 127.0.0.1:%s", flag, host, port)
	}
	if !remote && slices.ContainsFunc(found, func(a net.IPAddr) bool { return !a.IP.IsLoopback() }) {
		return "", usage("%s is %.80q, which other machines can reach, so anybody could log in as guest; use 127.0.0.1, or add --allow-remote", flag, value)
	}
	best := slices.IndexFunc(found, func(a net.IPAddr) bool { return a.IP.To4() != nil })
	return net.JoinHostPort(found[max(best, 0)].String(), port), nil
}

func (c *command) listen(flag, address string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(c.ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, coded(Unknown, fmt.Errorf("%s: %s is in use; stop the program that listens there, or choose another address", flag, address))
	case err != nil && !c.interrupted():
		return nil, coded(Unknown, fmt.Errorf("%s: %w", flag, err))
	}
	return l, err
}

// reached is the address at which a client on this machine reaches l.
func reached(l net.Listener) string {
	host, port, _ := net.SplitHostPort(l.Addr().String())
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}
