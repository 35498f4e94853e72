package audit

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
)

// What Rule.Severity may be.
const (
	severityError   = "error"
	severityWarning = "warning"
)

// Finding is a broken [Rule].
type Finding struct {
	// Rule is the ID of the [Rule].
	Rule string `json:"rule"`
	// Severity is that of the Rule.
	Severity string           `json:"severity"`
	Resource declare.Resource `json:"resource"`
	// Argument is the setting at fault, such as "x-message-ttl", for the rule
	// "different"; else it is empty.
	Argument string `json:"argument,omitempty"`
	// Problem and Remedy are a sentence each, without a full stop.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// String is the finding on two lines.
func (f Finding) String() string {
	return fmt.Sprintf("%-7s %s: %s (%s)\n        %s", f.Severity, f.Resource, f.Problem, f.Rule, f.Remedy)
}

// Skipped is a rule that wasn't checked, or only in part.
type Skipped struct {
	Rule string `json:"rule"`
	// Needs is the part that the rule needs. Why says why it couldn't be read.
	Needs string `json:"needs"`
	Why   string `json:"why"`
}

// Verification is the result of [Check]. It prints for people and marshals to
// JSON.
type Verification struct {
	// Findings, the worst first.
	Findings []Finding `json:"findings"`
	// Skipped rules, which might have found more.
	Skipped []Skipped `json:"skipped"`
	// Checked is how many rules were checked.
	Checked int `json:"checked"`
	// Elsewhere are findings at resources that the topology doesn't name. Leftovers are
	// delay queues that it doesn't name, but whose messages return to its queues or come
	// from its exchanges: an earlier version may have declared them, or another team.
	// Only CheckOwn fills both.
	Elsewhere []Finding          `json:"elsewhere,omitempty"`
	Leftovers []declare.Resource `json:"leftovers,omitempty"`
}

// Clean reports whether every rule was checked and nothing was found.
func (v Verification) Clean() bool { return len(v.Findings) == 0 && len(v.Skipped) == 0 }

// Count returns how many findings have this severity.
func (v Verification) Count(severity string) int {
	n := 0
	for _, f := range v.Findings {
		if f.Severity == severity {
			n++
		}
	}
	return n
}

// String returns the verification as text, for people.
func (v Verification) String() string {
	var b strings.Builder
	for _, f := range v.Findings {
		fmt.Fprintln(&b, f)
	}
	for i, skipped := range v.Skipped {
		if slices.ContainsFunc(v.Skipped[:i], func(s Skipped) bool { return s.Why == skipped.Why }) {
			continue // each reason once
		}
		fmt.Fprintf(&b, "not checked: %s\n        %s\n", skippedFor(skipped.Why, v.Skipped), skipped.Why)
	}
	for _, r := range v.Leftovers {
		fmt.Fprintf(&b, "left over: %s isn't in the topology, but delays messages for it\n        if no other team uses it, remove its bindings, and delete it once it is empty\n", r)
	}
	if n := len(v.Elsewhere); n > 0 {
		fmt.Fprintf(&b, "findings at resources outside the topology, not counted: %d\n        verify without a topology lists them\n", n)
	}
	fmt.Fprintf(&b, "%d errors, %d warnings; %d rules checked, %d not.\n", v.Count(severityError), v.Count(severityWarning), v.Checked, len(v.Skipped))
	return b.String()
}

// skippedFor lists the rules that are skipped for one reason, by what they need.
func skippedFor(why string, all []Skipped) string {
	var needs []string
	byNeed := map[string][]string{}
	for _, s := range all {
		if s.Why != why {
			continue
		}
		if byNeed[s.Needs] == nil {
			needs = append(needs, s.Needs)
		}
		byNeed[s.Needs] = append(byNeed[s.Needs], s.Rule)
	}
	var parts []string
	for _, need := range needs {
		parts = append(parts, fmt.Sprintf("%s (needs the %s)", strings.Join(byNeed[need], ", "), need))
	}
	return strings.Join(parts, "; ")
}

// Check checks a snapshot against all [Rules]. In one of the HTTP API it checks the whole
// virtual host, and t may be empty. In one that was read over AMQP alone it checks t's queues
// and bindings; Verification.Skipped lists the rules that need more.
//
// waive names rules to leave out, such as "dead-letter", or a rule for a single
// resource, such as "dead-letter queue \"audit\"", as a finding prints it.
func Check(s Snapshot, t declare.Topology, waive ...string) Verification {
	c := &check{routes: newRoutes(s), diff: Compare(s, t)}
	v := Verification{Findings: []Finding{}, Skipped: []Skipped{}}
	for _, rule := range rules {
		if slices.Contains(waive, rule.ID) {
			continue
		}
		if part, why := s.lacks(rule.needs); why != "" {
			v.Skipped = append(v.Skipped, Skipped{rule.ID, part, why})
			continue
		}
		v.Checked++
		c.rule, c.found = rule, nil
		rule.check(c)
		for _, f := range c.found {
			if !slices.Contains(waive, f.Rule+" "+f.Resource.String()) {
				v.Findings = append(v.Findings, f)
			}
		}
	}
	if why := s.unread(partExchanges); why != "" && len(t.Exchanges) > 0 && !slices.Contains(waive, "missing") {
		v.Skipped = append(v.Skipped, Skipped{"missing", partExchanges, why}, Skipped{"different", partExchanges, why})
	}
	slices.SortStableFunc(v.Findings, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) })
	return v
}

