package cli

import (
	"cmp"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const rootHelp = `Try it with a RabbitMQ in memory:
  hopback broker &
  echo 'work-queues: {orders: }' | hopback topology apply -    # with delayed retries and a DLQ
  hopback dlq survey                                           # dead letters by queue, reason, and error
  hopback dlq replay orders.dead --all                         # send them back to their queue`

const connectionHelp = `Every command that needs RabbitMQ takes the same flags. The shortest way is the
environment, which also keeps passwords out of the process list:

  export HOPBACK_URL=amqp://guest:guest@localhost:5672/

The URL is amqp://user:password@host:5672/vhost, or amqps:// with port 5671 for TLS.
Percent-encode reserved characters in it: the virtual host a/b is /a%2Fb. Without a
path, the virtual host is "/". hopback never prints passwords.

Some commands also read the HTTP API of RabbitMQ's management plugin: AMQP can't list
queues, exchanges, and policies. If the broker listens on its usual port, hopback
expects the HTTP API on port 15672 of the same host (15671 with TLS), with the same
user. Otherwise set --management-url. "none" turns the HTTP API off.

Examples:
  hopback dlq survey --url amqps://ops@rabbit.example.com/shop --token-file token
  hopback topology plan topology.yaml --ca ca.pem --cert client.pem --external`

const completionHelp = `Print a script that makes your shell complete commands, flags, and names that the broker
has, such as queues. Names need the HTTP API.

"hopback completion bash --help" explains how to load the script; "zsh", "fish", and
"powershell" have the same.`

// connectionAnnotation marks a flag that "hopback help connection" explains, in place of
// every command's help.
const connectionAnnotation = "hopback_connection"

// The groups of commands in the help of the root.
const (
	groupTopology = "topology"
	groupDLQ      = "dlq"
	groupService  = "service"
	groupOther    = "other"
)

func groups(root *cobra.Command) {
	root.AddGroup(
		&cobra.Group{ID: groupTopology, Title: "Queues, exchanges, and bindings:"},
		&cobra.Group{ID: groupDLQ, Title: "Dead letters:"},
		&cobra.Group{ID: groupService, Title: "Services:"},
		&cobra.Group{ID: groupOther, Title: "Help:"},
	)
	root.SetHelpCommand(inGroup(groupOther, helpCommand()))
	root.SetCompletionCommandGroupID(groupOther)
}

// describeCompletion replaces the description of cobra's command.
func describeCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Short, cmd.Long = "Print a script that completes commands in your shell", completionHelp
		}
	}
}

func inGroup(id string, cmd *cobra.Command) *cobra.Command {
	cmd.GroupID = id
	return cmd
}

// helpCommand refuses what there is no help on: cobra's would print the help of the root, and
// succeed.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command, or how commands connect: help connection",
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usage("there is no help for %.80q; \"hopback help\" lists all commands", strings.Join(args, " "))
			}
			target.InitDefaultHelpFlag()
			target.InitDefaultVersionFlag()
			return target.Help()
		},
	}
}

// connectionTopic is what "hopback help connection" prints. It isn't a command that runs.
func (c *command) connectionTopic() *cobra.Command {
	f := pflag.NewFlagSet("connection", pflag.ContinueOnError)
	(&command{}).connectionFlags(f)
	shown := pflag.NewFlagSet("shown", pflag.ContinueOnError)
	f.VisitAll(shown.AddFlag)
	return &cobra.Command{
		Use:   "connection",
		Short: "Explain --url, TLS, tokens, and the HTTP API",
		Long:  connectionHelp + "\n\nFlags:\n" + shown.FlagUsages(),
	}
}

