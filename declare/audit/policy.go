package audit

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
	"github.com/hopback/hopback/declare/internal/values"
)

func comparePolicies(a, b declare.Policy) int {
	return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name), strings.Compare(a.Pattern, b.Pattern))
}

// applies reports whether p applies to a resource. Patterns are Perl's, and Go supports a part of
// that syntax; one that Go can't parse matches nothing here, and ok is false.
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
	re := patterns.of(p.Pattern)
	if re == nil {
		return false, false
	}
	return re.MatchString(name), true
}

// unsupported is a key of a policy that a queue's type doesn't have, or "". Such a policy doesn't
// apply to the queue at all, and the next one does:
// TestAPolicyWithAnUnsupportedKeyDoesNotApply pins it.
func unsupported(p declare.Policy, kind, queueType string) string {
	if kind != "queue" {
		return ""
	}
	for _, key := range values.SortedKeys(p.Definition) {
		if types, limited := typesOfKey[key]; limited && !slices.Contains(types, queueType) {
			return key
		}
	}
	return ""
}

var quorumAndClassic = []string{queuearg.Quorum, queuearg.Classic}

// typesOfKey are the keys of policies that some types of queues don't have.
var typesOfKey = map[string][]string{
	"max-length": quorumAndClassic, "overflow": quorumAndClassic, "expires": quorumAndClassic, "message-ttl": quorumAndClassic, "dead-letter-exchange": quorumAndClassic, "dead-letter-routing-key": quorumAndClassic,
	"delivery-limit": {queuearg.Quorum}, "dead-letter-strategy": {queuearg.Quorum}, "target-group-size": {queuearg.Quorum},
	"max-in-memory-length": {queuearg.Quorum}, "max-in-memory-bytes": {queuearg.Quorum}, "queue-mode": {queuearg.Classic},
	"max-age": {queuearg.Stream}, "stream-max-segment-size-bytes": {queuearg.Stream}, "initial-cluster-size": {queuearg.Stream},
}

// patterns keeps compiled patterns: a policy is compared with every queue.
var patterns = patternCache{compiled: map[string]*regexp.Regexp{}}

type patternCache struct {
	mu       sync.Mutex
	compiled map[string]*regexp.Regexp
}

// of returns nil for a pattern that Go can't parse.
func (c *patternCache) of(pattern string) *regexp.Regexp {
	c.mu.Lock()
	defer c.mu.Unlock()
	re, known := c.compiled[pattern]
	if !known {
		if len(c.compiled) >= 1000 {
			clear(c.compiled)
		}
		re, _ = regexp.Compile(pattern)
		c.compiled[pattern] = re
	}
	return re
}

// policyOf is the one policy that counts for a thing, of users or of operators.
func (s Snapshot) policyOf(operator bool, kind, queueType, name string) *declare.Policy {
	var best *declare.Policy
	for i, p := range s.Policies {
		if p.Operator != operator {
			continue
		}
		if best != nil && p.Priority <= best.Priority || unsupported(p, kind, queueType) != "" {
			continue
		}
		if yes, _ := policyApplies(p, kind, queueType, name); yes {
			best = &s.Policies[i]
		}
	}
	return best
}

// Effective returns the arguments of a queue after applying the policies that match it. For a
// snapshot without policies it returns the queue's own arguments.
func (s Snapshot) Effective(q declare.QueueInfo) map[string]any {
	return s.effective("queue", q.Type, q.Name, q.Arguments)
}

// effective merges policies into arguments as RabbitMQ does, key by key. An operator's policy
// takes precedence over a user's, but of two numbers the smaller one counts.
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
	return merge(queueType, policy, args)
}

// merge merges what policies say, by the arguments' names, into arguments.
func merge(queueType string, policy, args map[string]any) map[string]any {
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

// resolve returns the value that counts, of a policy's and an argument's. Either may be nil.
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
