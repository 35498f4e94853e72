// Command broker starts and ends the RabbitMQ brokers that hopback's
// integration tests and examples need. Run it with --help.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
)

const usage = `broker starts real RabbitMQ brokers, 4.3 and 4.0 at the same time, and stops them.

Usage:
  broker up [--env] [--write FILE] [VERSION...]  start what doesn't run yet
  broker down [VERSION...]                       stop brokers; without VERSION,
                                                 those of tests, too
  broker status [--quiet] [VERSION...]           list running brokers; exit code
                                                 1 if one of VERSION isn't ready
  broker env                                     print export lines for them
  broker run [VERSION...] [SERVER...] -- COMMAND [ARG...]
                                                 run a command with brokers
  broker clean                                   stop all, remove cache and images

VERSION is 4.3, 4.0, or any: the newest that can be started. Without it, up means
4.3 and 4.0, run means any, and down and status mean all. For run it can be
any-or-none: if no broker can be started, the command runs without one.

SERVER is postgres, redis, or prometheus. It is the server of
HOPBACK_POSTGRES_URL, HOPBACK_REDIS_URL, or HOPBACK_PROMETHEUS_URL. Otherwise
broker starts one from Debian's packages, and stops it after the command. The command finds its
URL in that variable. Prometheus has the alerts of hopbackotel/dashboards.
It scrapes the command's metrics at http://127.0.0.1:9464/metrics, and the
queues of the first broker.

  --env         up prints the export lines, as "broker env" does
  --write FILE  up writes them to FILE
  --quiet       status prints nothing

Examples:
  broker up                         both versions, until "broker down"
  eval "$(broker up --env 4.3)"     and HOPBACK_URL_4_3 is set in this shell
  broker run 4.0 -- go test ./...   4.0 for one command; its exit code is kept
  broker run 4.3 prometheus -- go run ./myservice
                                    with Prometheus and hopback's alerts

"run" sets HOPBACK_URL_4_3 and so on for its command, and HOPBACK_URL to the
first of its brokers.

broker tries these ways in order, or only the one that HOPBACK_BROKER_WITH names:
  env           HOPBACK_URL_4_3, HOPBACK_URL_4_0: amqp:// URLs of running
                brokers; HOPBACK_MANAGEMENT_URL_4_3, _4_0: their HTTP APIs, if not
                on port 15672
  docker        Docker and docker-compose.yml, with the official image
  chroot        Debian's packages in a chroot, as root on Linux
  docker-built  an image of the same packages, with docker-compose.yml

Exit codes: 0 done; 1 failed; 2 bad arguments. run exits as its command does.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errUsage is for invalid arguments without an *argument.Error.
var errUsage = errors.New("run broker --help for what can be said")

func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return 2
	}
	code, err := dispatch(ctx, args[0], args[1:], stdout, stderr)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, usage)
		return 0
	}
	if err == nil {
		return code
	}
	fmt.Fprintln(stderr, err)
	var bad *argument.Error
	if errors.Is(err, errUsage) || errors.As(err, &bad) {
		return 2
	}
	return 1
}

func dispatch(ctx context.Context, verb string, args []string, stdout, stderr io.Writer) (int, error) {
	flags := flag.NewFlagSet("broker "+verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	parse := func() error {
		if err := flags.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return err
			}
			return fmt.Errorf("broker %s: %w; %w", verb, err, errUsage)
		}
		return nil
	}
	switch verb {
	case "up":
		env := flags.Bool("env", false, "")
		file := flags.String("write", "", "")
		if err := parse(); err != nil {
			return 0, err
		}
		return 0, up(ctx, flags.Args(), *env, *file, stdout, stderr)
	case "down":
		if err := parse(); err != nil {
			return 0, err
		}
		return 0, rabbitmq.Down(ctx, stderr, flags.Args()...)
	case "status":
		quiet := flags.Bool("quiet", false, "")
		if err := parse(); err != nil {
			return 0, err
		}
		if *quiet {
			stdout = io.Discard
		}
		return status(ctx, flags.Args(), stdout)
	case "run":
		// By hand, lest flags of the command be taken for ours.
		if len(args) > 0 && (args[0] == "-h" || args[0] == "-help" || args[0] == "--help") {
			return 0, flag.ErrHelp
		}
		at := slices.Index(args, "--")
		if at < 0 || at == len(args)-1 {
			return 0, fmt.Errorf("broker run: no command; write it after --; %w", errUsage)
		}
		return runWith(ctx, args[:at], args[at+1:], stdout, stderr)
	case "env", "clean":
		if err := parse(); err != nil {
			return 0, err
		}
		if flags.NArg() > 0 {
			return 0, fmt.Errorf("broker %s: takes no argument, but got %q; %w", verb, flags.Arg(0), errUsage)
		}
		if verb == "clean" {
			return 0, rabbitmq.Clean(ctx, stderr)
		}
		return 0, env(ctx, stdout)
	case "help", "-h", "-help", "--help":
		return 0, flag.ErrHelp
	}
	return 0, fmt.Errorf("broker: there is no command %q; %w", verb, errUsage)
}

func up(ctx context.Context, versions []string, env bool, file string, stdout, stderr io.Writer) error {
	if len(versions) == 0 {
		versions = []string{"4.3", "4.0"}
	}
	brokers, err := rabbitmq.Up(ctx, stderr, true, versions...)
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, b := range brokers {
		lines.WriteString(exports(b.Version, b.URL, b.ManagementURL))
	}
	if env {
		if _, err := io.WriteString(stdout, lines.String()); err != nil {
			return err
		}
	}
	if file != "" {
		return os.WriteFile(file, []byte(lines.String()), 0o600)
	}
	return nil
}

// exports returns lines for a shell.
func exports(version, url, managementURL string) string {
	v := strings.ReplaceAll(version, ".", "_")
	return fmt.Sprintf("export HOPBACK_URL_%s=%s\nexport HOPBACK_MANAGEMENT_URL_%s=%s\n", v, quote(url), v, quote(managementURL))
}

// quote for a POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func status(ctx context.Context, versions []string, stdout io.Writer) (int, error) {
	list, err := rabbitmq.List(ctx)
	if err != nil {
		return 0, err
	}
	serving := map[string]bool{}
	for _, s := range list {
		if len(versions) > 0 && !slices.Contains(versions, s.Version) {
			continue
		}
		if s.Err != nil {
			fmt.Fprintf(stdout, "%s (%s): doesn't serve: %v\n", s.Name, s.How, s.Err)
			continue
		}
		until := "until nobody uses it"
		switch {
		case s.How == rabbitmq.HowEnvironment:
			until = "not ours"
		case s.Keep:
			until = "until broker down"
		}
		serving[s.Version] = true
		fmt.Fprintf(stdout, "%s (%s): %s at %s, management at %s, %s", s.Name, s.How, s.FullVersion, s.URL, s.ManagementURL, until)
		if !s.Started.IsZero() {
			fmt.Fprintf(stdout, ", for %s", time.Since(s.Started).Round(time.Second))
		}
		fmt.Fprintln(stdout)
	}
	if len(list) == 0 {
		fmt.Fprintln(stdout, "no broker runs")
	}
	for _, v := range versions {
		if !serving[v] {
			return 1, nil
		}
	}
	return 0, nil
}

func env(ctx context.Context, stdout io.Writer) error {
	list, err := rabbitmq.List(ctx)
	if err != nil {
		return err
	}
	found := false
	for _, s := range list {
		if s.Err == nil && s.Name == s.Version {
			found = true
			if _, err := io.WriteString(stdout, exports(s.Version, s.URL, s.ManagementURL)); err != nil {
				return err
			}
		}
	}
	if !found {
		return errors.New("no broker runs; start some by: broker up")
	}
	return nil
}

// withoutRefusals drops the lines that say why Docker or Debian's packages can't be used. The
// command runs anyway, so one line about that is enough.
type withoutRefusals struct{ out io.Writer }

func (w withoutRefusals) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(": not by ")) {
		return len(line), nil
	}
	return w.out.Write(line)
}

// runWith runs a command while it holds brokers, and returns its exit code.
func runWith(ctx context.Context, names, command []string, stdout, stderr io.Writer) (code int, err error) {
	var versions, servers []string
	for _, name := range names {
		if name == "postgres" || name == "redis" || name == "prometheus" {
			servers = append(servers, name)
		} else {
			versions = append(versions, name)
		}
	}
	if len(versions) == 0 {
		versions = []string{"any"}
	}
	orNone := len(versions) == 1 && versions[0] == "any-or-none"
	if orNone {
		versions = []string{"any"}
	}
	progress := stderr
	if orNone {
		progress = withoutRefusals{stderr}
	}
	brokers, err := rabbitmq.Need(ctx, progress, versions...)
	var noWay *rabbitmq.NoWayError
	switch {
	case orNone && errors.As(err, &noWay):
		fmt.Fprintln(stderr, "No RabbitMQ here: that takes Docker with compose, or root on Debian. HOPBACK_URL_4_3 can name one that runs.")
	case err != nil:
		return 0, err
	}
	defer func() {
		for _, b := range brokers {
			err = errors.Join(err, b.Release(ctx))
		}
	}()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	// Ctrl-C reaches the command too; it has a while to end by itself.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = os.Environ()
	if len(brokers) > 0 {
		cmd.Env = append(cmd.Env, "HOPBACK_URL="+brokers[0].URL, "HOPBACK_MANAGEMENT_URL="+brokers[0].ManagementURL)
	}
	for _, b := range brokers {
		v := strings.ReplaceAll(b.Version, ".", "_")
		cmd.Env = append(cmd.Env, "HOPBACK_URL_"+v+"="+b.URL, "HOPBACK_MANAGEMENT_URL_"+v+"="+b.ManagementURL)
	}
	for _, name := range servers {
		if name == "prometheus" {
			url, end, err := startPrometheus(ctx, stderr, brokers)
			if err != nil {
				return 0, err
			}
			defer func() { _ = end() }()
			cmd.Env = append(cmd.Env, "HOPBACK_PROMETHEUS_URL="+url)
			continue
		}
		get, variable := service.Postgres, "HOPBACK_POSTGRES_URL"
		if name == "redis" {
			get, variable = service.Redis, "HOPBACK_REDIS_URL"
		}
		s, err := get(ctx, stderr)
		if err != nil {
			return 0, err
		}
		defer s.Close()
		cmd.Env = append(cmd.Env, variable+"="+s.URL)
	}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	if errors.Is(err, context.Canceled) && cmd.ProcessState != nil && cmd.ProcessState.Success() {
		return 0, nil // ^C has ended it, and it calls that a success
	}
	return 0, err
}
