package cli_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/hopbacktest"
)

// The types have the keys of the custom resource definitions of RabbitMQ's Messaging Topology Operator
// (rabbitmq.com/v1beta1, in version 1.20), without those that a topology doesn't need. Another key is
// an error.
type (
	operatorCluster struct{ Name, Namespace string }
	operatorObject  struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Metadata   struct{ Name string }
		Spec       yaml.Node
	}
	operatorSpec struct {
		Name, VHost, Type, Source, Destination, Pattern string
		Durable                                         bool
		AutoDelete                                      bool   `yaml:"autoDelete"`
		DeletionPolicy                                  string `yaml:"deletionPolicy"`
		DestinationType                                 string `yaml:"destinationType"`
		RoutingKey                                      string `yaml:"routingKey"`
		ApplyTo                                         string `yaml:"applyTo"`
		Priority                                        int
		Arguments, Definition                           map[string]any
		RabbitmqClusterReference                        operatorCluster `yaml:"rabbitmqClusterReference"`
	}
)

// operatorKeys are the keys of each kind.
var operatorKeys = map[string][]string{
	"Queue":          {"name", "vhost", "type", "durable", "autoDelete", "deleteIfEmpty", "deleteIfUnused", "arguments", "deletionPolicy", "rabbitmqClusterReference"},
	"Exchange":       {"name", "vhost", "type", "durable", "autoDelete", "arguments", "rabbitmqClusterReference"},
	"Binding":        {"vhost", "source", "destination", "destinationType", "routingKey", "arguments", "rabbitmqClusterReference"},
	"Policy":         {"name", "vhost", "pattern", "applyTo", "priority", "definition", "rabbitmqClusterReference"},
	"OperatorPolicy": {"name", "vhost", "pattern", "applyTo", "priority", "definition", "rabbitmqClusterReference"},
}

// declaredByOperator is what the operator would declare, as definitions: numbers go through float64
// there.
func declaredByOperator(t *testing.T, text string) (declared map[string][]any, kinds map[string]int) {
	t.Helper()
	declared, kinds = map[string][]any{}, map[string]int{}
	names := map[string]bool{}
	objectName := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	d := yaml.NewDecoder(strings.NewReader(text))
	d.KnownFields(true)
	for {
		var o operatorObject
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return declared, kinds
		}
		require.NoError(t, err)
		assert.Equal(t, "rabbitmq.com/v1beta1", o.APIVersion)
		assert.Regexp(t, objectName, o.Metadata.Name)
		assert.LessOrEqual(t, len(o.Metadata.Name), 253)
		assert.False(t, names[o.Kind+" "+o.Metadata.Name], "%s %s is there twice", o.Kind, o.Metadata.Name)
		names[o.Kind+" "+o.Metadata.Name] = true
		for i := 0; i < len(o.Spec.Content); i += 2 {
			assert.Contains(t, operatorKeys[o.Kind], o.Spec.Content[i].Value, o.Kind)
		}
		kinds[o.Kind]++
		var s operatorSpec
		require.NoError(t, o.Spec.Decode(&s))
		assert.Equal(t, operatorCluster{"rabbitmq", "brokers"}, s.RabbitmqClusterReference)
		args := map[string]any{}
		for k, v := range s.Arguments {
			args[k] = v
		}
		if s.Type != "" && o.Kind == "Queue" {
			assert.Equal(t, "retain", s.DeletionPolicy)
			args["x-queue-type"] = s.Type
		}
		add := func(list string, v map[string]any) {
			text, err := json.Marshal(v)
			require.NoError(t, err)
			var converted any
			require.NoError(t, json.Unmarshal(text, &converted))
			declared[list] = append(declared[list], converted)
		}
		switch o.Kind {
		case "Queue":
			add("queues", map[string]any{"name": s.Name, "vhost": s.VHost, "durable": s.Durable, "auto_delete": s.AutoDelete, "arguments": args})
		case "Exchange":
			add("exchanges", map[string]any{"name": s.Name, "vhost": s.VHost, "type": s.Type, "durable": s.Durable, "auto_delete": s.AutoDelete, "internal": false, "arguments": args})
		case "Binding":
			add("bindings", map[string]any{"vhost": s.VHost, "source": s.Source, "destination": s.Destination, "destination_type": s.DestinationType, "routing_key": s.RoutingKey, "arguments": args})
		case "Policy":
			add("policies", map[string]any{"vhost": s.VHost, "name": s.Name, "pattern": s.Pattern, "apply-to": s.ApplyTo, "priority": s.Priority, "definition": s.Definition})
		case "OperatorPolicy":
			add("parameters", map[string]any{"vhost": s.VHost, "component": "operator_policy", "name": s.Name, "value": map[string]any{"pattern": s.Pattern, "apply-to": s.ApplyTo, "priority": s.Priority, "definition": s.Definition}})
		default:
			assert.Fail(t, "unknown kind", o.Kind)
		}
	}
}

