package audit

import (
	"cmp"
	"slices"

	"github.com/hopback/hopback/declare/audit/internal/facts"
)

// examined is what Examine knows besides a snapshot.
type examined struct {
	cluster *facts.Cluster
	all     []Snapshot
	here    facts.VHost // the virtual host that is being examined
}

// Examine runs all rules of [ExamineRules] on the virtual hosts of any applications. Unlike
// [Check] it doesn't know what the topology should be, so it reports as an error only what loses
// or blocks messages by itself. Package declare/audit/doctor calls it.
//
// waive disables rules, as for Check.
func Examine(all []Snapshot, cluster facts.Cluster, waive ...string) Verification {
	if len(all) == 0 {
		all = []Snapshot{{Version: cluster.Version}} // the cluster has rules, too
	}
	v := Verification{Findings: []Finding{}, Skipped: []Skipped{}}
	live := &examined{cluster: &cluster, all: all}
	run := map[string]bool{}
	for i, s := range all {
		live.here = cluster.VHosts[s.VHost]
		c := &check{routes: newRoutes(s), live: live}
		if cluster.Unread[facts.Policies] != "" {
			for name, q := range c.queues {
				q.args = merge(q.Type, prefixed(live.here.Queues[name].Policy), q.Arguments)
				c.queues[name] = q
			}
		}
		for _, rule := range ExamineRules() {
			if slices.Contains(waive, rule.ID) || ofCluster(rule) && i > 0 {
				continue
			}
			if part, why := live.lacks(s, rule.needs); why != "" {
				v.skip(Skipped{rule.ID, part, why})
				continue
			}
			run[rule.ID] = true
			c.rule, c.found = rule, nil
			rule.check(c)
			v.add(c.found, waive)
		}
	}
	v.Checked = len(run)
	slices.SortStableFunc(v.Findings, func(a, b Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return v
}

// prefixed brings the keys of a policy into the form of arguments.
func prefixed(definition map[string]any) map[string]any {
	args := make(map[string]any, len(definition))
	for k, v := range definition {
		args["x-"+k] = v
	}
	return args
}

// lacks is lacks of a snapshot and of the cluster.
func (e *examined) lacks(s Snapshot, needs []string) (part, why string) {
	if part, why := s.lacks(needs); why != "" {
		return part, why
	}
	for _, part := range needs {
		if why := e.cluster.Unread[part]; why != "" {
			return part, why
		}
	}
	return "", ""
}

// skip notes a rule that isn't run, once.
func (v *Verification) skip(s Skipped) {
	if !slices.Contains(v.Skipped, s) {
		v.Skipped = append(v.Skipped, s)
	}
}

// add adds findings that aren't waived. Those about the broker are the same in each virtual host.
func (v *Verification) add(found []Finding, waive []string) {
	for _, f := range found {
		if f.Resource.Kind == "broker" || f.Resource.Kind == "node" {
			f.VHost = ""
			if slices.ContainsFunc(v.Findings, func(o Finding) bool { return o.Rule == f.Rule && o.Resource == f.Resource }) {
				continue
			}
		}
		if !slices.Contains(waive, f.Rule+" "+f.Resource.String()) {
			v.Findings = append(v.Findings, f)
		}
	}
}

// rank orders severities, the worst first.
func rank(severity string) int {
	return slices.Index([]string{severityError, severityWarning, severityNote}, severity)
}

// ofCluster reports whether a rule is about the cluster, and not about a virtual host.
func ofCluster(r Rule) bool { return slices.Contains(r.needs, facts.Alarms) }
