package cli

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/audit"
)

const operatorAPI = "rabbitmq.com/v1beta1"

// Manifests of RabbitMQ's Messaging Topology Operator, with the keys of its custom resource
// definitions.
type (
	manifest struct {
		APIVersion string           `yaml:"apiVersion"`
		Kind       string           `yaml:"kind"`
		Metadata   manifestMetadata `yaml:"metadata"`
		Spec       any              `yaml:"spec"`
	}
	manifestMetadata struct {
		Name string `yaml:"name"`
	}
	clusterReference struct {
		Name      string `yaml:"name"`
		Namespace string `yaml:"namespace,omitempty"`
	}
	queueSpec struct {
		Name           string           `yaml:"name"`
		VHost          string           `yaml:"vhost"`
		Type           string           `yaml:"type,omitempty"`
		Durable        bool             `yaml:"durable"`
		AutoDelete     bool             `yaml:"autoDelete,omitempty"`
		Arguments      map[string]any   `yaml:"arguments,omitempty"`
		DeletionPolicy string           `yaml:"deletionPolicy"`
		Cluster        clusterReference `yaml:"rabbitmqClusterReference"`
	}
	exchangeSpec struct {
		Name       string           `yaml:"name"`
		VHost      string           `yaml:"vhost"`
		Type       string           `yaml:"type"`
		Durable    bool             `yaml:"durable"`
		AutoDelete bool             `yaml:"autoDelete,omitempty"`
		Arguments  map[string]any   `yaml:"arguments,omitempty"`
		Cluster    clusterReference `yaml:"rabbitmqClusterReference"`
	}
	bindingSpec struct {
		VHost           string           `yaml:"vhost"`
		Source          string           `yaml:"source"`
		Destination     string           `yaml:"destination"`
		DestinationType string           `yaml:"destinationType"`
		RoutingKey      string           `yaml:"routingKey,omitempty"`
		Arguments       map[string]any   `yaml:"arguments,omitempty"`
		Cluster         clusterReference `yaml:"rabbitmqClusterReference"`
	}
	policySpec struct {
		Name       string           `yaml:"name"`
		VHost      string           `yaml:"vhost"`
		Pattern    string           `yaml:"pattern"`
		ApplyTo    string           `yaml:"applyTo"`
		Priority   int64            `yaml:"priority"`
		Definition map[string]any   `yaml:"definition"`
		Cluster    clusterReference `yaml:"rabbitmqClusterReference"`
	}
)

// exportedDocument is a definitions document, as audit.Definitions writes it.
type exportedDocument struct {
	Queues []struct {
		VHost, Name string
		Durable     bool
		AutoDelete  bool `json:"auto_delete"`
		Arguments   map[string]any
	}
	Exchanges []struct {
		VHost, Name, Type string
		Durable, Internal bool
		AutoDelete        bool `json:"auto_delete"`
		Arguments         map[string]any
	}
	Bindings []struct {
		VHost, Source, Destination string
		DestinationType            string `json:"destination_type"`
		RoutingKey                 string `json:"routing_key"`
		Arguments                  map[string]any
	}
	Policies []struct {
		VHost, Name string
		exportedPolicy
	}
	Parameters []struct {
		VHost, Component, Name string
		Value                  json.RawMessage
	}
}

type exportedPolicy struct {
	Pattern    string
	ApplyTo    string `json:"apply-to"`
	Priority   int64
	Definition map[string]any
}

const operatorPolicy = "operator_policy"

// manifests collects the manifests of a virtual host.
type manifests struct {
	vhost   string
	cluster clusterReference
	list    []manifest
	errs    []error
	left    []string
}

