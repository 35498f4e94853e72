package audit

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/values"
)

// What Rule.Severity may be.
const (
	severityError   = "error"
	severityWarning = "warning"
	// severityNote is for rules of Examine only.
	severityNote = "note"
)

// Finding is a violation of a [Rule].
type Finding struct {
	// Rule is the ID of the [Rule].
	Rule string `json:"rule"`
	// Severity is that of the Rule.
	Severity string           `json:"severity"`
	Resource declare.Resource `json:"resource"`
	// VHost is the virtual host. Only [Examine] sets it; it is empty for the whole cluster.
	VHost string `json:"vhost,omitempty"`
	// Path is the path that a message takes, where the rule is about one: a place, what happens
	// there, the next place, and so on. Only [Examine] sets it.
	Path []string `json:"path,omitempty"`
	// Argument is the setting at fault, such as "x-message-ttl", for the rule "different".
	// Otherwise it is empty.
	Argument string `json:"argument,omitempty"`
	// Problem is what is wrong, and Remedy how to fix it. Each is a sentence without a full stop.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// String returns the finding on two lines.
func (f Finding) String() string {
	return fmt.Sprintf("%-7s %s: %s (%s)\n        %s", f.Severity, f.Resource, f.Problem, f.Rule, f.Remedy)
}

// Skipped is a rule that [Check] didn't run, or only in part.
type Skipped struct {
	Rule string `json:"rule"`
	// Needs is the part of the snapshot that the rule needs, and Why the reason that it couldn't
	// be read.
	Needs string `json:"needs"`
	Why   string `json:"why"`
}

// Verification is the result of [Check]. It prints as text and marshals to JSON.
type Verification struct {
	// Findings lists the violations, the worst first.
	Findings []Finding `json:"findings"`
	// Skipped lists the rules that weren't run, which might have found more.
	Skipped []Skipped `json:"skipped"`
	// Checked is how many rules were run.
	Checked int `json:"checked"`
	// Elsewhere lists findings at resources outside the topology. Leftovers lists delay queues
	// outside the topology whose messages return to its queues or come from its exchanges: an
	// earlier version may have declared them, or another team. Only [CheckOwn] fills both.
	Elsewhere []Finding          `json:"elsewhere,omitempty"`
	Leftovers []declare.Resource `json:"leftovers,omitempty"`
}

// Clean reports whether every rule was run and found nothing.
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

// String returns the verification as text.
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
		fmt.Fprintf(&b, "findings outside the topology, not counted: %d\n        verify without a topology lists them\n", n)
	}
	fmt.Fprintf(&b, "%s, %s; %s checked, %d skipped.\n", values.Count(v.Count(severityError), "error"), values.Count(v.Count(severityWarning), "warning"), values.Count(v.Checked, "rule"), len(v.Skipped))
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

// Check runs all [Rules] on a snapshot. If the snapshot was read from the HTTP API, it checks the
// whole virtual host, and t may be empty. If it was read over AMQP alone, it checks t's queues
// and bindings, and [Verification.Skipped] lists the rules that need more.
//
// waive disables rules: a rule's ID, such as "dead-letter", or a rule for a single resource as a
// finding prints it, such as "dead-letter queue \"audit\"".
func Check(s Snapshot, t declare.Topology, waive ...string) Verification {
	c := &check{routes: newRoutes(s), diff: Compare(s, t), wanted: t}
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
	slices.SortStableFunc(v.Findings, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // error, warning
	return v
}

// CheckOwn is [Check] for a team that shares its virtual host with others. Findings contains only
// violations at resources of t; the others are in Elsewhere. It also reports delay queues that an
// earlier version of t left behind. An empty t means the whole virtual host.
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

// leftovers are delay queues outside a topology that are bound to an exchange of it, or that
// return to a queue of it. own has the topology's resources.
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

// lacks returns the first part that a rule needs and the snapshot doesn't have, and why; "" for
// none.
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
	diff Diff
	// wanted is the topology that the snapshot is compared with.
	wanted declare.Topology
	rule   Rule
	found  []Finding
	// live is set by Examine. The queues then belong to any application.
	live *examined
	// passed is the result of passedOn.
	passed map[string]string
}

// foreign reports whether the queues belong to any application, so that nobody can say what the
// topology should be.
func (c *check) foreign() bool { return c.live != nil }

// report adds a finding with the rule's severity and remedy.
func (c *check) report(t declare.Resource, problem string, args ...any) {
	f := Finding{Rule: c.rule.ID, Severity: c.rule.Severity, Resource: t, Problem: fmt.Sprintf(problem, args...), Remedy: c.rule.Remedy}
	if c.foreign() {
		f.Severity, f.VHost = c.rule.Examined, c.s.VHost
	}
	c.found = append(c.found, f)
}

// as changes the severity of the last finding. Check ignores it.
func (c *check) as(severity string) {
	if c.foreign() {
		c.found[len(c.found)-1].Severity = severity
	}
}

// path adds the path of a message to the last finding.
func (c *check) path(steps ...string) {
	if c.foreign() {
		c.found[len(c.found)-1].Path = steps
	}
}

func (c *check) queue(q liveQueue, problem string, args ...any) {
	c.report(queueResource(q.Name), problem, args...)
}
