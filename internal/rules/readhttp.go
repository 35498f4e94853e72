package rules

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
)

// ReadHTTP reads a whole virtual host. Queues, exchanges, and bindings must be readable; what a
// user without the tags "policymaker" or "monitoring" can't see is left out and reported.
func ReadHTTP(ctx context.Context, r Reader) (Snapshot, error) {
	s := Snapshot{VHost: r.VHost()}
	vhost := "/" + address.Escape(s.VHost)

	var queues []HTTPQueue
	var exchanges []HTTPExchange
	var bindings []HTTPBinding
	for _, part := range []struct {
		path string
		into any
	}{{"/queues", &queues}, {"/exchanges", &exchanges}, {"/bindings", &bindings}} {
		// An error of one of these would repeat for all.
		if err := Get(ctx, r, part.path+vhost, part.into); err != nil {
			return Snapshot{}, err
		}
	}
	for _, q := range queues {
		AddQueue(&s, q)
	}
	for _, x := range exchanges {
		AddExchange(&s, x)
	}
	for _, b := range bindings {
		if b.Source != "" {
			s.Bindings = append(s.Bindings, b.Binding())
		}
	}

	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	err := Get(ctx, r, "/overview", &overview)
	if err == nil && overview.Version == "" {
		err = BadReply("/overview", "has no rabbitmq_version")
	}
	if s.optional(err, PartVersion) {
		s.Version = overview.Version
	}
	var nodes []struct {
		Name string `json:"name"`
	}
	if err = Get(ctx, r, "/nodes?columns=name", &nodes); err == nil && len(nodes) == 0 {
		err = BadReply("/nodes", "is empty")
	}
	if s.optional(err, PartNodes) {
		for _, n := range nodes {
			s.Nodes = append(s.Nodes, n.Name)
		}
	}
	for _, p := range []struct {
		path     string
		operator bool
	}{{"/policies", false}, {"/operator-policies", true}} {
		var policies []declare.Policy
		if s.optional(Get(ctx, r, p.path+vhost, &policies), PartPolicies) {
			for _, policy := range policies {
				policy.Operator = p.operator
				policy.Definition = JSONArguments(policy.Definition)
				s.Policies = append(s.Policies, policy)
			}
		}
	}
	if ctx.Err() != nil {
		return Snapshot{}, context.Cause(ctx)
	}
	Sort(&s)
	return s, nil
}

// optional notes what couldn't be read.
func (s *Snapshot) optional(err error, part string) bool {
	if err != nil {
		Hide(s, err.Error(), part)
	}
	return err == nil
}

// AddQueue adds a queue, and which policies apply to it. RabbitMQ 4.0 leaves these out until it has
// first collected them.
func AddQueue(s *Snapshot, q HTTPQueue) {
	s.Queues = append(s.Queues, q.Info())
	if len(q.Effective) > 0 && string(q.Effective) != "null" {
		s.govern(QueueResource(q.Name), governors{q.User, q.Operator})
	}
}

// AddExchange adds an exchange, and which policies apply to it. The default exchange isn't one of
// those that can be declared, bound, or lose messages.
func AddExchange(s *Snapshot, x HTTPExchange) {
	if x.Name != "" {
		s.Exchanges = append(s.Exchanges, x.info())
		s.govern(ExchangeResource(x.Name), governors{x.User, x.Operator})
	}
}

// Get requests a path below /api, and parses the reply.
func Get(ctx context.Context, r Reader, path string, into any) error {
	text, err := r.Get(ctx, path)
	if err != nil {
		return err
	}
	path, _, _ = strings.Cut(path, "?") // a long list of columns
	if string(bytes.TrimSpace(text)) == "null" {
		return BadReply(path, "is null")
	}
	if err := DecodeJSON(text, into); err != nil {
		return fmt.Errorf("hopback: the HTTP API's reply to %s can't be parsed: %w", path, err)
	}
	return nil
}

// BadReply is an answer that RabbitMQ never gives. Taken at its word, it would say that there is
// nothing to find.
func BadReply(path, problem string) error {
	return fmt.Errorf("hopback: GET /api%s: %w: it %s; check that the URL is that of RabbitMQ's management API", path, declare.ErrBadReply, problem)
}