// CheckOwn is [Check] for a team that shares its virtual host with others. Findings are
// those at resources of t; the rest is Elsewhere. It reports the delay queues that are
// left over from an earlier version of t. An empty t is the whole virtual host.
func CheckOwn(s Snapshot, t declare.Topology, waive ...string) Verification {
	v := Check(s, t, waive...)
	own := map[declare.Resource]bool{}
	for _, d := range t.Declarations() {
		own[d.Resource] = true
	}
	if len(own) == 0 {
		return v
	}
	all := v.Findings
	v.Findings = []Finding{}
	for _, f := range all {
		if own[f.Resource] || f.Resource.Kind == "broker" {
			v.Findings = append(v.Findings, f)
		} else {
			v.Elsewhere = append(v.Elsewhere, f)
		}
	}
	v.Leftovers = leftovers(newRoutes(s), own)
	return v
}

// leftovers are delay queues outside a topology that an exchange of it leads to, or that
// lead to a queue of it. own has the topology's resources.
func leftovers(r *routes, own map[declare.Resource]bool) []declare.Resource {
	var left []declare.Resource
	for _, q := range r.sorted() {
		if own[queueResource(q.Name)] || !q.delays() || q.passing() {
			continue
		}
		fed := slices.ContainsFunc(r.s.Bindings, func(b declare.Binding) bool { return b.Queue == q.Name && own[exchangeResource(b.Source)] })
		for to := range r.deadFrom(q, "expired") {
			fed = fed || own[queueResource(to)] && !r.queues[to].hasTTL()
		}
		if fed {
			left = append(left, queueResource(q.Name))
		}
	}
	return left
}

// lacks is the first part that a rule needs and the snapshot doesn't have, and why;
// "" for none.
func (s Snapshot) lacks(needs []string) (part, why string) {
	for _, p := range needs {
		if why := s.unread(p); why != "" {
			return p, why
		}
	}
	return "", ""
}

// check is one rule being checked.
type check struct {
	*routes
	diff  Diff
	rule  Rule
	found []Finding
}

// report takes the rule's severity and remedy.
func (c *check) report(t declare.Resource, problem string, args ...any) {
	c.found = append(c.found, Finding{Rule: c.rule.ID, Severity: c.rule.Severity, Resource: t, Problem: fmt.Sprintf(problem, args...), Remedy: c.rule.Remedy})
}

func (c *check) queue(q liveQueue, problem string, args ...any) {
	c.report(queueResource(q.Name), problem, args...)
}
