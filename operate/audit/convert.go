package audit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/rules"
)

// Export returns t as the definitions of a virtual host, for operators to import. The virtual
// host and its users aren't included and must exist. The error is that of
// [declare.Topology.Validate].
func Export(vhost string, t declare.Topology, policies ...declare.Policy) (Definitions, error) {
	if err := t.Validate(); err != nil {
		return Definitions{}, err
	}
	if vhost == "" {
		return Definitions{}, argument.New("vhost", nil, "is empty", `pass the name of the virtual host; the default one is "/"`)
	}
	s := check.FromTopology(t)
	s.VHost = vhost
	s.Policies = policies
	return DefinitionsOf(s), nil
}

// DefinitionsOf returns s as a definitions document, without the exchanges that every virtual host
// has and without exclusive queues.
func DefinitionsOf(s check.Snapshot) Definitions {
	var d Definitions
	for _, q := range s.Queues {
		if !q.Exclusive {
			d.queues = append(d.queues, definedQueue{VHost: s.VHost, Name: q.Name, Durable: q.Durable, AutoDelete: q.AutoDelete, Arguments: q.Arguments})
		}
	}
	for _, x := range s.Exchanges {
		if !names.Reserved(x.Name) {
			d.exchanges = append(d.exchanges, definedExchange{
				VHost: s.VHost, Name: x.Name, Type: string(x.Type), Durable: x.Durable, AutoDelete: x.AutoDelete, Internal: x.Internal, Arguments: x.Arguments,
			})
		}
	}
	for _, b := range s.Bindings {
		args := rules.BindingArguments(b)
		def := definedBinding{VHost: s.VHost, Source: b.Source, Destination: b.Queue, DestinationType: "queue", RoutingKey: b.Key, Arguments: args}
		if b.Queue == "" {
			def.Destination, def.DestinationType = b.Exchange, "exchange"
		}
		d.bindings = append(d.bindings, def)
	}
	var operators []any
	for _, p := range s.Policies {
		p.VHost = s.VHost
		if !p.Operator {
			d.policies = append(d.policies, definedPolicy{Policy: p})
			continue
		}
		operators = append(operators, map[string]any{
			"vhost": s.VHost, "component": operatorPolicy, "name": p.Name,
			"value": map[string]any{"pattern": p.Pattern, "apply-to": p.ApplyTo, "priority": p.Priority, "definition": p.Definition},
		})
	}
	if len(operators) > 0 {
		d.Other = map[string]json.RawMessage{"parameters": values.JSON(operators)}
	}
	d.sort()
	return d
}

const operatorPolicy = "operator_policy"

