package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
)

const topologyHelp = `Plan, apply, check, convert, and draw topologies: work queues with their retry
topology, and other queues, exchanges, and bindings.

FILE is a small YAML file, or RabbitMQ's definitions in JSON; - is stdin.
The smallest YAML file:

  work-queues:
    orders:

A larger one:

  retry:
    strategy: auto               # republish, dead-letter, native or auto
    delays: [10s, 1m, 10m]
    max-retries: 5
    names: {prefix: team-a.}
  work-queues:
    orders: {delivery-limit: 5}
  queues:
    audit: {type: stream, max-age: 168h}
  exchanges:
    shop: {type: topic, alternate-exchange: team-a.parking_exchange}
  bindings:
    - {source: shop, queue: orders, key: order.*}

"hopback topology schema" prints its JSON schema, with every key. For an editor with
a YAML language server, name the schema in the file's first line:
  # yaml-language-server: $schema=./topology.schema.json

Only the HTTP API of the management plugin shows exchanges, policies, and other teams'
queues. Without it, hopback checks less, and says what it couldn't check.

Exit codes:
  0    done; the topology is correct
  1    no: verify has findings, a plan has differences that can't be changed in
       place, or a resource in use wasn't deleted
  2    unknown: the broker can't be reached or refuses the user, the timeout
       expired, or the HTTP API is missing
  64   the command line or the file is wrong; nothing was sent
  130  interrupted`

func (c *command) topology() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topology",
		Short: "Plan, apply, check, convert, and draw topologies",
		Long:  topologyHelp,
		Example: `  export HOPBACK_URL=amqp://guest:guest@localhost:5672/
  hopback topology plan topology.yaml
  hopback topology apply topology.yaml
  hopback topology verify topology.yaml`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	f.StringVar(&c.vhost, "vhost", "", "`name` of the virtual host in definitions (default that of --url, or the only one)")
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	_ = cmd.RegisterFlagCompletionFunc("vhost", c.vhostNames())
	cmd.AddCommand(c.plan(), c.apply(), c.verify(), c.export(), c.importCommand(), c.graph(), c.migrate(), c.delete(), c.schema())
	return cmd
}

// files checks the number of files.
func files(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return usage("%s needs a file: %s topology.yaml", cmd.CommandPath(), cmd.CommandPath())
		case len(args) > most:
			return usage("%s takes %s, not %d; use one topology at a time", cmd.CommandPath(), count(most, "file"), len(args))
		}
		return nil
	}
}

// completeFiles completes names of files that can be topologies.
func completeFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return []string{"yaml", "yml", "json"}, cobra.ShellCompDirectiveFilterFileExt
}

// within is cmd's context with its time limit. Each group of commands has a --timeout, with a
// default.
func (c *command) within(cmd *cobra.Command) (context.Context, context.CancelFunc, error) {
	limit, err := cmd.Flags().GetDuration("timeout")
	switch {
	case err != nil:
		return nil, nil, err
	case limit < 0:
		return nil, nil, usage("--timeout is negative; use a duration, or 0 for no limit")
	case limit == 0:
		ctx, cancel := context.WithCancel(cmd.Context())
		return ctx, cancel, nil
	}
	ctx, cancel := context.WithTimeoutCause(cmd.Context(), limit, &timeoutError{limit})
	return ctx, cancel, nil
}

// work runs do with a broker and, if a file is named, its topology.
func (c *command) work(cmd *cobra.Command, args []string, do func(ctx context.Context, b *broker, in input) error) error {
	b, err := c.broker()
	if err != nil {
		return err
	}
	defer b.close()
	var in input
	if len(args) > 0 {
		if in, err = c.load(args[0], b.vhost); err != nil {
			return err
		}
		if err := in.topology.Validate(); err != nil {
			return coded(Usage, fmt.Errorf("%s: %w", in.name, err))
		}
	}
	ctx, cancel, err := c.within(cmd)
	if err != nil {
		return err
	}
	defer cancel()
	return do(ctx, b, in)
}

