package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
)

// from is the snapshot of a file, or of the live virtual host.
func (c *command) from(cmd *cobra.Command, args []string) (check.Snapshot, error) {
	if len(args) > 0 {
		in, err := c.load(args[0], "")
		switch {
		case err != nil && in.defs == nil:
			return check.Snapshot{}, err
		case in.defs != nil && in.name != "":
			// The document itself, even if it isn't a valid topology.
			return in.defs.Snapshot(in.vhost), nil
		}
		return check.FromTopology(in.topology), err
	}
	b, err := c.broker()
	if err != nil {
		return check.Snapshot{}, err
	}
	if b.api == nil {
		return check.Snapshot{}, usage("without a file, this command needs the HTTP API to list what exists; %s. Or name a file", b.noAPI)
	}
	ctx, cancel, err := c.within(cmd)
	if err != nil {
		return check.Snapshot{}, err
	}
	defer cancel()
	p := c.progress("reading " + b.shown)
	defer p.end()
	s, err := check.Read(ctx, check.Sources{HTTP: b.api}, declare.Topology{})
	return s, timedOut(ctx, err)
}

func (c *command) export() *cobra.Command {
	var format, cluster string
	cmd := &cobra.Command{
		Use:   "export [FILE]",
		Short: "Convert a topology to RabbitMQ definitions, or to Kubernetes manifests",
		Long: `Print the topology as RabbitMQ definitions, for POST /api/definitions, rabbitmqctl
import_definitions, and load_definitions. --vhost names the virtual host, "/" by
default, which must exist. Without FILE, export reads the live topology with its
policies over the HTTP API. It never prints users.

--format kubernetes prints manifests for RabbitMQ's Messaging Topology Operator, 1.17 or
later: Exchange, Queue, Binding, Policy, and OperatorPolicy. --cluster names the
RabbitmqCluster. If the operator has no field for a part of the topology, export names it
and prints nothing. What isn't a part of it, such as users, is left out; stderr lists that.`,
		Example: `  hopback topology export --vhost shop topology.yaml > definitions.json
  hopback topology export --format kubernetes --cluster rabbitmq topology.yaml > topology.k8s.yaml
  curl -u admin -H 'Content-Type: application/json' -d @definitions.json http://localhost:15672/api/definitions`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			kubernetes := format == formatKubernetes
			switch {
			case !kubernetes && cluster != "":
				return usage("--cluster is for --format kubernetes; leave it out, or add --format kubernetes")
			case kubernetes && !clusterName.MatchString(cluster):
				return usage("--cluster is %.80q; name the RabbitmqCluster, as NAME, or NAMESPACE/NAME if it is in another namespace than the manifests", cluster)
			}
			e, err := c.exported(cmd, args)
			if err != nil {
				return err
			}
			text := e.definitions.Encode()
			if kubernetes {
				if err := exclusiveQueues(e.topology); err != nil {
					return err
				}
				namespace, name, ok := strings.Cut(cluster, "/")
				if !ok {
					namespace, name = "", cluster
				}
				var left string
				if text, left, err = kubernetesManifests(e.definitions, e.vhost, clusterReference{name, namespace}); err != nil {
					return err
				}
				if left != "" {
					c.say(errors.New("left out: " + left))
				}
			}
			_, err = c.stdout.w.Write(text)
			return err
		},
	}
	format = formatDefinitions
	cmd.Flags().Var(&choice{&format, []string{formatDefinitions, formatKubernetes}}, "format", "print this `format`: definitions or kubernetes")
	_ = cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{formatDefinitions, formatKubernetes}, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().StringVar(&cluster, "cluster", "", "`name` of the RabbitmqCluster in manifests, as NAME or NAMESPACE/NAME")
	return cmd
}

// The formats of export.
const (
	formatDefinitions = "definitions"
	formatKubernetes  = "kubernetes"
)

var clusterName = regexp.MustCompile(`^([a-z0-9][a-z0-9-]*/)?[a-z0-9][a-z0-9.-]*$`)

// export is what "topology export" converts. topology is that of a topology file.
type export struct {
	definitions audit.Definitions
	vhost       string
	topology    declare.Topology
}

