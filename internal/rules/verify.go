package rules

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/values"
)

// What Rule.Severity may be.
const (
	SeverityError   = "error"
	SeverityWarning = "warning"
	// SeverityNote is for rules of Examine only.
	SeverityNote = "note"
)

// Finding is a violation of a [Rule].
type Finding struct {
	// Rule is the ID of the [Rule].
	Rule string `json:"rule"`
	// Severity is that of the Rule.
	Severity string           `json:"severity"`
	Resource declare.Resource `json:"resource"`
	// VHost is the virtual host. Only package doctor sets it; it is empty for the whole cluster.
	VHost string `json:"vhost,omitempty"`
	// Path is the path that a message takes, where the rule is about one: a place, what happens
	// there, the next place, and so on. Only package doctor sets it.
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
	fmt.Fprintf(&b, "%s, %s; %s checked, %d skipped.\n", values.Count(v.Count(SeverityError), "error"), values.Count(v.Count(SeverityWarning), "warning"), values.Count(v.Checked, "rule"), len(v.Skipped))
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

// Check runs all rules on a snapshot. If the snapshot was read from the HTTP API, it checks the
// whole virtual host, and t may be empty. If it was read over AMQP alone, it checks t's queues
// and bindings, and [Verification.Skipped] lists the rules that need more.
//
// waive disables rules: a rule's ID, such as "dead-letter", or a rule for a single resource as a
// finding prints it, such as "dead-letter queue \"audit\"".
func Check(s Snapshot, t declare.Topology, waive ...string) Verification {
	v := Verification{Findings: []Finding{}, Skipped: []Skipped{}}
	var run []Entry
	for _, rule := range Table {
		if slices.Contains(waive, rule.ID) {
			continue
		}
		if part, why := Lacks(s, rule.Needs); why != "" {
			v.Skipped = append(v.Skipped, Skipped{rule.ID, part, why})
			continue
		}
		run = append(run, rule)
	}
	v.Checked = len(run)
	diff := Compare(s, t)
	for _, f := range InBoth(context.Background(), s, run, func(r *Routes) *Checker { return &Checker{Routes: r, diff: diff, wanted: t} }) {
		if !slices.Contains(waive, f.Rule+" "+f.Resource.String()) {
			v.Findings = append(v.Findings, f)
		}
	}
	if why := s.unread(PartExchanges); why != "" && len(t.Exchanges) > 0 && !slices.Contains(waive, "missing") {
		v.Skipped = append(v.Skipped, Skipped{"missing", PartExchanges, why}, Skipped{"different", PartExchanges, why})
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
	v.Leftovers = leftovers(NewRoutes(context.Background(), s), own)
	return v
}

// leftovers are delay queues outside a topology that are bound to an exchange of it, or that
// return to a queue of it. own has the topology's resources.
func leftovers(r *Routes, own map[declare.Resource]bool) []declare.Resource {
	var left []declare.Resource
	for _, q := range r.Sorted() {
		if own[QueueResource(q.Name)] || !q.Delays() || q.Passing() {
			continue
		}
		fed := slices.ContainsFunc(r.Snapshot.Bindings, func(b declare.Binding) bool { return b.Queue == q.Name && own[ExchangeResource(b.Source)] })
		for to := range r.deadFrom(q, "expired") {
			fed = fed || own[QueueResource(to)] && !r.Queues[to].HasTTL()
		}
		if fed {
			left = append(left, QueueResource(q.Name))
		}
	}
	return left
}

// Lacks returns the first part that a rule needs and the snapshot doesn't have, and why; "" for
// none.
func Lacks(s Snapshot, needs []string) (part, why string) {
	for _, p := range needs {
		if why := s.unread(p); why != "" {
			return p, why
		}
	}
	return "", ""
}

// Checker is one rule being checked.
type Checker struct {
	*Routes
	diff Diff
	// wanted is the topology that the snapshot is compared with.
	wanted declare.Topology
	rule   Entry
	found  []Finding
	// Foreign reports that the queues belong to any application, so that nobody can say what the
	// topology should be. Examine sets it.
	Foreign bool
}

// InBoth runs rules on a snapshot. If some policies can't be decided, it does so twice, with and
// without these. A finding that depends on them says so. Once ctx has ended, what it returns isn't
// complete.
func InBoth(ctx context.Context, s Snapshot, run []Entry, start func(*Routes) *Checker) []Finding {
	find := func(s Snapshot) (found []Finding, doubts []doubt) {
		c := start(NewRoutes(ctx, s))
		for _, rule := range run {
			if c.Stopped() {
				break
			}
			c.rule, c.found = rule, nil
			rule.Check(c)
			found = append(found, c.found...)
		}
		return found, c.doubts
	}
	found, doubts := find(s)
	if len(doubts) == 0 {
		return found
	}
	s.doubted = true
	var all []Finding
	type key struct{ rule, severity, kind, name, problem string }
	keyOf := func(f Finding) key { return key{f.Rule, f.Severity, f.Resource.Kind, f.Resource.Name, f.Problem} }
	with := map[key]bool{}
	other, _ := find(s)
	for _, f := range other {
		with[keyOf(f)] = true
	}
	names := make([]string, len(doubts))
	for i, d := range doubts {
		names[i] = d.policy.Name
	}
	which := "the policy " + Listed(names, 3) + " applies"
	if len(names) > 1 {
		which = "one of the policies " + Listed(names, 3) + " applies"
	}
	without := map[key]bool{}
	for _, f := range found {
		without[keyOf(f)] = true
		if !with[keyOf(f)] && f.Rule != rulePolicyPattern {
			f.Problem += ", unless " + which
		}
		all = append(all, f)
	}
	for _, f := range other {
		if !without[keyOf(f)] && f.Rule != rulePolicyPattern {
			f.Problem += ", if " + which
			all = append(all, f)
		}
	}
	return all
}

// Sorted and sortedExchanges shadow those of routes: they end early once the time is up.
func (c *Checker) Sorted() iter.Seq2[int, Queue] { return untilStopped(c, c.Routes.Sorted()) }

func (c *Checker) SortedExchanges() iter.Seq2[int, Exchange] {
	return untilStopped(c, c.Routes.SortedExchanges())
}

func untilStopped[T any](c *Checker, list []T) iter.Seq2[int, T] {
	return func(yield func(int, T) bool) {
		for i, one := range list {
			if c.Stopped() || !yield(i, one) {
				return
			}
		}
	}
}

// Report adds a finding with the rule's severity and remedy.
func (c *Checker) Report(t declare.Resource, problem string, args ...any) {
	f := Finding{Rule: c.rule.ID, Severity: c.rule.Severity, Resource: t, Problem: fmt.Sprintf(problem, args...), Remedy: c.rule.Remedy}
	if c.Foreign {
		f.Severity, f.VHost = c.rule.Examined, c.Snapshot.VHost
	}
	c.found = append(c.found, f)
}

// As changes the severity of the last finding. Check ignores it.
func (c *Checker) As(severity string) {
	if c.Foreign {
		c.found[len(c.found)-1].Severity = severity
	}
}

// Path adds the path of a message to the last finding.
func (c *Checker) Path(steps ...string) {
	if c.Foreign {
		c.found[len(c.found)-1].Path = steps
	}
}

func (c *Checker) ReportQueue(q Queue, problem string, args ...any) {
	c.Report(QueueResource(q.Name), problem, args...)
}
