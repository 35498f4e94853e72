package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const (
	// completionPatience is the default of IO.CompletionPatience.
	completionPatience = 2 * time.Second
	// completionReads is up to how many messages a queue is read for completion. The command holds
	// them for that moment.
	completionReads = 1000
)

// silent is above every level, so that a log stays empty.
const silent = slog.Level(100)

// candidates maps what the shell can complete to descriptions.
type candidates map[string]string

// completes is a completion from the broker, or known if the broker doesn't answer in time: a shell has
// no place for errors.
func (c *command) completes(known candidates, find func(ctx context.Context, b *broker, args []string) (candidates, error)) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		patience := cmp.Or(c.io.CompletionPatience, completionPatience)
		ctx, cancel := context.WithTimeout(c.ctx, patience)
		defer cancel()
		found := maps.Clone(known)
		if b, err := c.broker(); err == nil && b.api != nil {
			b.level, b.patience = silent, patience/4
			defer b.close()
			if more, err := find(ctx, b, args); err == nil {
				found = more
				maps.Copy(found, known)
			}
		}
		var all []string
		for _, name := range slices.Sorted(maps.Keys(found)) {
			// A shell reads a line for each candidate, with a tab before its description.
			if !strings.HasPrefix(name, begun) || slices.Contains(args, name) || name == "" || clean(name) != name {
				continue
			}
			if description := clean(found[name]); description != "" {
				name += "\t" + description
			}
			all = append(all, name)
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	}
}

// firstOnly completes the first argument alone.
func firstOnly(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(cmd, args, begun)
	}
}

// get requests a list from the HTTP API.
func (b *broker) get(ctx context.Context, path string, list any) error {
	text, err := b.api.Get(ctx, path)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, list)
}

// listedQueue is a queue in the HTTP API's list.
type listedQueue struct {
	Name  string `json:"name"`
	Ready uint64 `json:"messages_ready"`
}

func (b *broker) listQueues(ctx context.Context) (all []listedQueue, err error) {
	err = b.get(ctx, "/queues/"+address.Escape(b.vhost)+"?columns=name,messages_ready", &all)
	return all, err
}

func (c *command) queueNames() cobra.CompletionFunc {
	return c.completes(nil, func(ctx context.Context, b *broker, _ []string) (candidates, error) {
		all, err := b.listQueues(ctx)
		names := candidates{}
		for _, q := range all {
			names[q.Name] = count(q.Ready, "message")
		}
		return names, err
	})
}

// named completes the names of what the HTTP API lists at a path.
func (c *command) named(path func(b *broker) string) cobra.CompletionFunc {
	return c.completes(nil, func(ctx context.Context, b *broker, _ []string) (candidates, error) {
		var all []struct {
			Name string `json:"name"`
		}
		err := b.get(ctx, path(b), &all)
		names := candidates{}
		for _, one := range all {
			names[one.Name] = ""
		}
		return names, err
	})
}

func (c *command) exchangeNames() cobra.CompletionFunc {
	return c.named(func(b *broker) string { return "/exchanges/" + address.Escape(b.vhost) + "?columns=name" })
}

func (c *command) vhostNames() cobra.CompletionFunc {
	return c.named(func(*broker) string { return "/vhosts?columns=name" })
}

// partitionGroups completes the names of groups of package partition, from the names of their queues.
func (c *command) partitionGroups() cobra.CompletionFunc {
	return c.completes(nil, func(ctx context.Context, b *broker, _ []string) (candidates, error) {
		all, err := b.listQueues(ctx)
		counts := map[string]int{}
		for _, q := range all {
			if m := partitionName.FindStringSubmatch(q.Name); m != nil {
				counts[m[1][:strings.LastIndexByte(m[1], '.')]]++
			}
		}
		names := candidates{}
		for name, n := range counts {
			names[name] = count(n, "partition")
		}
		return names, err
	})
}

