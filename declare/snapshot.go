package declare

import (
	"cmp"
	"fmt"
	"slices"
)

// Snapshot is what a virtual host has, read once: a value, over which [Compare],
// [Check] and the graphs are pure functions. [Read] takes one of a live broker;
// [Topology.Snapshot] and [Definitions.Snapshot] make one of what isn't live.
//
// It may be partial: Blind says what it doesn't tell.
type Snapshot struct {
	VHost string `json:"vhost,omitempty"`
	// Version of the broker, such as "4.3.6"; empty when unknown.
	Version string `json:"version,omitempty"`
	// Nodes of the cluster, whether they run or not, sorted; empty when unknown.
	Nodes     []string       `json:"nodes,omitempty"`
	Queues    []QueueInfo    `json:"queues"`
	Exchanges []ExchangeInfo `json:"exchanges"`
	// Bindings, but for those of the default exchange, which every queue has.
	Bindings []Binding `json:"bindings"`
	// Policies of users and operators.
	Policies []Policy `json:"policies,omitempty"`
	// Blind is what the snapshot can't tell.
	Blind []Blind `json:"blind,omitempty"`
	// Refused are the things that the user has no permission to ask for. For a
	// binding, the Thing's name is the question that was asked.
	Refused []Unseen `json:"refused,omitempty"`
}

// Unseen is a thing that couldn't be looked at, and why.
type Unseen struct {
	Thing Thing  `json:"thing"`
	Why   string `json:"why"`
}

func (s Snapshot) refused(t Thing) string {
	for _, u := range s.Refused {
		if u.Thing == t {
			return u.Why
		}
	}
	return ""
}

// ExchangeInfo is what the broker says about an exchange.
type ExchangeInfo struct {
	Name       string         `json:"name"`
	Type       ExchangeType   `json:"type"`
	Durable    bool           `json:"durable"`
	AutoDelete bool           `json:"auto_delete"`
	Internal   bool           `json:"internal"`
	Arguments  map[string]any `json:"arguments"`
}

// Part is a part of a snapshot that can be out of sight.
type Part string

// The parts.
const (
	// PartExchanges: which exchanges there are. RabbitMQ ends the session that
	// asks for one over AMQP.
	PartExchanges Part = "exchanges"
	// PartQueues and PartBindings: those beyond the topology that was asked
	// about. Over AMQP one can only ask for what one can name.
	PartQueues   Part = "other queues"
	PartBindings Part = "other bindings"
	// PartPolicies: the policies, which change what a queue's arguments say.
	PartPolicies Part = "policies"
	// PartNodes: the cluster's nodes.
	PartNodes Part = "nodes"
	// PartCounts: the messages that are held for dead-lettering or delayed.
	PartCounts Part = "message counts"
	// PartVersion: which RabbitMQ it is.
	PartVersion Part = "version"
)

// Blind says what a snapshot can't tell, and why.
type Blind struct {
	Part Part   `json:"part"`
	Why  string `json:"why"`
}

// blind returns why a part is out of sight, or "" when it isn't.
func (s Snapshot) blind(p Part) string {
	for _, b := range s.Blind {
		if b.Part == p {
			return b.Why
		}
	}
	return ""
}

func (s *Snapshot) hide(why string, parts ...Part) {
	for _, p := range parts {
		if s.blind(p) == "" {
			s.Blind = append(s.Blind, Blind{p, why})
		}
	}
}

// sort brings everything into an order that doesn't depend on the broker.
func (s *Snapshot) sort() {
	slices.Sort(s.Nodes)
	slices.SortFunc(s.Queues, func(a, b QueueInfo) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Exchanges, func(a, b ExchangeInfo) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Bindings, compareBindings)
	slices.SortFunc(s.Policies, comparePolicies)
	slices.SortFunc(s.Blind, func(a, b Blind) int { return cmp.Compare(a.Part, b.Part) })
}

func compareBindings(a, b Binding) int {
	key := func(b Binding) []string {
		args, _ := b.arguments("")
		return []string{b.Source, b.Exchange, b.Queue, b.Key, string(canonicalJSON(args))}
	}
	return slices.Compare(key(a), key(b))
}

// notLive is why a topology or a definitions file is blind.
const notLive = "this isn't read from a broker"

// Snapshot is t as if a broker had it, and nothing else but the exchanges that
// every broker has. What is wrong with t isn't told: see [Topology.Validate].
func (t Topology) Snapshot() Snapshot {
	var s Snapshot
	for _, x := range t.Exchanges {
		body, _ := x.declaration()
		typ, _ := body["type"].(string)
		args, _ := body["arguments"].(map[string]any)
		durable, _ := body["durable"].(bool)
		s.Exchanges = append(s.Exchanges, ExchangeInfo{
			Name: x.Name, Type: ExchangeType(typ), Durable: durable,
			AutoDelete: x.AutoDelete, Internal: x.Internal, Arguments: args,
		})
	}
	for _, q := range t.Queues {
		if isNil(q) {
			continue
		}
		body, _ := q.declaration()
		args, _ := body["arguments"].(map[string]any)
		typ, ok := args["x-queue-type"].(string)
		if !ok {
			typ = typeClassic
		}
		durable, _ := body["durable"].(bool)
		autoDelete, _ := body["auto_delete"].(bool)
		exclusive, _ := body["exclusive"].(bool)
		s.Queues = append(s.Queues, QueueInfo{
			Name: q.Address().QueueName(), Type: typ, Durable: durable,
			AutoDelete: autoDelete, Exclusive: exclusive, Arguments: args,
		})
	}
	s.Bindings = slices.Clone(t.Bindings)
	s.addPredeclared()
	s.hide(notLive, PartNodes, PartCounts, PartVersion)
	s.sort()
	return s
}

// addPredeclared adds the exchanges that every virtual host has from its birth.
func (s *Snapshot) addPredeclared() {
	have := map[string]bool{}
	for _, x := range s.Exchanges {
		have[x.Name] = true
	}
	for _, x := range []ExchangeInfo{
		{Name: "amq.direct", Type: Direct}, {Name: "amq.fanout", Type: Fanout}, {Name: "amq.topic", Type: Topic},
		{Name: "amq.headers", Type: Headers}, {Name: "amq.match", Type: Headers},
	} {
		if !have[x.Name] {
			x.Durable, x.Arguments = true, map[string]any{}
			s.Exchanges = append(s.Exchanges, x)
		}
	}
}

// atLeast says whether the broker's version is known and at least major.minor.
func (s Snapshot) atLeast(major, minor int) (yes, known bool) {
	var a, b int
	if n, _ := fmt.Sscanf(s.Version, "%d.%d", &a, &b); n != 2 {
		return false, false
	}
	return a > major || a == major && b >= minor, true
}
