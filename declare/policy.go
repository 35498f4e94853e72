package declare

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
)

// Policy sets arguments for all queues or exchanges whose name matches, without
// declaring them again: it is how a live queue's limits can be changed.
type Policy struct {
	VHost string `json:"vhost,omitempty"`
	Name  string `json:"name"`
	// Pattern is a regular expression that is searched for in the name.
	Pattern string `json:"pattern"`
	// ApplyTo is "all", "queues", "classic_queues", "quorum_queues", "streams"
	// or "exchanges"; empty is "all".
	ApplyTo string `json:"apply-to"`
	// Priority: of the policies that match, only the one with the highest counts.
	Priority int64 `json:"priority"`
	// Definition has the arguments without their "x-", such as "message-ttl".
	Definition map[string]any `json:"definition"`
	// Operator marks an operator policy, which is merged over the users'.
	Operator bool `json:"operator,omitempty"`
}

func comparePolicies(a, b Policy) int {
	return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name), strings.Compare(a.Pattern, b.Pattern))
}

// applies says whether p is for a thing. Patterns are Perl's, of which Go's are a
// part; one that Go can't read is taken to match nothing, and ok is false.
func (p Policy) applies(kind Kind, queueType, name string) (yes, ok bool) {
	switch p.ApplyTo {
	case "", "all":
	case "queues":
		yes = kind == KindQueue
	case "classic_queues":
		yes = kind == KindQueue && queueType == typeClassic
	case "quorum_queues":
		yes = kind == KindQueue && queueType == typeQuorum
	case "streams":
		yes = kind == KindQueue && queueType == typeStream
	case "exchanges":
		yes = kind == KindExchange
	}
	if !yes && p.ApplyTo != "" && p.ApplyTo != "all" {
		return false, true
	}
	re, err := regexp.Compile(p.Pattern)
	if err != nil {
		return false, false
	}
	return re.MatchString(name), true
}

// policyOf is the one policy that counts for a thing, of users or of operators.
func (s Snapshot) policyOf(operator bool, kind Kind, queueType, name string) *Policy {
	var best *Policy
	for i, p := range s.Policies {
		if p.Operator != operator {
			continue
		}
		if yes, _ := p.applies(kind, queueType, name); yes && (best == nil || p.Priority > best.Priority) {
			best = &s.Policies[i]
		}
	}
	return best
}

// effective merges policies into arguments as RabbitMQ does: of two numbers the
// smaller one counts, of other values the argument's, and an operator's policy
// goes over a user's.
func (s Snapshot) effective(kind Kind, queueType, name string, args map[string]any) map[string]any {
	user := s.policyOf(false, kind, queueType, name)
	operator := s.policyOf(true, kind, queueType, name)
	if user == nil && operator == nil {
		return args
	}
	merged := map[string]any{}
	prefix := "x-"
	if kind == KindExchange {
		prefix = ""
	}
	put := func(p *Policy, wins bool) {
		if p == nil {
			return
		}
		for k, v := range p.Definition {
			k = prefix + k
			n, isNumber := v.(int64)
			old, has := merged[k].(int64)
			switch {
			case isNumber && has:
				merged[k] = min(n, old)
			case merged[k] == nil || wins:
				merged[k] = v
			}
		}
	}
	put(user, false)
	put(operator, true)
	for k, v := range args {
		n, isNumber := v.(int64)
		old, has := merged[k].(int64)
		if isNumber && has && slices.Contains(minimums, k) {
			n = min(n, old)
			v = n
		}
		merged[k] = v
	}
	return merged
}

// minimums are the arguments of which the smaller one counts, policy's or
// argument's; for the rest the argument counts.
var minimums = []string{"x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-delivery-limit"}
