package engine

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Policy changes the settings of the queues and exchanges whose names match. Of several
// that match, the one of the highest priority counts.
type Policy struct {
	// Pattern is a regular expression of names.
	Pattern string
	// ApplyTo is "all", "queues", "exchanges", "classic_queues", "quorum_queues" or
	// "streams". Default: "all".
	ApplyTo  string
	Priority int64
	// Definition has keys such as "max-length" and "dead-letter-exchange". Its values
	// are strings, booleans and whole numbers.
	Definition map[string]any
	// Operator makes it an operator policy. Its limits are combined with those of the
	// policy: the smaller one counts.
	Operator bool
}

type policy struct {
	name, vhost string
	Policy
	pattern    *regexp.Regexp
	definition table
}

// The keys that policies may have, and those that operator policies may have, too. RabbitMQ
// 4.0 doesn't know all. Those of plugins, such as federation-upstream, are refused as they
// are without the plugin (TestAPolicyWithAnUnsupportedKeyDoesNotApply).
var (
	operatorKeys = []string{
		"max-length", "max-length-bytes", "overflow", "delivery-limit", "expires", "message-ttl", "target-group-size", "queue-version",
		"max-in-memory-length", "max-in-memory-bytes",
	}
	operatorKeys43 = []string{"delayed-retry-type", "delayed-retry-min", "delayed-retry-max"}
	operatorKeys44 = []string{"member-placement-tag"}
	policyKeys     = []string{
		"dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy", "alternate-exchange", "queue-leader-locator", "max-age",
		"stream-max-segment-size-bytes", "queue-mode", "initial-cluster-size", "stream-filter-size-bytes", "consumer-timeout",
	}
	policyKeys43 = []string{"consumer-disconnected-timeout"}
)

// policyKey says whether a policy, or an operator policy, may have a key.
func (v *version) policyKey(name string, operator bool) bool {
	return slices.Contains(operatorKeys, name) || v.newer && slices.Contains(operatorKeys43, name) || v.newest && slices.Contains(operatorKeys44, name) ||
		!operator && (slices.Contains(policyKeys, name) || v.newer && slices.Contains(policyKeys43, name))
}

// unsupported are the keys that a type of queue doesn't have, of those that RabbitMQ looks
// at. A policy with one of them doesn't apply to such a queue at all.
var unsupported = map[string][]string{
	typeClassic: {
		"delivery-limit", "dead-letter-strategy", "target-group-size", "max-in-memory-length", "max-in-memory-bytes", "max-age",
		"stream-max-segment-size-bytes", "initial-cluster-size",
	},
	typeQuorum: {"queue-mode", "max-age", "stream-max-segment-size-bytes", "initial-cluster-size"},
	typeStream: {
		"max-length", "overflow", "delivery-limit", "expires", "message-ttl", "dead-letter-exchange", "dead-letter-routing-key",
		"dead-letter-strategy", "target-group-size", "max-in-memory-length", "max-in-memory-bytes", "queue-mode",
	},
}

// applies says whether a policy has no key that a type of queue doesn't have.
func (p *policy) applies(kind string) bool {
	return !slices.ContainsFunc(p.definition, func(a argument) bool { return slices.Contains(unsupported[kind], a.name) })
}

// A Refusal is what RabbitMQ says of something that it doesn't take.
type Refusal string

func (r Refusal) Error() string { return string(r) }

func refused(format string, args ...any) error { return Refusal(fmt.Sprintf(format, args...)) }