func (c *command) plan() *cobra.Command {
	var exitCode bool
	cmd := &cobra.Command{
		Use:   "plan FILE",
		Short: "Show what apply would do",
		Long: `Show what apply would do. "+" marks what apply would create, "!" what exists with
different settings, which apply refuses, and "?" what isn't known.

The exit code is 0 if apply would succeed, and 1 if it would refuse. With --exit-code
it is 0 if nothing would change, 1 if something is missing or different, and 2 if that
isn't known.`,
		Example: `  hopback topology plan topology.yaml
  hopback topology plan --exit-code --json definitions.json`,
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, args, func(ctx context.Context, b *broker, in input) error {
				d, err := c.compare(ctx, b, in)
				if err != nil {
					return err
				}
				if err := c.printDiff(d); err != nil {
					return err
				}
				switch {
				case d.Conflicts(), exitCode && d.Count("create") > 0:
					return exit(No)
				case exitCode && !d.Nothing():
					return exit(Unknown)
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 1 if apply would change anything or refuse, and with 2 if that isn't known")
	c.outputFlag(cmd, "the plan")
	return cmd
}

// compare reads the live topology and compares.
func (c *command) compare(ctx context.Context, b *broker, in input) (audit.Diff, error) {
	p := c.progress("reading " + b.shown)
	defer p.end()
	s, err := b.snapshot(ctx, in.topology)
	if err != nil {
		return audit.Diff{}, err
	}
	return audit.Compare(s, in.topology), nil
}

// inCommand replaces Go's API by commands.
var inCommand = strings.NewReplacer(
	"declare it with retry.Topology, or disable this check with Policy.Waive if a RabbitMQ policy sets one",
	"declare it with hopback topology apply, or, if it exists already, set the RabbitMQ policy that hopback retry policies prints; --waive dead-letter disables this check",
	"as package operate/migrate does", "as hopback topology migrate does",
	"declare it with retry.CentralTopology, or leave it out of CentralConfig.Queues", "declare it with hopback topology apply, or leave it out of central.queues",
	"apply retry.CentralTopology of this policy, and call retry.TakeOver or run hopback retry take-over", "run hopback topology apply and hopback retry take-over",
	"retry.CentralTopology", "hopback topology apply", "apply retry.Topology of this policy", "run hopback topology apply", "retry.Topology", "hopback topology apply",
	"Policy.Waive", "--waive")

func (c *command) printDiff(d audit.Diff) error {
	if c.structured() {
		return c.printStructured(d)
	}
	return c.stdout.lines(inCommand.Replace(d.String()), diffMarks...)
}

func (c *command) apply() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "apply FILE",
		Short: "Declare the topology",
		Long: `Declare the topology: exchanges, then queues, then bindings. apply never deletes or
changes a resource. If one exists with different settings, apply declares nothing and
prints the plan. You can run apply again, and concurrently.`,
		Example: `  hopback topology apply topology.yaml
  HOPBACK_URL=amqps://ci:password@rabbit.example.com/shop hopback topology apply --json topology.yaml`,
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, args, func(ctx context.Context, b *broker, in input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				d, err := c.unrefused(ctx, b, in)
				if err != nil {
					return err
				}
				report, err := c.applyNow(ctx, b, in)
				if err != nil && len(report.Steps) == 0 {
					return err
				}
				if err == nil {
					c.persist(ctx, b, in, report)
				}
				return errors.Join(c.printReport(withExisting(report, d), err), err)
			})
		},
	}
	c.outputFlag(cmd, "what was done")
	return cmd
}

// unrefused compares first, so that nothing is done in part: if the broker would refuse the
// topology, it prints the plan and returns an error.
func (c *command) unrefused(ctx context.Context, b *broker, in input) (audit.Diff, error) {
	p := c.progress("reading " + b.shown)
	s, err := b.readBoth(ctx, in.topology)
	p.end()
	if err != nil {
		return audit.Diff{}, err
	}
	d := audit.Compare(s, in.topology)
	if d.Conflicts() {
		if err := c.printDiff(d); err != nil {
			return d, err
		}
		c.say(errors.New("nothing was done: the resources marked with ! exist with different settings, or can't exist; the plan above lists the remedies"))
		return d, exit(No)
	}
	return d, nil
}

// withExisting reports which exchanges and bindings existed before. The broker doesn't report that.
func withExisting(r declare.Report, before audit.Diff) declare.Report {
	was := map[declare.Resource]string{}
	for _, change := range before.Changes {
		was[change.Resource] = change.Kind
	}
	for i, step := range r.Steps {
		switch {
		case step.Result != "declared":
		case was[step.Resource] == "keep":
			r.Steps[i].Result = "existed"
		case was[step.Resource] == "create":
			r.Steps[i].Result = "created"
		}
	}
	return r
}

func (c *command) applyNow(ctx context.Context, b *broker, in input) (declare.Report, error) {
	all := len(in.topology.Exchanges) + len(in.topology.Queues) + len(in.topology.Bindings)
	p := c.progress("applying")
	defer p.end()
	r := &counting{Management: b.conn.Management()}
	stop := p.follow(func() {
		p.set("applying %s to %s: %s answered", count(all, "resource"), b.shown, count(uint64(r.replies.Load()), "request"))
	})
	defer stop()
	report, err := declare.Apply(ctx, r, in.topology)
	return report, timedOut(ctx, err)
}

// writtenDown is more than a broker needs to persist new queues by itself.
const writtenDown = 4 * time.Second