// VHosts returns the virtual hosts that d names, sorted. "" stands for a document of a single
// one.
func (d Definitions) VHosts() []string {
	var list []string
	for _, q := range d.queues {
		list = append(list, q.VHost)
	}
	for _, x := range d.exchanges {
		list = append(list, x.VHost)
	}
	for _, b := range d.bindings {
		list = append(list, b.VHost)
	}
	for _, p := range d.policies {
		list = append(list, p.VHost)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// Topology returns the resources of d in a virtual host. Entries without a virtual host belong to
// every one. A queue becomes the typed value that declares exactly the same, or else a
// [declare.RawQueue].
//
// The error joins an *[argument.Error] for each exchange that isn't durable. The Topology is
// complete even then.
func (d Definitions) Topology(vhost string) (declare.Topology, error) {
	var t declare.Topology
	var errs []error
	in := func(v string) bool { return v == vhost || v == "" }
	for _, x := range d.exchanges {
		if !in(x.VHost) || names.Reserved(x.Name) {
			continue
		}
		args := map[string]any{}
		exchange := declare.Exchange{Name: x.Name, Type: declare.ExchangeType(x.Type), AutoDelete: x.AutoDelete, Internal: x.Internal}
		for k, v := range x.Arguments {
			if alternate, ok := v.(string); ok && k == "alternate-exchange" {
				exchange.AlternateExchange = alternate
			} else {
				args[k] = v
			}
		}
		if len(args) > 0 {
			exchange.Arguments = args
		}
		if !x.Durable {
			errs = append(errs, argument.At(names.Label("Exchange", x.Name).Field("durable"), argument.CodeUnsupported, nil, "is false: the exchange and its bindings are lost when the broker restarts", "make it durable in the definitions"))
		}
		t.Exchanges = append(t.Exchanges, exchange)
	}
	for _, q := range d.queues {
		if in(q.VHost) {
			t.Queues = append(t.Queues, q.queue())
		}
	}
	for _, b := range d.bindings {
		if in(b.VHost) {
			t.Bindings = append(t.Bindings, b.binding())
		}
	}
	return t, errors.Join(errs...)
}

// Snapshot returns the resources of d in a virtual host, for [check.Verify] and the graphs. It doesn't
// validate d.
func (d Definitions) Snapshot(vhost string) check.Snapshot {
	s := check.Snapshot{VHost: vhost}
	in := func(v string) bool { return v == vhost || v == "" }
	rules.SetDefaultQueueType(&s, string(d.defaultQueueType(vhost)))
	for _, x := range d.exchanges {
		// A broker has those of reserved names, and ignores what a document says of them.
		if in(x.VHost) && !names.Reserved(x.Name) {
			s.Exchanges = append(s.Exchanges, check.ExchangeInfo{Name: x.Name, Type: declare.ExchangeType(x.Type), Durable: x.Durable, AutoDelete: x.AutoDelete, Internal: x.Internal, Arguments: notNil(x.Arguments)})
		}
	}
	for _, q := range d.queues {
		if !in(q.VHost) {
			continue
		}
		queueType, ok := q.Arguments["x-queue-type"].(string)
		if !ok {
			queueType = defaultType(rules.DefaultQueueType(s)).of(q)
		}
		s.Queues = append(s.Queues, declare.QueueInfo{Name: q.Name, VHost: vhost, Type: queueType, Durable: q.Durable, AutoDelete: q.AutoDelete, Arguments: notNil(q.Arguments)})
	}
	for _, b := range d.bindings {
		if in(b.VHost) && b.Source != "" {
			s.Bindings = append(s.Bindings, b.binding())
		}
	}
	for _, p := range d.policies {
		if in(p.VHost) {
			s.Policies = append(s.Policies, p.Policy)
		}
	}
	operators, unread := d.operatorPolicies()
	for _, p := range operators {
		if in(p.VHost) {
			s.Policies = append(s.Policies, p)
		}
	}
	if unread != "" {
		rules.Hide(&s, fmt.Sprintf("the operator policy %.80q can't be parsed", unread), rules.PartPolicies)
	}
	rules.AddPredeclared(&s)
	rules.Hide(&s, rules.NotLive, rules.PartNodes, rules.PartCounts)
	for _, key := range []string{"rabbitmq_version", "rabbit_version"} { // 3.x writes the second one
		if raw := d.Other[key]; s.Version == "" && raw != nil && json.Unmarshal(raw, &s.Version) != nil {
			s.Version = ""
		}
	}
	if s.Version == "" {
		rules.Hide(&s, rules.NotLive, rules.PartVersion)
	}
	rules.Sort(&s)
	return s
}

// defaultType is the type of queues that don't say theirs, in a virtual host.
type defaultType string

// of is the type that a broker gives a queue. It ignores the member "type", and makes a classic queue
// where the default type can't be what the queue says. TestAFileIsWhatTheBrokerReads pins it.
func (d defaultType) of(q definedQueue) string {
	if d == "" || !q.Durable || q.AutoDelete {
		return queuearg.Classic
	}
	return string(d)
}

// defaultQueueType is the default type of a virtual host. A document of all virtual hosts has it in
// the virtual host's metadata; a broker ignores the member besides. A document of a single one
// doesn't change that of the virtual host that it is imported to, which is likely the same.
func (d Definitions) defaultQueueType(vhost string) defaultType {
	type kind struct {
		Name     string      `json:"name"`
		Own      defaultType `json:"default_queue_type"`
		Metadata struct {
			Default defaultType `json:"default_queue_type"`
		} `json:"metadata"`
	}
	known := func(t defaultType) defaultType {
		if t == queuearg.Quorum || t == queuearg.Stream {
			return t
		}
		return ""
	}
	var vhosts []kind
	if raw := d.Other["vhosts"]; raw != nil {
		_ = json.Unmarshal(raw, &vhosts)
		for _, v := range vhosts {
			if v.Name == vhost {
				return known(v.Metadata.Default)
			}
		}
		return ""
	}
	var only kind
	_ = json.Unmarshal(d.Other["metadata"], &only.Metadata)
	_ = json.Unmarshal(d.Other["default_queue_type"], &only.Own)
	return known(cmp.Or(only.Metadata.Default, only.Own))
}

// operatorPolicies are among the parameters. unread is the name of one that can't be
// understood, or "".
func (d Definitions) operatorPolicies() (list []declare.Policy, unread string) {
	var parameters []struct {
		VHost     string `json:"vhost"`
		Component string `json:"component"`
		Name      string `json:"name"`
		Value     json.RawMessage
	}
	if raw := d.Other["parameters"]; raw == nil || json.Unmarshal(raw, &parameters) != nil {
		return nil, ""
	}
	for _, p := range parameters {
		if p.Component != operatorPolicy {
			continue
		}
		var value struct {
			declare.Policy
			Definition json.RawMessage `json:"definition"`
		}
		if rules.DecodeJSON(p.Value, &value) != nil {
			unread = p.Name
			continue
		}
		policy := value.Policy
		policy.VHost, policy.Name, policy.Operator = p.VHost, p.Name, true
		var ok bool
		if policy.Definition, ok = policyDefinition(value.Definition); !ok {
			unread = p.Name
			continue
		}
		list = append(list, policy)
	}
	return list, unread
}

// policyDefinition reads a policy's definition: an object, or a list of pairs, which
// is what rabbitmqctl of RabbitMQ 4.0 makes of it for an operator's.
func policyDefinition(text json.RawMessage) (map[string]any, bool) {
	var m map[string]any
	if rules.DecodeJSON(text, &m) == nil {
		return rules.JSONArguments(m), true
	}
	var pairs [][]any
	if rules.DecodeJSON(text, &pairs) != nil {
		return nil, false
	}
	m = map[string]any{}
	for _, pair := range pairs {
		if len(pair) != 2 {
			return nil, false
		}
		key, ok := pair[0].(string)
		if !ok {
			return nil, false
		}
		m[key] = pair[1]
	}
	return rules.JSONArguments(m), true
}

func (b definedBinding) binding() declare.Binding {
	of := declare.Binding{Source: b.Source, Queue: b.Destination, Key: b.RoutingKey}
	if b.DestinationType == "exchange" {
		of.Queue, of.Exchange = "", b.Destination
	}
	return rules.WithArguments(of, b.Arguments)
}

// queue is the typed queue that sends exactly what q has, or a RawQueue.
func (q definedQueue) queue() declare.Queue {
	args := notNil(q.Arguments)
	raw := declare.RawQueue{Name: q.Name, Durable: q.Durable, AutoDelete: q.AutoDelete, Arguments: args}
	want := map[string]any{"durable": q.Durable, "exclusive": false, "auto_delete": q.AutoDelete, "arguments": args}
	for _, typed := range []declare.Queue{quorumFrom(q.Name, args), classicFrom(q, args), streamFrom(q.Name, args)} {
		// Settings that the typed queue can't express make it another one, or invalid.
		one := declare.Topology{Queues: []declare.Queue{typed}}
		if one.Validate() == nil && reflect.DeepEqual(one.Declarations()[0].Body, want) {
			return typed
		}
	}
	return raw
}

// taker takes arguments out of a copy, so that what is left has no field.
type taker map[string]any

func takerOf(args map[string]any) taker {
	t := taker{}
	for k, v := range args {
		if k != "x-queue-type" {
			t[k] = v
		}
	}
	return t
}

func take[T any](t taker, key string) (v T) {
	v, ok := t[key].(T)
	if ok {
		delete(t, key)
	}
	return v
}

func (t taker) millis(key string) time.Duration {
	return time.Duration(take[int64](t, key)) * time.Millisecond
}

func (t taker) deadLetter() declare.DeadLetterTarget {
	exchange, set := t["x-dead-letter-exchange"].(string)
	if !set {
		return declare.Drop()
	}
	delete(t, "x-dead-letter-exchange")
	d := declare.DeadLetterTarget{Exchange: exchange, RoutingKey: take[string](t, "x-dead-letter-routing-key"), AtMostOnce: true}
	if t["x-dead-letter-strategy"] == "at-least-once" {
		delete(t, "x-dead-letter-strategy")
		d.AtMostOnce = false
	}
	return d
}

// left is what has no field; nil for nothing.
func (t taker) left() map[string]any {
	if len(t) == 0 {
		return nil
	}
	return t
}

func quorumFrom(name string, args map[string]any) declare.QuorumQueue {
	t := takerOf(args)
	q := declare.QuorumQueue{
		Name: name, DeadLetter: t.deadLetter(), MessageTTL: t.millis("x-message-ttl"), Expires: t.millis("x-expires"),
		MaxLength: take[int64](t, "x-max-length"), MaxLengthBytes: take[int64](t, "x-max-length-bytes"),
		Overflow:             declare.Overflow(take[string](t, "x-overflow")),
		SingleActiveConsumer: take[bool](t, "x-single-active-consumer"),
		InitialGroupSize:     int(take[int64](t, "x-quorum-initial-group-size")),
		TargetGroupSize:      int(take[int64](t, "x-quorum-target-group-size")),
		PlacementTag:         take[string](t, "x-member-placement-tag"),
		LeaderLocator:        declare.LeaderLocator(take[string](t, "x-queue-leader-locator")),
		ConsumerTimeout:      t.millis("x-consumer-timeout"), ConsumerDisconnectedTimeout: t.millis("x-consumer-disconnected-timeout"),
		DelayedRetry: declare.DelayedRetry{
			Kind: declare.RetryKind(take[string](t, "x-delayed-retry-type")), Min: t.millis("x-delayed-retry-min"), Max: t.millis("x-delayed-retry-max"),
		},
	}
	if !q.DeadLetter.AtMostOnce && q.Overflow == declare.OverflowRejectPublish && !q.DeadLetter.IsDrop() {
		q.Overflow = "" // which means the same
	}
	if limit, ok := t["x-delivery-limit"].(int64); ok {
		delete(t, "x-delivery-limit")
		q.DeliveryLimit = declare.Limit(limit)
		if limit == 0 {
			q.DeliveryLimit = declare.NoRedelivery
		}
	}
	q.Arguments = t.left()
	return q
}

func classicFrom(d definedQueue, args map[string]any) declare.ClassicQueue {
	t := takerOf(args)
	q := declare.ClassicQueue{
		Name: d.Name, DeadLetter: t.deadLetter(), MessageTTL: t.millis("x-message-ttl"), Expires: t.millis("x-expires"),
		MaxLength: take[int64](t, "x-max-length"), MaxLengthBytes: take[int64](t, "x-max-length-bytes"),
		Overflow: declare.Overflow(take[string](t, "x-overflow")), MaxPriority: int(take[int64](t, "x-max-priority")),
		SingleActiveConsumer: take[bool](t, "x-single-active-consumer"), LeaderLocator: declare.LeaderLocator(take[string](t, "x-queue-leader-locator")),
		Version: int(take[int64](t, "x-queue-version")), AutoDelete: d.AutoDelete, Transient: !d.Durable,
	}
	q.Arguments = t.left()
	return q
}

func streamFrom(name string, args map[string]any) declare.Stream {
	t := takerOf(args)
	s := declare.Stream{
		Name: name, MaxLengthBytes: take[int64](t, "x-max-length-bytes"), MaxSegmentSize: take[int64](t, "x-stream-max-segment-size-bytes"),
		FilterSize: int(take[int64](t, "x-stream-filter-size-bytes")), InitialClusterSize: int(take[int64](t, "x-initial-cluster-size")),
		LeaderLocator: declare.LeaderLocator(take[string](t, "x-queue-leader-locator")),
	}
	// Other units than seconds would be sent as seconds: those stay raw.
	var seconds int64
	if n, _ := fmt.Sscanf(take[string](t, "x-max-age"), "%ds", &seconds); n == 1 {
		s.MaxAge = time.Duration(seconds) * time.Second
	}
	s.Arguments = t.left()
	return s
}
