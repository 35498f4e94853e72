package audit

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
)

func comparePolicies(a, b declare.Policy) int {
	return cmp.Or(cmp.Compare(a.VHost, b.VHost), cmp.Compare(a.Name, b.Name), strings.Compare(a.Pattern, b.Pattern))
}

// applies says whether p is for a thing. Patterns are Perl's, of which Go's are a
// part; one that Go can't read is taken to match nothing, and ok is false.
func policyApplies(p declare.Policy, kind declare.Kind, queueType, name string) (yes, ok bool) {
	switch p.ApplyTo {
	case "", "all":
	case "queues":
		yes = kind == declare.KindQueue
	case "classic_queues":
		yes = kind == declare.KindQueue && queueType == queuearg.Classic
	case "quorum_queues":
		yes = kind == declare.KindQueue && queueType == queuearg.Quorum
	case "streams":
		yes = kind == declare.KindQueue && queueType == queuearg.Stream
	case "exchanges":
		yes = kind == declare.KindExchange
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
func (s Snapshot) policyOf(operator bool, kind declare.Kind, queueType, name string) *declare.Policy {
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
	return s.effective(declare.KindQueue, q.Type, q.Name, q.Arguments)
}

// effective merges policies into arguments as RabbitMQ does: of two numbers the
// smaller one counts, of other values the argument's, and an operator's policy
// goes over a user's.
func (s Snapshot) effective(kind declare.Kind, queueType, name string, args map[string]any) map[string]any {
	user := s.policyOf(false, kind, queueType, name)
	operator := s.policyOf(true, kind, queueType, name)
	if user == nil && operator == nil {
		return args
	}
	merged := map[string]any{}
	prefix := "x-"
	if kind == declare.KindExchange {
		prefix = ""
	}
	put := func(p *declare.Policy, wins bool) {
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
