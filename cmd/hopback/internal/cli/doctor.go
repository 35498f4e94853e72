package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
)

const doctorHelp = `Find what loses messages, blocks them, sends them in circles, or lets them pile up on
any RabbitMQ, regardless of the clients that use it. It needs no topology file, and nothing on the
broker has to use hopback.

BROKER is the URL of the management plugin's HTTP API. FILE is a definitions file, which
rabbitmqctl export_definitions writes; - is stdin. Without an argument, doctor examines
the broker of --url or $HOPBACK_URL. To keep the password out of the process list, set
$HOPBACK_MANAGEMENT_URL.

doctor only reads: it sends GET requests, a dozen, and one for every 500 queues and every
500 exchanges. The user needs the tag "monitoring", and "policymaker" for policies; with
"management" alone it sees less. doctor says what it couldn't see.

Findings are errors if messages are lost or stuck, or will be; warnings if that happens
once something else fails as well; and notes if nothing is lost by it.

-o sarif is for code scanning, such as GitHub's: each finding has its line in FILE. The
GitHub Action hopback/hopback/.github/actions/doctor does that.

Exit codes:
  0    no errors (--fail-on changes that)
  1    errors
  2    unknown: the broker can't be read, or there are no errors but some rules of
       severity error couldn't be checked on a live broker
  64   the command line or the file is wrong; nothing was sent
  130  interrupted`

// doctorFlags are the flags of the command.
type doctorFlags struct {
	waive                 []string
	html, explain, failOn string
	rules                 bool

	file []byte // the definitions that were examined
}

