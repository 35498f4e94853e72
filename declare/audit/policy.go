package audit

import (
	"cmp"
	"maps"
	"regexp"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
)

func comparePolicies(a, b declare.Policy) int {
	return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name), strings.Compare(a.Pattern, b.Pattern))
}

// applies says whether p is for a thing. Patterns are Perl's, of which Go's are a
// part; one that Go can't read is taken to match nothing, and ok is false.
func policyApplies(p declare.Policy, kind, queueType, name string) (yes, ok bool) {
	switch p.ApplyTo {
	case "", "all":
	case "queues":
		yes = kind == "queue"
	case "classic_queues":
		yes = kind == "queue" && queueType == queuearg.Classic
	case "quorum_queues":
		yes = kind == "queue" && queueType == queuearg.Quorum
	case "streams":
		yes = kind == "queue" && queueType == queuearg.Stream
	case "exchanges":
		yes = kind == "exchange"
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
func (s Snapshot) policyOf(operator bool, kind, queueType, name string) *declare.Policy {
	var best *declare.Policy
	for i, p := range s.Policies {
		if p.Operator != operator {
			continue
		}
		if yes, _ := policyApplies(p, kind, queueType, name); yes && (best == nil || p.Priority > best.Priority) {
			best = &s.Policies[i]
		}
	}
	return best
}

// Effective returns the arguments of a queue with the policies that apply to it. A snapshot
// without policies returns the queue's own.
func (s Snapshot) Effective(q declare.QueueInfo) map[string]any {
	return s.effective("queue", q.Type, q.Name, q.Arguments)
}

// effective merges policies into arguments as RabbitMQ does, key by key. An operator's
// policy goes over a user's, but of two numbers the smaller one counts.
// TestWhichOfArgumentAndPolicyCounts and TestWhichOfTwoPoliciesCounts pin it.
func (s Snapshot) effective(kind, queueType, name string, args map[string]any) map[string]any {
	user := s.policyOf(false, kind, queueType, name)
	operator := s.policyOf(true, kind, queueType, name)
	if user == nil && operator == nil {
		return args
	}
	prefix := "x-"
	if kind == "exchange" {
		prefix = ""
	}
	policy := map[string]any{}
	for _, p := range []*declare.Policy{user, operator} {
		if p == nil {
			continue
		}
		for k, v := range p.Definition {
			policy[prefix+k] = resolve(precedencePolicySmaller, policy[prefix+k], v)
		}
	}
	merged := maps.Clone(policy)
	for k, v := range args {
		merged[k] = resolve(precedenceOf(queueType, k), policy[k], v)
	}
	return merged
}

// precedence is which value of a key counts, a policy's or the argument's. The zero value is
// the argument's.
type precedence int

const (
	precedenceArgumentWins precedence = iota
	precedencePolicyWins
	precedenceSmallerWins
	// precedenceLimitWins is precedenceSmallerWins, but a negative number is no limit.
	precedenceLimitWins
	// precedencePolicySmaller is for a user's policy and an operator's: the smaller number, and of
	// other values the operator's.
	precedencePolicySmaller = precedenceSmallerWins
)

func precedenceOf(queueType, key string) precedence {
	switch key {
	case "x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-consumer-timeout", "x-delayed-retry-min", "x-delayed-retry-max":
		return precedenceSmallerWins
	case "x-delivery-limit":
		return precedenceLimitWins
	case "x-delayed-retry-type":
		return precedencePolicyWins
	case "x-overflow":
		if queueType == queuearg.Quorum {
			return precedencePolicyWins
		}
	}
	return precedenceArgumentWins
}

// resolve returns the value that counts: of a policy and an argument, either of which may be
// nil.
func resolve(by precedence, policy, argument any) any {
	p, number := policy.(int64)
	a, both := argument.(int64)
	switch {
	case policy == nil:
		return argument
	case argument == nil, by == precedencePolicyWins:
		return policy
	case by == precedenceArgumentWins || !number || !both:
		return argument
	case by == precedenceLimitWins && (p < 0 || a < 0):
		return max(p, a)
	}
	return min(p, a)
}