// DecodeJSON keeps the text of numbers, so that 2 isn't 2.0.
func DecodeJSON(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode(into)
}

// HTTPQueue is a queue in the form of the HTTP API. RabbitMQ leaves out counts until it has first
// collected them, some seconds after the queue was declared.
type HTTPQueue struct {
	Name       string          `json:"name"`
	VHost      string          `json:"vhost"`
	Type       string          `json:"type"`
	Durable    bool            `json:"durable"`
	AutoDelete bool            `json:"auto_delete"`
	Exclusive  bool            `json:"exclusive"`
	Leader     string          `json:"leader"`
	Node       string          `json:"node"`
	State      string          `json:"state"`
	Members    []string        `json:"members"`
	Online     []string        `json:"online"`
	Arguments  json.RawMessage `json:"arguments"`
	Ready      *uint64         `json:"messages_ready"`
	Unacked    uint64          `json:"messages_unacknowledged"`
	DLX        uint64          `json:"messages_dlx"`
	Delayed    uint64          `json:"messages_delayed"`
	Consumers  uint64          `json:"consumers"`
	// User and Operator are the names of the policies that apply, and Effective is what both set.
	User      string          `json:"policy"`
	Operator  string          `json:"operator_policy"`
	Effective json.RawMessage `json:"effective_policy_definition"`
}

func (q HTTPQueue) Info() declare.QueueInfo {
	info := declare.QueueInfo{
		Name: q.Name, VHost: q.VHost, Type: q.Type, Durable: q.Durable, AutoDelete: q.AutoDelete, Exclusive: q.Exclusive,
		Leader: q.Leader, Replicas: q.Members, Online: q.Online, State: q.State, Consumers: q.Consumers,
		MessagesUnacknowledged: q.Unacked, MessagesDeadLettering: q.DLX, MessagesDelayed: q.Delayed,
		Arguments: RawArguments(q.Arguments), Counted: q.Ready != nil,
	}
	if q.Ready != nil {
		info.Messages = *q.Ready
	}
	if info.Leader == "" && q.Type == queuearg.Classic {
		info.Leader = q.Node
	}
	return info
}

type HTTPExchange struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Durable    bool            `json:"durable"`
	AutoDelete bool            `json:"auto_delete"`
	Internal   bool            `json:"internal"`
	Arguments  json.RawMessage `json:"arguments"`
	User       string          `json:"policy"`
	Operator   string          `json:"operator_policy"`
}

func (x HTTPExchange) info() ExchangeInfo {
	return ExchangeInfo{x.Name, declare.ExchangeType(x.Type), x.Durable, x.AutoDelete, x.Internal, RawArguments(x.Arguments)}
}

type HTTPBinding struct {
	Source          string          `json:"source"`
	Destination     string          `json:"destination"`
	DestinationType string          `json:"destination_type"`
	RoutingKey      string          `json:"routing_key"`
	Arguments       json.RawMessage `json:"arguments"`
}

func (b HTTPBinding) Binding() declare.Binding {
	of := declare.Binding{Source: b.Source, Key: b.RoutingKey}
	if b.DestinationType == "exchange" {
		of.Exchange = b.Destination
	} else {
		of.Queue = b.Destination
	}
	return WithArguments(of, RawArguments(b.Arguments))
}

// RawArguments reads arguments in JSON. No arguments can be a list, [], since
// that is what Erlang makes of an empty table.
func RawArguments(text json.RawMessage) map[string]any {
	var m map[string]any
	if DecodeJSON(text, &m) != nil {
		return map[string]any{}
	}
	return JSONArguments(m)
}

// JSONArguments brings values into the form of normal: whole numbers are int64.
func JSONArguments(m map[string]any) map[string]any {
	args := make(map[string]any, len(m))
	for k, v := range m {
		args[k] = JSONValue(v)
	}
	return args
}

func JSONValue(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		f, _ := v.Float64()
		return f
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = JSONValue(v[i])
		}
		return list
	case map[string]any:
		return JSONArguments(v)
	}
	return v
}
