package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/retry"
)

const retryHelp = `Add delayed retries to workers in any language. The workers only reject messages. One
or several processes of "hopback retry run" count the attempts, and send each message
to a delay queue or to the dead-letter queue. The policy is in a topology file with the
section central:

  retry:
    delays: [10s, 1m, 10m]
    rules:
      - {reason: fatal, do: dead-letter}
  central:
  work-queues:
    orders:

"hopback topology apply" declares it first.

Exit codes:
  0    done; ^C or SIGTERM stopped run, which finished its messages
  1    no: the topology would lose messages, or a queue is missing
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line or the file is wrong; nothing was sent
  130  interrupted before it started`

func (c *command) retry() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "retry",
		Short: "Add delayed retries to workers in any language",
		Long:  retryHelp,
		Example: `  hopback topology apply topology.yaml
  hopback retry run topology.yaml`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command, or of the start of run; 0 means none")
	cmd.AddCommand(c.retryRun(),
		c.retryTurn("take-over", "Route rejected messages of live work queues to the failed queue",
			`Route the messages that live work queues dead-letter to the failed queue, instead of
to their dead-letter queues. Apply the file first, and start "hopback retry run"
afterwards. Workers continue. A message that is dead-lettered at this moment may end up
in both queues.`, retry.TakeOver),
		c.retryTurn("hand-back", "Undo take-over: route rejected messages to the dead-letter queues again",
			`Route the messages that live work queues dead-letter to their dead-letter queues
again. Keep "hopback retry run" running until the failed queue is empty. Workers
continue.`, retry.HandBack),
		c.retryPolicies())
	cmd.AddCommand(c.waitingCommands()...)
	return cmd
}

// centralFile reads a topology file with a section central.
func (c *command) centralFile(name string) (topologyfile.File, error) {
	text, name, err := c.read(name)
	if err != nil {
		return topologyfile.File{}, err
	}
	if isDefinitions(text) {
		return topologyfile.File{}, usage("%s has RabbitMQ definitions, which have no retry policy; name a topology file", name)
	}
	f, err := topologyfile.Parse(name, text)
	if err == nil && f.Central == nil {
		err = usage("%s has no section central; add the line \"central:\"", name)
	}
	return f, err
}

func (c *command) retryRun() *cobra.Command {
	var waive []string
	var prefetch int
	var grace time.Duration
	cmd := &cobra.Command{
		Use:   "run FILE",
		Short: "Retry messages from the failed queue, until ^C or SIGTERM",
		Long: `Retry messages from the failed queue, until ^C or SIGTERM. The process has no state:
any number can run at once, and a process that is killed loses nothing.

It first checks the topology, as a worker with retry.With does. --waive disables a
check: its findings are only logged. With the HTTP API, the checks include policies.`,
		Example: `  hopback retry run topology.yaml
  hopback retry run --waive at-most-once --prefetch 2000 topology.yaml`,
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := c.centralFile(args[0])
			if err != nil {
				return err
			}
			policy := f.Policy
			for _, w := range waive {
				policy.Waive = append(policy.Waive, retry.Guard(w))
			}
			if err := policy.Validate(); err != nil {
				return usage("--waive: %w", err)
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				b.level = slog.LevelInfo
				if err := b.connect(ctx); err != nil {
					return err
				}
				return c.central(ctx, b, policy, *f.Central, client.ConsumerConfig{Prefetch: prefetch, Grace: grace, NoIsolation: true})
			})
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&waive, "waive", nil, "disable a `check`, and only log its findings; may be repeated")
	flags.IntVar(&prefetch, "prefetch", 1000, "hold at most this many messages")
	durationVar(flags, &grace, "grace", 0, "time limit to finish messages after a signal (default 30s)")
	_ = cmd.RegisterFlagCompletionFunc("waive", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var all []string
		for _, g := range retry.AllGuards() {
			all = append(all, string(g))
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

// central consumes until a signal. ctx limits the start.
func (c *command) central(ctx context.Context, b *broker, policy retry.Policy, cfg retry.CentralConfig, consumer client.ConsumerConfig) error {
	if b.api != nil {
		cfg.HTTP = b.api
	}
	queue := cfg.FailedQueueOf(policy)
	log := b.logger()
	h := &starting{Handler: retry.Central(policy, cfg), within: ctx, onStart: func() {
		log.Info("hopback: retrying", "failed_queue", queue, "work_queues", strings.Join(cfg.Queues, ", "))
	}}
	err := b.conn.Consume(c.ctx, queue, h, consumer)
	switch {
	case err != nil:
		if errors.Is(err, client.ErrNotFound) {
			err = errors.Join(err, coded(No, errors.New("declare the topology of the file: hopback topology apply FILE")))
		}
		return timedOut(ctx, err)
	case h.begun:
		log.Info("hopback: drained", "failed_queue", queue)
		return nil
	}
	return c.ctx.Err()
}

// starting limits the time of the checks, and calls onStart once they have passed.
type starting struct {
	client.Handler
	within  context.Context
	onStart func()
	begun   bool
}

func (s *starting) Prepare(ctx context.Context, start client.Start) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !s.begun {
		defer context.AfterFunc(s.within, func() { cancel(context.Cause(s.within)) })()
	}
	err := client.Prepare(ctx, s.Handler, start)
	if err == nil && !s.begun {
		s.begun = true
		s.onStart()
	}
	return err
}

func (c *command) retryTurn(name, short, long string, turn func(context.Context, declare.Requester, retry.Policy, retry.CentralConfig) error) *cobra.Command {
	cmd := &cobra.Command{
		Use: name + " FILE", Short: short, Long: long,
		Example:           "  hopback retry " + name + " topology.yaml",
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := c.centralFile(args[0])
			if err != nil {
				return err
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				if err := turn(ctx, b.conn.Management(), f.Policy, *f.Central); err != nil {
					return timedOut(ctx, err)
				}
				if c.structured() {
					return c.printStructured(map[string][]string{"work_queues": f.Central.Queues})
				}
				_, err := fmt.Fprintf(c.stdout.w, "%s: %s.\n", count(len(f.Central.Queues), "work queue"), strings.Join(f.Central.Queues, ", "))
				return err
			})
		},
	}
	c.outputFlag(cmd, "the work queues")
	return cmd
}

