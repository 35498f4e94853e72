package cli

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
)

const formatSARIF = "sarif"

const (
	sarifSchema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
	doctorPage  = "https://github.com/hopback/hopback/blob/main/docs/doctor.md"
)

// The part of SARIF 2.1.0 that a report of doctor needs. GitHub shows it as annotations.
type (
	sarifLog struct {
		Schema  string     `json:"$schema"`
		Version string     `json:"version"`
		Runs    []sarifRun `json:"runs"`
	}
	sarifRun struct {
		Tool        sarifTool         `json:"tool"`
		Invocations []sarifInvocation `json:"invocations"`
		Results     []sarifResult     `json:"results"`
		ColumnKind  string            `json:"columnKind"`
	}
	sarifTool struct {
		Driver sarifDriver `json:"driver"`
	}
	sarifDriver struct {
		Name           string      `json:"name"`
		Version        string      `json:"version"`
		InformationURI string      `json:"informationUri"`
		Rules          []sarifRule `json:"rules"`
	}
	sarifRule struct {
		ID               string       `json:"id"`
		ShortDescription sarifMessage `json:"shortDescription"`
		FullDescription  sarifMessage `json:"fullDescription"`
		Help             sarifMessage `json:"help"`
		HelpURI          string       `json:"helpUri"`
		Defaults         sarifLevel   `json:"defaultConfiguration"`
	}
	sarifLevel struct {
		Level string `json:"level"`
	}
	sarifMessage struct {
		Text     string `json:"text"`
		Markdown string `json:"markdown,omitempty"`
	}
	// sarifInvocation has what doctor couldn't see.
	sarifInvocation struct {
		Successful    bool                `json:"executionSuccessful"`
		Notifications []sarifNotification `json:"toolExecutionNotifications"`
	}
	sarifNotification struct {
		Level   string       `json:"level"`
		Message sarifMessage `json:"message"`
	}
	sarifResult struct {
		RuleID       string            `json:"ruleId"`
		RuleIndex    int               `json:"ruleIndex"`
		Level        string            `json:"level"`
		Message      sarifMessage      `json:"message"`
		Locations    []sarifLocation   `json:"locations"`
		Fingerprints map[string]string `json:"partialFingerprints"`
	}
	sarifLocation struct {
		Physical *sarifPhysical `json:"physicalLocation,omitempty"`
		Logical  []sarifLogical `json:"logicalLocations"`
	}
	sarifPhysical struct {
		Artifact sarifArtifact `json:"artifactLocation"`
		Region   region        `json:"region"`
	}
	sarifArtifact struct {
		URI    string `json:"uri"`
		BaseID string `json:"uriBaseId,omitempty"`
	}
	sarifLogical struct {
		Name string `json:"name"`
		Full string `json:"fullyQualifiedName"`
		Kind string `json:"kind"`
	}
)

// sarif converts a report. name and text are the file that was examined; name is "" for a broker
// and for stdin, which have no place in a repository.
func sarif(r doctor.Report, name string, text []byte) sarifLog {
	run := sarifRun{
		Tool:        sarifTool{sarifDriver{Name: "hopback doctor", Version: version().Version, InformationURI: doctorPage}},
		Invocations: []sarifInvocation{{Successful: true, Notifications: []sarifNotification{}}},
		Results:     []sarifResult{}, ColumnKind: "unicodeCodePoints",
	}
	index := map[string]int{}
	for i, rule := range doctor.Rules() {
		index[rule.ID] = i
		run.Tool.Driver.Rules = append(run.Tool.Driver.Rules, sarifRuleOf(rule))
	}
	note := func(text string, args ...any) {
		run.Invocations[0].Notifications = append(run.Invocations[0].Notifications, sarifNotification{"note", sarifMessage{Text: fmt.Sprintf(text, args...)}})
	}
	for _, u := range r.Unseen {
		note("not seen: %s: %s", u.Part, u.Why)
	}
	places := regions(text)
	for _, g := range r.Groups {
		if g.Count > len(g.Findings) {
			note("%s has %d places; the report has the first %d", g.Rule.ID, g.Count, len(g.Findings))
		}
		for _, f := range g.Findings {
			run.Results = append(run.Results, sarifResult{
				RuleID: f.Rule, RuleIndex: index[f.Rule], Level: f.Severity,
				Message:      sarifMessage{Text: inCommand.Replace(fmt.Sprintf("%s: %s. To fix it: %s.", f.Resource, f.Problem, f.Remedy))},
				Locations:    []sarifLocation{sarifLocationOf(f, name, places)},
				Fingerprints: map[string]string{"hopback/v1": fingerprint(f)},
			})
		}
	}
	return sarifLog{sarifSchema, "2.1.0", []sarifRun{run}}
}

