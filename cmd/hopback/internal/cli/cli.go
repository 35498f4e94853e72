// Package cli is the command hopback. It runs in-process: [Run] takes everything
// from its [IO], so that tests need no process of their own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/partition"
)

// The exit codes.
const (
	// Done: it is done, or all is as it should be.
	Done = 0
	// No: the answer is no. Verify has findings, a plan has differences that Apply refuses,
	// or something is in use and isn't deleted.
	No = 1
	// Unknown: the command failed, or the answer isn't known. The broker can't be reached, or
	// refuses the login or a permission; the timeout expired; rules couldn't be checked.
	Unknown = 2
	// Usage: the command line or the file is wrong, and nothing was sent.
	Usage = 64
	// Interrupted: by a signal.
	Interrupted = 130
)

// IO connects a run with its process.
type IO struct {
	// Args without the program's name.
	Args []string
	// Env is os.Getenv.
	Env    func(string) string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// StdoutIsTerminal and StderrIsTerminal allow colors there, and a line of
	// progress that is overwritten.
	StdoutIsTerminal, StderrIsTerminal bool
	// CompletionPatience is how long the shell waits for the broker after a tab. Default: 2 s.
	CompletionPatience time.Duration
	// StdoutSize is the size of the terminal, in columns and rows; nil, or zero, if it isn't known.
	StdoutSize func() (width, height int)
}

func (io IO) size() (width, height int) {
	if io.StdoutSize == nil {
		return 0, 0
	}
	return io.StdoutSize()
}

// Process is the IO of this process.
func Process() IO {
	return IO{
		Args: os.Args[1:], Env: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		StdoutIsTerminal: term.IsTerminal(int(os.Stdout.Fd())), StderrIsTerminal: term.IsTerminal(int(os.Stderr.Fd())),
		StdoutSize: func() (width, height int) {
			width, height, err := term.GetSize(int(os.Stdout.Fd()))
			if err != nil {
				return 0, 0
			}
			return width, height
		},
	}
}

// command is one run.
type command struct {
	ctx    context.Context // ends by a signal
	io     IO
	stdout printer
	stderr printer
	// overwrites reports whether stderr is a terminal whose last line can be overwritten, and redraws
	// whether stdout is one that can be cleared.
	overwrites, redraws bool

	url, managementURL, vhost string
	login                     login
	dlqFlags                  dlqFlags
	format                    string // of --output
	wrote                     bool   // JSON or YAML, to stdout
	unknown                   error  // the command whose help was asked for doesn't exist
}

// Run runs the command, and returns the exit code. When ctx ends it stops, and reports
// what was done.
func Run(ctx context.Context, io IO) int {
	c := &command{ctx: ctx, io: io}
	dumb := io.Env("TERM") == "dumb"
	plain := dumb || io.Env("NO_COLOR") != ""
	c.overwrites, c.redraws = io.StderrIsTerminal && !dumb, io.StdoutIsTerminal && !dumb
	c.stdout = printer{w: &lockedWriter{w: io.Stdout}, colors: io.StdoutIsTerminal && !plain}
	c.stderr = printer{w: &lockedWriter{w: io.Stderr}, colors: io.StderrIsTerminal && !plain}
	root := c.root()
	root.SetArgs(append([]string{}, io.Args...)) // nil would be this process's
	root.SetIn(io.Stdin)
	root.SetOut(c.stdout.w)
	root.SetErr(c.stderr.w)
	describeCompletion(root) // its output is root's now
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = c.unknown
	}
	if err == nil {
		return Done
	}
	code := c.codeOf(err)
	if !errors.Is(err, errReported) {
		c.say(err)
		if c.structured() && !c.wrote {
			_ = c.printStructured(map[string]any{"error": plainText(err)})
		}
	}
	return code
}

// errReported marks an error that stdout reports completely.
var errReported = errors.New("reported before")

// codedError is an error with an exit code.
type codedError struct {
	code int
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }

func (e *codedError) Unwrap() error { return e.err }

func coded(code int, err error) error {
	if err == nil {
		return nil
	}
	return &codedError{code, err}
}

// exit is an exit code without a message.
func exit(code int) error {
	if code == Done {
		return nil
	}
	return coded(code, errReported)
}

func usage(format string, args ...any) error { return coded(Usage, fmt.Errorf(format, args...)) }

func (c *command) interrupted() bool { return c.ctx.Err() != nil }