func (c *command) retryPolicies() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policies FILE",
		Short: "Print RabbitMQ policies that route existing queues to the failed queue",
		Long: `Print the RabbitMQ policies that make existing queues dead-letter to the failed queue,
as rabbitmqctl commands or, with --json, for definitions. A policy doesn't override the
dead-letter exchange that a queue was declared with. A queue can have only one policy:
if it has one already, merge the two. The command doesn't connect to the broker.`,
		Example: `  hopback retry policies topology.yaml
  hopback retry policies --json --vhost shop topology.yaml`,
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(_ *cobra.Command, args []string) error {
			f, err := c.centralFile(args[0])
			if err != nil {
				return err
			}
			if f.Central.CounterExchange != "" {
				return usage("%s has a counter-exchange, so its queues already dead-letter correctly; they need no policies", args[0])
			}
			existing := *f.Central
			existing.Queues = slices.DeleteFunc(slices.Clone(existing.Queues), func(name string) bool {
				return slices.ContainsFunc(f.Work, func(q declare.QuorumQueue) bool { return q.Name == name })
			})
			if len(existing.Queues) == 0 {
				return usage("%s names no existing queues; list them under central.queues. work-queues need no policy", args[0])
			}
			policies, err := retry.CentralPolicies(f.Policy, existing)
			if err != nil {
				return err
			}
			vhost := c.vhost
			if vhost == "" {
				vhost = "/"
			}
			for i := range policies {
				policies[i].VHost = vhost
			}
			if c.structured() {
				return c.printStructured(map[string]any{"policies": inDefinitions(policies)})
			}
			for _, p := range policies {
				definition, err := json.Marshal(p.Definition)
				if err != nil {
					return err
				}
				quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
				_, err = fmt.Fprintf(c.stdout.w, "rabbitmqctl set_policy --vhost %s --apply-to %s --priority %d %s %s %s\n",
					quote(p.VHost), p.ApplyTo, p.Priority, quote(p.Name), quote(p.Pattern), quote(string(definition)))
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&c.vhost, "vhost", "", "`name` of the policies' virtual host (default /)")
	_ = cmd.RegisterFlagCompletionFunc("vhost", c.vhostNames())
	c.outputFlag(cmd, "the policies")
	return cmd
}

// inDefinitions is policies as definitions have them.
func inDefinitions(policies []declare.Policy) []map[string]any {
	list := make([]map[string]any, len(policies))
	for i, p := range policies {
		list[i] = map[string]any{"vhost": p.VHost, "name": p.Name, "pattern": p.Pattern, "apply-to": p.ApplyTo, "priority": p.Priority, "definition": p.Definition}
	}
	return list
}

// refusedByGuards reports whether the checks of the topology failed.
func refusedByGuards(err error) bool {
	_, ok := errors.AsType[*retry.GuardError](err)
	return ok || errors.Is(err, client.ErrNotFound)
}