func (c *command) exported(cmd *cobra.Command, args []string) (export, error) {
	if len(args) == 0 {
		s, err := c.from(cmd, nil)
		if err == nil && c.vhost != "" {
			s.VHost = c.vhost
		}
		return export{definitions: audit.DefinitionsOf(s), vhost: s.VHost}, err
	}
	in, err := c.load(args[0], "")
	if err != nil {
		return export{}, err
	}
	if in.defs != nil { // in canonical form, with all other content
		return export{definitions: *in.defs, vhost: cmp.Or(in.vhost, "/")}, nil
	}
	e := export{vhost: cmp.Or(c.vhost, "/"), topology: in.topology}
	e.definitions, err = audit.Export(e.vhost, in.topology)
	return e, err
}

func (c *command) importCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import [DEFINITIONS]",
		Short: "Convert RabbitMQ definitions to a topology file",
		Long: `Print RabbitMQ definitions as a topology file, to keep a topology as code. Without
DEFINITIONS, import reads the live topology over the HTTP API. The file lists every
queue, exchange, and binding. It has no policies and no users; stderr lists what is
left out.

To declare definitions on a broker, apply them: hopback topology apply definitions.json`,
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

func (c *command) toImport(cmd *cobra.Command, args []string) (audit.Definitions, string, error) {
	if len(args) == 0 {
		s, err := c.from(cmd, nil)
		return audit.DefinitionsOf(s), s.VHost, err
	}
	text, name, err := c.read(args[0])
	if err != nil {
		return audit.Definitions{}, "", err
	}
	if !isDefinitions(text) {
		return audit.Definitions{}, "", usage("%s isn't a definitions file in JSON; a topology file needs no import: use it with plan, apply, and verify", name)
	}
	in, err := definitions(name, text, c.vhost, "")
	if err != nil {
		return audit.Definitions{}, "", err
	}
	return *in.defs, in.vhost, nil
}

// leftOut lists what topology files can't contain.
func leftOut(d audit.Definitions, vhost string) string {
	var parts []string
	for _, p := range d.Snapshot(vhost).Policies {
		parts = append(parts, fmt.Sprintf("policy %.80q", p.Name))
	}
	var document struct {
		Bindings []struct{ Source, VHost, Destination string }
	}
	_ = json.Unmarshal(d.Encode(), &document) // Encode writes valid JSON
	for _, b := range document.Bindings {
		if b.Source == "" && (b.VHost == vhost || b.VHost == "") {
			parts = append(parts, fmt.Sprintf("binding of the default exchange to %.80q, which every queue has", b.Destination))
		}
	}
	if others := otherMembers(d); others != "" {
		parts = append(parts, others)
	}
	return strings.Join(parts, ", ")
}

// otherMembers lists the members of definitions that aren't a part of a topology.
func otherMembers(d audit.Definitions, except ...string) string {
	var parts []string
	for _, other := range []string{"users", "permissions", "topic_permissions", "parameters", "global_parameters"} {
		if raw := strings.TrimSpace(string(d.Other[other])); raw != "" && raw != "[]" && !slices.Contains(except, other) {
			parts = append(parts, other)
		}
	}
	return strings.Join(parts, ", ")
}

func (c *command) graph() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "graph [FILE]",
		Short: "Draw a topology, for Mermaid or Graphviz",
		Long: `Draw a topology. GitHub renders Mermaid; dot is for Graphviz. Without FILE, graph reads
the live virtual host over the HTTP API.`,
		Example: `  hopback topology graph topology.yaml
  hopback topology graph --format dot | dot -Tsvg > topology.svg`,
		Args:              files(0, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			draw, ok := map[string]func(check.Snapshot) string{"mermaid": audit.Mermaid, "dot": audit.DOT}[format]
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
	cmd.Flags().StringVar(&format, "format", "mermaid", "`language` of the drawing: mermaid or dot")
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
				return usage("schema takes no file; write it as hopback topology schema")
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			_, err := c.stdout.w.Write(topologyfile.Schema())
			return err
		},
	}
}

// follow calls do twice a second, until stop is called.
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
