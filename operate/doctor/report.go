package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/internal/examine"
	"github.com/hopback/hopback/operate/internal/facts"
)

// newReport runs the rules and the recognizer.
func newReport(ctx context.Context, all []check.Snapshot, cluster facts.Cluster, opts Options) (Report, error) {
	r := Report{Time: cluster.Now, Version: cluster.Version, VHosts: len(all), Groups: []Group{}, Frameworks: []Framework{}, Unseen: []Unseen{}}
	for _, n := range cluster.Nodes {
		r.Nodes = append(r.Nodes, n.Name)
	}
	for _, s := range all {
		r.Queues += len(s.Queues)
		r.Exchanges += len(s.Exchanges)
		r.Bindings += len(s.Bindings)
		r.Policies += len(s.Policies)
		for _, q := range s.Queues {
			r.Messages += q.Messages + q.MessagesUnacknowledged
		}
		r.Frameworks = append(r.Frameworks, recognize(s)...)
	}
	v, err := examine.Examine(ctx, all, cluster, opts.Waive...)
	if err != nil {
		return Report{}, err
	}
	r.Checked = v.Checked
	r.group(v.Findings)
	for _, s := range v.Skipped {
		r.unseen(s.Needs, s.Why, s.Rule)
	}
	if why := cluster.Unread[facts.Policies]; why != "" {
		r.unseen(facts.Policies, why+"; what applies to queues is known all the same", "")
	}
	return r, nil
}

// group sorts findings, which are sorted by severity, into groups by rule. Within a severity, the
// order is that of the rules.
func (r *Report) group(findings []check.Finding) {
	rules := map[string]audit.Rule{}
	for _, rule := range Rules() {
		rules[rule.ID] = rule
	}
	type key struct{ severity, rule string }
	at := map[key]int{}
	for _, f := range findings {
		k := key{f.Severity, f.Rule}
		i, known := at[k]
		if !known {
			i = len(r.Groups)
			at[k] = i
			r.Groups = append(r.Groups, Group{Rule: rules[f.Rule], Severity: f.Severity})
		}
		g := &r.Groups[i]
		if g.Count++; g.Count <= maxPlaces {
			g.Findings = append(g.Findings, f)
		}
	}
}

func (r *Report) unseen(part, why, rule string) {
	i := slices.IndexFunc(r.Unseen, func(u Unseen) bool { return u.Part == part && u.Why == why })
	if i < 0 {
		i = len(r.Unseen)
		r.Unseen = append(r.Unseen, Unseen{Part: part, Why: why, Rules: []string{}})
	}
	if rule != "" && !slices.Contains(r.Unseen[i].Rules, rule) {
		r.Unseen[i].Rules = append(r.Unseen[i].Rules, rule)
	}
}

// Count returns how many places have this severity: "error", "warning", or "note".
func (r Report) Count(severity string) (n int) {
	for _, g := range r.Groups {
		if g.Severity == severity {
			n += g.Count
		}
	}
	return n
}

// shownPlaces is how many places of a group the text shows.
const shownPlaces = 5

// String returns the report as text: the worst first.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", r.headline())
	for _, f := range r.Frameworks {
		fmt.Fprintf(&b, "\nrecognized: %s\n", clean(frameworkLine(f)))
		write(&b, "  ", clean(f.Because)+".")
		if f.Cure != "" {
			write(&b, "  ", clean(f.Cure))
		}
		if f.Central {
			write(&b, "  ", centralOffer)
		}
	}
	for _, g := range r.Groups {
		g.write(&b)
	}
	for _, u := range r.Unseen {
		fmt.Fprintf(&b, "\nnot seen: %s\n", clean(u.Part))
		write(&b, "  ", clean(u.Why)+".")
		if len(u.Rules) > 0 {
			write(&b, "  ", "Not checked: "+strings.Join(u.Rules, ", ")+".")
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.total())
	return b.String()
}