func (c *command) doctor() *cobra.Command {
	var d doctorFlags
	cmd := &cobra.Command{
		Use:   "doctor [BROKER | FILE]",
		Short: "Audit any RabbitMQ, regardless of its clients",
		Long:  doctorHelp,
		Example: `  hopback doctor http://guest:guest@localhost:15672
  hopback doctor definitions.json --html report.html
  hopback doctor definitions.json -o sarif > doctor.sarif
  hopback doctor -o json --fail-on warning
  hopback doctor --explain dead-letter-route`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usage("%s takes one broker or file, not %d", cmd.CommandPath(), len(args))
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"json"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch err := d.check(); {
			case err != nil:
				return err
			case c.format == formatSARIF && (d.rules || d.explain != ""):
				return usage("-o sarif is a format of reports; use json or yaml for rules")
			case d.rules:
				return c.printDoctorRules()
			case d.explain != "":
				return c.explainRule(d.explain)
			}
			r, live, err := c.diagnose(cmd, args, &d)
			if err != nil {
				return err
			}
			if c.format == formatSARIF {
				return c.printDoctor(r, live, d, func() error { return c.printSARIF(r, live, d) })
			}
			return c.printDoctor(r, live, d, func() error {
				return c.stdout.lines(inCommand.Replace(r.String()), doctorMarks...)
			})
		},
	}
	c.connectionFlags(cmd.Flags())
	f := cmd.Flags()
	f.StringVar(&c.vhost, "vhost", "", "`name` of the only virtual host to examine (default all)")
	f.StringArrayVar(&d.waive, "waive", nil, "disable a `rule`, or a rule for one resource; may be repeated")
	f.StringVar(&d.html, "html", "", "also write the report to a `file` as one self-contained page")
	f.StringVar(&d.explain, "explain", "", "only explain a `rule`: what happens, how to reproduce it, and how to fix it")
	f.StringVar(&d.failOn, "fail-on", "error", "exit with 1 from this `severity` on: error, warning, or note")
	f.BoolVar(&d.rules, "rules", false, "only print the rules")
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	c.outputFlag(cmd, "the report or rules", formatSARIF)
	ids := func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return doctorRuleIDs(), cobra.ShellCompDirectiveNoFileComp
	}
	_ = cmd.RegisterFlagCompletionFunc("vhost", c.vhostNames())
	_ = cmd.RegisterFlagCompletionFunc("fail-on", cobra.FixedCompletions([]string{"error", "warning", "note"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("waive", ids)
	_ = cmd.RegisterFlagCompletionFunc("explain", ids)
	return cmd
}

func doctorRuleIDs() []string {
	var ids []string
	for _, r := range doctor.Rules() {
		ids = append(ids, r.ID)
	}
	return ids
}

// check refuses unknown rules and severities.
func (d doctorFlags) check() error {
	if !slices.Contains([]string{"error", "warning", "note"}, d.failOn) {
		return usage("--fail-on: %.80q isn't a severity; write error, warning, or note", d.failOn)
	}
	ids := doctorRuleIDs()
	named := slices.Clone(d.waive)
	if d.explain != "" {
		named = append(named, d.explain)
	}
	for _, w := range named {
		id, _, _ := strings.Cut(w, " ")
		if slices.Contains(ids, id) {
			continue
		}
		if best := argument.Nearest(id, ids); best != "" {
			return usage("there is no rule %.80q; did you mean %q?", id, best)
		}
		return usage("there is no rule %.80q; \"hopback doctor --rules\" lists the rules", id)
	}
	return nil
}

// diagnose examines a broker or a file. live reports that it was a broker.
func (c *command) diagnose(cmd *cobra.Command, args []string, d *doctorFlags) (r doctor.Report, live bool, err error) {
	ctx, cancel, err := c.within(cmd)
	if err != nil {
		return r, false, err
	}
	defer cancel()
	opts := doctor.Options{VHost: c.vhost, Waive: d.waive}
	if len(args) == 1 && !strings.Contains(args[0], "://") {
		r, err = c.diagnoseFile(ctx, args[0], opts, d)
		return r, false, timedOut(ctx, err)
	}
	api, err := c.doctorAPI(args)
	if err != nil {
		return r, true, err
	}
	p := c.progress("reading " + api.String())
	r, err = doctor.From(ctx, api, opts)
	p.end()
	if err != nil && c.interrupted() {
		err = context.Cause(c.ctx)
	}
	return r, true, timedOut(ctx, err)
}

func (c *command) diagnoseFile(ctx context.Context, name string, opts doctor.Options, d *doctorFlags) (doctor.Report, error) {
	// A host isn't a file, and neither is a URL without its scheme, which can contain a password.
	if _, err := os.Stat(name); name != "-" && errors.Is(err, fs.ErrNotExist) && (strings.Contains(name, "@") || !strings.ContainsAny(name, `/\`) && !strings.HasSuffix(name, ".json")) {
		return doctor.Report{}, usage("the argument is neither a file nor a URL; write the URL as http://user:password@host:15672")
	}
	text, shown, err := c.read(name)
	if err != nil {
		return doctor.Report{}, err
	}
	d.file = text
	r, err := doctor.FromDefinitions(ctx, bytes.NewReader(text), opts)
	r.Source = shown
	if err != nil && ctx.Err() == nil {
		return r, coded(Usage, fmt.Errorf("%s: %w", shown, err))
	}
	return r, err
}

// doctorAPI is the HTTP API of an argument, or that of the broker of the flags and the
// environment.
func (c *command) doctorAPI(args []string) (*httpapi.Reader, error) {
	if len(args) == 1 && strings.HasPrefix(args[0], "amqp") {
		c.url, args = args[0], nil
	}
	if len(args) == 0 {
		b, err := c.brokerFor(c.vhost)
		switch {
		case err != nil:
			return nil, err
		case b.api == nil:
			return nil, usage("doctor needs the HTTP API or a definitions file: %s", b.noAPI)
		}
		return b.api, nil
	}
	conf, err := c.login.tls()
	if err != nil {
		return nil, err
	}
	return httpapi.New(args[0], cmp.Or(c.vhost, "/"), httpapi.Config{TLS: conf, Token: c.apiToken(), MaxBody: maxInput})
}

var doctorMarks = []mark{{"error", red}, {"warning", yellow}, {"not seen", yellow}, {"recognized", green}}

// printSARIF prints a report of a file, or of a broker, whose findings have no place in a file.
func (c *command) printSARIF(r doctor.Report, live bool, d doctorFlags) error {
	name := r.Source
	if live || name == stdinName {
		name = ""
	}
	return c.printDocument(sarif(r, name, d.file))
}

// printDoctor prints a report, and returns its exit code.
func (c *command) printDoctor(r doctor.Report, live bool, d doctorFlags, text func() error) error {
	if d.html != "" {
		if err := os.WriteFile(d.html, r.HTML(), 0o600); err != nil {
			return usage("--html: %s can't be written: %w", d.html, reasonOf(err))
		}
	}
	var err error
	if c.structured() {
		err = c.printStructured(r)
	} else {
		err = text()
	}
	if err != nil {
		return err
	}
	for _, severity := range []string{"error", "warning", "note"} {
		if r.Count(severity) > 0 {
			return exit(No)
		}
		if severity == d.failOn {
			break
		}
	}
	if live && missedErrors(r) {
		return exit(Unknown)
	}
	return nil
}

// missedErrors reports whether a rule that finds errors wasn't run everywhere.
func missedErrors(r doctor.Report) bool {
	return slices.ContainsFunc(r.Unseen, func(u doctor.Unseen) bool {
		return slices.ContainsFunc(u.Rules, func(id string) bool { return doctorRule(id).Examined == "error" })
	})
}

func doctorRule(id string) audit.Rule {
	rules := doctor.Rules()
	return rules[slices.IndexFunc(rules, func(r audit.Rule) bool { return r.ID == id })]
}

func (c *command) printDoctorRules() error {
	if c.structured() {
		return c.printStructured(doctor.Rules())
	}
	for _, r := range doctor.Rules() {
		if _, err := fmt.Fprintf(c.stdout.w, "%-26s %-7s  %s\n", r.ID, r.Examined, r.Summary); err != nil {
			return err
		}
	}
	return nil
}

func (c *command) explainRule(id string) error {
	r := doctorRule(id)
	if c.structured() {
		return c.printStructured(r)
	}
	_, err := fmt.Fprintf(c.stdout.w, "%s (%s): %s\n\nWhat happens:\n  %s\n\nHow to reproduce it:\n  %s\n\nFix: %s.\n", r.ID, r.Examined, r.Summary, r.Happens, r.Reproduce, r.Remedy)
	if err == nil && r.Fix != "" {
		_, err = fmt.Fprintf(c.stdout.w, "  %s\n", strings.ReplaceAll(r.Fix, "\n", "\n  "))
	}
	if err == nil {
		_, err = fmt.Fprintf(c.stdout.w, "\n%s\n", r.Docs)
	}
	return err
}