// messagesOf completes from the messages of the queue that the first argument names, if it has few and
// reading them has no side effects. add collects the candidates.
func (c *command) messagesOf(known candidates, add func(found candidates, m desk.Summary)) cobra.CompletionFunc {
	return c.completes(known, func(ctx context.Context, b *broker, args []string) (candidates, error) {
		found := candidates{}
		if len(args) == 0 {
			return found, nil
		}
		all, err := b.listQueues(ctx)
		i := slices.IndexFunc(all, func(q listedQueue) bool { return q.Name == args[0] })
		if err != nil || i < 0 || all[i].Ready > completionReads {
			return found, err
		}
		if err := b.connect(ctx); err != nil {
			return nil, err
		}
		d, err := desk.New(b.conn, desk.Config{Names: retry.Names{Prefix: c.dlqFlags.prefix}, Logger: b.logger(), HTTP: b.api})
		if err != nil {
			return nil, err
		}
		l, err := d.List(ctx, desk.ListConfig{Queue: args[0], Limit: completionReads})
		for _, m := range l.Messages {
			add(found, m)
		}
		return found, err
	})
}

// reasons are those that hopback and the broker write. A worker can write others.
var reasons = []client.Reason{
	retry.ReasonExhausted, retry.ReasonPermanent, retry.ReasonRejected, retry.ReasonDeliveryLimit, retry.ReasonExpired, retry.ReasonMaxLength, retry.ReasonNoDelayQueue,
	retry.ReasonUnroutable, retry.ReasonUnknownQueue, client.ReasonUndecodable, client.ReasonTooLarge, client.ReasonPanicked, client.ReasonUnforwardable, client.ReasonUnparkable,
}

// completeSelection completes the flags that select messages.
func (c *command) completeSelection(cmd *cobra.Command) {
	_ = cmd.RegisterFlagCompletionFunc("from", c.queueNames())
	_ = cmd.RegisterFlagCompletionFunc("group", c.messagesOf(nil, func(found candidates, m desk.Summary) {
		found[m.Group] = strings.TrimSpace(fmt.Sprintf("%s %s", m.Reason, errorText(m.ErrorType, m.Error)))
	}))
	_ = cmd.RegisterFlagCompletionFunc("id", c.messageIDs())
	known := candidates{}
	for _, r := range reasons {
		known[string(r)] = ""
	}
	_ = cmd.RegisterFlagCompletionFunc("reason", c.messagesOf(known, func(found candidates, m desk.Summary) { found[string(m.Reason)] = "" }))
}

func (c *command) completeAccept(cmd *cobra.Command) {
	var names []string
	for _, w := range warnings {
		names = append(names, string(w))
	}
	_ = cmd.RegisterFlagCompletionFunc("accept", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
}

func (c *command) messageIDs() cobra.CompletionFunc {
	return c.messagesOf(nil, func(found candidates, m desk.Summary) {
		found[m.ID] = strings.TrimSpace(fmt.Sprintf("%s %s", m.MessageID, errorText(m.ErrorType, m.Error)))
	})
}

// queueThenID completes a queue, and then the ID of a message in it.
func (c *command) queueThenID() cobra.CompletionFunc {
	queues, ids := c.queueNames(), c.messageIDs()
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return queues(cmd, args, begun)
		case 1:
			return ids(cmd, args, begun)
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

// withoutFiles makes every command that completes nothing by itself complete no names of files: most
// arguments aren't files.
func withoutFiles(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil && !cmd.HasSubCommands() {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	own := func(f *pflag.Flag) {
		if _, ok := cmd.GetFlagCompletionFunc(f.Name); ok || f.Value.Type() == "bool" {
			return
		}
		if name, _ := pflag.UnquoteUsage(f); name != "file" && name != "folder" {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.NoFileCompletions)
		}
	}
	cmd.Flags().VisitAll(own)
	cmd.PersistentFlags().VisitAll(own)
	for _, sub := range cmd.Commands() {
		withoutFiles(sub)
	}
}