// SetPolicy sets a policy of a virtual host. The error says what RabbitMQ refuses it for.
func (b *Broker) SetPolicy(vhost, name string, p Policy) error {
	if p.ApplyTo == "" {
		p.ApplyTo = "all"
	}
	if !slices.Contains([]string{"all", "queues", "exchanges", "classic_queues", "quorum_queues", "streams"}, p.ApplyTo) {
		return refused("Validation failed\n\napply-to '%s' unrecognised", p.ApplyTo)
	}
	pattern, err := regexp.Compile(p.Pattern)
	if err != nil {
		return refused("Validation failed\n\n%v", err)
	}
	if len(p.Definition) == 0 {
		return refused("Validation failed\n\nno policy provided\n")
	}
	definition := tableOf(p.Definition)
	for _, a := range definition {
		if !b.version.policyKey(a.name, p.Operator) {
			return refused("Validation failed\n\n[<<%q>>] are not recognised policy settings\n", a.name)
		}
		for _, c := range checks {
			if c.name == "x-"+a.name && c.name != "x-dead-letter-routing-key" {
				if text := c.check(a, definition); text != "" {
					return refused("Validation failed\n\n%s is not a valid %s\n", a, a.name)
				}
			}
		}
	}
	// RabbitMQ 4.3.6 wants it of a policy, and not of a queue's arguments.
	if kind, ok := definition.get("delayed-retry-type"); ok && kind.value != "disabled" {
		if _, ok := definition.get("delayed-retry-min"); !ok {
			return refused("Validation failed\n\ndelayed-retry-min is required when delayed-retry-type is %v\n", kind.value)
		}
	}
	b.lock()
	defer b.unlock()
	v := b.vhosts[vhost]
	if v == nil {
		return fmt.Errorf("%w: virtual host %q", ErrMissing, vhost)
	}
	set := &policy{name: name, vhost: vhost, Policy: p, pattern: pattern, definition: definition}
	if p.Operator {
		v.operators[name] = set
	} else {
		v.policies[name] = set
	}
	v.applyPolicies()
	return nil
}

// DeletePolicy removes a policy. It says whether there was one.
func (b *Broker) DeletePolicy(vhost, name string, operator bool) bool {
	b.lock()
	defer b.unlock()
	v := b.vhosts[vhost]
	if v == nil {
		return false
	}
	of := v.policies
	if operator {
		of = v.operators
	}
	if of[name] == nil {
		return false
	}
	delete(of, name)
	v.applyPolicies()
	return true
}

func (v *vhost) applyPolicies() {
	for _, q := range v.queues {
		q.configure()
	}
	for _, x := range v.exchanges {
		v.configureExchange(x)
	}
	v.changed()
}

// best is the policy for a queue of a type, or, if that is "", for an exchange. Among equals RabbitMQ takes any; here it is the first by name.
func best(of map[string]*policy, name, kind string) *policy {
	var found *policy
	for _, p := range of {
		if !slices.Contains(policyKinds[kind], p.ApplyTo) || !p.applies(kind) || !p.pattern.MatchString(name) {
			continue
		}
		if found == nil || p.Priority > found.Priority || p.Priority == found.Priority && strings.Compare(p.name, found.name) < 0 {
			found = p
		}
	}
	return found
}

// policyKinds are the values of apply-to that concern a type of queue, and, for "",
// exchanges.
var policyKinds = map[string][]string{
	"":          {"all", "exchanges"},
	typeClassic: {"all", "queues", "classic_queues"},
	typeQuorum:  {"all", "queues", "quorum_queues"},
	typeStream:  {"all", "queues", "streams"},
}

func (v *vhost) policyFor(q *queue) *policy {
	return merged(best(v.policies, q.name, q.kind), best(v.operators, q.name, q.kind))
}

func (v *vhost) policyForExchange(x *exchange) *policy {
	if x.name == "" {
		return nil
	}
	return best(v.policies, x.name, "")
}

// merged joins a policy and an operator policy: of two numbers the smaller one counts.
func merged(p, operator *policy) *policy {
	if p == nil || operator == nil {
		if p == nil {
			return operator
		}
		return p
	}
	m := *p
	for _, a := range operator.definition {
		if old, ok := p.definition.get(a.name); ok {
			n, ok1 := a.value.(int64)
			was, ok2 := old.value.(int64)
			if ok1 && ok2 && was < n {
				continue
			}
		}
		m.definition = m.definition.set(a)
	}
	return &m
}
