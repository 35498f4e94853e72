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

// The keys that policies may have. RabbitMQ 4.0 doesn't know all.
var policyKeys = []string{
	"max-length", "max-length-bytes", "overflow", "delivery-limit", "expires", "message-ttl", "dead-letter-exchange",
	"dead-letter-routing-key", "dead-letter-strategy", "alternate-exchange", "queue-leader-locator", "target-group-size", "max-age",
	"stream-max-segment-size-bytes", "queue-version", "max-in-memory-length", "max-in-memory-bytes", "federation-upstream",
	"federation-upstream-set", "queue-mode", "initial-cluster-size", "stream-filter-size-bytes",
}

var policyKeys43 = []string{
	"consumer-timeout", "consumer-disconnected-timeout", "delayed-retry-type", "delayed-retry-min", "delayed-retry-max",
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
		if !slices.Contains(policyKeys, a.name) && !(b.version.newer && slices.Contains(policyKeys43, a.name)) {
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

// best is the policy for a thing. Among equals RabbitMQ takes any; here it is the first by name.
func best(of map[string]*policy, name string, kinds []string) *policy {
	var found *policy
	for _, p := range of {
		if !slices.Contains(kinds, p.ApplyTo) || !p.pattern.MatchString(name) {
			continue
		}
		if found == nil || p.Priority > found.Priority || p.Priority == found.Priority && strings.Compare(p.name, found.name) < 0 {
			found = p
		}
	}
	return found
}

// policyKinds are the values of apply-to that concern the queue.
func (q *queue) policyKinds() []string {
	switch q.kind {
	case typeClassic:
		return []string{"all", "queues", "classic_queues"}
	case typeStream:
		return []string{"all", "queues", "streams"}
	}
	return []string{"all", "queues", "quorum_queues"}
}

func (v *vhost) policyFor(q *queue) *policy {
	kinds := q.policyKinds()
	return merged(best(v.policies, q.name, kinds), best(v.operators, q.name, kinds))
}

func (v *vhost) policyForExchange(x *exchange) *policy {
	if x.name == "" {
		return nil
	}
	return best(v.policies, x.name, []string{"all", "exchanges"})
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