// centralOffer is what hopback can do for workers that reject.
const centralOffer = "Delayed retries without changing the workers: hopback retry run, see docs/central-retrier.md."

func frameworkLine(f Framework) string {
	line := f.Name
	if f.Variant != "" {
		line += ", " + f.Variant
	}
	if !f.Certain {
		line += ", probably"
	}
	return fmt.Sprintf("%s: %s and %s of the virtual host %.80q", line, count(len(f.Queues), "queue"), count(len(f.Exchanges), "exchange"), f.VHost)
}

// headline says what was examined.
func (r Report) headline() string {
	what := "RabbitMQ"
	if r.Version != "" {
		what += " " + r.Version
	}
	what += ", " + r.Source
	if len(r.Nodes) > 0 {
		what += ", " + count(len(r.Nodes), "node")
	}
	return clean(fmt.Sprintf("%s: %s, %s, %s, %s, %s", what, count(r.VHosts, "virtual host"), count(r.Queues, "queue"),
		count(r.Exchanges, "exchange"), count(r.Bindings, "binding"), count(r.Policies, "policy")))
}

// total is the last line.
func (r Report) total() string {
	missed := map[string]bool{}
	for _, u := range r.Unseen {
		for _, rule := range u.Rules {
			missed[rule] = true
		}
	}
	return fmt.Sprintf("%s, %s, %s; %s checked, %d skipped or only partly checked.", count(r.Count("error"), "error"), count(r.Count("warning"), "warning"),
		count(r.Count("note"), "note"), count(r.Checked, "rule"), len(missed))
}

func (g Group) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n%-8s %s: %s\n", g.Severity, g.Rule.ID, count(g.Count, "place"))
	for i, f := range g.Findings {
		if i == shownPlaces {
			fmt.Fprintf(b, "  … and %d more\n", g.Count-i)
			break
		}
		write(b, "  ", clean(place(f)))
		if len(f.Path) > 0 {
			fmt.Fprintf(b, "      %s\n", clean(drawn(f.Path)))
		}
	}
	x := g.Rule.Explanation
	if x.Happens != "" {
		write(b, "    ", "What happens: "+x.Happens)
	}
	write(b, "    ", "Fix: "+g.Rule.Remedy+".")
	for line := range strings.Lines(x.Fix) {
		fmt.Fprintf(b, "      %s\n", strings.TrimSuffix(line, "\n"))
	}
	if x.Docs != "" {
		fmt.Fprintf(b, "    %s\n", x.Docs)
	}
}

// place is a finding in one sentence.
func place(f check.Finding) string {
	in := ""
	if f.VHost != "" && f.VHost != "/" {
		in = fmt.Sprintf(" in %.80q", f.VHost)
	}
	return fmt.Sprintf("%s%s: %s.", f.Resource, in, f.Problem)
}

// drawn draws the path of a message: a place, what happens there, and the next place.
func drawn(path []string) string {
	var b strings.Builder
	for i, step := range path {
		switch {
		case i%2 == 0:
			b.WriteString(step)
		case step == "":
			b.WriteString(" ──▶ ")
		default:
			b.WriteString(" ──" + step + "──▶ ")
		}
	}
	return b.String()
}

// width is how long lines are.
const width = 100

// write writes a paragraph, broken between words. Further lines are indented by two more.
func write(b *strings.Builder, indent, text string) {
	line := indent
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
			line += word
		case len(line)+1+len(word) > width:
			fmt.Fprintf(b, "%s\n", line)
			line = indent + "  " + word
		default:
			line += " " + word
		}
	}
	fmt.Fprintf(b, "%s\n", line)
}

// clean replaces what a terminal would obey. Names are quoted before; this is for what others
// wrote: versions, nodes, and errors.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if r == ' ' || unicode.IsPrint(r) {
			return r
		}
		return '�'
	}, strings.ToValidUTF8(text, "�"))
}

// count is a number of things.
func count(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "y"):
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(what, "y"))
	}
	return fmt.Sprintf("%d %ss", n, what)
}
