package rules

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/rules/pattern"
)

func ComparePolicies(a, b declare.Policy) int {
	return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name), strings.Compare(a.Pattern, b.Pattern))
}

// Applies reports whether a policy applies to a resource, as far as its pattern and apply-to say.
// known is false if the pattern can't be evaluated here, and the broker didn't say what applies.
func Applies(s Snapshot, p *declare.Policy, kind, queueType, name string) (yes, known bool) {
	switch p.ApplyTo {
	case "", "all":
		yes = true
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
	if !yes {
		return false, true
	}
	compiled := s.compiled[p]
	if compiled == nil {
		compiled = patterns.of(p.Pattern)
	}
	if yes, known = compiled.Match(name); known {
		return yes, true
	}
	by, known := s.governed[declare.Resource{Kind: kind, Name: name}]
	if p.Operator {
		return by.operator == p.Name, known
	}
	return by.user == p.Name, known
}

// governors are the policies that apply to a resource according to the broker, by name. Counts of
// queues, and so this, are some seconds old.
type governors struct{ user, operator string }

// DefaultQueueType returns the type of queues that don't say theirs, or "" if it isn't known.
func DefaultQueueType(s Snapshot) string { return s.fallback }

func SetDefaultQueueType(s *Snapshot, t string) { s.fallback = t }

// govern notes which policies apply to a resource according to the broker.
func (s *Snapshot) govern(t declare.Resource, by governors) {
	if s.governed == nil {
		s.governed = map[declare.Resource]governors{}
	}
	s.governed[t] = by
}

// Unsupported is a key of a policy that a queue's type doesn't have, or "". Such a policy doesn't
// apply to the queue at all, and the next one does:
// TestAPolicyWithAnUnsupportedKeyDoesNotApply pins it.
func Unsupported(p declare.Policy, kind, queueType string) string {
	if kind != "queue" {
		return ""
	}
	first := ""
	for key := range p.Definition {
		if types, limited := typesOfKey[key]; limited && !slices.Contains(types, queueType) && (first == "" || key < first) {
			first = key
		}
	}
	return first
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
var patterns = patternCache{compiled: map[string]*pattern.Pattern{}}

// maxPatterns bounds the cache.
const maxPatterns = 20_000

type patternCache struct {
	mu       sync.Mutex
	compiled map[string]*pattern.Pattern
}

func (c *patternCache) of(text string) *pattern.Pattern {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.compiled[text]
	if p == nil {
		if len(c.compiled) >= maxPatterns {
			clear(c.compiled)
		}
		p = pattern.Compile(text)
		c.compiled[text] = p
	}
	return p
}

// PolicyOf is the one policy that counts for a thing, of users or of operators. A policy that
// can't be decided counts if s.doubted is set.
func PolicyOf(s Snapshot, operator bool, kind, queueType, name string) *declare.Policy {
	sure, possible := s.policiesOf(operator, kind, queueType, name)
	if s.doubted {
		return possible
	}
	return sure
}

// policiesOf are the policies that count if none applies of those that can't be decided, and if all
// of these do.
func (s Snapshot) policiesOf(operator bool, kind, queueType, name string) (sure, possible *declare.Policy) {
	for i := range s.Policies {
		p := &s.Policies[i]
		// What counts for sure is possible.
		if p.Operator != operator || sure != nil && p.Priority <= sure.Priority {
			continue
		}
		yes, known := Applies(s, p, kind, queueType, name)
		if !yes && known || Unsupported(*p, kind, queueType) != "" {
			continue
		}
		if yes {
			sure = p
		}
		if possible == nil || p.Priority > possible.Priority {
			possible = p
		}
	}
	return sure, possible
}

// doubt is a policy that counts for a resource, or doesn't: nobody can tell.
type doubt struct {
	policy *declare.Policy
	over   []declare.Resource
}

// doubtful notes a resource whose effective policy isn't known.
func (r *Routes) doubtful(t declare.Resource, queueType string) {
	for _, operator := range []bool{false, true} {
		sure, possible := r.Snapshot.policiesOf(operator, t.Kind, queueType, t.Name)
		if sure == possible {
			continue
		}
		i := slices.IndexFunc(r.doubts, func(d doubt) bool { return d.policy == possible })
		if i < 0 {
			i = len(r.doubts)
			r.doubts = append(r.doubts, doubt{policy: possible})
		}
		r.doubts[i].over = append(r.doubts[i].over, t)
	}
}

// compile prepares the patterns of policies: each is compared with all queues and exchanges.
func (s *Snapshot) compile() (exact bool) {
	exact = true
	s.compiled = make(map[*declare.Policy]*pattern.Pattern, len(s.Policies))
	for i := range s.Policies {
		p := patterns.of(s.Policies[i].Pattern)
		s.compiled[&s.Policies[i]] = p
		exact = exact && p.Exact()
	}
	return exact
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
	user := PolicyOf(s, false, kind, queueType, name)
	operator := PolicyOf(s, true, kind, queueType, name)
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
	return Merge(queueType, policy, args)
}

// Merge merges what policies say, by the arguments' names, into arguments.
func Merge(queueType string, policy, args map[string]any) map[string]any {
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
