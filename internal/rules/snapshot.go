package rules

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/rules/pattern"
	"github.com/hopback/hopback/internal/values"
)

// Snapshot is the content of a virtual host at one time. [Read] takes one of a live broker;
// [FromTopology] and audit.Definitions make one without a broker. [Compare], [Check], and
// the graphs depend on nothing else.
//
// A snapshot may be partial: see Unread and Refused.
type Snapshot struct {
	VHost string `json:"vhost,omitempty"`
	// Version is the broker's version, such as "4.3.6". It is empty if unknown.
	Version string `json:"version,omitempty"`
	// Nodes are the nodes of the cluster, running or not, sorted. Empty if unknown.
	Nodes     []string            `json:"nodes,omitempty"`
	Queues    []declare.QueueInfo `json:"queues"`
	Exchanges []ExchangeInfo      `json:"exchanges"`
	// Bindings lists all bindings except those of the default exchange.
	Bindings []declare.Binding `json:"bindings"`
	// Policies are those of users and of operators.
	Policies []declare.Policy `json:"policies,omitempty"`
	// Unread lists the parts that couldn't be read.
	Unread []UnreadPart `json:"unread,omitempty"`
	// Refused lists what the user has no permission to read. For a binding, the Resource's name
	// is the request's path.
	Refused []UnreadResource `json:"refused,omitempty"`

	// assumed reports that there may be exchanges besides Exchanges: see Assume.
	assumed bool
	// governed says which policies apply, as far as the broker said so.
	governed map[declare.Resource]governors
	// compiled are the policies' patterns.
	compiled map[*declare.Policy]*pattern.Pattern
	// fallback is the type of queues that don't say theirs, "" if unknown.
	fallback string
	// doubted makes policies apply that can't be decided: see inBoth.
	doubted bool
}

// UnreadResource is a queue or a binding that couldn't be read, and why.
type UnreadResource struct {
	Resource declare.Resource `json:"resource"`
	Why      string           `json:"why"`
}

func (s Snapshot) refused(t declare.Resource) string {
	for _, u := range s.Refused {
		if u.Resource == t {
			return u.Why
		}
	}
	return ""
}

// ExchangeInfo is the state of an exchange.
type ExchangeInfo struct {
	Name       string               `json:"name"`
	Type       declare.ExchangeType `json:"type"`
	Durable    bool                 `json:"durable"`
	AutoDelete bool                 `json:"auto_delete"`
	Internal   bool                 `json:"internal"`
	Arguments  map[string]any       `json:"arguments"`
}

func QueueResource(name string) declare.Resource {
	return declare.Resource{Kind: "queue", Name: name}
}

func ExchangeResource(name string) declare.Resource {
	return declare.Resource{Kind: "exchange", Name: name}
}

// The parts of a [Snapshot] that may be unread.
const (
	// PartExchanges: the exchanges. RabbitMQ ends the session that asks for one over AMQP.
	PartExchanges = "exchanges"
	// partQueues and partBindings: the queues and bindings outside the topology. AMQP shows
	// only those that the request names.
	partQueues   = "other queues"
	PartBindings = "other bindings"
	// PartPolicies: the policies, which change what a queue's arguments say.
	PartPolicies = "policies"
	// PartNodes: the cluster's nodes.
	PartNodes = "nodes"
	// PartCounts: the messages that are held for dead-lettering or delayed.
	PartCounts = "message counts"
	// PartVersion: the broker's version.
	PartVersion = "version"
)

// UnreadPart is a part that couldn't be read, and why.
type UnreadPart struct {
	// Part is "exchanges", "other queues", "other bindings", "policies", "nodes", "message
	// counts", or "version". Other queues and bindings are those outside the topology: AMQP shows
	// only those that a request names.
	Part string `json:"part"`
	Why  string `json:"why"`
}

// unread returns why a part could not be read, or "" if it was read.
func (s Snapshot) unread(p string) string {
	for _, b := range s.Unread {
		if b.Part == p {
			return b.Why
		}
	}
	return ""
}

func Hide(s *Snapshot, why string, parts ...string) {
	for _, p := range parts {
		if s.unread(p) == "" {
			s.Unread = append(s.Unread, UnreadPart{p, why})
		}
	}
}