func sarifRuleOf(rule audit.Rule) sarifRule {
	text := fmt.Sprintf("What happens: %s\nTo reproduce it: %s\nFix: %s.", rule.Happens, rule.Reproduce, rule.Remedy)
	markdown := fmt.Sprintf("**What happens:** %s\n\n**To reproduce it:** %s\n\n**Fix:** %s.", rule.Happens, rule.Reproduce, rule.Remedy)
	if rule.Fix != "" {
		text += "\n" + rule.Fix
		markdown += "\n\n```\n" + rule.Fix + "\n```"
	}
	markdown += fmt.Sprintf("\n\n[RabbitMQ's documentation](%s)", rule.Docs)
	return sarifRule{
		ID: rule.ID, ShortDescription: sarifMessage{Text: rule.Summary}, FullDescription: sarifMessage{Text: rule.Happens},
		Help: sarifMessage{Text: text, Markdown: markdown}, HelpURI: rule.Docs, Defaults: sarifLevel{rule.Examined},
	}
}

func sarifLocationOf(f check.Finding, name string, places map[defined]region) sarifLocation {
	full := f.Resource.Kind + "/" + f.Resource.Name
	if f.VHost != "" {
		full = f.VHost + "/" + full
	}
	l := sarifLocation{Logical: []sarifLogical{{Name: f.Resource.Name, Full: full, Kind: "resource"}}}
	if name == "" {
		return l
	}
	at, ok := places[defined{f.Resource.Kind, f.VHost, f.Resource.Name}]
	if !ok {
		at, ok = places[defined{f.Resource.Kind, "", f.Resource.Name}] // definitions of one virtual host don't name it
	}
	if !ok {
		at = region{1, 1, 1, 1} // the file as a whole
	}
	artifact := sarifArtifact{URI: (&url.URL{Path: filepath.ToSlash(filepath.Clean(name))}).String(), BaseID: "%SRCROOT%"}
	if filepath.IsAbs(name) {
		artifact = sarifArtifact{URI: (&url.URL{Scheme: "file", Path: filepath.ToSlash(name)}).String()}
	}
	l.Physical = &sarifPhysical{artifact, at}
	return l
}

// fingerprint tells a finding from others, also when its line changes.
func fingerprint(f check.Finding) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{f.Rule, f.VHost, f.Resource.Kind, f.Resource.Name, f.Argument}, "\x00")))
	return hex.EncodeToString(sum[:16])
}

// region is a part of a text. Lines and columns begin with 1, and the end is exclusive.
type region struct {
	StartLine   int `json:"startLine"`
	StartColumn int `json:"startColumn"`
	EndLine     int `json:"endLine"`
	EndColumn   int `json:"endColumn"`
}

// defined is a resource in a definitions document.
type defined struct{ kind, vhost, name string }

// regions finds the objects of queues, exchanges, and policies in a definitions document. What it
// can't read, it leaves out: doctor has read the document before.
func regions(text []byte) map[defined]region {
	found := map[defined]region{}
	bom := []byte("\ufeff")
	at := cursor{text: bytes.TrimPrefix(text, bom), line: 1, column: 1}
	d := json.NewDecoder(bytes.NewReader(at.text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return found
	}
	kinds := map[string]string{"queues": "queue", "exchanges": "exchange", "policies": "policy"}
	for d.More() {
		member, err := d.Token()
		if err != nil {
			return found
		}
		name, _ := member.(string)
		kind := kinds[name]
		if kind == "" {
			var skipped json.RawMessage
			if d.Decode(&skipped) != nil {
				return found
			}
			continue
		}
		if t, err := d.Token(); err != nil || t != json.Delim('[') {
			return found
		}
		for d.More() {
			var object struct{ Name, VHost string }
			start := int(d.InputOffset())
			start += max(0, slices.Index(at.text[start:], '{'))
			if d.Decode(&object) != nil {
				return found
			}
			var place region
			place.StartLine, place.StartColumn = at.to(start)
			place.EndLine, place.EndColumn = at.to(int(d.InputOffset()))
			if key := (defined{kind, object.VHost, object.Name}); found[key] == (region{}) {
				found[key] = place
			}
		}
		if _, err := d.Token(); err != nil {
			return found
		}
	}
	return found
}

// cursor counts lines and columns up to growing offsets.
type cursor struct {
	text                 []byte
	offset, line, column int
}

func (c *cursor) to(offset int) (line, column int) {
	passed := c.text[c.offset:offset]
	c.offset = offset
	if i := bytes.LastIndexByte(passed, '\n'); i >= 0 {
		c.line += bytes.Count(passed, []byte{'\n'})
		c.column = 1
		passed = passed[i+1:]
	}
	c.column += utf8.RuneCount(passed)
	return c.line, c.column
}