func (c *command) codeOf(err error) int {
	var own *codedError
	var bad *argument.Error
	var file *topologyfile.Error
	var api *httpapi.Error
	switch {
	case errors.As(err, &own):
		return own.code
	case c.interrupted():
		return Interrupted
	case errors.As(err, &file), errors.As(err, &bad):
		return Usage
	case errors.As(err, &api):
		return Unknown // even a 404
	case errors.As(err, new(*desk.SideEffectsError)), errors.As(err, new(*desk.NoMessageError)), errors.As(err, new(*desk.LineError)):
		return No
	case refusedByGuards(err):
		return No
	case errors.Is(err, partition.ErrWrongGroup), errors.Is(err, declare.ErrConflict), errors.Is(err, declare.ErrInUse), errors.Is(err, declare.ErrNotFound), errors.Is(err, declare.ErrInvalid):
		return No
	}
	return Unknown
}

// say prints an error, a line for each of those that are joined.
func (c *command) say(err error) {
	for line := range strings.Lines(plainText(err)) {
		line = strings.TrimSuffix(line, "\n")
		_, _ = fmt.Fprintf(c.stderr.w, "%s %s\n", c.stderr.paint(red, "hopback:"), line)
	}
}

// plainText is an error without the packages' prefix, which the command writes once.
func plainText(err error) string {
	return inCommand.Replace(prefix.ReplaceAllString(err.Error(), "$1"))
}

var prefix = regexp.MustCompile(`(?m)(^|[\s(])hopback: `)

func (c *command) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "hopback",
		Short:         "Delayed retries and dead letters for RabbitMQ",
		Long:          rootHelp,
		Version:       version().String(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	group(root)
	groups(root)
	root.SetUsageFunc(usageText)
	root.SetVersionTemplate("hopback {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usage("%s%s; see %s --help", err, flagHint(cmd, err), cmd.CommandPath())
	})
	root.AddCommand(
		inGroup(groupTopology, c.topology()), inGroup(groupTopology, c.doctor()), inGroup(groupTopology, c.partition()), inGroup(groupDLQ, c.dlq()), inGroup(groupDLQ, c.desk()),
		inGroup(groupService, c.retry()), inGroup(groupService, c.schedule()), inGroup(groupService, c.queue()), inGroup(groupService, c.workers()), inGroup(groupService, c.outbox()), inGroup(groupService, c.serve()), inGroup(groupService, c.playground()),
		inGroup(groupService, c.publish()), inGroup(groupService, c.initial()), inGroup(groupOther, c.connectionTopic()), inGroup(groupOther, c.versionCommand()))
	c.refuseUnknownHelp(root)
	withoutFiles(root)
	return root
}

// group makes a command with subcommands show its help, and refuse unknown subcommands: cobra
// would show the help and succeed.
func group(cmd *cobra.Command) {
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		var names []string
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				names = append(names, sub.Name())
			}
		}
		best := argument.Nearest(args[0], names)
		for _, sub := range cmd.Commands() {
			for _, below := range sub.Commands() {
				if below.Name() == args[0] {
					best = sub.Name() + " " + args[0] // the user left out "topology"
				}
			}
		}
		if best != "" {
			return usage("%s has no command %.80q; did you mean %q?", cmd.CommandPath(), args[0], best)
		}
		return usage("%s has no command %.80q; its commands are %s", cmd.CommandPath(), args[0], strings.Join(names, ", "))
	}
}

// flagHint suggests a flag in place of one that doesn't exist.
func flagHint(cmd *cobra.Command, err error) string {
	name, ok := strings.CutPrefix(err.Error(), "unknown flag: --")
	if !ok {
		return ""
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if best := argument.Nearest(name, names); best != "" {
		return fmt.Sprintf("; did you mean --%s?", best)
	}
	return ""
}

const (
	red    = "31"
	green  = "32"
	yellow = "33"
)

// printer writes text, with colors if the terminal has them.
type printer struct {
	w      io.Writer
	colors bool
}

func (p printer) paint(color, text string) string {
	if !p.colors {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// lines prints text, each line in the color of the first mark that it starts with.
func (p printer) lines(text string, colors ...mark) error {
	var b strings.Builder
	for line := range strings.Lines(text) {
		body, ended := strings.CutSuffix(line, "\n")
		i := slices.IndexFunc(colors, func(m mark) bool { return strings.HasPrefix(body, m.begins) })
		if i >= 0 {
			body = p.paint(colors[i].color, body)
		}
		b.WriteString(body)
		if ended {
			b.WriteByte('\n')
		}
	}
	_, err := io.WriteString(p.w, b.String())
	return err
}

type mark struct{ begins, color string }

var (
	diffMarks    = []mark{{"+", green}, {"!", red}, {"-", red}, {"?", yellow}}
	findingMarks = []mark{{"error", red}, {"warning", yellow}, {"not checked", yellow}}
	reportMarks  = []mark{{"created", green}, {"refused", red}, {"unknown", red}, {"not tried", yellow}}
)

// lockedWriter serializes the writes of commands, progress, and the client's log.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