// persist makes new quorum queues survive a crash of the broker. See declare.Persist.
func (c *command) persist(ctx context.Context, b *broker, in input, report declare.Report) {
	quorum := map[string]bool{}
	for _, q := range check.FromTopology(in.topology).Queues {
		quorum[q.Name] = q.Type == "quorum"
	}
	i := slices.IndexFunc(report.Steps, func(s declare.Step) bool {
		return s.Result == "created" && s.Resource.Kind == "queue" && quorum[s.Resource.Name]
	})
	if i < 0 {
		return
	}
	p := c.progress("waiting until the broker has persisted the new queues")
	defer p.end()
	// The user probably may configure names like this one.
	if declare.Persist(ctx, b.conn.Management(), report.Steps[i].Resource.Name+".") == nil {
		return
	}
	timer := time.NewTimer(writtenDown)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// printReport prints what was done. Errors in failed go to stderr only.
func (c *command) printReport(r declare.Report, failed error) error {
	if c.structured() {
		return c.printStructured(r)
	}
	for i, step := range r.Steps {
		if step.Err != nil && errors.Is(failed, step.Err) {
			r.Steps[i].Err = nil
		}
	}
	if err := c.stdout.lines(r.String(), reportMarks...); err != nil {
		return err
	}
	var parts []string
	for _, result := range []string{"not tried", "created", "existed", "declared", "deleted", "refused", "unknown"} {
		if n := r.Count(result); n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, result))
		}
	}
	_, err := fmt.Fprintf(c.stdout.w, "%s.\n", strings.Join(parts, ", "))
	return err
}

func (c *command) verify() *cobra.Command {
	var waive []string
	var offline, rules bool
	cmd := &cobra.Command{
		Use:   "verify [FILE]",
		Short: "Check that the live topology can't lose messages",
		Long: `Check that the live topology can't lose messages or hold them forever, and that
everything in FILE exists as declared. With FILE, verify checks only the resources in
it, and lists delay queues that an earlier version of FILE may have left. Without FILE,
it checks the whole virtual host, and needs the HTTP API.

The exit code is 0 if all rules were checked without findings, 1 with findings, and 2
without findings if some rules couldn't be checked. --waive disables a rule, or a rule
for one resource, as verify prints it.

--offline checks FILE itself, without a broker, by the rules that need none.`,
		Example: `  hopback topology verify topology.yaml
  hopback topology verify --waive not-replicated --waive 'dead-letter queue "audit"'
  hopback topology verify --offline definitions.json
  hopback topology verify --rules`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch err := checkWaived(waive); {
			case err != nil:
				return err
			case rules:
				return c.printRules()
			case offline:
				return c.verifyOffline(args, waive)
			}
			return c.work(cmd, args, func(ctx context.Context, b *broker, in input) error {
				p := c.progress("reading " + b.shown)
				s, err := b.snapshot(ctx, in.topology)
				p.end()
				if err != nil {
					return err
				}
				v := check.VerifyOwn(s, in.topology, waive...)
				return c.printVerification(v, len(v.Skipped) > 0)
			})
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&waive, "waive", nil, "disable a `rule`, or a rule for one resource; may be repeated")
	f.BoolVar(&offline, "offline", false, "check FILE itself, without a broker")
	f.BoolVar(&rules, "rules", false, "only print the rules")
	_ = cmd.RegisterFlagCompletionFunc("waive", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return ruleIDs(), cobra.ShellCompDirectiveNoFileComp
	})
	c.outputFlag(cmd, "findings or rules")
	return cmd
}

func ruleIDs() []string {
	var ids []string
	for _, r := range audit.Rules() {
		ids = append(ids, r.ID)
	}
	return ids
}

// checkWaived refuses unknown rules.
func checkWaived(waive []string) error {
	ids := ruleIDs()
	for _, w := range waive {
		id, _, _ := strings.Cut(w, " ")
		if slices.Contains(ids, id) {
			continue
		}
		if best := argument.Nearest(id, ids); best != "" {
			return usage("--waive: there is no rule %.80q; did you mean %q?", id, best)
		}
		return usage("--waive: there is no rule %.80q; \"hopback topology verify --rules\" lists the rules", id)
	}
	return nil
}

func (c *command) printRules() error {
	if c.structured() {
		return c.printStructured(audit.Rules())
	}
	for _, r := range audit.Rules() {
		if _, err := fmt.Fprintf(c.stdout.w, "%-26s %-7s  %s\n", r.ID, r.Severity, r.Summary); err != nil {
			return err
		}
	}
	return nil
}

func (c *command) verifyOffline(args, waive []string) error {
	if len(args) == 0 {
		return usage("verify --offline needs a file; name a topology file or definitions")
	}
	text, name, err := c.read(args[0])
	if err != nil {
		return err
	}
	var s check.Snapshot
	if isDefinitions(text) {
		// The document itself, with its policies, even if it isn't a valid topology.
		in, err := definitions(name, text, c.vhost, "")
		if err != nil {
			return err
		}
		s = in.defs.Snapshot(in.vhost)
	} else {
		f, err := topologyfile.Parse(name, text)
		if err != nil {
			return err
		}
		s = check.FromTopology(f.Topology)
	}
	return c.printVerification(check.Verify(s, declare.Topology{}, waive...), false)
}

func (c *command) printVerification(v check.Verification, unknown bool) error {
	var err error
	if c.structured() {
		err = c.printStructured(v)
	} else {
		err = c.stdout.lines(inCommand.Replace(v.String()), findingMarks...)
	}
	switch {
	case err != nil:
		return err
	case len(v.Findings) > 0:
		return exit(No)
	case unknown:
		return exit(Unknown)
	}
	return nil
}
