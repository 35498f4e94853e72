// Package doctor audits any RabbitMQ, regardless of its clients. It reads a management HTTP API or a
// definitions file, and reports what loses messages, blocks them, sends them in circles, or lets
// them pile up.
//
//	api, err := httpapi.New("http://user:password@localhost:15672", "/", httpapi.Config{})
//	report, err := doctor.From(ctx, api, doctor.Options{})
//	fmt.Print(report)
//
// Data flows in one direction, and every step can be tested without the one before:
//
//	HTTP API ──▶ examine.ReadAll ──▶ snapshots, facts ──▶ examine.Examine ──▶ findings ──▶ Report ──▶ text, JSON, HTML
//	definitions ──▶ audit.ParseDefinitions ──▶ snapshots ─┘      └──▶ frameworks.Recognize ──┘
//
// The rules are those of [check.Verify], and more: see [audit.ExamineRules]. Verify knows what the
// topology should be. The doctor doesn't, so here a rule is an error only if messages are lost or
// stuck without another failure.
//
// The doctor only reads: it sends GET requests, some twenty of them, and one for every 500 queues
// and every 500 exchanges. What it couldn't see is in [Report.Unseen].
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/internal/examine"
	"github.com/hopback/hopback/operate/internal/facts"
	"github.com/hopback/hopback/operate/internal/utf8text"
)

// Options limits an examination. The zero value examines everything that the user sees.
type Options struct {
	// VHost is the virtual host to examine. Default: all that the user or the file shows.
	VHost string
	// Waive disables rules: a rule's ID, or a rule for a single resource as a finding prints it,
	// such as "expires queue \"audit\"".
	Waive []string
}

// Report is the result of an examination. It prints as text and marshals to JSON.
type Report struct {
	// Source is what was examined.
	Source string    `json:"source"`
	Time   time.Time `json:"time"`
	// Version is the broker's, and Nodes are the cluster's. Both are empty if unknown.
	Version string   `json:"version,omitempty"`
	Nodes   []string `json:"nodes,omitempty"`
	// How much was examined. Messages are ready or unacknowledged.
	VHosts    int    `json:"vhosts"`
	Queues    int    `json:"queues"`
	Exchanges int    `json:"exchanges"`
	Bindings  int    `json:"bindings"`
	Policies  int    `json:"policies"`
	Messages  uint64 `json:"messages"`
	// Requests is how many HTTP requests it took.
	Requests int64 `json:"requests"`
	// Checked is how many rules were run.
	Checked int `json:"checked"`
	// Groups are the findings, by rule, the worst first.
	Groups []Group `json:"findings"`
	// Frameworks are the libraries and systems whose topologies were recognized.
	Frameworks []Framework `json:"frameworks"`
	// Unseen is what couldn't be read. The rules that need it might have found more.
	Unseen []Unseen `json:"unseen"`
}

// Group is what one rule found.
type Group struct {
	Rule audit.Rule `json:"rule"`
	// Severity is "error" if messages are lost or stuck, or will be; "warning" if that happens
	// once something else fails as well; "note" if nothing is lost by it.
	Severity string `json:"severity"`
	// Count is how many places the rule found, and Findings are the first 1,000 of them.
	Count    int             `json:"count"`
	Findings []check.Finding `json:"places"`
}

// Unseen is a part that couldn't be read.
type Unseen struct {
	Part string `json:"part"`
	Why  string `json:"why"`
	// Rules are those that weren't run, or not everywhere. If there are none, the report assumes
	// what Why says.
	Rules []string `json:"rules"`
}

// maxPlaces bounds a Group.
const maxPlaces = 1000

// maxDefinitions bounds a definitions file.
const maxDefinitions = 256 << 20

// Rules returns the rules that an examination runs.
func Rules() []audit.Rule { return audit.ExamineRules() }

// From examines a broker. api's virtual host doesn't matter: see [Options.VHost]. The user needs
// the tag "monitoring", and "policymaker" to read policies. With the tag "management" alone it
// sees its own virtual hosts, and no nodes.
//
// The error is that of api, or the cause of ctx's end, and means that nothing could be examined.
func From(ctx context.Context, api check.Reader, opts Options) (Report, error) {
	if api == nil {
		return Report{}, argument.New("api", nil, "is nil", "pass httpapi.New")
	}
	counting := &countingReader{Reader: api}
	all, cluster, err := examine.ReadAll(ctx, counting, opts.VHost)
	if err != nil {
		return Report{}, err
	}
	r, err := newReport(ctx, all, cluster, opts)
	if err != nil {
		return Report{}, err
	}
	r.Source, r.Requests = "the broker", counting.n.Load()
	if s, ok := api.(fmt.Stringer); ok {
		r.Source = s.String()
	}
	return r, nil
}

// countingReader counts requests.
type countingReader struct {
	check.Reader
	n atomic.Int64
}

func (c *countingReader) Get(ctx context.Context, path string) ([]byte, error) {
	c.n.Add(1)
	return c.Reader.Get(ctx, path)
}

// FromDefinitions examines a definitions document, which rabbitmqctl export_definitions and GET
// /api/definitions write. It reads at most 256 MiB. If the document is malformed, the error is an
// *[argument.Error] that names the place. If ctx ends first, it is the cause of that.
func FromDefinitions(ctx context.Context, from io.Reader, opts Options) (Report, error) {
	text, err := io.ReadAll(io.LimitReader(from, maxDefinitions+1))
	switch {
	case err != nil:
		return Report{}, fmt.Errorf("hopback: the definitions can't be read: %w", err)
	case len(text) > maxDefinitions:
		return Report{}, argument.New("definitions", nil, "has more than 256 MiB", "export a single virtual host")
	}
	text, encoding := utf8text.Decode(text)
	d, err := audit.ParseDefinitions(text)
	if err != nil {
		return Report{}, err
	}
	names := d.VHosts()
	if len(names) > 1 && names[0] == "" {
		names = names[1:] // what has no virtual host belongs to each
	}
	switch {
	case opts.VHost == "":
	case !slices.Contains(names, opts.VHost) && !slices.Equal(names, []string{""}):
		return Report{}, argument.New("Options.VHost", opts.VHost, "isn't in the definitions", "name a virtual host that has queues or exchanges there")
	default:
		names = []string{opts.VHost}
	}
	const why = "only a live broker shows it"
	cluster := facts.Cluster{Now: time.Now(), Unread: map[string]string{}}
	for _, part := range []string{facts.Alarms, facts.Consumers, facts.Features, facts.Flags} {
		cluster.Unread[part] = why
	}
	var all []check.Snapshot
	for _, name := range names {
		s := d.Snapshot(name)
		cluster.Version = s.Version
		all = append(all, s)
	}
	r, err := newReport(ctx, all, cluster, opts)
	if err != nil {
		return Report{}, err
	}
	r.Source = "definitions"
	if encoding != "" {
		r.Unseen = append(r.Unseen, Unseen{Part: "encoding", Why: "the file is " + encoding + "; RabbitMQ refuses to import it, or may: write it as UTF-8 without a byte order mark first", Rules: []string{}})
	}
	var has struct {
		Policies json.RawMessage `json:"policies"`
	}
	if json.Unmarshal(text, &has) == nil && has.Policies == nil {
		r.Unseen = append(r.Unseen, Unseen{Part: "policies", Why: "the file has none; assumed that none applies", Rules: []string{}})
	}
	if d.Other["parameters"] == nil {
		r.Unseen = append(r.Unseen, Unseen{Part: "operator policies", Why: "the file has no parameters, which contain them; assumed that none applies", Rules: []string{}})
	}
	return r, nil
}
