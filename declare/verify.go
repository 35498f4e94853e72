package declare

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// Severity is how bad a finding is.
type Severity string

const (
	// SeverityError: messages are or will be lost, or stuck.
	SeverityError Severity = "error"
	// SeverityWarning: messages will be lost or stuck when something else fails,
	// too.
	SeverityWarning Severity = "warning"
)

// Finding is something that [Verify] doesn't like.
type Finding struct {
	// Rule is the ID of the [Rule].
	Rule     string   `json:"rule"`
	Severity Severity `json:"severity"`
	Thing    Thing    `json:"thing"`
	// Problem and Remedy are a sentence each, without a full stop.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// String is the finding on two lines.
func (f Finding) String() string {
	return fmt.Sprintf("%-7s %s: %s (%s)\n        %s", f.Severity, f.Thing, f.Problem, f.Rule, f.Remedy)
}

// Skipped is a rule that couldn't be checked, or not wholly, and why.
type Skipped struct {
	Rule string `json:"rule"`
	Why  string `json:"why"`
}

// Verification is what [Verify] found. It prints for people and marshals to JSON.
type Verification struct {
	// Findings, the worst first.
	Findings []Finding `json:"findings"`
	// Skipped rules, which might have found more.
	Skipped []Skipped `json:"skipped"`
	// Checked is how many rules were checked.
	Checked int `json:"checked"`
}

// Clean reports whether every rule was checked, and none found anything.
func (v Verification) Clean() bool { return len(v.Findings) == 0 && len(v.Skipped) == 0 }

// Count is how many findings have the severity.
func (v Verification) Count(s Severity) int {
	n := 0
	for _, f := range v.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// String is the verification for people.
func (v Verification) String() string {
	var b strings.Builder
	for _, f := range v.Findings {
		fmt.Fprintln(&b, f)
	}
	byWhy := map[string][]string{}
	for _, s := range v.Skipped {
		byWhy[s.Why] = append(byWhy[s.Why], s.Rule)
	}
	whys := make([]string, 0, len(byWhy))
	for why := range byWhy {
		whys = append(whys, why)
	}
	slices.Sort(whys)
	for _, why := range whys {
		fmt.Fprintf(&b, "not checked: %s\n        %s\n", strings.Join(byWhy[why], ", "), why)
	}
	fmt.Fprintf(&b, "%d errors, %d warnings; %d rules checked, %d not.\n", v.Count(SeverityError), v.Count(SeverityWarning), v.Checked, len(v.Skipped))
	return b.String()
}

// Verify reads what is live and checks it against every one of [Rules]: those of
// one queue, those of the ways that dead letters take, and that all of t is there
// as it should be. t may be empty where the HTTP API can be read, which tells of
// everything in the virtual host; over AMQP alone only t's queues and bindings
// are looked at, and the rules that need more are in Verification.Skipped.
//
// waive names rules that aren't checked, such as "dead-letter", or a rule at a
// single thing, such as "dead-letter queue \"audit\"", as it is printed.
func Verify(ctx context.Context, src Sources, t Topology, waive ...string) (Verification, error) {
	if err := t.Validate(); err != nil {
		return Verification{}, err
	}
	s, err := Read(ctx, src, t)
	if err != nil {
		return Verification{}, err
	}
	return Check(s, t, waive...), nil
}

// Check is [Verify] over what was read before, or over what isn't live: the
// snapshot of a topology or of definitions.
func Check(s Snapshot, t Topology, waive ...string) Verification {
	c := &check{routes: newRoutes(s), diff: Compare(s, t)}
	v := Verification{Findings: []Finding{}, Skipped: []Skipped{}}
	for _, rule := range rules {
		if slices.Contains(waive, rule.ID) {
			continue
		}
		if why := s.lacks(rule.needs); why != "" {
			v.Skipped = append(v.Skipped, Skipped{rule.ID, why})
			continue
		}
		v.Checked++
		c.rule, c.found = rule, nil
		rule.check(c)
		for _, f := range c.found {
			if !slices.Contains(waive, f.Rule+" "+f.Thing.String()) {
				v.Findings = append(v.Findings, f)
			}
		}
	}
	if why := s.blind(PartExchanges); why != "" && len(t.Exchanges) > 0 && !slices.Contains(waive, "missing") {
		v.Skipped = append(v.Skipped, Skipped{"missing", "exchanges can't be told " + why}, Skipped{"different", "exchanges can't be told " + why})
	}
	slices.SortStableFunc(v.Findings, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) })
	return v
}

// lacks says why a rule can't be checked, or "".
func (s Snapshot) lacks(needs []Part) string {
	for _, p := range needs {
		if why := s.blind(p); why != "" {
			return fmt.Sprintf("it needs the %s, which can't be told: %s", p, why)
		}
	}
	return ""
}

// check is one rule being checked.
type check struct {
	*routes
	diff  Diff
	rule  Rule
	found []Finding
}

// report takes the rule's severity and remedy.
func (c *check) report(t Thing, problem string, args ...any) {
	c.found = append(c.found, Finding{c.rule.ID, c.rule.Severity, t, fmt.Sprintf(problem, args...), c.rule.Remedy})
}

func (c *check) queue(q liveQueue, problem string, args ...any) {
	c.report(Thing{KindQueue, q.Name}, problem, args...)
}