// usageText is the help of a command, below its description.
func usageText(cmd *cobra.Command) error {
	var b strings.Builder
	b.WriteString("Usage:\n")
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "  %s COMMAND\n", cmd.CommandPath())
	} else {
		fmt.Fprintf(&b, "  %s\n", cmd.UseLine())
	}
	if len(cmd.Aliases) > 0 {
		fmt.Fprintf(&b, "\nAlias: %s\n", strings.Join(cmd.Aliases, ", "))
	}
	if cmd.HasExample() {
		fmt.Fprintf(&b, "\nExamples:\n%s\n", cmd.Example)
	}
	commandsText(&b, cmd)
	own, ownHidden := shownFlags(cmd.LocalFlags())
	above, aboveHidden := shownFlags(cmd.InheritedFlags())
	if own != "" {
		fmt.Fprintf(&b, "\nFlags:\n%s", own)
	}
	if above != "" {
		fmt.Fprintf(&b, "\nFlags of all %s commands:\n%s", cmd.Parent().CommandPath(), above)
	}
	if ownHidden || aboveHidden {
		fmt.Fprintf(&b, "\nThe broker is that of --url or $%s, by default %s.\n\"hopback help connection\" lists the flags for TLS, tokens, and the HTTP API.\n", urlVariable, defaultURL)
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n\"%s COMMAND --help\" explains a command.\n", cmd.CommandPath())
	}
	_, err := fmt.Fprint(cmd.OutOrStderr(), b.String())
	return err
}

// commandsText lists the commands of cmd, by group if it has groups.
func commandsText(b *strings.Builder, cmd *cobra.Command) {
	if !cmd.HasAvailableSubCommands() {
		return
	}
	width := 0
	for _, sub := range cmd.Commands() {
		width = max(width, len(sub.Name()))
	}
	list := func(title, id string) {
		fmt.Fprintf(b, "\n%s\n", title)
		for _, sub := range cmd.Commands() {
			if sub.GroupID == id && !sub.Hidden {
				fmt.Fprintf(b, "  %-*s  %s\n", width, sub.Name(), sub.Short)
			}
		}
	}
	if len(cmd.Groups()) == 0 {
		list("Commands:", "")
		return
	}
	for _, g := range cmd.Groups() {
		list(g.Title, g.ID)
	}
}

// shownFlags is the help of flags without those of the connection. hidden says whether there
// are any of those.
func shownFlags(all *pflag.FlagSet) (text string, hidden bool) {
	shown := pflag.NewFlagSet("", pflag.ContinueOnError)
	all.VisitAll(func(f *pflag.Flag) {
		if f.Annotations[connectionAnnotation] != nil {
			hidden = true
			return
		}
		shown.AddFlag(f)
	})
	return shown.FlagUsages(), hidden
}

// buildVersion is what "hopback version" prints.
type buildVersion struct {
	Version    string `json:"version"`
	Commit     string `json:"commit,omitempty"`
	CommitTime string `json:"commit_time,omitempty"`
	Modified   bool   `json:"modified,omitempty"`
	Go         string `json:"go,omitempty"`
	Platform   string `json:"platform,omitempty"`
}

// version is that of this program.
func version() buildVersion {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return buildVersion{Version: "(unknown version)"}
	}
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) buildVersion {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	v := buildVersion{Version: cmp.Or(info.Main.Version, "(devel)"), Commit: settings["vcs.revision"], CommitTime: settings["vcs.time"], Modified: settings["vcs.modified"] == "true", Go: info.GoVersion}
	if goos, arch := settings["GOOS"], settings["GOARCH"]; goos != "" && arch != "" {
		v.Platform = goos + "/" + arch
	}
	return v
}

// String returns a line with the version, the commit, and Go's version.
func (v buildVersion) String() string {
	parts := []string{v.Version}
	if v.Commit != "" {
		text := "commit " + v.Commit[:min(len(v.Commit), 12)]
		if v.CommitTime != "" {
			text += " of " + v.CommitTime
		}
		if v.Modified {
			text += ", with uncommitted changes"
		}
		parts = append(parts, text)
	}
	if v.Go != "" {
		parts = append(parts, strings.TrimSpace(v.Go+" "+v.Platform))
	}
	return strings.Join(parts, ", ")
}

// versionCommand is "hopback version", which prints what --version does.
func (c *command) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version", Args: takes(0, 0, ""),
		RunE: func(*cobra.Command, []string) error {
			if c.structured() {
				return c.printStructured(version())
			}
			_, err := fmt.Fprintf(c.stdout.w, "hopback %s\n", version())
			return err
		},
	}
	c.outputFlag(cmd, "the version")
	return cmd
}