// kubernetesManifests are the manifests of what d has for a virtual host, and what they leave out. What
// is a part of the topology and can't be expressed is an error: a *argument.Error for each place.
func kubernetesManifests(d audit.Definitions, vhost string, cluster clusterReference) (text []byte, leftOut string, err error) {
	var doc exportedDocument
	decoder := json.NewDecoder(bytes.NewReader(d.Encode()))
	decoder.UseNumber()
	if err := decoder.Decode(&doc); err != nil {
		return nil, "", err
	}
	m := &manifests{vhost: vhost, cluster: cluster}
	m.exchangesAndQueues(doc)
	m.bindings(doc)
	m.policies(doc)
	if err := errors.Join(m.errs...); err != nil {
		return nil, "", err
	}
	if others := otherMembers(d, "parameters"); others != "" {
		m.left = append(m.left, others)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# For RabbitMQ's Messaging Topology Operator, 1.17 or later. The virtual host %q must exist.\n", vhost)
	b.WriteString("# If you delete the manifest of a queue, the queue and its messages stay: see deletionPolicy.\n")
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	for _, one := range m.list {
		if err := e.Encode(one); err != nil {
			return nil, "", err
		}
	}
	return b.Bytes(), strings.Join(m.left, ", "), e.Close()
}

// here reports whether a part of the document belongs to the virtual host: a document of a single
// one doesn't name it.
func (m *manifests) here(vhost string) bool { return vhost == m.vhost || vhost == "" }

func (m *manifests) add(kind string, spec any, names ...string) {
	m.list = append(m.list, manifest{operatorAPI, kind, manifestMetadata{m.name(names...)}, spec})
}

func (m *manifests) refuse(resource, what string, value any, problem, remedy string) {
	m.errs = append(m.errs, argument.New(resource+"."+what, value, problem+": RabbitMQ's Messaging Topology Operator has no field for it", remedy))
}

func (m *manifests) exchangesAndQueues(doc exportedDocument) {
	for _, x := range doc.Exchanges {
		if !m.here(x.VHost) {
			continue
		}
		resource := fmt.Sprintf("exchanges[%q]", x.Name)
		if x.Internal {
			m.refuse(resource, "internal", true, "can't be exported", "make the exchange not internal, or import definitions instead")
		}
		m.add("Exchange", exchangeSpec{x.Name, m.vhost, x.Type, x.Durable, x.AutoDelete, m.arguments(resource, x.Arguments), m.cluster}, x.Name)
	}
	for _, q := range doc.Queues {
		if !m.here(q.VHost) {
			continue
		}
		resource := fmt.Sprintf("queues[%q]", q.Name)
		args := m.arguments(resource, q.Arguments)
		kind, _ := args["x-queue-type"].(string)
		if kind != "" {
			delete(args, "x-queue-type") // the operator adds it
		}
		m.add("Queue", queueSpec{q.Name, m.vhost, kind, q.Durable, q.AutoDelete, args, "retain", m.cluster}, q.Name)
	}
}

func (m *manifests) bindings(doc exportedDocument) {
	for _, b := range doc.Bindings {
		if !m.here(b.VHost) || b.Source == "" { // every queue has a binding of the default exchange
			continue
		}
		resource := fmt.Sprintf("bindings[%q to %s %q, key %q]", b.Source, b.DestinationType, b.Destination, b.RoutingKey)
		args := m.arguments(resource, b.Arguments)
		text, _ := json.Marshal(args) // JSON again
		m.add("Binding", bindingSpec{m.vhost, b.Source, b.Destination, b.DestinationType, b.RoutingKey, args, m.cluster},
			b.Source, b.Destination, b.DestinationType, b.RoutingKey, string(text))
	}
}

func (m *manifests) policies(doc exportedDocument) {
	add := func(kind, name string, p exportedPolicy) {
		definition := m.arguments(fmt.Sprintf("policies[%q]", name), p.Definition)
		if definition == nil {
			definition = map[string]any{}
		}
		m.add(kind, policySpec{name, m.vhost, p.Pattern, p.ApplyTo, p.Priority, definition, m.cluster}, name)
	}
	for _, p := range doc.Policies {
		if m.here(p.VHost) {
			add("Policy", p.Name, p.exportedPolicy)
		}
	}
	for _, p := range doc.Parameters {
		switch {
		case !m.here(p.VHost):
		case p.Component != operatorPolicy:
			m.left = append(m.left, fmt.Sprintf("parameter %.80q of %.80q", p.Name, p.Component))
		default:
			var policy exportedPolicy
			d := json.NewDecoder(bytes.NewReader(p.Value))
			d.UseNumber()
			if err := d.Decode(&policy); err != nil {
				m.errs = append(m.errs, argument.New(fmt.Sprintf("parameters[%q].value", p.Name), nil, "isn't an operator policy", "export the definitions again"))
				continue
			}
			add("OperatorPolicy", p.Name, policy)
		}
	}
}

// largestExact is up to where JSON's numbers are exact in a float64, as which the operator reads them.
const largestExact = 1 << 53

// arguments converts arguments, and refuses numbers that would arrive as others.
func (m *manifests) arguments(resource string, args map[string]any) map[string]any {
	if len(args) == 0 {
		return nil
	}
	converted := map[string]any{}
	for name, v := range args {
		converted[name] = m.value(resource, name, v)
	}
	return converted
}

func (m *manifests) value(resource, name string, v any) any {
	switch v := v.(type) {
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = m.value(resource, name, v[i])
		}
		return list
	case map[string]any:
		return m.arguments(resource+"."+name, v)
	case json.Number:
		if n, err := v.Int64(); err == nil && n >= -largestExact && n <= largestExact {
			return n
		}
		f, err := v.Float64()
		if err != nil || f == math.Trunc(f) {
			m.errs = append(m.errs, argument.New(resource+"."+name, v.String(), "can't be exported: RabbitMQ's Messaging Topology Operator would declare another number",
				"use an integer of at most 2^53, or import definitions instead"))
		}
		return f
	}
	return v
}

var (
	notInName  = regexp.MustCompile(`[^a-z0-9.-]+`)
	objectName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	edges      = regexp.MustCompile(`(^|\.)[-.]+|[-.]+(\.|$)`)
)

// name is the name of a Kubernetes object: that of the resource if possible, or one like it with a
// hash, so that no two are the same.
func (m *manifests) name(parts ...string) string {
	const longest = 253 // of Kubernetes
	if m.vhost == "/" && len(parts) == 1 && len(parts[0]) <= longest && objectName.MatchString(parts[0]) {
		return parts[0]
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{m.vhost}, parts...), "\x00")))
	hash := hex.EncodeToString(sum[:5])
	readable := notInName.ReplaceAllString(strings.ToLower(strings.Join(parts[:min(len(parts), 2)], "-")), "-")
	readable = strings.Trim(edges.ReplaceAllString(readable, "-"), "-.")
	readable = strings.Trim(readable[:min(len(readable), 60)], "-.")
	if name := readable + "-" + hash; objectName.MatchString(name) {
		return name
	}
	return "hopback-" + hash
}

// exclusiveQueues refuses queues that only the connection that declares them can use.
func exclusiveQueues(t declare.Topology) error {
	var errs []error
	for _, d := range (declare.Topology{Queues: t.Queues}).Declarations() {
		if d.Body["exclusive"] == true {
			errs = append(errs, argument.New(fmt.Sprintf("queues[%q].exclusive", d.Resource.Name), true, "can't be exported: such a queue ends with the connection that declares it", "let the program declare the queue"))
		}
	}
	return errors.Join(errs...)
}
