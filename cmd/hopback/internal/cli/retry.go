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
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/topologyfile"
)

const retryHelp = `Retry what workers reject, whatever they are written in. The workers need to do no
more than reject; one process, or several side by side, counts, waits, and brings
back or gives up, by the policy of a topology file with the section central:

  retry:
    delays: [10s, 1m, 10m]
    rules:
      - {reason: fatal, do: dead-letter}
  central:
  work-queues:
    orders:

"hopback topology apply" declares it. "hopback retry run" is the process.

Exit codes:
  0    done; run was ended by ^C or SIGTERM, and has drained
  1    no: the guards found topology that would lose messages, or a queue is missing
  2    unknown: the broker can't be reached or refuses the user, or the time is over
  64   the command line or the file is wrong; nothing was sent
  130  interrupted before it began`

func (c *command) retry() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "retry",
		Short: "Retry what workers of any kind reject",
		Long:  retryHelp,
		Example: `  hopback topology apply topology.yaml
  hopback retry run topology.yaml`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	f.Duration("timeout", time.Minute, "how long the command, or the start of run, may take; 0 means no limit")
	cmd.AddCommand(c.retryRun(),
		c.retryTurn("take-over", "Lead what live work queues dead-letter to the failed queue",
			`Lead what live work queues dead-letter to the failed queue, in place of their
dead-letter queues. Apply the file first, and start run afterwards. Workers go on.
A message that dies at this very moment may be in both queues.`, retry.TakeOver),
		c.retryTurn("hand-back", "Lead it to the dead-letter queues again",
			`Lead what live work queues dead-letter to their dead-letter queues again. Let run
go on until the failed queue is empty. Workers go on.`, retry.HandBack),
		c.retryPolicies())
	return cmd
}

// centralFile reads a topology file with a section central.
func (c *command) centralFile(name string) (topologyfile.File, error) {
	text, name, err := c.read(name)
	if err != nil {
		return topologyfile.File{}, err
	}
	if isDefinitions(text) {
		return topologyfile.File{}, usage("%s has definitions, which hold no policy; name a topology file", name)
	}
	f, err := topologyfile.Parse(name, text)
	if err == nil && f.Central == nil {
		err = usage("%s has no section central; add the line central: to it", name)
	}
	return f, err
}

func (c *command) retryRun() *cobra.Command {
	var waive []string
	var prefetch int
	var grace time.Duration
	cmd := &cobra.Command{
		Use:   "run FILE",
		Short: "Retry what arrives in the failed queue, until ^C or SIGTERM",
		Long: `Retry what arrives in the failed queue, until ^C or SIGTERM. It keeps no state, so
any number may run side by side, and one that is killed loses nothing.

Before it begins it checks the topology, as a worker with retry.With does. --waive
lets a guard only log what it finds. If the HTTP API answers, policies count, too.`,
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
				return c.central(ctx, b, policy, *f.Central, client.ConsumerConfig{Prefetch: prefetch, Grace: grace, NoQuarantine: true})
			})
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&waive, "waive", nil, "`guard` that only logs what it finds; may be repeated")
	flags.IntVar(&prefetch, "prefetch", 1000, "how many messages it holds at most")
	flags.DurationVar(&grace, "grace", 0, "how long it may drain (default 30s)")
	_ = cmd.RegisterFlagCompletionFunc("waive", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var all []string
		for _, g := range retry.AllGuards() {
			all = append(all, string(g))
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

// central consumes until the process is signalled. ctx bounds the start.
func (c *command) central(ctx context.Context, b *broker, policy retry.Policy, cfg retry.CentralConfig, consumer client.ConsumerConfig) error {
	if b.api != nil {
		cfg.HTTP = b.api
	}
	queue := cfg.FailedQueueOf(policy)
	started := make(chan struct{})
	h := &starting{Handler: retry.Central(policy, cfg), started: started, within: ctx}
	log := b.logger()
	go func() {
		select {
		case <-started:
			log.Info("hopback: retrying", "failed_queue", queue, "work_queues", strings.Join(cfg.Queues, ", "))
		case <-c.ctx.Done():
		}
	}()
	err := b.conn.Consume(c.ctx, queue, h, consumer)
	switch {
	case err != nil:
		return timedOut(ctx, err)
	case h.begun:
		log.Info("hopback: drained", "failed_queue", queue)
		return nil
	}
	return c.ctx.Err()
}

// starting bounds the guards' time, and tells when they are done.
type starting struct {
	client.Handler
	within  context.Context
	started chan struct{}
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
		close(s.started)
	}
	return err
}

func (c *command) retryTurn(name, short, long string, turn func(context.Context, declare.Requester, retry.Policy, retry.CentralConfig) error) *cobra.Command {
	return &cobra.Command{
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
				_, err := fmt.Fprintf(c.stdout.w, "%d work queues: %s.\n", len(f.Central.Queues), strings.Join(f.Central.Queues, ", "))
				return err
			})
		},
	}
}

func (c *command) retryPolicies() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policies FILE",
		Short: "Print the RabbitMQ policies by which existing queues dead-letter to the failed queue",
		Long: `Print the RabbitMQ policies by which existing queues dead-letter to the failed queue,
as rabbitmqctl commands or, with --json, for definitions. A policy doesn't change a
dead-letter exchange that a queue was declared with. A queue has one policy: if it has
one already, merge the two. The broker isn't asked.`,
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
				return usage("%s has a counter-exchange: its queues dead-letter as they should already", args[0])
			}
			existing := *f.Central
			existing.Queues = slices.DeleteFunc(slices.Clone(existing.Queues), func(name string) bool {
				return slices.ContainsFunc(f.Work, func(q declare.QuorumQueue) bool { return q.Name == name })
			})
			if len(existing.Queues) == 0 {
				return usage("%s names no existing queues under central.queues; work-queues need no policy", args[0])
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
			if c.json {
				return c.printJSON(map[string]any{"policies": inDefinitions(policies)})
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
	cmd.Flags().StringVar(&c.vhost, "vhost", "", "virtual host of the policies (default /)")
	c.jsonFlag(cmd, "the policies")
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

// refusedByGuards reports whether guards refused to begin.
func refusedByGuards(err error) bool {
	_, ok := errors.AsType[*retry.GuardError](err)
	return ok || errors.Is(err, client.ErrNotFound)
}
