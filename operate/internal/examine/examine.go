package examine

import (
	"cmp"
	"context"
	"slices"

	"github.com/hopback/hopback/operate/internal/facts"

	"github.com/hopback/hopback/internal/rules"
)

// examined is what Examine knows besides a snapshot.
type examined struct {
	cluster *facts.Cluster
	all     []rules.Snapshot
	here    facts.VHost // the virtual host that is being examined
}

// examineRule is a rule that only Examine runs.
type examineRule struct {
	ID, Examined, Summary, Remedy string

	needs []string
	check func(*examination)
}

// examination is one rule being run by Examine.
type examination struct {
	*rules.Checker
	live *examined
	// passed is the result of passedOn.
	passed map[string]string
}

// Table returns the rules of Verify, and those that only Examine runs.
func Table() []rules.Entry { return (&examined{}).table() }

// table has the rules of Verify, and those that only Examine runs.
func (e *examined) table() []rules.Entry {
	all := slices.Clone(rules.Table)
	for _, r := range examineRules {
		all = append(all, rules.Entry{ID: r.ID, Examined: r.Examined, Summary: r.Summary, Remedy: r.Remedy, Needs: r.needs, Check: func(c *rules.Checker) {
			r.check(&examination{Checker: c, live: e})
		}})
	}
	return all
}

// wanted are those of the table that Examine runs.
func (e *examined) wanted() []rules.Entry {
	return slices.DeleteFunc(e.table(), func(r rules.Entry) bool { return r.Examined == "" })
}

// Examine runs all rules of [ExamineRules] on the virtual hosts of any applications. Unlike
// [rules.Check] it doesn't know what the topology should be, so it reports as an error only what loses
// or blocks messages by itself. Package doctor calls it.
//
// waive disables rules, as for Check. The error is the cause of ctx's end.
func Examine(ctx context.Context, all []rules.Snapshot, cluster facts.Cluster, waive ...string) (rules.Verification, error) {
	if len(all) == 0 {
		all = []rules.Snapshot{{Version: cluster.Version}} // the cluster has rules, too
	}
	v := rules.Verification{Findings: []rules.Finding{}, Skipped: []rules.Skipped{}}
	live := &examined{cluster: &cluster, all: all}
	run := map[string]bool{}
	for i, s := range all {
		live.here = cluster.VHosts[s.VHost]
		var now []rules.Entry
		for _, rule := range live.wanted() {
			if slices.Contains(waive, rule.ID) || ofCluster(rule) && i > 0 {
				continue
			}
			if part, why := live.lacks(s, rule.Needs); why != "" {
				skip(&v, rules.Skipped{Rule: rule.ID, Needs: part, Why: why})
				continue
			}
			run[rule.ID] = true
			now = append(now, rule)
		}
		add(&v, rules.InBoth(ctx, s, now, live.start), waive)
		if ctx.Err() != nil {
			return rules.Verification{}, context.Cause(ctx)
		}
	}
	v.Checked = len(run)
	slices.SortStableFunc(v.Findings, func(a, b rules.Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return v, nil
}

// start begins the check of a virtual host.
func (e *examined) start(r *rules.Routes) *rules.Checker {
	if e.cluster.Unread[facts.Policies] != "" {
		for name, q := range r.Queues {
			q.Args = rules.Merge(q.Type, prefixed(e.here.Queues[name].Policy), q.Arguments)
			r.Queues[name] = q
		}
	}
	return &rules.Checker{Routes: r, Foreign: true}
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
func (e *examined) lacks(s rules.Snapshot, needs []string) (part, why string) {
	if part, why := rules.Lacks(s, needs); why != "" {
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
func skip(v *rules.Verification, s rules.Skipped) {
	if !slices.Contains(v.Skipped, s) {
		v.Skipped = append(v.Skipped, s)
	}
}

// add adds findings that aren't waived. Those about the broker are the same in each virtual host.
func add(v *rules.Verification, found []rules.Finding, waive []string) {
	for _, f := range found {
		if f.Resource.Kind == "broker" || f.Resource.Kind == "node" {
			f.VHost = ""
			if slices.ContainsFunc(v.Findings, func(o rules.Finding) bool { return o.Rule == f.Rule && o.Resource == f.Resource }) {
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
	return slices.Index([]string{rules.SeverityError, rules.SeverityWarning, rules.SeverityNote}, severity)
}

// ofCluster reports whether a rule is about the cluster, and not about a virtual host.
func ofCluster(r rules.Entry) bool { return slices.Contains(r.Needs, facts.Alarms) }
