package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/topologyfile"
)

// from is the snapshot of a file, or of the live virtual host where none is named.
func (c *command) from(cmd *cobra.Command, args []string) (declare.Snapshot, error) {
	if len(args) > 0 {
		in, err := c.load(args[0], "")
		switch {
		case err != nil && in.defs == nil:
			return declare.Snapshot{}, err
		case in.defs != nil && in.name != "":
			// The document as it is, also where a topology can't say so.
			return in.defs.Snapshot(in.vhost), nil
		}
		return in.topology.Snapshot(), err
	}
	b, err := c.broker()
	if err != nil {
		return declare.Snapshot{}, err
	}
	if b.api == nil {
		return declare.Snapshot{}, usage("without a file the HTTP API is needed to tell what there is; %s", b.noAPI)
	}
	ctx, cancel, err := c.within(cmd)
	if err != nil {
		return declare.Snapshot{}, err
	}
	defer cancel()
	p := c.progress("reading " + b.shown)
	defer p.end()
	s, err := declare.Read(ctx, declare.Sources{HTTP: b.api}, declare.Topology{})
	return s, timedOut(ctx, err)
}

func (c *command) export() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export [FILE]",
		Short: "Print RabbitMQ definitions, for those who alone may declare",
		Long: `Print the topology as RabbitMQ definitions, which POST /api/definitions, rabbitmqctl
import_definitions and load_definitions take unchanged. The virtual host is that of
--vhost, "/" by default, and must be there. Without FILE it is what is live, with
its policies, by the HTTP API. Users are never in it.`,
		Example: `  hopback topology export --vhost shop topology.yaml > definitions.json
  curl -u admin -H 'Content-Type: application/json' -d @definitions.json http://localhost:15672/api/definitions`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := c.exported(cmd, args)
			if err != nil {
				return err
			}
			_, err = c.stdout.w.Write(d.Encode())
			return err
		},
	}
	return cmd
}

func (c *command) exported(cmd *cobra.Command, args []string) (declare.Definitions, error) {
	if len(args) == 0 {
		s, err := c.from(cmd, nil)
		if err == nil && c.vhost != "" {
			s.VHost = c.vhost
		}
		return s.Definitions(), err
	}
	in, err := c.load(args[0], "")
	if err != nil {
		return declare.Definitions{}, err
	}
	if in.defs != nil {
		return *in.defs, nil // in the one form, with whatever else is in it
	}
	vhost := c.vhost
	if vhost == "" {
		vhost = "/"
	}
	return declare.Export(vhost, in.topology)
}

func (c *command) importCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import [DEFINITIONS]",
		Short: "Print a topology file of RabbitMQ definitions",
		Long: `Print the topology file that says what RabbitMQ definitions say, for keeping a
topology as code from now on. Without DEFINITIONS it is what is live, by the HTTP
API. Every queue, exchange and binding is in it by itself. Policies, users and the
like have no place in it; stderr says what was left out.

To make a broker have definitions, apply them: hopback topology apply definitions.json`,
		Example: `  hopback topology import definitions.json > topology.yaml
  hopback topology import --url amqp://ops:password@rabbit.example.com/shop > topology.yaml`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, vhost, err := c.toImport(cmd, args)
			if err != nil {
				return err
			}
			t, err := d.Topology(vhost)
			if err != nil {
				return coded(Usage, err)
			}
			text, err := topologyfile.Encode(t)
			if err != nil {
				return coded(Usage, err)
			}
			if left := leftOut(d, vhost); left != "" {
				c.say(errors.New("left out: " + left))
			}
			_, err = c.stdout.w.Write(text)
			return err
		},
	}
	return cmd
}

func (c *command) toImport(cmd *cobra.Command, args []string) (declare.Definitions, string, error) {
	if len(args) == 0 {
		s, err := c.from(cmd, nil)
		return s.Definitions(), s.VHost, err
	}
	text, name, err := c.read(args[0])
	if err != nil {
		return declare.Definitions{}, "", err
	}
	if !isDefinitions(text) {
		return declare.Definitions{}, "", usage("%s: isn't definitions in JSON; a topology file needs no import: plan, apply and verify take it as it is", name)
	}
	in, err := definitions(name, text, c.vhost, "")
	if err != nil {
		return declare.Definitions{}, "", err
	}
	return *in.defs, in.vhost, nil
}

// leftOut says what of definitions a topology file has no place for.
func leftOut(d declare.Definitions, vhost string) string {
	var parts []string
	for _, p := range d.Snapshot(vhost).Policies {
		parts = append(parts, fmt.Sprintf("policy %.80q", p.Name))
	}
	for _, b := range d.Bindings {
		if b.Source == "" && (b.VHost == vhost || b.VHost == "") {
			parts = append(parts, fmt.Sprintf("binding of the default exchange to %.80q, which every queue has", b.Destination))
		}
	}
	for _, other := range []string{"users", "permissions", "topic_permissions", "parameters", "global_parameters"} {
		if raw := strings.TrimSpace(string(d.Other[other])); raw != "" && raw != "[]" {
			parts = append(parts, other)
		}
	}
	return strings.Join(parts, ", ")
}

func (c *command) graph() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "graph [FILE]",
		Short: "Draw a topology, as Mermaid or for Graphviz",
		Long: `Draw a topology. Mermaid is what GitHub and many other places show as a picture;
dot is for Graphviz. Without FILE it is the live virtual host, by the HTTP API.`,
		Example: `  hopback topology graph topology.yaml
  hopback topology graph --format dot | dot -Tsvg > topology.svg`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			draw, ok := map[string]func(declare.Snapshot) string{"mermaid": declare.Mermaid, "dot": declare.DOT}[format]
			if !ok {
				return usage("--format is %.80q; it can be mermaid or dot", format)
			}
			s, err := c.from(cmd, args)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(c.stdout.w, draw(s))
			return err
		},
	}
	cmd.Flags().StringVar(&format, "format", "mermaid", "mermaid or dot")
	_ = cmd.RegisterFlagCompletionFunc("format", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{"mermaid", "dot"}, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

func (c *command) schema() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON schema of topology files",
		Example: "  hopback topology schema > topology.schema.json",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage("schema takes no file")
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			_, err := c.stdout.w.Write(topologyfile.Schema())
			return err
		},
	}
}

// follow calls do twice a second, until stop.
func (p *progress) follow(do func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		every(ctx, progressStep, do)
	}()
	return func() {
		cancel()
		<-done
	}
}
