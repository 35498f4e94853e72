package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
)

// readHTTP reads a whole virtual host. Queues, exchanges, and bindings must be readable; what a
// user without the tags "policymaker" or "monitoring" can't see is left out and reported.
func readHTTP(ctx context.Context, r Reader) (Snapshot, error) {
	s := Snapshot{VHost: r.VHost()}
	vhost := "/" + address.Escape(s.VHost)

	var queues []httpQueue
	var exchanges []httpExchange
	var bindings []httpBinding
	for _, part := range []struct {
		path string
		into any
	}{{"/queues", &queues}, {"/exchanges", &exchanges}, {"/bindings", &bindings}} {
		// An error of one of these would repeat for all.
		if err := get(ctx, r, part.path+vhost, part.into); err != nil {
			return Snapshot{}, err
		}
	}
	for _, q := range queues {
		s.Queues = append(s.Queues, q.info())
	}
	for _, x := range exchanges {
		if x.Name != "" {
			s.Exchanges = append(s.Exchanges, x.info())
		}
	}
	for _, b := range bindings {
		if b.Source != "" {
			s.Bindings = append(s.Bindings, b.binding())
		}
	}

	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if s.optional(get(ctx, r, "/overview", &overview), partVersion) {
		s.Version = overview.Version
	}
	var nodes []struct {
		Name string `json:"name"`
	}
	if s.optional(get(ctx, r, "/nodes?columns=name", &nodes), partNodes) {
		for _, n := range nodes {
			s.Nodes = append(s.Nodes, n.Name)
		}
	}
	for _, p := range []struct {
		path     string
		operator bool
	}{{"/policies", false}, {"/operator-policies", true}} {
		var policies []declare.Policy
		if s.optional(get(ctx, r, p.path+vhost, &policies), partPolicies) {
			for _, policy := range policies {
				policy.Operator = p.operator
				policy.Definition = jsonArguments(policy.Definition)
				s.Policies = append(s.Policies, policy)
			}
		}
	}
	if ctx.Err() != nil {
		return Snapshot{}, context.Cause(ctx)
	}
	s.checkPatterns()
	s.sort()
	return s, nil
}

// optional notes what couldn't be read.
func (s *Snapshot) optional(err error, part string) bool {
	if err != nil {
		s.hide(err.Error(), part)
	}
	return err == nil
}

// checkPatterns reports it if a policy's pattern can't be parsed here.
func (s *Snapshot) checkPatterns() {
	for _, p := range s.Policies {
		if _, ok := policyApplies(p, "queue", queuearg.Quorum, ""); !ok {
			s.hide(fmt.Sprintf("the pattern of the policy %.80q isn't a regular expression that Go supports", p.Name), partPolicies)
		}
	}
}

func get(ctx context.Context, r Reader, path string, into any) error {
	text, err := r.Get(ctx, path)
	if err != nil {
		return err
	}
	if err := decodeJSON(text, into); err != nil {
		path, _, _ = strings.Cut(path, "?") // a long list of columns
		return fmt.Errorf("hopback: the HTTP API's reply to %s can't be parsed: %w", path, err)
	}
	return nil
}

// decodeJSON keeps the text of numbers, so that 2 isn't 2.0.
func decodeJSON(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode(into)
}

// httpQueue is a queue in the form of the HTTP API. RabbitMQ leaves out counts until it has first
// collected them, some seconds after the queue was declared.
type httpQueue struct {
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
}

func (q httpQueue) info() declare.QueueInfo {
	info := declare.QueueInfo{
		Name: q.Name, VHost: q.VHost, Type: q.Type, Durable: q.Durable, AutoDelete: q.AutoDelete, Exclusive: q.Exclusive,
		Leader: q.Leader, Replicas: q.Members, Online: q.Online, State: q.State, Consumers: q.Consumers,
		MessagesUnacknowledged: q.Unacked, MessagesDeadLettering: q.DLX, MessagesDelayed: q.Delayed,
		Arguments: rawArguments(q.Arguments), Counted: q.Ready != nil,
	}
	if q.Ready != nil {
		info.Messages = *q.Ready
	}
	if info.Leader == "" && q.Type == queuearg.Classic {
		info.Leader = q.Node
	}
	return info
}

type httpExchange struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Durable    bool            `json:"durable"`
	AutoDelete bool            `json:"auto_delete"`
	Internal   bool            `json:"internal"`
	Arguments  json.RawMessage `json:"arguments"`
}

func (x httpExchange) info() ExchangeInfo {
	return ExchangeInfo{x.Name, declare.ExchangeType(x.Type), x.Durable, x.AutoDelete, x.Internal, rawArguments(x.Arguments)}
}

type httpBinding struct {
	Source          string          `json:"source"`
	Destination     string          `json:"destination"`
	DestinationType string          `json:"destination_type"`
	RoutingKey      string          `json:"routing_key"`
	Arguments       json.RawMessage `json:"arguments"`
}

func (b httpBinding) binding() declare.Binding {
	of := declare.Binding{Source: b.Source, Key: b.RoutingKey}
	if b.DestinationType == "exchange" {
		of.Exchange = b.Destination
	} else {
		of.Queue = b.Destination
	}
	return withArguments(of, rawArguments(b.Arguments))
}

// rawArguments reads arguments in JSON. No arguments can be a list, [], since
// that is what Erlang makes of an empty table.
func rawArguments(text json.RawMessage) map[string]any {
	var m map[string]any
	if decodeJSON(text, &m) != nil {
		return map[string]any{}
	}
	return jsonArguments(m)
}

// jsonArguments brings values into the form of normal: whole numbers are int64.
func jsonArguments(m map[string]any) map[string]any {
	args := make(map[string]any, len(m))
	for k, v := range m {
		args[k] = jsonValue(v)
	}
	return args
}

func jsonValue(v any) any {
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
			list[i] = jsonValue(v[i])
		}
		return list
	case map[string]any:
		return jsonArguments(v)
	}
	return v
}