// The manifests declare what the definitions do, in every virtual host and with names that Kubernetes
// doesn't allow.
func TestExportToKubernetes(t *testing.T) {
	t.Parallel()
	odd := `{
	"queues": [
		{"vhost": "/", "name": "Orders", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": -1, "x-max-length-bytes": 9007199254740992, "x-of-a-plugin": [1, 1.5, true, "no", null, {"a": 2}]}},
		{"vhost": "/", "name": "orders", "durable": false, "auto_delete": true, "arguments": {}},
		{"vhost": "/", "name": "ORDERS", "durable": true, "arguments": {"x-queue-type": "stream"}},
		{"vhost": "/", "name": "--", "durable": true, "arguments": {}},
		{"vhost": "/", "name": "größe…", "durable": true, "arguments": {}},
		{"vhost": "/", "name": "` + strings.Repeat("long.", 50) + `", "durable": true, "arguments": {}}
	],
	"exchanges": [{"vhost": "/", "name": "true", "type": "x-consistent-hash", "durable": true, "auto_delete": true, "internal": false, "arguments": {"hash-header": "on"}}],
	"bindings": [
		{"vhost": "/", "source": "true", "destination": "orders", "destination_type": "queue", "routing_key": "1", "arguments": {}},
		{"vhost": "/", "source": "true", "destination": "orders", "destination_type": "queue", "routing_key": "1", "arguments": {"x-match": "all", "n": 1}},
		{"vhost": "/", "source": "true", "destination": "orders", "destination_type": "queue", "routing_key": "2", "arguments": {}}
	],
	"policies": [{"vhost": "/", "name": "p", "pattern": "^a", "apply-to": "quorum_queues", "priority": 7, "definition": {"max-length": 5}}],
	"parameters": [{"vhost": "/", "component": "operator_policy", "name": "o", "value": {"pattern": ".*", "apply-to": "queues", "priority": 1, "definition": {"expires": 1000}}}]
}`
	topology, err := os.ReadFile(root + "/operate/topologyfile/testdata/ladder.yaml")
	require.NoError(t, err)
	for vhost, text := range map[string]string{"/": odd, "shop": string(topology)} {
		args := []string{"topology", "export", "--vhost", vhost, file(t, "topology", text)}
		definitions := world{}.run(args...)
		require.Zero(t, definitions.code, definitions.stderr)
		r := world{}.run(append(args, "--format", "kubernetes", "--cluster", "brokers/rabbitmq")...)
		require.Zero(t, r.code, r.stderr)
		assert.Empty(t, r.stderr)
		declared, kinds := declaredByOperator(t, r.stdout)
		var want map[string][]any
		require.NoError(t, json.Unmarshal([]byte(definitions.stdout), &want))
		for _, list := range []string{"queues", "exchanges", "bindings", "policies", "parameters"} {
			assert.ElementsMatch(t, want[list], declared[list], list)
		}
		assert.NotZero(t, kinds["Queue"])
	}

	small, err := os.ReadFile(root + "/operate/topologyfile/testdata/small.yaml")
	require.NoError(t, err)
	r := world{stdin: string(small)}.run("topology", "export", "--format", "kubernetes", "--cluster", "rabbitmq", "-")
	require.Zero(t, r.code, r.stderr)
	const golden = "testdata/kubernetes.yaml"
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(r.stdout), 0o600))
	}
	text, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.Equal(t, string(text), r.stdout, "run: go test ./internal/cli -run TestExportToKubernetes -update")

	// Live, with what others have declared.
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	w := world{env: map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}, stdin: string(small)}
	require.Zero(t, w.run("topology", "apply", "-").code)
	assert.Equal(t, string(text), w.run("topology", "export", "--format", "kubernetes", "--cluster", "rabbitmq").stdout)
}

// What the operator can't declare is an error that names the place, and nothing is printed.
func TestExportToKubernetesRefuses(t *testing.T) {
	t.Parallel()
	queue := func(args string) string {
		return `{"queues": [{"vhost": "/", "name": "q", "durable": true, "arguments": {` + args + `}}]}`
	}
	for text, says := range map[string][]string{
		`{"exchanges": [{"vhost": "/", "name": "x", "type": "topic", "durable": true, "internal": true}, {"vhost": "/", "name": "y", "type": "topic", "durable": true, "internal": true}]}`: {
			`exchanges["x"].internal`, `exchanges["y"].internal`, "import definitions instead"},
		"queues: {a: {type: raw, exclusive: true}}": {`queues["a"].exclusive`},
		queue(`"x-a": 9007199254740993`):            {`queues["q"].x-a`, "another number"},
		queue(`"x-a": [2.0]`):                       {`queues["q"].x-a`, "another number"},
		queue(`"x-a": {"b": 1e30}`):                 {`queues["q"].x-a.b`, "another number"},
	} {
		r := world{}.run("topology", "export", "--format", "kubernetes", "--cluster", "rabbitmq", file(t, "topology", text))
		assert.Equal(t, 64, r.code, text)
		assert.Empty(t, r.stdout)
		for _, part := range says {
			assert.Contains(t, r.stderr, part)
		}
	}
	good := file(t, "good.yaml", small)
	for args, says := range map[string]string{
		"--format kubernetes " + good:                    "--cluster is \"\"",
		"--format kubernetes --cluster Not_Good " + good: "name the RabbitmqCluster",
		"--cluster rabbitmq " + good:                     "add --format kubernetes",
		"--format helm " + good:                          "use one of definitions, kubernetes",
	} {
		r := world{}.run(append([]string{"topology", "export"}, strings.Fields(args)...)...)
		assert.Equal(t, 64, r.code, args)
		assert.Contains(t, r.stderr, says)
	}
	r := world{stdin: `{"queues": [{"vhost": "/", "name": "q", "durable": true, "arguments": {"x-queue-type": "quorum"}}], "users": [{"name": "u"}], "parameters": [{"vhost": "/", "component": "shovel", "name": "s", "value": {}}]}`}.
		run("topology", "export", "--format", "kubernetes", "--cluster", "rabbitmq", "-")
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stderr, `left out: parameter "s" of "shovel", users`)
}