// Assume completes a snapshot that was read over AMQP alone, which shows no exchanges and no
// policies. Use it in a worker that checks its topology without further permissions.
//
// It assumes that t's exchanges are as t declares them, that no policy applies, and that queues
// and bindings outside s don't exist. It assumes nothing about other exchanges. The broker's
// version is known if you set s.Version.
func (s Snapshot) Assume(t declare.Topology) Snapshot {
	s.Exchanges, s.Policies = FromTopology(t).Exchanges, nil
	s.Unread = slices.DeleteFunc(slices.Clone(s.Unread), func(b UnreadPart) bool {
		return b.Part == PartExchanges || b.Part == partQueues || b.Part == PartBindings || b.Part == PartPolicies || b.Part == PartVersion && s.Version != ""
	})
	s.assumed = true
	return s
}

// Sort brings everything into an order that doesn't depend on the broker.
func Sort(s *Snapshot) {
	slices.Sort(s.Nodes)
	slices.SortFunc(s.Queues, func(a, b declare.QueueInfo) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Exchanges, func(a, b ExchangeInfo) int { return cmp.Compare(a.Name, b.Name) })
	sortBindings(s.Bindings)
	slices.SortFunc(s.Policies, ComparePolicies)
	slices.SortFunc(s.Unread, func(a, b UnreadPart) int { return cmp.Compare(a.Part, b.Part) })
}

// sortBindings sorts by what makes a binding one.
func sortBindings(list []declare.Binding) {
	type keyed struct {
		key [5]string
		b   declare.Binding
	}
	all := make([]keyed, len(list))
	for i, b := range list {
		all[i] = keyed{[5]string{b.Source, b.Exchange, b.Queue, b.Key, string(values.JSON(BindingArguments(b)))}, b}
	}
	slices.SortFunc(all, func(a, b keyed) int { return slices.Compare(a.key[:], b.key[:]) })
	for i := range all {
		list[i] = all[i].b
	}
}

// NotLive is why a topology or a definitions file lacks parts.
const NotLive = "only a live broker shows it"

// FromTopology returns a snapshot of a broker that has t, the exchanges of every virtual host,
// and nothing else. It doesn't validate t: see [declare.Topology.Validate].
func FromTopology(t declare.Topology) Snapshot {
	var s Snapshot
	for _, d := range (declare.Topology{Exchanges: t.Exchanges, Queues: t.Queues}).Declarations() {
		flag := func(key string) bool { on, _ := d.Body[key].(bool); return on }
		args, _ := d.Body["arguments"].(map[string]any)
		if d.Resource.Kind == "exchange" {
			typ, _ := d.Body["type"].(string)
			s.Exchanges = append(s.Exchanges, ExchangeInfo{
				Name: d.Resource.Name, Type: declare.ExchangeType(typ), Durable: flag("durable"),
				AutoDelete: flag("auto_delete"), Internal: flag("internal"), Arguments: args,
			})
			continue
		}
		typ, ok := args["x-queue-type"].(string)
		if !ok {
			typ = queuearg.Classic
		}
		s.Queues = append(s.Queues, declare.QueueInfo{
			Name: d.Resource.Name, Type: typ, Durable: flag("durable"),
			AutoDelete: flag("auto_delete"), Exclusive: flag("exclusive"), Arguments: args,
		})
	}
	s.Bindings = slices.Clone(t.Bindings)
	AddPredeclared(&s)
	Hide(&s, NotLive, PartNodes, PartCounts, PartVersion)
	Sort(&s)
	return s
}

// AddPredeclared adds the exchanges that every new virtual host has.
func AddPredeclared(s *Snapshot) {
	have := map[string]bool{}
	for _, x := range s.Exchanges {
		have[x.Name] = true
	}
	for _, x := range []ExchangeInfo{
		{Name: "amq.direct", Type: declare.ExchangeDirect}, {Name: "amq.fanout", Type: declare.ExchangeFanout}, {Name: "amq.topic", Type: declare.ExchangeTopic},
		{Name: "amq.headers", Type: declare.ExchangeHeaders}, {Name: "amq.match", Type: declare.ExchangeHeaders},
		{Name: "amq.rabbitmq.trace", Type: declare.ExchangeTopic, Internal: true},
	} {
		if !have[x.Name] {
			x.Durable, x.Arguments = true, map[string]any{}
			s.Exchanges = append(s.Exchanges, x)
		}
	}
}

// atLeast says whether the broker's version is known and at least major.minor.
func atLeast(s Snapshot, major, minor int) (yes, known bool) {
	var a, b int
	if n, _ := fmt.Sscanf(s.Version, "%d.%d", &a, &b); n != 2 {
		return false, false
	}
	return a > major || a == major && b >= minor, true
}
